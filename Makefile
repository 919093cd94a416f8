PYTHON ?= python3
JOBS ?= 2
TORCH ?= 2.13.0

# Another version of torch has an environment of its own: make test TORCH=2.15.0.
VENV := .venv$(patsubst %,-%,$(filter-out 2.13.0,$(TORCH)))
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp

.PHONY: demo test test-all fuzz lint docs bench clean

demo: $(STAMP)
	$(BIN)/python examples/char_lm.py

# The other runs are of the tests marked `cuda`, on a simulated device under both of its names (tests/device).
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m cuda --simulate cuda tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m cuda --simulate sim tests

# The same with all cases of what `make test` takes a part of.
test-all: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --all
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m cuda --simulate cuda --all tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m cuda --simulate sim tests

# Random programs, with regions and without, until it is stopped: make fuzz, make fuzz ARGS="--seconds 600".
fuzz: $(STAMP)
	PYTHONPATH=. OMP_NUM_THREADS=1 $(BIN)/python -W ignore tests/fuzz.py $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy remat tests/typing_cases.py
	PATH="$(CURDIR)/$(BIN):$$PATH" pyright tests/typing_cases.py
	PATH="$(CURDIR)/$(BIN):$$PATH" pyright --verifytypes remat --ignoreexternal | grep "completeness score: 100%"

docs: $(STAMP)
	$(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build

# Each prints a table and leaves its figures in .bench. `benchmarks.gpu` needs a GPU, and says so where there is none.
bench: $(STAMP)
	$(BIN)/python -m benchmarks.memory --output .bench/memory.json
	$(BIN)/python -m benchmarks.policies --output .bench/policies.json
	$(BIN)/python -m benchmarks.overhead --output .bench/overhead.json
	$(BIN)/python -m benchmarks.libraries --output .bench/libraries.json
	$(BIN)/python -m benchmarks.compiled --output .bench/compiled.json
	$(BIN)/python -m benchmarks.gpu --output .bench/gpu.json --picture .bench/gpu.svg
	$(BIN)/python -m benchmarks.scan --output .bench/scan.json
	$(BIN)/python -m benchmarks.speed --output .bench/speed.json

# The environments stay: remove .venv by hand to build it anew.
clean:
	rm -rf .bench .build docs/_build build dist .pytest_cache .hypothesis .ruff_cache .mypy_cache
	find . -name __pycache__ -not -path './.venv*/*' -prune -exec rm -rf {} +

# torch comes first and pinned, so that the second line finds it installed and leaves it alone. fairscale, beside which
# a test runs its drop-in, comes as source, and what else it asks for isn't needed.
$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install torch==$(TORCH)
	$(BIN)/python -m pip install -e '.[test,integration,docs,examples,benchmarks,lint]' setuptools wheel
	$(BIN)/python -m pip install --no-deps --no-build-isolation fairscale==0.4.13
	touch $@
