#!/usr/bin/env bash
# The one door for a person: finds or makes a Python environment, then trains or tests in it. See ./launch.sh --help.
set -euo pipefail

# Exit codes as everywhere in this project: 64 usage, 74 the environment could not be installed, 75 stopped, 78 no usable Python.
readonly USAGE=64 NOT_INSTALLED=74 NO_PYTHON=78

say() { printf '%s\n' "$*" >&2; }

help() {
    cat <<'TEXT'
./launch.sh [key=value ...]       set up, then train ds_configs/quickstart.yaml on every local GPU, or on two CPU ranks;
                                  of 7, 9 or 16 GPUs on as many as divide its batch of 120
./launch.sh train CONFIG [key=value ...] [--num_gpus N] [--master_port P] [--deepspeed_config FILE] [--dry_run]
                                  on this machine; with -H HOSTFILE on its hosts, through ssh
./launch.sh node CONFIG [key=value ...] [--nnodes N --node_rank R --master_addr A --master_port P --num_gpus G]
                                  one member without ssh: in a pod, under srun, by hand (`dsf launch node`)
./launch.sh check|plan|render|keys|schema|completion|import|new|inspect|report|bench|prepare|generate|export|evaluate|predict|trust|lr-range|doctor|launch ...
                                  the same as `dsf check ...`: --help tells of each
./launch.sh docs                  set up, then build the documentation: site/index.html, for a browser without a network
./launch.sh test [pytest options] set up, then run the tests (all of them, or what the options choose)
./launch.sh setup [text|data|lora|fp8|metrics|onnx|bench|docs|dev ...]
                                  set up only, with these extras: the active virtualenv or conda environment if it has
                                  torch, else .venv
./launch.sh help                  this text

Settings are dotted: optimizer.lr=0.01 batch.global_size=256. A second call sets up nothing twice.
TEXT
}

# The folder of this file, also when it is started through a symbolic link or from elsewhere.
own_folder() {
    local path=${BASH_SOURCE[0]} target
    while [[ -L $path ]]; do
        target=$(readlink "$path")
        [[ $target == /* ]] || target=$(dirname "$path")/$target
        path=$target
    done
    cd "$(dirname "$path")" && pwd -P
}
ROOT=$(own_folder)
readonly ROOT
readonly VENV=$ROOT/.venv TOOLS=$ROOT/.venv-tools
PY='' COMMAND=''

# ---------------------------------------------------------------------------------------------- which environment

runs() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; }

# A look, not an import: importing torch takes seconds. From / so that no folder named torch is taken for it.
has_torch() { (cd / && "$1" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)') >/dev/null 2>&1; }

# An active environment is used when it has torch; nothing that is in it is changed.
use_active() {
    local prefix=$1 kind=$2 python=$1/bin/python how=''
    [[ -n $prefix && -x $python && ! $prefix -ef $VENV ]] || return 1
    if ! has_torch "$python"; then
        say "environment: the active $kind $prefix has no torch and is left alone"
        return 1
    fi
    runs "$python" || { say "environment: the active $kind $prefix has a Python older than 3.10"; exit "$NO_PYTHON"; }
    PY=$python
    [[ -x $prefix/bin/dsf ]] || how="; for \`dsf\` in it: pip install --no-deps -e $(printf %q "$ROOT")"
    say "environment: the active $kind $prefix, used as it is$how"
}

# The tested version first, then the others that all pinned packages support.
find_python() {
    local name
    for name in python3.11 python3.12 python3.13 python3.10 python3 python; do
        if runs "$name"; then
            command -v "$name"
            return
        fi
    done
    say 'environment: no Python >= 3.10 found (tried python3.10 to python3.13, python3, python); install one and run this again'
    exit "$NO_PYTHON"
}

# uv if it can be had: from PATH, or from the package index into a folder of our own. Prints nothing if not.
find_uv() {
    local python=$1
    if uv --version >/dev/null 2>&1; then
        command -v uv
    elif "$TOOLS/bin/uv" --version >/dev/null 2>&1; then
        printf '%s\n' "$TOOLS/bin/uv"
    elif "$python" -m pip install --quiet --target "$TOOLS" uv >/dev/null 2>&1 && [[ -x $TOOLS/bin/uv ]]; then
        printf '*\n' >"$TOOLS/.gitignore"
        say "environment: uv installed into .venv-tools"
        printf '%s\n' "$TOOLS/bin/uv"
    fi
}

# ------------------------------------------------------------------------------------------------------ installing

# Where `dsf` and `tensorboard` are typed by hand, the environment has to be active; %q: a path with blanks.
tell_ready() {
    local script=$VENV/bin/activate how=''
    [[ ! $PWD -ef $ROOT ]] || script=.venv/bin/activate
    [[ ${VIRTUAL_ENV:-} -ef $VENV ]] || how="; to use it in this shell: source $(printf %q "$script")"
    say "environment: .venv, ready$how"
}

# Of what an installer writes, the lines that show how far it is: what is large, and each of its stages.
show_progress() {
    local line
    while IFS= read -r line; do
        # pip names files: of those the package and the size are enough.
        [[ $line != *.whl\ \(* && $line != *.tar.gz\ \(* ]] || line=${line/-*\(/ (}
        case $line in
            *ownload*[MG]B* | *ownload*[MG]iB* | Resolved* | Prepared* | Installed* | Installing* | *Building*)
                printf '  %s\n' "${line:0:76}" ;;
        esac
    done
}

# Runs a command and shows how far it is; if it fails, shows the end of its output and where the rest is, and returns 1.
tried() {
    local what=$1 log
    shift
    log=$(mktemp "${TMPDIR:-/tmp}/dsf-setup.XXXXXX")
    if "$@" 2>&1 | tee "$log" | show_progress >&2; then
        rm -f "$log"
        return
    fi
    tail -n 20 "$log" >&2
    say "environment: $what failed; all of its output is in $log"
    return 1
}

logged() { tried "$@" || exit "$NOT_INSTALLED"; }

# uv, and where it cannot fetch (a company's certificate that only pip knows, a proxy) or is not there, pip.
install_packages() {
    local uv
    # Not with the environment's own Python: where uv has made it there is no pip to get uv with.
    uv=$(find_uv "$(PATH=${PATH//"$VENV/bin:"/} find_python 2>/dev/null || printf '%s\n' "$PY")")
    if [[ -n $uv ]]; then
        # shellcheck disable=SC2046  # one word or none, twice
        tried 'uv' "$uv" pip install $(bytecode) --python "$PY" $(torch_backend "$uv") "$@" && return
        say 'environment: trying pip instead (with a certificate of your own for uv: UV_SYSTEM_CERTS=1)'
    fi
    "$PY" -m pip --version >/dev/null 2>&1 || "$PY" -m ensurepip >/dev/null 2>&1 || true
    logged 'pip' "$PY" -m pip install "$@"
}

# As pip does: without bytecode every process of a run would compile torch's 1,200 modules anew where it may not write. Tests
# may write, and of the 24,000 modules that are installed for them most are never imported.
bytecode() { [[ $COMMAND == test ]] || printf '%s\n' --compile-bytecode; }

# The build of torch that fits this machine, if uv reaches the index that has it: a quick look, before anything is fetched.
torch_backend() {
    ! has_gpu && ! has_torch "$PY" || return 0
    ! UV_HTTP_RETRIES=0 UV_HTTP_TIMEOUT=5 "$1" pip install --quiet --dry-run --no-deps --python "$PY" --torch-backend=auto \
        torch >/dev/null 2>&1 || printf '%s\n' '--torch-backend=auto'
}

has_gpu() { command -v nvidia-smi >/dev/null; }

facts() { "$PY" "$ROOT/framework/hosts/environment.py" "$@"; }

# Adds to an active environment what it lacks, under constraints that forbid to change what it has.
complete_active() {
    local extras=$1 absent kept
    # shellcheck disable=SC2086  # extras are words
    absent=$(facts missing $extras) || { say "environment: too old here; choose another environment, or update it"; exit "$NO_PYTHON"; }
    export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}
    [[ -n $absent ]] || return 0
    say "environment: installing what is missing: ${absent//$'\n'/ }"
    kept=$(mktemp "${TMPDIR:-/tmp}/dsf-kept.XXXXXX")
    facts installed >"$kept"
    # shellcheck disable=SC2086  # one requirement to a word
    if "$PY" -m pip --version >/dev/null 2>&1; then
        logged 'pip' "$PY" -m pip install -c "$kept" $absent
    else
        install_packages -c "$kept" $absent
    fi
    rm -f "$kept"
}

# What cannot be written is not made again or cleared: it is somebody else's.
refuse_unwritable() {
    local place
    for place in "$ROOT" "$VENV" "$VENV/bin"; do
        if [[ -e $place && ! -w $place ]]; then
            say "environment: $place cannot be written by $(id -un): it belongs to somebody else; work in a clone of your own," \
                'or activate an environment that has torch'
            exit "$NOT_INSTALLED"
        fi
    done
}

make_venv() {
    local python uv
    python=$(find_python)
    uv=$(find_uv "$python")
    if [[ -n $uv ]]; then
        say "environment: .venv, made with uv and $("$python" -V)"
        logged 'uv venv' "$uv" venv --clear --python "$python" "$VENV"
    else
        say "environment: .venv, made with $("$python" -V) and pip (uv is not to be had)"
        logged 'python -m venv (on Debian: apt install python3-venv)' "$python" -m venv --clear "$VENV"
    fi
}

# .venv holds this project itself in place (-e), so that edits count at once.
install_into_venv() {
    local extras=$1 pins=(-c "$ROOT/constraints.txt") target="${ROOT}[${1// /,}]" size=''
    rm -f "$VENV"/.dsf-trainer-*
    if ! "$PY" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        say "environment: Python 3.10 is too old for constraints.txt; the newest versions that fit are taken"
        pins=(-c /dev/null)
    fi
    has_torch "$PY" || size=' (some minutes the first time, and 6 GB with the CUDA build of torch)'
    say "environment: installing dsf-trainer[${extras// /,}]$size"
    install_packages "${pins[@]}" -e "$target"
}

# On processors every run needs this operation, and the first one would stand still while two ranks wait for a compiler.
compile_ahead() {
    local said path=$PATH
    ! has_gpu || return 0
    # What tests have compiled on this machine before is taken, and what they will need is kept.
    [[ $COMMAND != test ]] || path=$ROOT/tests/compiler:$PATH
    say "environment: compiling DeepSpeed's shared-memory operation for CPU (half a minute, once)"
    # Of its output the last line says why it failed.
    said=$(PATH=$path DS_ACCELERATOR=cpu "$PY" -c '
import os, sys
from framework.errors import ConfigError
from framework.doctor.node.software import check_ops
from framework.doctor.node.requirements import requirements_without_config
from framework.plan.cluster import Cluster
try:
    found = check_ops(requirements_without_config(Cluster(device="cpu")), os.environ).problems
    if errors := [problem for problem in found if problem.severity == "error"]:
        raise ConfigError(errors)
    from framework.engine.compiled_ahead import compile_for_processors
    compile_for_processors()
except ConfigError as error:
    sys.exit(str(error))' 2>&1) || say "environment: ${said##*$'\n'}; until then no run on processors starts"
}

complete_venv() {
    local extras=$1 stamp
    PY=$VENV/bin/python
    if ! "$PY" -c '' >/dev/null 2>&1; then
        refuse_unwritable
        [[ ! -e $VENV ]] || say 'environment: .venv has no Python that runs (an interrupted start?) and is made again'
        make_venv
    elif ! runs "$PY"; then
        say "environment: .venv has $("$PY" -V 2>&1), older than 3.10; move it away and run this again"
        exit "$NO_PYTHON"
    fi
    stamp=$VENV/.dsf-trainer-${extras// /-}
    # shellcheck disable=SC2086  # extras are words
    if [[ -f $stamp && $(<"$stamp") == "$(facts stamp $extras)" ]]; then
        tell_ready
        return
    fi
    refuse_unwritable
    install_into_venv "$extras"
    # Written last, so that an interrupted installation is repeated. Whoever has the tests' tools can also train.
    # shellcheck disable=SC2086
    facts stamp $extras >"$stamp"
    facts stamp train >"$VENV/.dsf-trainer-train"
    compile_ahead
    tell_ready
}

set_up() {
    if use_active "${VIRTUAL_ENV:-}" virtualenv || use_active "${CONDA_PREFIX:-}" 'conda environment'; then
        complete_active "$1"
    else
        complete_venv "$1"
    fi
    # What the person's own shell finds, and how this script is called from there: the run's last lines are commands for it.
    export DSF_SHELL_PATH=$PATH DSF_DOOR=./launch.sh
    [[ $PWD -ef $ROOT ]] || DSF_DOOR=$(printf %q "$ROOT/launch.sh")
    # As an activated environment: torch calls `ninja` by name, and `deepspeed` is found.
    PATH=$(dirname "$PY"):$PATH
    export PATH
}

# From another folder everything is named by its whole path, so that the commands in the summary work there, too.
train_quickstart() {
    set_up train
    [[ ! $PWD -ef $ROOT ]] || exec "$PY" -m framework train ds_configs/quickstart.yaml --fit_batch "$@"
    local word output=("run.output_dir='${ROOT//\'/\'\'}/runs'")
    for word in "$@"; do
        [[ $word != run.output_dir=* ]] || output=() # a setting is given once
    done
    exec "$PY" -m framework train "$ROOT/ds_configs/quickstart.yaml" --fit_batch ${output[@]+"${output[@]}"} "$@"
}

# ---------------------------------------------------------------------------------------------------------- commands

main() {
    local command=${1:-}
    COMMAND=$command
    [[ $# -eq 0 ]] || shift
    case $command in
        '') train_quickstart ;;
        [[:alpha:]]*.*=*) train_quickstart "$command" "$@" ;;
        train)
            [[ $# -gt 0 ]] || { say 'launch.sh train: name a run config, for example ds_configs/quickstart.yaml'; exit "$USAGE"; }
            set_up train
            exec "$PY" -m framework train "$@"
            ;;
        node)
            [[ $# -gt 0 ]] || { say 'launch.sh node: name a run config, for example ds_configs/quickstart.yaml'; exit "$USAGE"; }
            set_up train
            exec "$PY" -m framework launch node "$@"
            ;;
        check | plan | render | keys | schema | completion | import | new | inspect | report | bench | prepare | generate | export | evaluate | predict | trust | lr-range | doctor | launch)
            set_up train
            exec "$PY" -m framework "$command" "$@"
            ;;
        test)
            set_up 'train dev'
            cd "$ROOT"
            unset DSF_SHELL_PATH DSF_DOOR
            exec "$PY" -m pytest "$@"
            ;;
        docs)
            set_up 'train docs'
            cd "$ROOT"
            exec "$PY" -m tools.docs_site "$@"
            ;;
        setup)
            local extra
            for extra in "$@"; do
                [[ $extra =~ ^(train|text|data|lora|fp8|metrics|onnx|bench|docs|dev)$ ]] ||
                    { say "launch.sh setup: there is no extra '$extra'; there are text, data, lora, fp8, metrics, onnx, bench, docs and dev"; exit "$USAGE"; }
            done
            [[ ${1:-} != train ]] || shift
            set_up "train${*:+ $*}"
            ;;
        -h | --help | help) help ;;
        *)
            say "launch.sh: there is no command '$command'; see ./launch.sh --help"
            exit "$USAGE"
            ;;
    esac
}

# Process 1 of a container never gets a signal that it does not handle: it would set up, and train, in spite of a request.
[[ $$ -ne 1 ]] || trap 'exit 75' TERM
main "$@"
