# Everything a person or the check runs. Each target sets up what it needs, from nothing.
#   make demo      see a real text compressed by a real model, and questioned
#   make test      the tests: minutes, no network once the packages are there
#   make test-all  the slow ones too, on the real base model, and core and trainer on the oldest versions that are supported
#   make peers     the environment of the peers that `dodo evaluate` can measure
#   make check     lint, types, imports
#   make bench     measure speed and memory, into results/

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-all test-oldest peers check bench clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,train,evaluate,plot,serve]'
	touch $(READY)

demo: $(READY)
	$(BIN)/python examples/demo.py

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q

test-all: $(READY) test-oldest
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[harness,quantized,ray]'
	$(BIN)/python -m pytest -q -m ''

OLDEST := .venv-oldest
CORE := adapters autoregressive base compressor fingerprint generation model nuggets saving selection straight_through streaming thresholds

test-oldest: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --constraint constraints-oldest.txt --editable '.[train]' pytest
	$(OLDEST)/bin/python -m pytest -q $(CORE:%=tests/test_%.py) tests/data tests/training/test_training.py -k "not gguf"

PEERS := .venv-peers

peers: $(PEERS)/.ready

$(PEERS)/.ready: constraints-peers.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --constraint constraints-peers.txt kvpress llmlingua
	touch $(PEERS)/.ready

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/lint-imports

bench: $(READY)
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python benchmarks/compressor.py
	$(BIN)/python benchmarks/training.py
	$(BIN)/python benchmarks/autoregressive.py
	$(BIN)/python benchmarks/serving.py

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
