# Two commands do everything from a bare clone: `make pretrain` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# Python compiles what it imports at its first start: most of what is installed never is.
INSTALL = $(BIN)/python -m pip install --quiet --no-compile
READY = $(VENV)/.ready
TESTED = $(VENV)/.tested
# Tests start hundreds of processes: where no bytecode may be written, each would compile torch.
PYTEST = pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder
TESTS = PYTHONDONTWRITEBYTECODE= $(BIN)/python -m $(PYTEST)

.PHONY: pretrain test check check-all coverage docs format fuzz kernels lock mutants references screenshots wheel

pretrain: $(READY)  ## set up, run the main job on the embedded data, and index what was learnt
	$(BIN)/heron pretrain faces
	$(BIN)/heron embed runs/faces --out embeddings/faces
	$(BIN)/heron index embeddings/faces --out indexes/faces

test: $(TESTED)  ## set up, and pass the tests
	$(TESTS)

check: $(TESTED)  ## format, lint, types, tests: what CI runs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(TESTS)

check-all: $(TESTED)  ## all tests, those of minutes and those that repeat a promise too
	HERON_WEEKLY=1 $(TESTS) --timeout 1800

coverage: $(TESTED)  ## lines that the tests run in any process, by room (COVERAGE=tests/data for some)
	rm -rf build/coverage && mkdir -p build/coverage
	status=0; PYTHONDONTWRITEBYTECODE= $(BIN)/python -m coverage run -m $(PYTEST) --timeout 1800 \
	  $(COVERAGE) || status=$$?; \
	$(BIN)/python -m coverage combine --quiet \
	  && $(BIN)/python -m coverage json --quiet -o build/coverage/lines.json \
	  && $(BIN)/python -m tests.coverage_table build/coverage/lines.json && exit $$status

docs: $(TESTED)  ## the site of docs/, into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

screenshots: $(TESTED)  ## what people see, at two widths, light and dark, into build/screenshots
	$(BIN)/python docs/make_screenshots.py

references: $(TESTED)  ## every reference loss, to the last digit (another machine: --relative 1e-9)
	rm -rf build/references
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.reference_runs build/references
	$(BIN)/python -m tests.compare_losses build/references tests/references $(RELATIVE)

fuzz: $(TESTED)  ## 5,000 draws of files that are anything, anew each time (FUZZ=50000 for more)
	HERON_FUZZ=$(or $(FUZZ),5000) $(BIN)/python -m pytest tests/test_fuzz.py

mutants: $(TESTED)  ## of 100 faults planted in the code, at least 95 make a test fail: half an hour
	$(BIN)/python -m tests.mutants $(MUTANTS)

TRITONS = 3.6.0 3.7.1 3.8.0 3.9.0
kernels: $(TESTED)  ## every kernel compiled under each Triton that Heron's versions of torch bring
	set -e; for version in $(TRITONS); do \
	  $(INSTALL) --no-deps --upgrade --target build/triton-$$version triton==$$version; \
	  PYTHONPATH=build/triton-$$version $(BIN)/python -m benchmarks.kernels --processes 2; \
	done

format: $(TESTED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

wheel: $(READY)  ## dist/heron_pretrain-VERSION-py3-none-any.whl, from what git knows
	rm -rf build dist && mkdir -p build/source
	git ls-files -z | xargs -0 cp --parents --no-dereference --target-directory build/source
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist build/source
	rm -rf build

# What a user needs; a file of its own for what tests need beside it.
$(READY): requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Heron needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --requirement requirements.lock
	$(INSTALL) --no-deps --editable .
	touch $(READY)

$(TESTED): $(READY) requirements-dev.lock requirements-triton.lock requirements-vision.lock
	$(INSTALL) --requirement requirements-dev.lock
	$(INSTALL) --no-deps --target $(VENV)/vision --upgrade --requirement requirements-vision.lock
	# CUDA builds of torch bring their Triton; the others get one, for the tests in its interpreter.
	$(BIN)/python -c 'import triton' 2>/dev/null || $(INSTALL) --requirement requirements-triton.lock
	touch $(TESTED)

FREEZE = .lock/bin/python -m pip freeze --all --exclude pip --exclude heron-pretrain | sed 's/+cpu$$//'
lock:  ## pin what the two commands install, from pyproject.toml, in a new environment
	rm -rf .lock && $(PYTHON) -m venv .lock
	.lock/bin/python -m pip install --quiet torch==2.13.0
	.lock/bin/python -m pip install --quiet '.[train,remote]'
	.lock/bin/python -m pip install --quiet '.[cpu,remote,serve,study]'
	(echo '# Made by `make lock`: what a user needs.' && $(FREEZE)) > requirements.lock
	# boto3 has botocore's version; left to itself, pip searches for the pair that s3fs admits.
	.lock/bin/python -m pip install --quiet '.[dev]' \
	  boto3==$$(.lock/bin/python -c 'import botocore; print(botocore.__version__)')
	(echo '# Made by `make lock`: what tests need beside it.' \
	  && echo '--requirement requirements.lock' \
	  && $(FREEZE) | grep --invert-match --line-regexp --fixed-strings --file requirements.lock) \
	  > requirements-dev.lock
	rm -rf .lock build *.egg-info
