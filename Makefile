# Every target makes the virtual environment first when it is missing; python3 and make are all that is needed.
#   make CONSTRAINTS=          install the newest torch that fits (the first time, or after make clean)
#   make PYTHON=python3.12     choose the interpreter

PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# One thread per test process: more of them than cores makes small tensor operations many times slower.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# Hundreds of modules are imported by every process of a test: what Python made of them is kept, whatever the shell says.
unexport PYTHONDONTWRITEBYTECODE
# A worker takes a part of the tests as they stand, so that neighbours share what they made, and of another's when idle.
BOTH := -n 2 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help demo check light test quick test-all soak lint clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml $(wildcard $(CONSTRAINTS))
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) -e ".[dev]"
	touch $(STAMP)

# For the interpreter of GPU kernels, which has wheels for Linux only. Beside the environment: torch behaves otherwise
# where it finds Triton.
$(VENV)/triton: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --target $@ "triton==3.9.0; sys_platform == 'linux'"

demo: $(STAMP) ## train a small language model on Python's standard library, or go on where that was stopped; see runs/demo
	$(BIN)/phalanx train --model phalanx-demo --data stdlib --steps 250 --seq-len 128 --batch-size 8 --lr 2e-3 --warmup-steps 10 --resume auto --out runs/demo

check: $(STAMP) ## for the inner loop: lint, types and the tests that need no other process, side by side
	$(MAKE) --no-print-directory --jobs 2 --output-sync lint light

# In one process, beside pyright: a second one would import torch once more, and take from pyright, which takes longest.
light: $(STAMP)
	$(PYTEST) -q -m "light and not long" --hypothesis-profile=check

test: $(VENV)/triton ## lint, types and every test that is not marked long, side by side
	$(MAKE) --no-print-directory --jobs 2 lint quick

quick: $(VENV)/triton
	$(PYTEST) $(BOTH) -m "not long"

test-all: lint $(VENV)/triton ## the same with the long tests, and more random cases of each property
	$(PYTEST) $(BOTH) --hypothesis-profile=all

soak: $(STAMP) ## a thousand random faults; each run is held against one that nothing happened to; goes on where it was
	$(BIN)/python benchmarks/soak.py --folder runs/soak --out docs/results/soak.json $(SOAK)
	$(BIN)/python benchmarks/pages.py

lint: $(STAMP) ## ruff and pyright
	$(BIN)/ruff check
	$(BIN)/ruff format --check --quiet
	$(BIN)/pyright

clean: ## remove the virtual environment, caches and build results (runs/ is kept)
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
