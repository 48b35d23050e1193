# HAWK. `make` alone lists the targets.
.DEFAULT_GOAL := help
.PHONY: help setup setup-ttnn demo check test test-kmod chaos simulate mutations fuzz nightly lint clean

PY := .venv/bin/python
export PYTHON TTNN_PYTHON TORCH_INDEX

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## make .venv (Python 3.11; TORCH_INDEX=URL where pip's index has no CPU torch)
	@scripts/setup.sh

setup-ttnn: ## make .venv-ttnn (Python 3.12 or 3.10), in which TTNN judges our layouts; TTNN_PYTHON=PATH chooses
	@scripts/setup_ttnn.sh

demo: setup ## prefill on vLLM's CPU backend, decode on a simulated NPU, compare with one instance
	@.venv/bin/hawk demo

lint: setup
	@.venv/bin/ruff check .
	@$(PY) -m mypy

check: lint ## ruff, mypy and the quick tests (under a minute)
	@$(PY) -m pytest -q -n 2 -m "not e2e and not vllm and not ttnn and not slow"

test: lint setup-ttnn ## everything
	@$(PY) -m pytest

test-kmod: setup ## the kernel module in a VM: real verbs, Mooncake, all of HAWK (Debian 12; as root it installs what it needs)
	@$(MAKE) --no-print-directory -C kmod test

FAULTS ?= 100
SEED ?= 1
chaos: setup ## FAULTS=n SEED=n: faults on real processes under load (kill, stop, cut, full disk, ...); needs root
	@$(PY) -m tests.chaos --faults $(FAULTS) --seed $(SEED)

SEEDS ?= $(if $(filter file,$(origin SEED)),0..1000,$(SEED))
simulate: setup ## SEED=n or SEEDS=a..b: deployments in virtual time; one seed prints its events and replays exactly
	@$(PY) -m tests.protocol.run_simulation $(SEEDS)

mutations: setup ## wrong changes of the protocol, each of which the simulation must catch
	@$(PY) -m tests.mutations.run_mutations

FRAMES ?= 20000
fuzz: setup ## FRAMES=n SEED=n: hostile frames at every decoder, the state machines and real sockets
	@$(PY) -m tests.fuzz.run_fuzz --frames $(FRAMES) --seed $(SEED)

nightly: mutations ## what takes too long for `make test`: 20,000 seeds, a million frames, 100 real faults
	@$(PY) -m tests.protocol.run_simulation 0..20000
	@$(PY) -m tests.fuzz.run_fuzz --frames 1000000 --seed $(SEED)
	@$(MAKE) --no-print-directory chaos FAULTS=100 SEED=$(SEED)

clean: ## remove caches and build output (.venv stays)
	rm -rf build dist kmod/build .pytest_cache .hypothesis .mypy_cache .ruff_cache *.egg-info
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
