# Everything from a fresh copy of the project, with Python 3.11 to 3.13 and make alone. Start with: make help
#
#   PYTHON    the interpreter to build .venv with; the default is the first fitting one on the PATH
#   PIP_ARGS  more arguments for pip install, such as the package index of another build of torch
#   DEMO_RUN  the folder that `make demo` writes
#   ARGS      for `make bench`: a part of it, or a longer one, such as ARGS="W1 W4" or ARGS=--full
#             for `make gpu`: such as ARGS=--rehearse or ARGS="--budget 200 --only train"
#   WHEELHOUSE, PYTHON_VERSION, HAVE, MACHINE   for a machine without network: see docs/how-to/gpus-and-clusters.md

VENV := .venv
BIN := $(VENV)/bin
BENCH_VENV := .venv-bench
DOCS_VENV := .venv-docs
GPU_VENV := .venv-gpu
ARGS ?=
WHEELHOUSE ?=
PYTHON_VERSION ?=
HAVE ?=
MACHINE ?= x86_64
PIP_ARGS ?=
DEMO_RUN ?= runs/demo-$(shell date +%Y%m%d-%H%M%S)

FITS := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	$$p -c '$(FITS)' 2>/dev/null && echo $$p && break; done)

# `make gpu` prefers a Python that has torch. It must fit and have torch; a Python that was named is taken as it is.
HAS_TORCH := import importlib.util as u, sys; sys.exit(not ((3, 11) <= sys.version_info[:2] <= (3, 13) and u.find_spec("torch")))
GPU_PYTHON = $(if $(filter command environment,$(firstword $(origin PYTHON))),$(PYTHON),$(shell \
	for p in $(BIN)/python python3 python python3.13 python3.12 python3.11; do \
	$$p -c '$(HAS_TORCH)' 2>/dev/null && echo $$p && exit; done; echo $(PYTHON)))

# Each stamp is younger than what it was made from, so setting up isn't repeated.
VENV_STAMP := $(VENV)/.stamp-venv
RUN_STAMP := $(VENV)/.stamp-run
DEV_STAMP := $(VENV)/.stamp-dev
LOGGERS_STAMP := $(VENV)/.stamp-loggers
BENCH_STAMP := $(BENCH_VENV)/.stamp-bench
DOCS_STAMP := $(DOCS_VENV)/.stamp-docs
PIP_OPTIONS := --disable-pip-version-check -c constraints.txt $(PIP_ARGS)
PIP := $(BIN)/python -m pip install $(PIP_OPTIONS)

define PYTHON_FITS
@test -n "$(PYTHON)" || { \
  echo "No Python 3.11, 3.12 or 3.13 on the PATH: install one, or name it with  make PYTHON=/path/to/python3"; \
  exit 1; }
@$(PYTHON) -c '$(FITS)' || { \
  echo "$(PYTHON) is not Python 3.11, 3.12 or 3.13: name one with  make PYTHON=/path/to/python3"; exit 1; }
@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
  echo "$(PYTHON) can't make virtual environments: on Debian and Ubuntu install python3-venv" \
       "(apt-get install python3-venv), or name another with  make PYTHON=/path/to/python3"; exit 1; }
endef

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-all bench gpu wheelhouse docs docs-serve screenshots lint format clean

help: ## show this list
	@echo "hotloop: trains your PyTorch network as fast as your hardware allows, and proves it"
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "The first call makes $(VENV) and installs everything there, which takes a few minutes. On Linux torch comes with"
	@echo "several GB of CUDA libraries; without an NVIDIA GPU, its CPU build spares you those:"
	@echo '  make demo PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"'

demo: $(RUN_STAMP) ## train a small network on Fashion-MNIST, then look at its mistakes
	$(BIN)/hotloop train examples/fashion.py -p width=0.5 --epochs 4 --run $(DEMO_RUN)
	$(BIN)/hotloop evaluate $(DEMO_RUN)

# Two at a time, each with one thread of its own: two threads on a core that is in use wait for each other. Who comes
# to the end of his half first takes over tests of the other's.
test: $(DEV_STAMP) ## run the tests, in about a quarter of an hour on two idle cores
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

bench: $(BENCH_STAMP) ## hotloop beside what you would pick instead, half an hour; ARGS="--help" says what else
	@$(BENCH_VENV)/bin/python -m bench.speed $(ARGS)

# The environment is made around the torch that a Python has, once: see bench/gpu/environment.py.
gpu: ## prove everything on a GPU, in eight minutes; ARGS=--rehearse tries the list on the CPU
	@test -n "$(GPU_PYTHON)" || { \
	  echo "No Python 3.11, 3.12 or 3.13 on the PATH: name the one that has torch with  make gpu PYTHON=/path/to/python3"; \
	  exit 1; }
	@$(GPU_PYTHON) -m bench.gpu.environment $(GPU_VENV) --arguments="$(ARGS)" --pip-options="$(PIP_ARGS)" \
	  $(if $(WHEELHOUSE),--wheelhouse "$(WHEELHOUSE)")
	@$(GPU_VENV)/bin/python -m bench.gpu $(ARGS)

# Runs in any Python with pip, as it downloads for another one.
wheelhouse: ## collect what `make gpu` needs on a machine without network; PYTHON_VERSION=3.12 is that machine's
	$(PYTHON_FITS)
	@test -n "$(PYTHON_VERSION)" || { echo "name the other machine's Python:  make wheelhouse PYTHON_VERSION=3.12"; exit 1; }
	@$(PYTHON) -m bench.gpu.wheelhouse "$(or $(WHEELHOUSE),wheelhouse)" --python-version "$(PYTHON_VERSION)" \
	  --have "$(HAVE)" --machine "$(MACHINE)"

test-all: $(LOGGERS_STAMP) ## run these tests and those left out for their length, about half an hour
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m ""

docs: $(DOCS_STAMP) ## build the documents as a site in build/site, which opens without a network
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -m mkdocs build --quiet --strict
	@echo "build/site/index.html"

docs-serve: $(DOCS_STAMP) ## show the site at http://127.0.0.1:8000, built again when a page changes
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -m mkdocs serve

screenshots: $(DEV_STAMP) ## record the session of README.md and the pictures of pages again; needs Chromium
	$(BIN)/python -m docs.generators.session
	$(BIN)/python -m docs.generators.pages

lint: $(DEV_STAMP) ## check style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(DEV_STAMP) ## put the code into the one style
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean: ## remove what make made, except runs/ and what was measured (.bench/)
	rm -rf $(VENV) $(BENCH_VENV) $(DOCS_VENV) $(GPU_VENV) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find src tests examples bench -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV_STAMP):
	$(PYTHON_FITS)
	$(PYTHON) -m venv $(VENV)
	@touch $@

# The peers stay out of the way of what is tested: they bring a hundred packages.
$(BENCH_STAMP): pyproject.toml constraints.txt
	$(PYTHON_FITS)
	$(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_VENV)/bin/python -m pip install $(PIP_OPTIONS) -e '.[bench]'
	@# As below.
	$(BENCH_VENV)/bin/python -m pip install $(PIP_OPTIONS) --no-deps timm
	@printf '#!/bin/sh\ncd "%s" && exec "%s" -m bench.speed "$$@"\n' "$(CURDIR)" "$(abspath $(BENCH_VENV))/bin/python" \
	  > $(BENCH_VENV)/bin/hotloop-bench && chmod +x $(BENCH_VENV)/bin/hotloop-bench
	@touch $@

# The site reads the source without importing hotloop, so that its environment has no torch.
$(DOCS_STAMP): pyproject.toml constraints.txt
	$(PYTHON_FITS)
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install $(PIP_OPTIONS) 'mkdocs<2' 'mkdocs-material<10' 'mkdocstrings[python]' ruff
	@touch $@

$(RUN_STAMP): $(VENV_STAMP) pyproject.toml constraints.txt
	$(PIP) -e .
	@touch $@

$(DEV_STAMP): $(VENV_STAMP) pyproject.toml constraints.txt
	$(PIP) -e '.[dev]'
	@# Without what it depends on: PyPI's torchvision fits CUDA builds of torch alone. The tests do without torchvision.
	@# axe-playwright-python has axe-core's script; the tests drive the browser without playwright.
	$(PIP) --no-deps timm axe-playwright-python
	@touch $@ $(RUN_STAMP)

# The libraries of the loggers bring fifty packages, which `make test` does without.
$(LOGGERS_STAMP): $(DEV_STAMP)
	$(PIP) -e '.[loggers]'
	@# Without what it depends on: trackio 0.43 excludes pillow 13, which its tables of figures don't use.
	$(PIP) --no-deps trackio
	@touch $@
