#!/usr/bin/env bash
# What a CUDA machine says about the ops: tests, values, times, memory, the table dispatch should hold. Under 8 minutes.
#   bench/gpu.sh         on a GPU; writes bench/results/gpu-NAME.json
#   bench/gpu.sh --dry   every line of it that a CPU can run, in tiny sizes, kernels interpreted; writes runs/gpu-dry.json
# Nothing is downloaded: PYTHON (default: python) has torch, triton, transformers and peft; pytest and TRL if there are.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
# The package by a link to it: with this folder itself on the path, transformers would take kernels/ for a package.
mkdir -p build/gpu
ln -sfn "$PWD/ppo_fast" build/gpu/ppo_fast
export PYTHONPATH=$PWD/build/gpu:$PWD/bench${PYTHONPATH:+:$PYTHONPATH} PYTHONSAFEPATH=1
if [ "${1:-}" = --dry ]; then
    export TRITON_INTERPRET=1
fi

if ! ls ppo_fast/_C*.so > /dev/null 2>&1; then
    $PYTHON setup.py -q build_ext --inplace || echo "the extension does not build here; CPU tensors take plain PyTorch"
fi
$PYTHON -c 'import ppo_fast; print("ppo_fast", ppo_fast.__version__, ppo_fast.backends()["why"])'

if $PYTHON -c 'import pytest' 2> /dev/null; then
    $PYTHON -m pytest -q tests/kernels/gpu
else
    echo "pytest is not installed: the GPU tests are left out, the bench still checks values before it times"
fi
$PYTHON -m gpu "$@"
