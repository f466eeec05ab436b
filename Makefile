# Targets and what they do: `make help`.
.DEFAULT_GOAL := help
SHELL := /bin/bash

PYTHON ?= python3
CONFIG ?= configs/wikihow_t5_3b.yaml
ARGS ?=
RUN_DIR ?= runs/demo

VENV := .venv
BIN := $(VENV)/bin
# Newer than requirements.txt once everything in it is installed: written last.
STAMP := $(VENV)/.requirements-installed
# There while pip works; left behind by a failed or interrupted set-up: the next starts afresh.
BUILDING := $(VENV)/.building

# One thread a process: two processes share the cores, and torchrun does not warn. A GPU would be
# used by one process only.
ON_CPU := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES=
# torchrun, without its own traceback behind our last word.
TORCHRUN := $(BIN)/python -m t5_fsdp.cli.launcher --standalone
TORCHRUN_CPU := $(ON_CPU) $(TORCHRUN) --nproc_per_node 2
# The files of tests are dealt to two processes, in their order, so that none that takes long comes
# last. The long tests keep two cores busy by themselves.
TWO_AT_ONCE := -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: help setup demo train doctor test test-long test-exhaustive coverage lint docs clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /|/' \
		| while IFS='|' read -r name text; do printf '  make %-15s %s\n' "$$name" "$$text"; done
	@echo
	@echo '  Variables: CONFIG=FILE.yaml (train), RUN_DIR=FOLDER (demo),'
	@echo '             ARGS="--section.option value ..." (demo, train, doctor),'
	@echo '             ARGS="pytest options" (test, test-long, coverage),'
	@echo '             PYTHON=/path/to/python3 (setup)'

setup: $(STAMP)  ## only make .venv, with what demo, tests and training need
	@echo '$(VENV) is ready.'

$(STAMP): requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
		echo 'error: $(PYTHON) is missing or older than Python 3.10, which is needed;' \
			'install a newer one or name it: make setup PYTHON=python3.11' >&2; exit 2; }
	@if [ -e $(BUILDING) ] || ! $(BIN)/python -c '' 2>/dev/null; then rm -rf $(VENV); fi
	@echo 'Making $(VENV) with PyTorch and the packages in requirements.txt (takes 2 to 10 minutes) ...'
	@$(PYTHON) -m venv $(VENV)
	@touch $(BUILDING)
	@$(BIN)/python -m pip install --disable-pip-version-check --no-input -r requirements.txt \
			> $(VENV)/pip.log 2>&1 || { \
		tail -n 15 $(VENV)/pip.log >&2; \
		echo 'error: pip could not install requirements.txt, or was interrupted; the end of' \
			'$(VENV)/pip.log is above. The next try starts afresh' >&2; exit 2; }
	@rm -f $(BUILDING)
	@touch $(STAMP)

demo: $(STAMP)  ## train a tiny T5 on two CPU processes, then ROUGE
	@case ' $(ARGS)' in *' --run_dir'*) \
		echo 'error: give RUN_DIR=FOLDER to make demo instead of --run_dir in ARGS' >&2; exit 2;; esac
	@$(TORCHRUN_CPU) scripts/train.py --config configs/demo.yaml --run_dir $(RUN_DIR) $(ARGS)
	@$(TORCHRUN_CPU) scripts/eval_rouge.py --checkpoint $(RUN_DIR) --split test

train: $(STAMP)  ## train on all GPUs (CONFIG: configs/wikihow_t5_3b.yaml)
	@$(BIN)/python -m t5_fsdp.cli.launch_check --config $(CONFIG) $(ARGS)
	@$(TORCHRUN) --nproc_per_node gpu scripts/train.py --config $(CONFIG) $(ARGS)

doctor: $(STAMP)  ## check whether this machine is fit for training
	@$(BIN)/python scripts/doctor.py $(ARGS)

test: $(STAMP)  ## run the test suite (ten minutes on two cores)
	@HF_HUB_OFFLINE=1 $(BIN)/python -m pytest $(TWO_AT_ONCE) -m 'not long and not exhaustive' $(ARGS)

test-long: $(STAMP)  ## run the long tests
	@HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m long $(ARGS) || { \
		code=$$?; [ $$code -eq 5 ] || exit $$code; echo 'There are no long tests.'; }

test-exhaustive: $(STAMP)  ## run what the other tests take samples of
	@HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m exhaustive $(ARGS)

coverage: $(STAMP)  ## lines that make test runs, at least 90 % (half an hour)
	@$(BIN)/coverage erase
	@HF_HUB_OFFLINE=1 $(BIN)/coverage run -m pytest -m 'not long and not exhaustive' $(ARGS)
	@$(BIN)/coverage combine --quiet
	@$(BIN)/coverage report

lint: $(STAMP)  ## ruff, import-linter and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports
	@$(BIN)/mypy

docs: $(STAMP)  ## write docs/configuration.md anew from t5_fsdp/config.py
	@$(BIN)/python -m t5_fsdp.cli.option_reference > docs/configuration.md

clean:  ## remove .venv and caches; runs/ and data/ stay
	rm -rf $(VENV) .mypy_cache .ruff_cache .import_linter_cache .hypothesis .coverage* build *.egg-info
	find t5_fsdp scripts tests -name __pycache__ -type d -prune -exec rm -rf {} +
