#!/usr/bin/env bash
# What a CUDA machine says about the ops: tests, values, times, memory, the table dispatch should hold. Under 8 minutes.
#   bench/gpu.sh         on a GPU; writes bench/results/gpu-NAME.json
#   bench/gpu.sh --dry   every line of it that a CPU can run, in tiny sizes, kernels interpreted; writes runs/gpu-dry.json
# Nothing is downloaded: PYTHON (default: python) has torch, triton, transformers and peft; pytest and TRL if there are.
# Each part has its share of LIMIT seconds; one that takes longer is cut off, and the JSON has the others.
set -euo pipefail
SECONDS=0
LIMIT=450
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
# The package by a link to it: with this folder itself on the path, transformers would take kernels/ for a package.
mkdir -p build/gpu
ln -sfn "$PWD/ppo_fast" build/gpu/ppo_fast
export PYTHONPATH=$PWD/build/gpu:$PWD/bench${PYTHONPATH:+:$PYTHONPATH} PYTHONSAFEPATH=1
if [ "${1:-}" = --dry ]; then
    export TRITON_INTERPRET=1
    LIMIT=1800
fi

if ! ls ppo_fast/_C*.so > /dev/null 2>&1; then
    timeout 150 $PYTHON setup.py -q build_ext --inplace ||
        echo "the extension does not build here; CPU tensors take plain PyTorch"
fi
$PYTHON -c 'import ppo_fast; print("ppo_fast", ppo_fast.__version__, ppo_fast.backends()["why"])'
$PYTHON -m gpu --seconds $((LIMIT - SECONDS)) "$@"
