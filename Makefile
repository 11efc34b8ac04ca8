# Two commands on a fresh machine: `make demo` and `make test`. Both set up .venv themselves, once.
#   make setup PYTHON=python3.12 TORCH=torch==2.13.0 PIP_ARGS="--index-url ..."   all optional
# On a machine whose python has torch with CUDA, .venv lies over its packages and takes only what is missing.

PYTHON ?= python3
PY := .venv/bin/python
READY := .venv/.ready
LIBRARIES_READY := .venv-libraries/.ready
LIBRARIES := megatron-core==0.16.1 torchtitan==0.3.0 spmd_types==0.2.3 tyro docstring-parser typeguard triton \
    peft==0.21.2 accelerate==1.15.0
FLASHINFER := flashinfer-python==0.7.2.post1 apache-tvm-ffi==0.1.15.post2 requests==2.34.2 urllib3==2.8.0 \
    certifi==2026.10.18 charset-normalizer==3.5.2 einops==0.8.2 nvidia-ml-py==13.615.71
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
# Without bytecode each process that tests start compiles all that it imports: a fifth of their CPU time.
unexport PYTHONDONTWRITEBYTECODE

# Evaluated when a recipe needs them, after setup.
GPUS = $(shell $(PY) -c 'import torch; print(torch.cuda.device_count())' 2>/dev/null || echo 0)
# A worker per core: one more costs as much as it gains.
XDIST = $(shell $(PY) -c "import os, xdist; print('-n', min(16, os.cpu_count()), '--dist worksteal')" 2>/dev/null)
CLANG_FORMAT = $(firstword $(wildcard .venv/bin/clang-format) clang-format)
SHELLCHECK = $(firstword $(wildcard .venv/bin/shellcheck) shellcheck)
SOURCES = $(shell find csrc bench tests -name '*.h' -o -name '*.cuh' -o -name '*.cu' -o -name '*.cpp')
PYTHON_SOURCES := setup.py megamoe jit bench examples tests tools
export SLOW ?= 0

.PHONY: help setup accept demo test lint fmt model flaws compile gpu libraries dist clean

help:
	@sed -n 's/^## //p' $(MAKEFILE_LIST)

## setup    .venv with torch, megamoe (editable) and the developers' tools
setup: $(READY)
$(READY): setup.py constraints.txt tools/setup_env.sh tools/pip_install.sh
	PYTHON="$(PYTHON)" TORCH="$(TORCH)" PIP_ARGS="$(PIP_ARGS)" tools/setup_env.sh
	@touch $@

## demo     train a small MoE language model over two ranks, check it against one rank (3 minutes on 2 cores)
demo: $(READY)
	$(PY) tools/train_step.py $(ARGS)

## test     tests this machine can run (GPU tests too where there are GPUs), but for libraries'; SLOW=1: slow ones, too
# Tests without a GPU see none: torch takes a visible one as the default device of meshes and groups.
test: $(READY)
	@if [ $(GPUS) -gt 0 ]; then \
	    failed=0; \
	    CUDA_VISIBLE_DEVICES= $(PY) -m pytest -q $(XDIST) -m "not gpu and not ep" tests || failed=1; \
	    $(MAKE) --no-print-directory gpu || failed=1; \
	    exit $$failed; \
	else \
	    $(PY) -m pytest -q $(XDIST) tests; \
	fi

## gpu      only the tests that need a GPU, one after the other
gpu: $(READY)
	$(PY) -m pytest -q -m "gpu or ep" tests

## libraries  adapters of Megatron-Core, torchtitan, SGLang, vLLM, FlashInfer beside these, in .venv-libraries
libraries: $(LIBRARIES_READY)
	@$(MAKE) --no-print-directory -k -j2 -O $(addprefix .libraries-,vllm training sglang flashinfer compressed_tensors)
# Each in a process of its own, with packages that the others must not see.
.libraries-vllm .libraries-sglang .libraries-compressed_tensors: BESIDE := :.venv-libraries/serving
.libraries-flashinfer: BESIDE := :.venv-libraries/flashinfer
.libraries-%: FILES = tests/libraries/test_$*.py
.libraries-training: FILES := tests/libraries
.libraries-%:
	PYTHONPATH=$(PYTHONPATH):tests/libraries$(BESIDE) CUDA_VISIBLE_DEVICES= \
	    .venv-libraries/bin/python -m pytest -q -p no:warnings $(FILES)
# Without their dependencies, which would replace packages of .venv: with what they import on CPUs.
$(LIBRARIES_READY): $(READY) setup.py Makefile tests/libraries/serving.txt
	rm -rf .venv-libraries
	$(PY) -m venv --without-pip .venv-libraries
	@$(PY) -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	    > $$(.venv-libraries/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/over.pth
	tools/pip_install.sh .venv-libraries/bin/python --no-deps $(PIP_ARGS) $(LIBRARIES)
	tools/pip_install.sh .venv-libraries/bin/python --no-deps $(PIP_ARGS) \
	    --target .venv-libraries/serving -r tests/libraries/serving.txt
	tools/pip_install.sh .venv-libraries/bin/python --no-deps $(PIP_ARGS) \
	    --target .venv-libraries/flashinfer $(FLASHINFER)
	@touch $@

## accept   all that a change of the kernel has to pass on GPUs: checks, soak, demo, sweep; logs in out/accept
accept: $(READY)
	PYTHON="$(CURDIR)/$(PY)" tools/accept.sh

## model    the protocol model checker and the kernel's source on CPU fibers
model: $(READY)
	$(PY) -m pytest -q $(XDIST) tests/model tests/emulate

## flaws    kernels with planted flaws, on CPU fibers: each has to be seen
flaws: $(READY)
	$(PY) -m pytest -q $(XDIST) -m flaws tests/emulate

## compile  compile every kernel variant (no GPU needed): registers, spills, stack, SASS opcodes
compile: $(READY)
	$(PY) tools/compile_report.py

## lint     ruff, mypy, clang-format, shellcheck
lint: $(READY)
	$(PY) -m ruff check $(PYTHON_SOURCES)
	$(PY) -m ruff format --check $(PYTHON_SOURCES)
	$(PY) -m mypy
	@$(CLANG_FORMAT) --dry-run -Werror $(SOURCES)
	$(SHELLCHECK) tools/*.sh .ci/run

## fmt      format everything
fmt: $(READY)
	$(PY) -m ruff check --fix-only $(PYTHON_SOURCES)
	$(PY) -m ruff format $(PYTHON_SOURCES)
	$(CLANG_FORMAT) -i $(SOURCES)

## dist     source distribution and wheel in dist/
dist: $(READY)
	$(PY) -m build --outdir dist .

## clean    build outputs and caches; .venv and .venv-libraries stay
clean:
	rm -rf build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*/*' -prune -exec rm -rf {} +
