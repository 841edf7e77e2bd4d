# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# `make demo` and `make test` are all that a newcomer needs: each sets up .venv by itself.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.set-up
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal --cpu-total
# What is long is guarded by another test too: docs/long-runs.md.
SHORT  := -m "not long"
# mypy cannot read setuptools' package-dir: it gets a tree of links that has the layout of the wheel.
TYPED  := build/typecheck/retrograd

# Bytecode is written where it is missing, whatever the user's shell says: hundreds of tools and workers import the same.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup demo test quick bytecode lint types lit lit-then-unit lit-then-all unit integration coverage models fuzz vulkan-driver test-gpu sanitize-gpu test-long test-budgets test-precisions long wheel bench bench-gpu bench-memory format clean

help: ## print the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): requirements-dev.txt requirements-models.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("retrograd needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0] + \
	  ": run make PYTHON=/path/to/python3.11" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --requirement requirements-dev.txt
	$(BIN)/python -m pip install --quiet --no-compile --no-deps --requirement requirements-models.txt
	$(BIN)/python -m pip install --quiet --no-build-isolation --no-deps --editable .
	@# To bytecode what is imported, a third of what there is: pip compiled all of it, on one core.
	$(BIN)/python -c 'import retrograd.api, torch._dynamo, torch._functorch.aot_autograd'
	touch $@

setup: $(STAMP) ## create .venv with the pinned packages and retrograd, editable

demo: $(STAMP) ## train two small networks on handwritten digits, through retrograd and in eager
	$(BIN)/python examples/digits.py

# mypy takes one core for most of a minute, beside lit and the first of the tests: they keep all cores busy, and end last,
# with pytest's summary in the last line.
quick: bytecode lint ## what tells most in a minute or two: lint, types, lit and unit tests
	$(MAKE) --no-print-directory --jobs=2 types lit-then-unit

test: bytecode lint ## what has to pass for every change: lint, types, lit, unit and integration tests, the wheel
	$(MAKE) --no-print-directory --jobs=2 types lit-then-all

lit-then-unit: lit
	$(PYTEST) $(SHORT) tests/unit

lit-then-all: lit
	@# Those that take long come first: at the end no core waits for another's last. And before all, what one worker has to
	@# run alone: a file that is divided at the end has its environment, or its processes, once for each worker.
	$(PYTEST) $(SHORT) tests/integration/test_wheel.py tests/integration/test_two_processes.py tests/integration tests/unit

bytecode: $(STAMP)
	@# Every tool that a test starts imports these: two at once would compile them twice.
	@$(BIN)/python -m compileall -qq -j 0 retrograd dialects frontend pipelines runtime tools

lint: $(STAMP) ## ruff: rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP) ## mypy, strict
	@rm -rf $(TYPED) && mkdir -p $(TYPED)
	@ln -s $(CURDIR)/retrograd/* $(addprefix $(CURDIR)/,dialects frontend pipelines runtime tools) $(TYPED)
	@# In one run: two would read PyTorch's types twice.
	$(BIN)/mypy $(TYPED) $(wildcard tests examples benchmarks)

lit: $(STAMP) ## the passes, one by one, on MLIR text (needs no torch)
	$(BIN)/lit -v tests/lit

unit: $(STAMP) ## the unit tests
	$(PYTEST) tests/unit

integration: $(STAMP) ## the integration tests: graphs captured, compiled and run
	$(PYTEST) tests/integration

fuzz: $(STAMP) ## random programs beside eager, GRAPHS=2000 of them; the table and what went wrong go to build/fuzz
	$(BIN)/python tests/fuzz/run.py --graphs $(or $(GRAPHS),2000) --seed $(or $(SEED),0) $(ARGS)

coverage: $(STAMP) ## PyTorch's operator database through the compiler: docs/coverage.md (hours; goes on where it stopped)
	nice -n 10 $(BIN)/python tests/coverage/op_sweep.py --table docs/coverage.md $(ARGS)

models: $(STAMP) ## programs of transformers, timm and torch.nn's users through three doors: docs/models.md; ARGS=--unlisted: programs that nobody chose, docs/unlisted.md (hours; goes on where it stopped)
	nice -n 10 $(BIN)/python tests/corpus/corpus_run.py --write $(ARGS)

vulkan-driver: ## install Debian's software Vulkan driver, lavapipe, where there is none and this is root
	@if ls /usr/share/vulkan/icd.d/*.json /etc/vulkan/icd.d/*.json 2>/dev/null | grep -q json; then echo "a Vulkan driver is installed"; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update -q && apt-get install -q -y --no-install-recommends mesa-vulkan-drivers libvulkan1; \
	else echo "no Vulkan driver: as root, apt-get install mesa-vulkan-drivers; its tests are skipped"; fi

test-gpu: $(STAMP) ## the tests that need a CUDA device; fails without one
	@$(BIN)/python -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "no CUDA device to run on")'
	@$(BIN)/python -c 'import torch; print("device:", torch.cuda.get_device_name())'
	@# Tests of two processes need a device for each.
	@devices=$$($(BIN)/python -c 'import torch; print(torch.cuda.device_count())'); \
	if [ $$devices -lt 2 ]; then echo "one device: tests/gpu/test_two_gpus.py is left out"; two=--ignore=tests/gpu/test_two_gpus.py; fi; \
	echo $(BIN)/python -m pytest tests/gpu $$two; $(BIN)/python -m pytest tests/gpu $$two

sanitize-gpu: $(STAMP) ## kernels of our own on small tensors under compute-sanitizer, memcheck and racecheck (two minutes); ARGS=--all: all tiles
	$(BIN)/python tests/gpu/sanitize.py $(ARGS)

test-long: $(STAMP) ## all tests that need no device, those that `make test` leaves out too; ARGS="-m long" for these alone
	$(PYTEST) tests/integration tests/unit tests/upstream $(ARGS)

test-budgets: $(STAMP) ## gradients of all models for all partitions and for memory budgets from 10% to 100% (half an hour)
	$(BIN)/python -m pytest tests/budgets $(ARGS)

test-precisions: $(STAMP) ## five steps of all models in bfloat16 and under autocast, beside eager
	$(BIN)/python -m pytest -s tests/precisions $(ARGS)

long: $(STAMP) ## all that `make test` leaves out and needs no device (hours): what each said is written down in docs/long-runs.md
	$(MAKE) --keep-going test-long test-budgets test-precisions fuzz coverage models bench bench-memory

wheel: $(STAMP) ## build dist/*.whl, and try a wheel in a venv of its own
	rm -rf build/lib build/bdist.*
	$(BIN)/python -m build --wheel --no-isolation --outdir dist
	$(BIN)/python -m pytest tests/integration/test_wheel.py

bench: $(STAMP) ## time the backward passes beside PyTorch's own
	$(BIN)/python benchmarks/backward.py
	$(BIN)/python benchmarks/cpu_steps.py
	$(BIN)/python benchmarks/hooks.py

bench-gpu: $(STAMP) ## time forward and backward on a CUDA device: docs/gpu-small.md, at real sizes docs/gpu-steps.md, kernels docs/gpu-kernels.md
	$(BIN)/python benchmarks/gpu.py --write $(ARGS)
	$(BIN)/python benchmarks/gpu_steps.py --write
	$(BIN)/python benchmarks/kernels.py --write --tiles
	$(BIN)/python benchmarks/attention.py --write
	$(BIN)/python benchmarks/convolutions.py --write --jobs 4

bench-memory: $(STAMP) ## peak and time of backwards at a range of memory budgets, pictures and traces: build/bench-memory
	$(BIN)/python benchmarks/memory.py $(ARGS)

format: $(STAMP) ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove what was built; .venv stays
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache
	find tests/lit -name Output -type d -prune -exec rm -rf {} +
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
