#!/usr/bin/env bash
# What to run first where a GPU is at hand for some minutes (docs/gpu-status.md). A second call goes on
# with what is missing: it keeps what is in benchmarks/results/gpu_session.
# All three take eight minutes. STEPS: which of them, "1 2 3" if left out. SECONDS_OF_TESTS,
# SECONDS_AGAINST: of the first and the second.
set -u
cd "$(dirname "$0")/.." || exit
out=benchmarks/results/gpu_session
mkdir -p "$out"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

if ! python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "no CUDA device: nothing was run" >&2
  exit 1
fi
full_device=tests/gpu/test_gpu_risks.py::test_a_full_device_is_explained_and_the_way_out_that_is_named_is_one

# tests_of NAME ARGUMENTS: run tests with a limit, their output in tests_NAME.txt
tests_of() {
  timeout "${SECONDS_OF_TESTS:-170}" python -m pytest -q -p no:cacheprovider "${@:2}" >"$out/tests_$1.txt" 2>&1
  echo "tests $1: ended with $?"
  tail -5 "$out/tests_$1.txt"
}

for step in ${STEPS:-1 2 3}; do
  case $step in
    1)
      # Three processes share the device; what fills its memory runs alone, behind them.
      tests_of kernels tests/gpu/test_tiled_loss_on_gpu.py tests/gpu/test_products_on_gpu.py \
        tests/gpu/test_attention_on_gpu.py tests/gpu/test_packed_rows_on_gpu.py tests/gpu/test_ring_on_gpu.py \
        tests/gpu/test_fp8_on_gpu.py tests/gpu/test_gathered_on_gpu.py tests/gpu/test_copies_on_gpu.py \
        tests/gpu/test_host_activations_on_gpu.py &
      tests_of runs tests/gpu/test_written_weights_on_gpu.py tests/gpu/test_deepcompile_on_gpu.py \
        tests/gpu/test_zenflow_on_gpu.py tests/gpu/test_full_weights_on_gpu.py tests/gpu/test_flat_sums_on_gpu.py \
        tests/gpu/test_gpu_risks.py \
        --deselect "$full_device" &
      tests_of learning tests/gpu/test_states_on_gpu.py tests/gpu/test_on_gpu.py \
        tests/gpu/test_language_models_on_gpu.py &
      wait
      SECONDS_OF_TESTS=40 tests_of full_device "$full_device"
      ;;
    2)
      python -m benchmarks.one_gpu --against --seconds "${SECONDS_AGAINST:-200}" \
        --out "$out/one_gpu_against.json" 2>"$out/one_gpu_against.err"
      echo "one_gpu --against: ended with $?"
      ;;
    3)
      rm -rf "$out/profiled"
      timeout 90 python train.py --config ds_configs/gpt_tiny.yaml run.output_dir="$out" run.name=profiled model='{kind: gpt, size: gpt2, dropout: 0.0}' \
        data='{kind: text, sequence_length: 1024}' task='{kind: causal_lm}' precision.dtype=bf16 zero.stage=1 \
        batch='{global_size: 32, micro_size: 32}' optimizer='{kind: adamw, lr: 6e-4}' training.max_steps=16 scheduler.warmup_steps=2 \
        profile='{steps: 10-12}' evaluation.at_end=false checkpoint.at_end=false >"$out/profiled.txt" 2>&1
      echo "profile: ended with $?"
      python -m benchmarks.step_budget --model gpt2 --profile "$out/profiled" | tee "$out/step_budget.md"
      ;;
  esac
done
