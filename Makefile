# Two commands do everything from a bare clone: `make pretrain` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/.ready
TESTS = $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

.PHONY: pretrain test check format fuzz lock mutants references

pretrain: $(READY)  ## set up, and run the main job on the embedded data
	$(BIN)/accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no \
	  --dynamo_backend no pipeline/pretrain.py

test: $(READY)  ## set up, and pass the tests
	$(TESTS)

check: $(READY)  ## format, lint, types, tests: what CI runs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(TESTS)

references: $(READY)  ## every reference loss, to the last digit (another machine: --relative 1e-9)
	rm -rf build/references
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.reference_runs build/references
	$(BIN)/python -m tests.compare_losses build/references tests/references $(RELATIVE)

fuzz: $(READY)  ## 5,000 draws of files that are anything, anew each time (FUZZ=50000 for more)
	HERON_FUZZ=$(or $(FUZZ),5000) $(BIN)/python -m pytest tests/test_fuzz.py

mutants: $(READY)  ## of 100 faults planted in the code, at least 95 make a test fail: half an hour
	$(BIN)/python -m tests.mutants $(MUTANTS)

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(READY): requirements.lock requirements-triton.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Heron needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	# CUDA builds of torch bring their Triton; the others get one, for the tests in its interpreter.
	$(BIN)/python -c 'import triton' 2>/dev/null \
	  || $(BIN)/python -m pip install --quiet --requirement requirements-triton.lock
	touch $(READY)

lock:  ## pin what the two commands install, from pyproject.toml, in a new environment
	rm -rf .lock && $(PYTHON) -m venv .lock
	.lock/bin/python -m pip install --quiet torch==2.13.0
	.lock/bin/python -m pip install --quiet '.[remote]'
	# boto3 has botocore's version; left to itself, pip searches for the pair that s3fs admits.
	.lock/bin/python -m pip install --quiet '.[dev]' \
	  boto3==$$(.lock/bin/python -c 'import botocore; print(botocore.__version__)')
	(echo '# Made by `make lock`.' && .lock/bin/python -m pip freeze --exclude heron-pretrain) \
	  | sed 's/+cpu$$//' > requirements.lock
	rm -rf .lock build *.egg-info
