# make train   set everything up and train the default model; a second call skips what is done. ARGS='max_steps=2'
# make test    set everything up and run the tests of a day: a quarter of an hour on two cores
# make test-nodes every launcher on 2 and 4 machines made of namespaces: root, and tests/multinode/install.sh
# make test-all every case of every test, a new .venv for each Python from 3.11 to 3.14 found here among them, and
#              one with torch built for CUDA: hours
# make test-matrix a run saved under every split, resumed under every other
# make parity every split x precision x number of ranks against one process
# make check   ruff, mypy --strict and the quick tests, at once: two minutes on two cores
# make docs    run the commands that the pages print, write their outputs into the pages, and build the site
# make bench   this project against its peers on this machine

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The venv's bin first: DeepSpeed's launcher starts "python3" and finds ninja through PATH.
export PATH := $(CURDIR)/$(BIN):$(PATH)

# Said before a minute is spent on installing; any Python must be able to read it. pip starts the scripts of a folder
# with a space through a shell, which would read the characters.
define CHECK
import os, sys
if not (3, 11) <= sys.version_info < (3, 15):
    sys.exit("error: $(PYTHON) is Python %d.%d; 3.11 to 3.14 have a build of the pinned torch: make PYTHON=python3.12 ..."
             % sys.version_info[:2])
odd = sorted(set(os.getcwd()) & set(':"$$`\\'))
if odd:
    sys.exit("error: the path %s holds %s, with which programs in .venv do not start; move the folder"
             % (os.getcwd(), " ".join(odd)))
endef
export CHECK

.PHONY: train test test-nodes test-all test-matrix parity lint check quick docs bench setup setup-dev clean

setup: $(VENV)/.installed
setup-dev: $(VENV)/.installed-dev

# Extras that the README's commands use. The extra `tasks` (147 MB in 16,000 files) takes half as long again to install
# as all others: docs/tutorials/fine-tuning.md names its command where it is needed.
EXTRAS := images,serve

# pip would compile 18,000 files on one core; a package may have some for other versions of Python. The 7,600 that a run
# may import are compiled here on all cores, this project's among them; the rest is compiled where it is first imported.
UNCOMPILED := /(tests?|testing|plotly|sklearn|scipy|pandas|networkx|opentelemetry|pip|setuptools|transformers/models)/
define INSTALL
@$(PYTHON) -c "$$CHECK"
@echo 'installing into $(VENV) (a minute or two the first time)'
@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
@$(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check -c constraints.txt -e '$(1)'
@$(BIN)/python -m compileall -qq -j 0 -x '$(UNCOMPILED)' $(VENV)/lib pipeline || true
endef

$(VENV)/.installed: pyproject.toml constraints.txt
	$(call INSTALL,.[$(EXTRAS)])
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt
	$(call INSTALL,.[dev])
	@touch $(VENV)/.installed $@

train: setup
	deepspeed --log_level=warning launch/train.py --deepspeed ds_configs/zero2.json $(ARGS)

PARALLEL := --dist loadscope --no-loadscope-reorder
CORES = $(shell nproc)

# A worker more than cores: one has the nodes, whose stories wait more than they compute.
test: setup-dev
	python -m pytest -n $$(($(CORES) + 1)) $(PARALLEL) -m 'not nightly'

test-nodes: setup-dev
	python -m pytest tests/multinode $(PYTEST_ARGS)

test-all: setup-dev
	python -m pytest

test-matrix: setup-dev
	python -m pytest tests/checkpoint/test_any_to_any.py $(PYTEST_ARGS)

parity: setup-dev
	python -m pytest tests/parity $(PYTEST_ARGS)

# Warnings are errors: a link that leads nowhere, a page that is not in the menu.
SITE := NO_MKDOCS_2_WARNING=1 mkdocs build --quiet

lint: setup-dev
	ruff check .
	ruff format --check .
	mypy
	$(SITE)

check: setup-dev
	$(MAKE) --no-print-directory -j2 lint quick

quick: setup-dev
	python -m pytest -q -n $(CORES) $(PARALLEL) -m 'not slow and not gpu and not nightly'

docs: setup-dev
	python docs/write_reference.py
	python docs/outputs.py
	python docs/draw_one_curve.py
	$(SITE)

bench: setup
	python benchmarks/throughput.py

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache
