# `make help` lists commands and targets.
# The targets require Python 3.10 to 3.13. PYTHON=/path/to/python selects the interpreter.
PYTHON ?= $(shell for python in python3.11 python3.10 python3.12 python3.13 python3 python; do \
	if $$python -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1; then \
	echo $$python; break; fi; done)
# The tests run in two processes, because they spend most of their time tracing graphs, which uses only one core. Tests
# in the same file share fixtures, so they run in the same process.
PYTEST = -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder tests

.PHONY: quickstart help test test-all soak test-current test-current-all lint clean

define COMMANDS
Commands (use .venv/bin/python, after `make quickstart`); each has --help:
  python run.py             pretrains, fine-tunes, evaluates and exports
  python -m export          writes a checkpoint as a SavedModel
  python -m inference       embeds images and predicts classes with a SavedModel
  python -m checkpoints     describes a checkpoint or a SavedModel
  python -m transfer        evaluates an encoder on other data sets
  python -m paper.tables    lists and runs the paper's studies, and reports the results
  python -m paper.figures   draws the paper's figures
  python -m paper.probes    measures which transformations h and g(h) predict (Table 3)
Targets:
endef

quickstart: .venv/installed  ## installs the packages; pretrains, evaluates and exports a small network
	.venv/bin/python run.py --flagfile=paper/recipes/digits.cfg

help:  ## prints this list
	$(info $(COMMANDS))
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-20s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

test: .venv/installed-dev  ## runs the fast tests
	.venv/bin/python $(PYTEST) -m "not slow"

test-all: .venv/installed-dev  ## runs all tests
	.venv/bin/python $(PYTEST)

soak: .venv/installed-dev  ## kills training runs at random moments, and tries random flags (about an hour)
	.venv/bin/python tests/faults/soak.py
	.venv/bin/python -m pytest -q tests/faults/fuzz_test.py --hypothesis-profile=soak

test-current: .venv-current/installed-dev  ## runs the fast tests with TensorFlow 2.21
	.venv-current/bin/python $(PYTEST) -m "not slow"

test-current-all: .venv-current/installed-dev  ## runs all tests with TensorFlow 2.21
	.venv-current/bin/python $(PYTEST)

lint: .venv/installed-dev  ## checks the code style with ruff
	.venv/bin/python -m ruff check .

.venv/installed: requirements.txt requirements-common.txt
.venv-current/installed: requirements-current.txt requirements-common.txt
.venv/installed .venv-current/installed:
	@test -n "$(PYTHON)" || { echo "make: no Python from 3.10 to 3.13 found. Pass one: make PYTHON=/path/to/python"; exit 2; }
	@echo "Installing $< into $(@D) with $(PYTHON) (about four minutes, once)"
	$(PYTHON) -m venv $(@D)
	@# The pip version bundled with Python 3.10 cannot resolve these requirements.
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

%/installed-dev: %/installed requirements-dev.txt
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $@

clean:  ## removes the virtual environments
	rm -rf .venv .venv-current
