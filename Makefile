# Every target sets up its own .venv; nothing but Python, pip and make is needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
VISION := .venv-vision
VISION_READY := $(VISION)/.ready

# One BLAS thread a process: tests run one process a core, benchmarks compare single-threaded work.
export OMP_NUM_THREADS := 1
export MKL_NUM_THREADS := 1

.PHONY: help setup demo test test-quick test-vision lint bench docs clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'

define environment_with_torch
	$(PYTHON) -m venv $(1)
	$(1)/bin/pip install --quiet --upgrade pip
	$(1)/bin/pip install --quiet --constraint constraints.txt torch
endef

$(READY): pyproject.toml constraints.txt
	$(call environment_with_torch,$(VENV))
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

# Other packages of .venv fail to import beside a torchvision whose C++ operators do not fit its torch.
$(VISION_READY): pyproject.toml constraints.txt
	$(call environment_with_torch,$(VISION))
	$(VISION)/bin/pip install --quiet --constraint constraints.txt --no-deps torchvision timm
	$(VISION)/bin/pip install --quiet --constraint constraints.txt --editable '.[vision]' pytest
	@touch $@

setup: $(READY) ## create .venv with all that the other targets need

demo: $(READY) ## see it at work: three tables, and a report for your browser; about a minute
	$(BIN)/gnomon demo

lint: $(READY) ## ruff, mypy and the import contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint ## the linters, then the test suite
	$(BIN)/pytest --numprocesses 2 --dist worksteal

test-quick: $(READY) ## the tests that neither start processes nor are slow; about 75 seconds
	$(BIN)/pytest --numprocesses 2 --dist worksteal -m 'not spawns and not slow'

test-vision: $(VISION_READY) ## the tests of the networks from timm, in an environment of their own
	$(VISION)/bin/pytest tests/experiments/models/test_vision.py

bench: $(READY) ## beside other libraries, written to benchmarks/RESULTS.md; more than an hour
	$(BIN)/python benchmarks/spd.py --write
	$(BIN)/python benchmarks/solve.py --write
	$(BIN)/python benchmarks/mixture.py --write
	$(BIN)/python benchmarks/covariance.py --write
	$(BIN)/python benchmarks/safety.py --write
	$(BIN)/python benchmarks/steps.py --write
	$(BIN)/python benchmarks/vi.py --write

docs: $(READY) ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean: ## remove the environments and everything built
	rm -rf $(VENV) $(VISION) site dist demo bench build
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
