# `make` prints the targets. WORLD, DATA_DIR, RUN_DIR, RESTARTS and ARGS pass through.

WORLD ?= 3
DATA_DIR ?= data
RESTARTS ?= 0
ARGS ?=
PYTHON ?= python3

VENV := .venv
BIN := $(VENV)/bin

ifeq ($(origin RUN_DIR),undefined)
RUN_DIR := runs/$(shell date +%Y%m%d-%H%M%S)-$(shell od -An -N3 -tx1 /dev/urandom | tr -d ' ')
endif

# The shell splits ARGS; a --run-dir among them wins over RUN_DIR.
# torchrun's own log directory lies in the run directory, so that no temporary one is left.
# OMP_NUM_THREADS only silences torchrun's banner: launch.py divides the cores itself.
LAUNCH = run_dir='$(RUN_DIR)'; before=; \
	for word in $(ARGS); do \
		case "$$word" in --run-dir=*) run_dir="$${word\#--run-dir=}";; esac; \
		case "$$before" in --run-dir) run_dir="$$word";; esac; \
		before="$$word"; \
	done; \
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --local-addr=127.0.0.1 \
	--nproc_per_node=$(1) --max-restarts=$(RESTARTS) --log-dir="$$run_dir/torchrun" launch.py --run-dir="$$run_dir"

.DEFAULT_GOAL := help
.PHONY: help setup train smoke doctor test test-fast coverage mutants fmt lint types check bench bench-quick faults clean

help: ## print this
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1\t\2/p' $(MAKEFILE_LIST) | awk -F '\t' '{printf "  make %-11s %s\n", $$1, $$2}'
	@echo
	@echo "  make train WORLD=4 ARGS=\"--optimizer Adam --lr 0.001\"   one server, three trainers"
	@echo "  make train WORLD=3 RESTARTS=3                             goes on after a rank has died"
	@echo "  make train WORLD=3 DATA_DIR=folder-with-MNIST-raw      python launch.py --help lists ARGS"

setup: $(VENV)/.dev ## install everything into .venv

train: $(VENV)/.run ## train: WORLD ranks, DATA_DIR, RESTARTS, ARGS="options of launch.py"
	@$(call LAUNCH,$(WORLD)) --data-dir='$(DATA_DIR)' $(ARGS)

smoke: $(VENV)/.run ## train the generated digits at world size 2; fails below accuracy 0.90
	@$(call LAUNCH,2) --workload digits $(ARGS) && \
	$(BIN)/python -m benchmarks.require test_accuracy 0.90 "$$run_dir/report.json"

test: $(VENV)/.dev ## run all tests
	@$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not timed"
	@$(BIN)/python -m pytest -m timed

coverage: $(VENV)/.dev ## run all tests, and print which lines and branches of ps none has run
	@$(BIN)/coverage erase
	-@$(BIN)/coverage run -m pytest -n 2 --dist loadgroup -m "not timed"
	-@$(BIN)/coverage run -m pytest -m timed
	@$(BIN)/coverage combine --quiet
	@$(BIN)/coverage report

mutants: $(VENV)/.dev ## change the pure parts in small ways, and show what their fast tests let pass
	@$(BIN)/python -m tests.mutants

test-fast: $(VENV)/.dev ## run the tests that start no job
	@$(BIN)/python -m pytest -n 2 -m "not slow"

fmt: $(VENV)/.dev ## format the code
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

lint: $(VENV)/.dev ## check format, lint and the arrows between the rooms
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@found=$$($(BIN)/lint-imports --no-cache) || { echo "$$found"; exit 1; }

types: $(VENV)/.dev ## check types
	@$(BIN)/mypy

check: lint types test-fast ## lint, types and fast tests

doctor: $(VENV)/.run ## look at this machine as a run with ARGS would find it
	@$(BIN)/python -m ps doctor --world-size $(WORLD) --data-dir '$(DATA_DIR)' $(ARGS)

bench: $(VENV)/.run ## measure against loops, DDP, Hogwild, the tutorial, Ray; under 10 minutes
	@$(BIN)/python -m benchmarks.bench

bench-quick: $(VENV)/.run ## the same with fewer rounds; under 2 minutes
	@$(BIN)/python -m benchmarks.bench --quick

faults: $(VENV)/.run ## let every fault happen to real jobs, and see what becomes of them
	@$(BIN)/python -m benchmarks.faults

clean: ## remove .venv and caches; data and runs stay
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis mutants .coverage*
	find . -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/bin/pip:
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml | $(VENV)/bin/pip
	@echo "installing into $(VENV) ..."
	@$(BIN)/pip install --quiet --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@echo "installing the tools for development into $(VENV) ..."
	@$(BIN)/pip install --quiet --editable '.[dev]'
	@touch $@
