.DEFAULT_GOAL := help
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The demo's data, and the engine's environment: shared by demo, serve and the tests with the real engine.
DEMO := $(CURDIR)/.demo
export OVERNIGHT_ENGINE_HOME ?= $(DEMO)/engine

.PHONY: help setup engine check test demo serve bench format clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Overnight needs Python 3.11 or newer: make PYTHON=python3.x")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	PYTHONWARNINGS=ignore::UserWarning $(BIN)/python -m pip install --quiet --editable '.[dev,demo]'
	@touch $@

setup: $(VENV)/.ready ## the environment in .venv, with Overnight installed

engine: setup ## the environment of vLLM for the CPU, and the demo model, in .demo
	@$(BIN)/overnight engine install --cpu >/dev/null

demo: engine ## a server with a real model, 48 requests through the openai SDK, the answers
	@$(BIN)/python examples/run_demo.py

serve: engine ## the demo's server, kept running on http://127.0.0.1:8000/v1
	@$(BIN)/overnight serve --model demo --data $(DEMO)

bench: setup ## what Overnight costs beside a bare loop, and the memory of a full batch
	$(BIN)/python -m bench.overhead
	$(BIN)/python -m bench.memory

format: setup ## rewrite the code in the agreed format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

check: setup ## format, lint, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: engine ## every test, the real-engine ones included
	$(BIN)/python -m pytest

clean: ## remove the environments, the demo's data and all caches
	rm -rf $(VENV) $(DEMO) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
