# SPDX-License-Identifier: Apache-2.0
# A thin front of the CMake presets. CMAKE_ARGS goes to every configuration: make test CMAKE_ARGS=-DMLA_WERROR=ON
.DEFAULT_GOAL := help
.PHONY: help build demo test test-engines lint format coverage asan tsan cuda aarch64 wheels docs site clean

JOBS ?= $(shell nproc)
CMAKE_ARGS ?=
TRACE ?= data/mooncake_conversation_sample.jsonl

# GPU code: AUTO (where nvcc is), ON or OFF. It takes minutes to compile: the demo has it only where a GPU is.
CUDA ?= AUTO
gpu = $(or $(wildcard /proc/driver/nvidia/version),$(shell command -v nvidia-smi))

# Tests and lint look at the Python package too, in an environment of the project's own.
with_python = -DMLA_PYTHON=ON -DMLA_PYTHON_EXECUTABLE=$(CURDIR)/build/venv/bin/python

configure = cmake --preset $(1) $(2) $(CMAKE_ARGS)
build = cmake --build --preset $(1) --parallel $(JOBS)

help: ## Show this list
	@sed -n 's/^\([a-z0-9-]*\):[^#]*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

build: ## Set up, build the library and the command line (Release)
	scripts/setup.sh build
	$(call configure,default,-DMLA_CUDA=$(CUDA) -DMLA_BUILD_TESTS=OFF)
	$(call build,default)

demo: CUDA := $(if $(gpu),AUTO,OFF)
demo: build ## Set up, build, replay a minute of real requests through one layer of DeepSeek-V2-Lite
	build/default/bin/libmla replay $(TRACE) --model deepseek-v2-lite --requests 16 --as-fast-as-possible \
	  --time-budget 55

test: ## Set up, build, run all tests
	scripts/setup.sh test
	scripts/venv.sh build/venv
	$(call configure,default,-DMLA_CUDA=$(CUDA) -DMLA_BUILD_TESTS=ON $(with_python))
	$(call build,default)
	ctest --preset default

# ENGINES chooses releases: make test-engines ENGINES=vllm==0.33.0. LIBMLA_LIBRARY: that library, and nothing is built.
test-engines: ## The tests of the vLLM and SGLang plug-ins in the real packages (a GB to download)
ifndef LIBMLA_LIBRARY
	scripts/setup.sh test
endif
	scripts/venv.sh build/venv
ifndef LIBMLA_LIBRARY
	$(call configure,default,-DMLA_CUDA=$(CUDA) -DMLA_BUILD_TESTS=ON $(with_python))
	$(call build,default) --target mla_python mla_cli
endif
	scripts/engines.sh $(ENGINES)

lint: ## clang-format, clang-tidy, ruff, the layering and the docs check
	scripts/setup.sh lint
	scripts/venv.sh build/venv
	$(call configure,default,-B build/lint -DCMAKE_UNITY_BUILD=OFF -DMLA_CUDA=$(CUDA) -DMLA_BUILD_TESTS=ON $(with_python))
	scripts/lint.sh build/lint

format: ## Format all sources with clang-format 14
	scripts/setup.sh lint
	find include src tools tests examples python -name '*.h' -o -name '*.cpp' -o -name '*.c' -o -name '*.cu' -o -name '*.cuh' | xargs clang-format-14 -i

coverage: ## Line coverage of src/core, src/plan, src/dispatch and src/cpu; each at least 90 %
	scripts/setup.sh coverage
	$(call configure,coverage)
	$(call build,coverage)
	scripts/coverage.sh build/coverage

asan: ## All tests under the address and undefined-behaviour sanitizers
	scripts/setup.sh test
	$(call configure,asan)
	$(call build,asan)
	ctest --preset asan

tsan: ## The tests of the label "threads" under the thread sanitizer
	scripts/setup.sh test
	$(call configure,tsan)
	$(call build,tsan) --target tests_threads
	ctest --preset tsan -L '^threads$$'

cuda: ## The kernels by nvcc for all architectures: ptxas must report no unknown spill and no serialized wgmma
	scripts/setup.sh test
	$(call configure,cuda)
	$(call build,cuda) --target mla
	ctest --preset cuda -R '^cuda.ptxas'

aarch64: ## The library for 64-bit Arm by the cross compiler; tests of what it does on CPUs run under qemu-user
	scripts/setup.sh aarch64
	$(call configure,aarch64)
	$(call build,aarch64)
	ctest --preset aarch64

# CUDA=ON: with the kernels of all GPUs, or of those of MLA_CUDA_ARCHS="80;90" in the environment.
wheels: ## A Linux wheel in build/wheels, for CPUs; with CUDA=ON for GPUs too. It is installed and tried, or the target fails
	scripts/setup.sh wheels
	scripts/venv.sh build/venv
	CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) scripts/wheels.sh $(if $(filter ON,$(CUDA)),cu130,cpu)

# The readings of README's chart: the newest ones.
CHART = $(lastword $(sort $(wildcard bench/peers/*-h200.json)))

docs: build ## Refresh what is generated in docs: support matrix, estimates, C++ example, drawings, README's chart
	scripts/venv.sh build/venv
	scripts/draw_kernels.py --write
	PYTHONPATH=python build/venv/bin/python -m libmla plot $(CHART) --format svg --dark --out docs/img
	scripts/generated_docs.py --write example support estimates backends --mla build/default/bin/mla
	$(MAKE) site

SITE = build/site

site: ## The documentation as a site in build/site/html, with Python's, C++'s and C's reference; a dead link is an error
	scripts/setup.sh docs
	python3 -m venv $(SITE)/venv
	$(SITE)/venv/bin/pip install --quiet --disable-pip-version-check --requirement docs/site/requirements.txt
	doxygen docs/site/Doxyfile
	$(SITE)/venv/bin/sphinx-build -q -W --keep-going -b html -c docs/site -d $(SITE)/doctrees . $(SITE)/html

clean: ## Remove all build folders
	rm -rf build
