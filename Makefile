PYTHON ?= python3
JOBS ?= 2
TORCH ?= 2.13.0

# Each version of torch has its own environment: make test TORCH=2.15.0.
VENV := .venv$(patsubst %,-%,$(filter-out 2.13.0,$(TORCH)))
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check
QUICK := --ignore=tests/compile --ignore=tests/random_programs --ignore=tests/test_random_programs.py \
	--ignore=tests/benchmarks --ignore=tests/front --ignore=tests/scan
# A stamp for each set of packages in the environment: `make demo` installs far fewer than `make test`.
DEMO := $(VENV)/.demo
TEST := $(VENV)/.test
LINT := $(VENV)/.lint
DOCS := $(VENV)/.docs

# Without a target, make lists the targets.
help:
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

.PHONY: help demo test quick test-all fuzz lint docs bench package clean

demo: $(DEMO)  ## train a small transformer, and print memory and time with and without remat
	$(BIN)/python examples/char_lm.py $(ARGS)

# The second and third run are for tests marked `cuda`, on a simulated device under both of its names (tests/device).
test: $(TEST)  ## run the tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m cuda --simulate cuda tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m cuda --simulate sim tests

# What to run after a change, in two minutes: without other libraries, compiled code and long programs.
quick: $(TEST)  ## run the quick tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -m "not integration" tests $(QUICK)

# The same with all cases of the tests of which `make test` runs only some.
test-all: $(TEST)  ## run all cases of the tests (30 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --all
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m cuda --simulate cuda --all tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m cuda --simulate sim tests

# Compare random programs with and without regions, until stopped: make fuzz, make fuzz ARGS="--seconds 600".
fuzz: $(TEST)  ## compare random programs with and without regions
	PYTHONPATH=. OMP_NUM_THREADS=1 $(BIN)/python -W ignore tests/fuzz.py $(ARGS)

lint: $(LINT)  ## ruff, mypy and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy remat tests/typing_cases.py
	PATH="$(CURDIR)/$(BIN):$$PATH" pyright tests/typing_cases.py
	PATH="$(CURDIR)/$(BIN):$$PATH" pyright --verifytypes remat --ignoreexternal | grep "completeness score: 100%"

docs: $(DOCS)  ## build the documentation in docs/_build
	$(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build

# Each prints a table and writes its figures to .bench. `benchmarks.gpu` needs a GPU; without one it prints a message.
bench: $(TEST)  ## run the benchmarks
	$(BIN)/python -m benchmarks.memory --output .bench/memory.json
	$(BIN)/python -m benchmarks.policies --output .bench/policies.json
	$(BIN)/python -m benchmarks.overhead --output .bench/overhead.json
	$(BIN)/python -m benchmarks.libraries --output .bench/libraries.json
	$(BIN)/python -m benchmarks.compiled --output .bench/compiled.json
	$(BIN)/python -m benchmarks.gpu --output .bench/gpu.json --picture .bench/gpu.svg
	$(BIN)/python -m benchmarks.transforms --output .bench/transforms.json --picture .bench/transforms.svg
	$(BIN)/python -m benchmarks.scan --output .bench/scan.json
	$(BIN)/python -m benchmarks.budget --output .bench/budget.json --picture .bench/pareto.svg
	$(BIN)/python -m benchmarks.autopilot
	$(BIN)/python -m benchmarks.speed --output .bench/speed.json

# Build the source distribution and the wheel in dist.
package: $(DEMO)  ## build the source distribution and the wheel in dist
	rm -rf dist
	$(PIP) -q build
	$(BIN)/python -m build

# This does not remove the environments: delete .venv by hand to rebuild it.
clean:  ## remove what the other targets have built, except the environments
	rm -rf .bench .build docs/_build build dist .pytest_cache .hypothesis .ruff_cache .mypy_cache
	find . -name __pycache__ -not -path './.venv*/*' -prune -exec rm -rf {} +

# Install the pinned torch first, so that the next line does not replace it.
$(DEMO): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch==$(TORCH)
	$(PIP) -q -e '.[examples]'
	touch $@

$(LINT): $(DEMO)
	$(PIP) -q -e '.[test,lint]'
	touch $@

$(DOCS): $(DEMO)
	$(PIP) -q -e '.[docs]'
	touch $@

# Tests compare the drop-in with fairscale, which is built from source without its dependencies; tests don't need them.
# backpack and laplace-torch depend on torchvision, which asks for a torch of its own; only their examples need it.
$(TEST): $(DEMO)
	$(PIP) -q -e '.[test,integration,libraries,examples,benchmarks,lint]' setuptools wheel
	$(PIP) -q --no-deps --no-build-isolation fairscale==0.4.13
	$(PIP) -q --no-deps backpack-for-pytorch==1.7.1 curvlinops-for-pytorch==3.0.1 laplace-torch==0.3
	touch $@
