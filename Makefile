# Two commands: `make run` (the whole pipeline) and `make test`. Both set up .venv first.
PYTHON ?= python3
VENV ?= .venv
PROFILE ?= tiny
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
FAST := not slow and not notebook and not gpu and not browser

# the compiler of extensions looks for ninja on PATH
export PATH := $(abspath $(BIN)):$(PATH)

.PHONY: help setup run test check figures lab bench

help:
	@echo "make setup    create $(VENV) and install everything"
	@echo "make run      run the pipeline: PROFILE=tiny (default) or smoke, RUN=name to continue a run"
	@echo "make test     every test"
	@echo "make check    lint and fast tests, under a minute"
	@echo "make figures  redraw figures/"
	@echo "make lab      open the notebooks in JupyterLab"
	@echo "make bench    measure what benchmarks/ holds"

setup: $(STAMP)

$(STAMP): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) was not found; install Python 3.11 or newer, or name one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: $$($(PYTHON) --version) is too old; install Python 3.11 or newer, or name one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 2; }
	@command -v g++ >/dev/null || { echo "make: g++ was not found; install g++ 11 or newer (apt install g++, dnf install gcc-c++, conda install gxx)" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	@touch $@

run: setup
	$(BIN)/musalib run --profile $(PROFILE) $(if $(RUN),--run $(RUN))

test: setup
	$(BIN)/python -m pytest -m "not gpu and not browser"

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest -m "$(FAST)"

figures: setup
	$(BIN)/musalib figures $(if $(RUN),--run $(RUN))

lab: setup
	$(BIN)/jupyter lab notebooks

bench: setup
	@for script in benchmarks/*.py; do echo "$$script"; $(BIN)/python $$script || exit 1; done
