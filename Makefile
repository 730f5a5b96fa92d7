# Everything a person or the check runs. Each target sets up what it needs, from nothing.
#   make demo      see a real text compressed by a real model, and questioned
#   make test      the tests: minutes, no network once the packages are there
#   make test-all  the slow ones too, on the real base model
#   make check     lint, types, imports, documents
#   make bench     measure speed and memory, into results/

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-all check bench clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,train,plot]'
	touch $(READY)

demo: $(READY)
	$(BIN)/python examples/demo.py

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q

test-all: $(READY)
	$(BIN)/python -m pytest -q -m ''

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/lint-imports

bench: $(READY)
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python benchmarks/compressor.py

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
