# make train   the default model on the default data, four workers, on this machine
# make test    all tests, three files at a time: those on Slurm mostly wait; ROOM=launch runs those of hpc_train/launch:
#                its folder of tests, and the tests in one process whose imports reach it
# make test-share  ten minutes of the long forms, drawn by SHARE
# make test-all  the long forms as well: 500 kills in saves, 20 faults of each kind and 1,000 drawn at random, 5,000
#                damaged checkpoints, all pairs of layouts, faults of nodes, file systems and networks on Slurm, ten
#                minutes of attacks on the rendezvous server; hours. If interrupted, the next call skips the cases that
#                have passed with this code (recorded in .pytest_cache/long)
# make test-pythons  the wheel on Python 3.12 and 3.13, those of them that this machine has, without torch: help, version,
#                dry run, freeze; a minute, with packages from the index
# make test-torch TORCH=2.15.0  the layouts, checkpoints, faults, doors and resumption on another version of torch, in an
#                separate environment, which replaces that of the earlier version; TESTS=... runs others
# make lint    ruff, mypy, import-linter
# make docs    the documentation as web pages, in build/site; python -m http.server -d build/site serves them with search
# make monitoring-up, monitoring-down  a private Prometheus that scrapes your runs, e.g. those of make slurm-up, and
#                Grafana with the dashboards where it is installed; MONITORING_INSTALL=1 installs Prometheus
# make bench-peers  our step against Lightning Fabric, Accelerate, Trainer, torchtitan and a bare loop, in an
#                   environment of their own
# make bench-compression  the loss of the default task under each compression of gradients, as a plot; some minutes
#
# An active environment (virtualenv or conda) that has torch is used; otherwise .venv is made here.
# TORCH_INDEX=URL takes torch from another wheel index, e.g. https://download.pytorch.org/whl/cpu

PYTHON ?= python3
TORCH_INDEX ?=
ACTIVE := $(shell test -n "$$VIRTUAL_ENV$$CONDA_PREFIX" && python -c 'import torch' >/dev/null 2>&1 && echo yes)

ifeq ($(ACTIVE),yes)
PY := python
STAMPS := $(or $(VIRTUAL_ENV),$(CONDA_PREFIX))
else
PY := .venv/bin/python
STAMPS := .venv
endif
# pip would compile in one process what COMPILE compiles on all cores
INSTALL := $(PY) -m pip install --disable-pip-version-check --no-compile -c constraints.txt
COMPILE := $(PY) -m compileall -qq -j 0 $$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))') hpc_train \
           hydra_plugins || true  # some packages hold files that are not Python

.PHONY: train test test-share test-all test-pythons test-torch bench-peers bench-compression lint docs slurm-up slurm-down \
        slurm-env monitoring-up monitoring-down install install-dev install-ci clean

train: install
	$(PY) -m hpc_train +strategy=hybrid -m

ROOM ?=

test: install-dev
	files="$(if $(ROOM),$$($(PY) -m tests.structure.room $(ROOM)))" && $(PY) -m pytest -n 3 $$files

test-share: install-dev
	HPC_TRAIN_LONG=1 HPC_TRAIN_TRIALS=1 $(PY) -m pytest --long-share '$(SHARE)'

test-all: install-dev
	HPC_TRAIN_LONG=1 $(PY) -m pytest

test-pythons: install-dev
	HPC_TRAIN_LONG=1 $(PY) -m pytest tests/config/test_packaging.py -k other_pythons --durations 0

TESTS ?= tests/parallel tests/checkpoint tests/faults tests/doors tests/train/test_resume.py

test-torch: .venv-torch/.torch-$(TORCH)
	.venv-torch/bin/python -m pytest -n 3 $(TESTS)

# torch==2.13.0 takes 2.13.0+cpu where an index offers it; PyPI has only the build for CUDA (some GB with its libraries).
.venv-torch/.torch-$(TORCH): pyproject.toml constraints.txt
	$(if $(TORCH),,$(error make test-torch needs a version of torch, e.g. make test-torch TORCH=2.15.0))
	rm -rf .venv-torch
	$(PYTHON) -m venv .venv-torch
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt >.venv-torch/constraints.txt
ifneq ($(TORCH_INDEX),)
	.venv-torch/bin/python -m pip install --quiet --index-url $(TORCH_INDEX) torch==$(TORCH)
endif
	.venv-torch/bin/python -m pip install --quiet -c .venv-torch/constraints.txt -e '.[dev]'
	@touch $@

bench-peers: .venv-peers/.installed
	.venv-peers/bin/python -m benchmarks.peers $(PEERS)

.venv-peers/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-peers
ifneq ($(TORCH_INDEX),)
	.venv-peers/bin/python -m pip install --quiet -c constraints.txt --index-url $(TORCH_INDEX) torch
endif
	.venv-peers/bin/python -m pip install --quiet -c constraints.txt -e . lightning accelerate transformers torchtitan triton
	@touch $@

bench-compression: install-dev
	$(PY) -m benchmarks.compression_convergence $(COMPRESSION)

lint: install-dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -c "from importlinter.cli import lint_imports_command as main; main()"

docs: install
	$(INSTALL) -e '.[docs]'
	$(PY) docs/pictures.py
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

install: $(STAMPS)/.hpc_train-installed
install-dev: $(STAMPS)/.hpc_train-installed-dev
install-ci: $(STAMPS)/.hpc_train-installed-ci

.venv/bin/python:
	$(PYTHON) -m venv .venv

$(STAMPS)/.hpc_train-installed: pyproject.toml constraints.txt | $(filter .venv/%,$(PY))
	@echo "installing hpc_train and what it needs; torch is most of it, and pip prints sizes before it downloads"
ifneq ($(TORCH_INDEX),)
	$(INSTALL) --index-url $(TORCH_INDEX) torch
endif
	$(INSTALL) -e .
	@echo "compiling the Python files"
	@$(COMPILE)
	@du -sh $(STAMPS)
	@touch $@

$(STAMPS)/.hpc_train-installed-dev: $(STAMPS)/.hpc_train-installed
	$(INSTALL) -e '.[dev]'
	$(COMPILE)
	@touch $@

$(STAMPS)/.hpc_train-installed-ci: $(STAMPS)/.hpc_train-installed-dev
	$(INSTALL) -e '.[ci]'
	$(COMPILE)
	@touch $@

slurm-up:
	@$(PYTHON) slurm/devcluster/devcluster.py up $(DEVCLUSTER)

slurm-down:
	@$(PYTHON) slurm/devcluster/devcluster.py down $(DEVCLUSTER)

slurm-env:
	@$(PYTHON) slurm/devcluster/devcluster.py env $(DEVCLUSTER)

monitoring-up:
	@$(PYTHON) deploy/monitoring/monitoring.py up $(MONITORING)

monitoring-down:
	@$(PYTHON) deploy/monitoring/monitoring.py down $(MONITORING)

clean:
	rm -rf .venv .venv-peers .venv-torch build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
