# Archipelago. `make` lists what there is; every target sets up what it needs.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
EXTRAS ?= dev

# Python keeps what it compiles, also where the environment says otherwise (many containers do): each of Ray's processes
# would compile torch, Lightning and all they import again, four of its seven seconds.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help run test test-fast check check-all check-hosts lint fmt types bench docs picture clean

help:  ## List these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(READY): pyproject.toml constraints.txt
	@echo "Setting up $(VENV) (a few minutes the first time) ..."
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	@$(PY) -c 'import ray, actors.block, archipelago.cli.main'  # compiled once, before many processes need it at once
	@touch $@

run: $(READY)  ## Run the demonstration: four methods on two problems, three seeds, ends in tables and a report
	$(PY) -m platform.launch

# Tests without a Ray cluster and tests with one run beside each other: the latter mostly wait.
test: $(READY)  ## Run the test suite: all but the longest tests of clusters and sweeps (check-all)
	$(PY) -m tests.suite

test-fast: $(READY)  ## Run the tests that need no Ray cluster
	$(PY) -m pytest -n 2 -m "not ray and not slow and not full"

check: lint types test  ## What CI runs: lint, types, tests

check-all: check  ## Everything: also the full matrix of layouts and kills, and every table's small variant
	$(PY) -m pytest -m full --timeout=1800
	$(PY) -m benchmarks behaviour --processes 2 --out benchmarks/results  # about an hour on two idle cores, less where cells are kept

check-hosts: $(READY)  ## Runs across real hosts: killed, cut off, slow, late (root and `ip netns` needed; Linux)
	$(PY) -m pytest tests/hosts -m hosts --timeout=1800

lint: $(READY)  ## Lint and format check
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports --no-cache

fmt: $(READY)  ## Format the code
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

types: $(READY)  ## Static types
	$(VENV)/bin/mypy

bench: $(READY)  ## Speed and size, as ratios in one run
	$(PY) -m benchmarks

# The site needs packages that nothing else does: they come with its first build.
docs: $(READY)  ## Build the documentation site into site/, strictly
	@$(PY) -c 'import material, mkdocstrings' 2>/dev/null || \
		$(PY) -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS),docs]'
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(VENV)/bin/mkdocs build --strict  # not --quiet: it would not count warnings

picture: $(READY)  ## Make the picture of a report that README shows, of the last run (needs chromium)
	$(PY) -m docs.hooks.report_picture

clean:  ## Remove the virtual environment and caches (never your runs)
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
