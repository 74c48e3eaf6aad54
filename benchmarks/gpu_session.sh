#!/usr/bin/env bash
# What to run first where a GPU is at hand for some minutes (docs/gpu-status.md), the most important
# first. It ends after SESSION_SECONDS (540); a second call goes on with what is missing, as it keeps
# what is in runs/gpu_session.
#   1  GPT-2 through ours and four other loops: the row that the targets are about
#   2  all tests of tests/gpu, in three processes that share the device, then the one that fills it
#   3  a profile of GPT-2's step beside its budget
#   4  the other models through all loops
# STEPS: which of them, "1 2 3 4" if left out. PYTHON: the interpreter. ON: the kind of device; cpu
# runs all of it with small shapes, to try this script.
set -u
cd "$(dirname "$0")/.." || exit
out=${OUT_OF_SESSION:-runs/gpu_session}
session_seconds=${SESSION_SECONDS:-540}
on=${ON:-cuda}
python=${PYTHON:-$(command -v python || command -v python3)}
mkdir -p "$out"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

# What is missing ends it here, and not after minutes in a row or a test.
"$python" - "$on" <<'EOF' || exit
import importlib.util, sys
needed = "torch deepspeed pydantic yaml ruamel rich shtab numpy sklearn psutil ninja transformers accelerate peft pytest hypothesis"
missing = [name for name in needed.split() if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(f"not installed, and needed: {' '.join(missing)}; nothing was run")
import torch
if sys.argv[1] == "cuda" and not torch.cuda.is_available():
    sys.exit("no CUDA device: nothing was run")
EOF

# within LIMIT COMMAND...: run it with a limit, or for what is left of the session if that is less.
# It is interrupted as by Ctrl-C, so that it can write what it has, and killed 20 seconds later.
within() {
  local limit=$1 left=$((session_seconds - SECONDS))
  shift
  ((left < limit)) && limit=$left
  ((limit < 15)) && return 124
  timeout -s INT -k 20 "$limit" "$@"
}

# tests_of NAME LIMIT ARGUMENTS...: run the tests that have not passed yet, their output in
# tests_NAME.txt.
tests_of() {
  within "$2" "$python" -m pytest -p no:cacheprovider -v --passed "$out/passed_$1.txt" "${@:3}" >"$out/tests_$1.txt" 2>&1
  echo "tests $1: ended with $?"
  grep -E '^(FAILED|ERROR) |^=+ .* in [0-9.]+s' "$out/tests_$1.txt"
}

# against SECONDS MODELS...: measure the rows of these models that are missing.
against() {
  local seconds=$1 shapes=() left=$((session_seconds - SECONDS))
  shift
  # the row that is being measured then still ends by itself
  ((left - 90 < seconds)) && seconds=$((left - 90))
  ((seconds < 20)) && return
  [[ $on == cpu ]] && shapes=(--tiny)
  within $((seconds + 90)) "$python" -m benchmarks.one_gpu --against --seconds "$seconds" \
    --models "$@" "${shapes[@]}" --out "$out/one_gpu_against.json" 2>>"$out/one_gpu_against.err"
  echo "one_gpu --against: ended with $?"
}

full_device=tests/gpu/test_gpu_risks.py::test_a_full_device_is_explained_and_the_way_out_that_is_named_is_one
for step in ${STEPS:-1 2 3 4}; do
  echo "step $step, after $SECONDS s"
  case $step in
    1) against 180 gpt2 ;;
    2)
      tests_of kernels 170 tests/gpu/test_tiled_loss_on_gpu.py tests/gpu/test_products_on_gpu.py \
        tests/gpu/test_attention_on_gpu.py tests/gpu/test_packed_rows_on_gpu.py tests/gpu/test_ring_on_gpu.py \
        tests/gpu/test_fp8_on_gpu.py tests/gpu/test_gathered_on_gpu.py tests/gpu/test_copies_on_gpu.py \
        tests/gpu/test_host_activations_on_gpu.py &
      tests_of runs 170 tests/gpu/test_written_weights_on_gpu.py tests/gpu/test_deepcompile_on_gpu.py \
        tests/gpu/test_zenflow_on_gpu.py tests/gpu/test_full_weights_on_gpu.py tests/gpu/test_flat_sums_on_gpu.py \
        tests/gpu/test_gpu_risks.py --deselect "$full_device" &
      tests_of learning 170 tests/gpu/test_states_on_gpu.py tests/gpu/test_on_gpu.py \
        tests/gpu/test_language_models_on_gpu.py &
      wait
      tests_of full_device 60 "$full_device"
      ;;
    3)
      [[ -s $out/step_budget.md ]] && continue
      rm -rf "$out/profiled"
      if [[ $on == cpu ]]; then
        shapes=(batch='{global_size: 4, micro_size: 4}' data='{kind: text, sequence_length: 16}' model='{kind: gpt, size: tiny, dropout: 0.0, num_layers: 1}')
      else
        shapes=(batch='{global_size: 32, micro_size: 32}' data='{kind: text, sequence_length: 1024}' model='{kind: gpt, size: gpt2, dropout: 0.0}')
      fi
      within 90 "$python" train.py --config ds_configs/gpt_tiny.yaml run.output_dir="$out" run.name=profiled "${shapes[@]}" \
        task='{kind: causal_lm}' precision.dtype=bf16 zero.stage=1 optimizer='{kind: adamw, lr: 6e-4}' training.max_steps=16 \
        scheduler.warmup_steps=2 profile='{steps: 10-12}' evaluation.at_end=false checkpoint.at_end=false >"$out/profiled.txt" 2>&1
      echo "profile: ended with $?"
      [[ -s $out/profiled/profile/rank0.json.gz ]] || continue
      within 60 "$python" -m benchmarks.step_budget --model gpt2 --profile "$out/profiled" | tee "$out/step_budget.md"
      ;;
    4) against 180 gpt2-xl 8b-slice-lora 8b-slice resnet50 lenet bert-large ;;
  esac
done
echo "the session took $SECONDS s"
