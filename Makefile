# make demo   train the embedded example: installs into .venv on first use, then runs recipes/grpo.py
# make test   run the whole test suite
# make lint   ruff check and ruff format --check
# make clean  remove .venv, caches and build leftovers

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt

DEMO_STAMP := $(VENV)/.installed-demo
TEST_STAMP := $(VENV)/.installed-test

.PHONY: demo test lint clean

# Every question accelerate would otherwise answer for itself, with a warning, is answered here.
demo: $(DEMO_STAMP)
	$(BIN)/accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
		recipes/grpo.py

# The suite needs no network; HF_HUB_OFFLINE turns an accidental download into an immediate error.
test: $(TEST_STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest

lint: $(TEST_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The stamps are renewed only after a complete install, so an interrupted one is repeated.
$(DEMO_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) --editable ".[cpu]"
	touch $@

$(TEST_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) --editable ".[test,bench,cpu,triton,tasks,peft]"
	touch $@ $(DEMO_STAMP)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
