# make run: the main job; make test: the suite. Both set up .venv if it is missing.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: run test test-slow compilers lint

run: .venv/installed
	$(BIN)/python -m icejax.generate

test: .venv/installed-dev
	$(BIN)/python -m pytest -n 2 --dist loadfile  # more processes would take more than 3 GB

test-slow: .venv/installed-dev
	XLA_FLAGS= $(BIN)/python -m pytest -m slow

compilers: .venv/installed-aot

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "icejax needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv

.venv/installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

.venv/installed-dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable .[dev]
	touch $@

.venv/installed-aot: .venv/installed-dev  # of CUDA and TPU, without which tests/test_aot.py is skipped
	$(BIN)/python -m pip install --quiet --editable .[aot]
	touch $@
