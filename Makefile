# SteerGate: every command a developer or a new user needs. Each sets up what it needs by itself.
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-engine test-rest bench lint contracts docs lock clean

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3
# PyTorch's CPU wheels are not on every package index. Where pip cannot find torch's +cpu build, name an
# index or a folder that has it:  make setup TORCH_INDEX=<url>   or   PIP_FIND_LINKS=<folder> make setup
TORCH_INDEX ?=
LOCKS := requirements/server.txt requirements/dev.txt requirements/sdk.txt
STAMP := $(VENV)/.steergate-$(shell cat $(LOCKS) pyproject.toml sdk/python/pyproject.toml | sha256sum | cut -c1-16)

help:
	@echo "make setup | demo [ARGS=--json] | test [ARGS=...] | bench [ARGS=--quick] | lint | contracts | docs | lock"

setup: $(STAMP)

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "SteerGate needs Python 3.11 or newer; set PYTHON=..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-deps $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) "$$(grep '^torch==' requirements/server.txt)"
	$(BIN)/pip install --quiet --no-deps -r requirements/server.txt -r requirements/dev.txt
	$(BIN)/pip install --quiet --no-deps --no-build-isolation -e . -e sdk/python
	$(BIN)/pip download --quiet --no-deps --dest $(VENV)/wheels -r requirements/sdk.txt
	rm -f $(VENV)/.steergate-*
	touch $@

demo: setup
	@$(BIN)/python -m steergate_server.demo $(ARGS)

# Everything; with ARGS, the tests that they name. Two halves run beside each other: tests that share engines, and the
# rest, which holds those that start engines of their own.
OWN_ENGINES := $(addprefix tests/engine/test_,architectures.py features.py tensor_parallel.py v2_runner.py)
ifdef ARGS
test: setup
	$(BIN)/python -m pytest $(ARGS)
else
test: setup
	@$(MAKE) --no-print-directory -j2 --output-sync=line test-engine test-rest
endif

test-engine: setup
	$(BIN)/python -m pytest tests/engine tests/faults $(addprefix --ignore=,$(OWN_ENGINES))

test-rest: setup lint docs
	$(BIN)/python tools/export_client_contracts.py --check
	$(BIN)/python -m pytest -p no:cacheprovider tests/http tests/reference tests/sdk tests/unit $(OWN_ENGINES)

# What steering costs; alone on the machine. It is no test: nothing fails if it is slow.
bench: setup
	@$(BIN)/python -m benchmarks $(ARGS)

contracts: setup
	$(BIN)/python tools/export_client_contracts.py

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy server/steergate_server sdk/python/steergate tools benchmarks

# Resolve the lock files again from their .in files (needs network and uv).
lock:
	uv pip compile --quiet --python-version 3.11 --no-annotate --no-header --override requirements/overrides.txt requirements/server.in -o requirements/server.txt
	uv pip compile --quiet --python-version 3.11 --no-annotate --no-header --override requirements/overrides.txt requirements/dev.in -o requirements/dev.txt
	uv pip compile --quiet --python-version 3.11 --no-annotate --no-header requirements/sdk.in -o requirements/sdk.txt

clean:
	rm -rf $(VENV)
