# make demo   train SmolLM2-135M with PPO on two CPU cores, evaluate it on held-out prompts, write the report
# make test   lint, types, and the tests; make test-long adds the proofs that take minutes
# Each makes .venv if there is none, installs what is missing, builds the extension, and runs.
#
# An active environment that has torch is used as it is, and so is one given as VENV=...; elsewhere TORCH is installed.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
PYTHON ?= python3
TORCH ?= torch==2.13.0
HAS_TORCH = $(1)/bin/python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' 2>/dev/null
ACTIVE := $(or $(VIRTUAL_ENV),$(CONDA_PREFIX))
VENV ?= $(if $(and $(ACTIVE),$(shell $(call HAS_TORCH,$(ACTIVE)) && echo yes)),$(ACTIVE),.venv)
BIN := $(VENV)/bin
RUN ?= runs/sentiment-$(shell date +%Y%m%d-%H%M%S)

# One stamp per checkout and purpose: an environment may serve several checkouts.
STAMP := $(VENV)/.ppo_fast-$(shell pwd | cksum | cut -d ' ' -f 1)
SOURCES := pyproject.toml setup.py $(wildcard csrc/*)
PYTEST := $(BIN)/python -m pytest

.PHONY: demo test test-long lint clean

demo: $(STAMP)-demo
	$(BIN)/ppo-fast train --config ppo_fast/recipes/sentiment.yaml --output-dir $(RUN)
	$(BIN)/ppo-fast eval $(RUN)
	$(BIN)/ppo-fast report $(RUN)

test: $(STAMP)-dev lint
	OMP_NUM_THREADS=1 $(PYTEST) -q -n 2 -m "not long" --ignore=tests/kernels
	$(PYTEST) -q tests/kernels/aot
	TRITON_INTERPRET=1 $(PYTEST) -q tests/kernels/interpret

test-long: $(STAMP)-dev
	$(PYTEST) -q -m long

lint: $(STAMP)-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf build dist *.egg-info ppo_fast/*.so

$(STAMP)-demo: EXTRAS := demo
$(STAMP)-dev: EXTRAS := demo,dev
# pip is held to the torch that is there: a newer one that some package would like costs gigabytes.
$(STAMP)-demo $(STAMP)-dev: $(SOURCES)
	[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	$(call HAS_TORCH,$(VENV)) || $(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' > $(STAMP)-torch
	$(BIN)/python -m pip install --quiet --constraint $(STAMP)-torch --editable ".[$(EXTRAS)]"
	touch $@
