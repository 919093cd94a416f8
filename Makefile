PYTHON ?= python3
JOBS ?= 2
TORCH ?= 2.13.0

# Another version of torch has an environment of its own: make test TORCH=2.15.0.
VENV := .venv$(patsubst %,-%,$(filter-out 2.13.0,$(TORCH)))
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check
# One environment, and a stamp for each set of packages in it: `make demo` installs far fewer than `make test`.
DEMO := $(VENV)/.demo
TEST := $(VENV)/.test
LINT := $(VENV)/.lint
DOCS := $(VENV)/.docs

.PHONY: demo test test-all fuzz lint docs bench package clean

# Threads that wait for each other without spinning are much faster on a busy machine, and hardly slower on an idle one.
demo: $(DEMO)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python examples/char_lm.py $(ARGS)

# The other runs are of the tests marked `cuda`, on a simulated device under both of its names (tests/device).
test: $(TEST)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m cuda --simulate cuda tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m cuda --simulate sim tests

# The same with all cases of what `make test` takes a part of.
test-all: $(TEST)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --all
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m cuda --simulate cuda --all tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m cuda --simulate sim tests

# Random programs, with regions and without, until it is stopped: make fuzz, make fuzz ARGS="--seconds 600".
fuzz: $(TEST)
	PYTHONPATH=. OMP_NUM_THREADS=1 $(BIN)/python -W ignore tests/fuzz.py $(ARGS)

lint: $(LINT)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy remat tests/typing_cases.py
	PATH="$(CURDIR)/$(BIN):$$PATH" pyright tests/typing_cases.py
	PATH="$(CURDIR)/$(BIN):$$PATH" pyright --verifytypes remat --ignoreexternal | grep "completeness score: 100%"

docs: $(DOCS)
	$(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build

# Each prints a table and leaves its figures in .bench. `benchmarks.gpu` needs a GPU, and says so where there is none.
bench: $(TEST)
	$(BIN)/python -m benchmarks.memory --output .bench/memory.json
	$(BIN)/python -m benchmarks.policies --output .bench/policies.json
	$(BIN)/python -m benchmarks.overhead --output .bench/overhead.json
	$(BIN)/python -m benchmarks.libraries --output .bench/libraries.json
	$(BIN)/python -m benchmarks.compiled --output .bench/compiled.json
	$(BIN)/python -m benchmarks.gpu --output .bench/gpu.json --picture .bench/gpu.svg
	$(BIN)/python -m benchmarks.scan --output .bench/scan.json
	$(BIN)/python -m benchmarks.budget --output .bench/budget.json --picture .bench/pareto.svg
	$(BIN)/python -m benchmarks.speed --output .bench/speed.json

# The source distribution and the wheel, in dist.
package: $(DEMO)
	rm -rf dist
	$(PIP) -q build
	$(BIN)/python -m build

# The environments stay: remove .venv by hand to build it anew.
clean:
	rm -rf .bench .build docs/_build build dist .pytest_cache .hypothesis .ruff_cache .mypy_cache
	find . -name __pycache__ -not -path './.venv*/*' -prune -exec rm -rf {} +

# torch comes first and pinned, so that the next line finds it installed and leaves it alone.
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

# fairscale, beside which tests run its drop-in, is built from source without what it asks for, which they don't need.
$(TEST): $(DEMO)
	$(PIP) -q -e '.[test,integration,examples,benchmarks,lint]' setuptools wheel
	$(PIP) -q --no-deps --no-build-isolation fairscale==0.4.13
	touch $@
