# The whole of it: `make demo` to see it run, `make test` to test it, `make check` before a commit.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install demo test check format clean

install: $(STAMP)

# torch comes first, at its pinned version: asked for by a range it would bring whatever build is
# newest. Everything after it finds it already there.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt "setuptools>=77" torch
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e ".[dev,foreign,export]"
	touch $@

# Trains the built-in translation task on whatever is here, a GPU or two CPU cores.
demo: $(STAMP)
	$(BIN)/headrace train --config demo.yaml --project runs/demo

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m pytest tests/test_layering.py tests/test_exports.py tests/test_tests.py

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
	rm -rf src/*.egg-info
