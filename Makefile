# HAWK. `make` alone lists the targets.
.DEFAULT_GOAL := help
.PHONY: help setup setup-ttnn demo check test lint clean

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

clean: ## remove caches and build output (.venv stays)
	rm -rf build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache *.egg-info
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
