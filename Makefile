# `make demo` trains a small model, `make test` runs the tests, `make check` before a commit.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet -c constraints.txt
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-demo
DOCS_STAMP := $(VENV)/.installed-docs

.PHONY: install demo test check docs format clean

install: $(STAMP)

# torch is installed first, at its pinned version. The second command would otherwise install the
# newest build that its version range allows.
$(VENV)/.torch: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) "setuptools>=77" torch
	touch $@

$(STAMP): pyproject.toml $(VENV)/.torch
	$(PIP) --no-build-isolation -e ".[all,dev]"
	touch $(DEMO_STAMP) $@

# What the demo needs, without the libraries of the tests.
$(DEMO_STAMP): pyproject.toml $(VENV)/.torch
	$(PIP) --no-build-isolation -e ".[translate,monitor]"
	touch $@

# Trains on the built-in corpus, with a GPU or on two CPU cores.
demo: $(DEMO_STAMP)
	$(BIN)/headrace train --config demo.yaml --project runs/demo

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m pytest tests/test_layering.py tests/test_exports.py tests/test_tests.py

$(DOCS_STAMP): pyproject.toml $(VENV)/.torch
	$(PIP) --no-build-isolation -e ".[docs]"
	touch $@

# The documentation, as a folder of pages that need no network.
docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo site/index.html

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
	rm -rf src/*.egg-info
