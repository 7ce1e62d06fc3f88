# make run: the main job; make test: the suite. Both set up .venv if it is missing.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# An environment of its own: where compilers are and no device is, JAX says so at every start, and tests read what commands print.
AOT := .venv-aot
# kvpress pins transformers; the packages of two formats of weights come along.
KVPRESS := .venv-kvpress

# What says of whole models that their numbers are right is run once more with programs as users have them.
OPTIMISED := tests/models/test_parity.py tests/cache/test_clustered.py -k "(equal_transformers and fan_in) or greedy_text_equals or equal_the_reference"

# Seconds since 1970 after which no further test of the two longest suites begins; -rs tells how many were not run.
LIMITED = $(if $(UNTIL),--until $(UNTIL) -rs)

.PHONY: run test test-bench test-slow test-published test-aot lint

run: $(VENV)/installed
	$(BIN)/python -m icejax.generate

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest -n 2 --dist worksteal  # more processes would take more than 4 GB

test-bench: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m "bench and not slow" -n 2 --dist worksteal

test-slow: $(VENV)/installed-dev $(KVPRESS)/installed
	$(BIN)/python -m pytest -m slow -n 2 --dist worksteal $(LIMITED)
	XLA_FLAGS= $(BIN)/python -m pytest -n 2 --dist load $(OPTIMISED) $(LIMITED)

test-published: $(VENV)/installed-dev
	XLA_FLAGS= $(BIN)/python -m pytest -m published  # optimised programs, one model after another, 8 GB; they stay in the user's cache directory

test-aot: $(AOT)/installed
	XLA_FLAGS= $(AOT)/bin/python -m pytest -m slow -n 2 tests/aot/test_aot.py $(LIMITED)

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "icejax needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/installed-dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable .[dev]
	touch $@

$(KVPRESS)/installed: pyproject.toml Makefile
	$(PYTHON) -m venv $(KVPRESS)
	$(KVPRESS)/bin/python -m pip install --quiet kvpress==0.5.5 compressed-tensors==0.20.0 torch==2.13.0
	$(KVPRESS)/bin/python -m pip install --quiet --no-deps autoawq==0.2.7.post3  # it asks for an old transformers, and one file is read
	touch $@

$(AOT)/installed: pyproject.toml
	$(PYTHON) -m venv $(AOT)
	$(AOT)/bin/python -m pip install --quiet --editable .[test,aot]
	touch $@
