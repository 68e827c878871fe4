# `make help` lists commands and targets.
# The targets require Python 3.10 to 3.13. PYTHON=/path/to/python selects the interpreter of a new virtual environment.
# In requirements.txt, the version of TensorFlow depends on the version of Python.
is_supported = -c 'import ensurepip, sys; sys.exit(not (3, $(BEGIN)) <= sys.version_info[:2] < (3, $(END)))'
find_python = $(shell for python in $(1); do if $$python $(is_supported) >/dev/null 2>&1; then echo $$python; break; fi; done)
BEGIN = 10
END = 14
PYTHON ?= $(call find_python,python3.12 python3.13 python3.11 python3.10 python3 python)
# The tests run in two processes, because most of the time is spent tracing graphs, which uses only one core. Tests in
# the same file share fixtures, so they run in the same process.
PYTEST = -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder
# Tests of what may depend on the version of TensorFlow: recorded numbers, checkpoints, SavedModels, and short runs of each kind.
TENSORFLOW_TESTS = alternative_losses_test.py checkpoints data_util_test.py distillation_test.py export/export_test.py \
	inference/encoder_test.py lars_optimizer_test.py model_test.py objective_test.py replicas_test.py run_test.py \
	sources/tfds_features_test.py train_test.py

.PHONY: quickstart try install help test test-all docs-check soak mutations test-tf2.15 test-all-tf2.15 test-torch test-tpu test-compiled test-browser lint clean

define check_python
@test -x $(@D)/bin/python || "$(PYTHON)" $(is_supported) 2>/dev/null || { \
	echo 'make: PYTHON="$(PYTHON)" is not a Python interpreter from 3.$(BEGIN) to 3.$(shell expr $(END) - 1) with the venv module. Set PYTHON=/path/to/python.'; exit 2; }
endef

define COMMANDS
Commands (use .venv/bin/python, after `make install`); each has --help:
  python run.py             pretrains, fine-tunes, evaluates and exports networks
  python -m export          writes a checkpoint as a SavedModel or as PyTorch weights
  python -m inference       embeds images, predicts classes, and shows similar images with a SavedModel
  python -m checkpoints     describes a checkpoint or a SavedModel
  python -m transfer        evaluates an encoder on other data sets
  python -m paper.tables    lists and runs the paper's studies, and reports the results
  python -m paper.figures   draws the paper's figures
  python -m paper.probes    measures how well h and g(h) predict transformations (Table 3)
  python -m benchmarks      compares speed, memory and accuracy with baselines
Targets:
endef

quickstart: .venv/installed  ## installs the packages; pretrains, evaluates and exports a small network
	.venv/bin/python run.py --flagfile=paper/recipes/digits.cfg

export FOLDER
try: try-folder .venv/installed  ## pretrains on your own images and shows similar ones: make try FOLDER='my photos'
	.venv/bin/python run.py --flagfile=paper/recipes/own_images.cfg --dataset="folder:$$FOLDER"
	@run=$$(ls -td runs/*/ | head -1); printf '%s\n' "Open $${run}gallery.html in a browser. Next:" \
		"  . .venv/bin/activate" \
		"  python -m inference embed $$run '$$FOLDER' --out=vectors.csv" \
		"  python run.py --flagfile=paper/recipes/own_images_finetune.cfg --dataset='folder:$$FOLDER' --checkpoint=$$run  # with class folders" \
		"  tensorboard --logdir $$run"

try-folder:
	@test -n "$$FOLDER" || { echo "make: FOLDER is not set. Run make try FOLDER='my photos'."; exit 2; }

install: .venv/installed  ## installs the packages in .venv

help:  ## prints this list
	$(info $(COMMANDS))
	@awk -F ':.*## ' '/^[a-z0-9.-]+:.*## / {printf "  make %-20s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

test: .venv/installed-dev  ## runs the fast tests
	.venv/bin/python $(PYTEST) -m "not slow" tests

test-all: .venv/installed-dev  ## runs all tests
	.venv/bin/python $(PYTEST) tests

docs-check: .venv/installed-dev  ## runs the commands and the code of the documentation on small data (15 minutes)
	.venv/bin/python tests/docs/docs_check.py

soak: .venv/installed-dev  ## kills training runs at random moments and at each file operation, and tries random flags (90 minutes)
	.venv/bin/python tests/faults/soak.py
	SIMCLR_SOAK=1 .venv/bin/python -m pytest -q tests/faults/file_operations_test.py
	.venv/bin/python -m pytest -q tests/faults/fuzz_test.py --hypothesis-profile=soak

mutations: .venv/installed-dev  ## breaks the code in one place at a time, and reports which test fails (five minutes)
	.venv/bin/python tests/mutations.py

test-tf2.15: .venv-tf2.15/installed-dev  ## runs the tests of numbers, files and short runs with TensorFlow 2.15 (five minutes)
	.venv-tf2.15/bin/python $(PYTEST) -m "not slow" $(addprefix tests/,$(TENSORFLOW_TESTS))

test-all-tf2.15: .venv-tf2.15/installed-dev  ## runs all tests with TensorFlow 2.15
	.venv-tf2.15/bin/python $(PYTEST) tests

test-torch: .venv/installed-dev .venv-torch/installed  ## tests the code that uses PyTorch, torchvision and timm
	SIMCLR_TORCH_PYTHON=$(CURDIR)/.venv-torch/bin/python .venv/bin/python -m pytest -q tests/export/torch_weights_test.py \
		tests/benchmarks_test.py::test_losses_and_gradients_match_those_in_pytorch

test-tpu: .venv/installed-dev  ## installs the packages for TPUs, and starts the program with them on a CPU (five minutes)
	SIMCLR_TPU=1 .venv/bin/python -m pytest -q tests/tpu_test.py -k packages

test-compiled: .venv/installed-dev .venv-jax/installed  ## compiles training steps for GPUs and counts kernels (ten minutes)
	SIMCLR_JAX_PYTHON=$(CURDIR)/.venv-jax/bin/python .venv/bin/python -m pytest -q tests/benchmarks_test.py -k compiled

test-browser: .venv/installed-dev  ## opens the gallery and the report in a browser (apt-get install chromium chromium-driver)
	.venv/bin/python -m pytest -q tests/browser_check.py

lint: .venv/installed-dev  ## checks the code style with ruff and the types with mypy
	.venv/bin/python -m ruff check .
	.venv/bin/python -m ruff format --check --quiet .
	.venv/bin/python -m mypy

.venv-tf2.15/installed: END = 12
.venv-tf2.15/installed: PYTHON = $(call find_python,python3.11 python3.10)
.venv/installed .venv-tf2.15/installed: requirements.txt requirements-common.txt constraints-tf2.15.txt constraints-tf2.21.txt
	$(check_python)
	@echo "Installing $< into $(@D) (about four minutes, once)"
	test -x $(@D)/bin/python || "$(PYTHON)" -m venv $(@D)
	@cp constraints-tf$$($(@D)/bin/python -c 'import sys; print("2.15" if sys.version_info < (3, 12) else "2.21")').txt $(@D)/constraints.txt
	@# The pip version bundled with Python 3.10 cannot resolve these requirements.
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $< -c $(@D)/constraints.txt
	@touch $@

.venv-torch/installed: PYTHON = $(call find_python,python3.11 python3.12 python3.13 python3.10)
.venv-jax/installed: BEGIN = 12
.venv-jax/installed: PYTHON = $(call find_python,python3.12 python3.13)
.venv-torch/installed: requirements-torch.txt
.venv-jax/installed: requirements-jax.txt
.venv-torch/installed .venv-jax/installed:
	$(check_python)
	@echo "Installing $< into $(@D) (several minutes, once)"
	test -x $(@D)/bin/python || "$(PYTHON)" -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

%/installed-dev: %/installed requirements-dev.txt
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt -c $(@D)/constraints.txt
	@touch $@

clean:  ## removes the virtual environments
	rm -rf .venv .venv-*
