# make demo   a model trains through a cache of three pods on this machine
# make test   all tests
# make check  what CI checks besides the tests: style, types, import contracts
# Each makes its own virtual environment, .venv, the first time.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test check format bench-store bench-core bench-policies bench-pods bench-quality clean

demo: $(READY)
	@$(BIN)/refill demo

test: $(READY)
	$(BIN)/python -m pytest

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-store: $(READY)
	$(BIN)/python benchmarks/store_libraries.py

bench-core: $(READY)
	$(BIN)/python benchmarks/core_takes.py

bench-policies: $(READY)
	$(BIN)/python benchmarks/policies.py

bench-pods: $(READY)
	$(BIN)/python benchmarks/pod_throughput.py

bench-quality: $(READY)
	$(BIN)/python benchmarks/training_quality.py --plot docs/training_quality.svg

clean:
	rm -rf $(VENV) build *.egg-info

# Torch first and by its exact version, so that what follows finds it installed and brings no other build.
$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[torch,service,dev]'
	@touch $@
