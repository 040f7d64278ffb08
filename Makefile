# Every target sets itself up: `make demo` or `make test` on a fresh machine is enough.
PYTHON ?= python3
# processes that run tests, each with one thread
WORKERS ?= 2
# of `make gpu` and `make speed`: a folder with Fashion-MNIST in torchvision's layout
DATA ?= $(wildcard ../shared/data)
BIN := .venv/bin
INSTALLED := .venv/.installed

# Flower's files stay inside the checkout; no telemetry, no version look-ups.
export FLWR_HOME := $(CURDIR)/.flwr
export FLWR_TELEMETRY_ENABLED := 0
export FLWR_DISABLE_UPDATE_CHECK := 1
export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION := 1
# Tests start many processes: each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install demo test slow federation fuzz gpu speed lint types docs outside pages check format clean

help: ## show the targets
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/:[^#]*## /\t/' | expand -t 12

install: $(INSTALLED) ## make .venv from the pinned versions (quick when nothing changed)

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt uv
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --constraint constraints.txt --editable '.[simulation,dev]'
	touch $@

pins: install ## the newest versions that fit together, into constraints.txt
	mkdir -p build
	head -n 1 constraints.txt > build/constraints.txt
	$(BIN)/uv pip compile --quiet --upgrade --python-version 3.11 --extra simulation --extra dev --no-header --no-annotate pyproject.toml >> build/constraints.txt
	mv build/constraints.txt constraints.txt

demo: install ## NTK-FL, FedAvg and one exchange on real digits: Flower, Ray, a table and a picture
	$(BIN)/fedntk demo

lab: install ## Jupyter Lab with the notebooks
	$(BIN)/jupyter lab notebooks

PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadgroup
test: install ## the quick tests, with doctests, pages and notebooks in a short form
	$(PYTEST) -m 'not federation and not slow'

slow: install ## what `make test` leaves out: whole notebooks, full sizes
	$(PYTEST) -m 'slow and not federation'

federation: install ## tests on a real federation: TLS, SuperNodes with keys, processes that are killed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m federation

COUNT ?= 2000
SEED ?= 0
fuzz: install ## COUNT replies of liars to all strategies, drawn with SEED: none may break a rule
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz $(COUNT) $(SEED)

gpu: ## the cases of ntk and the benchmarks on a GPU; torch and numpy suffice, nothing is installed
	@python=$(PYTHON); $$python -c 'import torch' 2>/dev/null || ! test -x $(BIN)/python || python=$(BIN)/python; \
	$$python benchmarks/speed.py --device cuda $(if $(DATA),--data-dir $(DATA))

CASES ?= kernel* tangent_features* ntk_fl_round* ntk_dfl* engine* many_clients* features*
speed: install ## the table of docs/results/times.md again, one case after another; an idle machine
	set -f; $(BIN)/python benchmarks/speed.py $(if $(DATA),--data-dir $(DATA)) --cases $(CASES)
	$(BIN)/python docs/tables.py

# what `make lowest` runs: mathematics, clients, servers and short runs
OLDEST := tests/ntk tests/clients tests/strategies tests/simulations/test_runs.py tests/simulations/test_own_data.py tests/simulations/test_report.py
.PHONY: lowest newest
lowest: install ## quick tests with the oldest versions that pyproject.toml allows
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python build/lowest
	$(BIN)/uv pip install --quiet --python build/lowest/bin/python --resolution lowest-direct --editable '.[simulation,tensorboard,mlflow,privacy]'
	$(BIN)/uv pip install --quiet --python build/lowest/bin/python --constraint constraints.txt pytest pytest-xdist hypothesis selenium
	OMP_NUM_THREADS=1 build/lowest/bin/python -m pytest --numprocesses $(WORKERS) --dist loadgroup -m 'not federation and not slow and not ray' $(OLDEST)

# a Python that uv finds or can fetch
NEWEST ?= 3.13
newest: install ## the quick tests on a newer Python, with the newest versions of all
	$(BIN)/uv venv --quiet --clear --python $(NEWEST) build/newest
	$(BIN)/uv pip install --quiet --python build/newest/bin/python --editable '.[simulation,dev]'
	OMP_NUM_THREADS=1 build/newest/bin/python -m pytest --numprocesses $(WORKERS) --dist loadgroup -m 'not federation and not slow'

lint: install ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install ## mypy, strict
	$(BIN)/mypy

docs: install ## the site, in build/site; any warning or dead link fails
	@# without --quiet, which would keep warnings from --strict, too
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

outside: docs ## the links to other sites, which needs a network
	grep -v $$(sed -n 's/^Homepage = "\(.*\)"/\1/p' pyproject.toml) build/site-links.txt | \
	$(BIN)/uvx linkchecker==10.6.0 --check-extern --recursion-level=0 --stdin

pages: install ## write results, methods and defaults of settings where they are listed
	$(BIN)/python docs/tables.py

check: lint types docs test slow federation ## everything; CI leaves `slow` out

dist: install ## wheel and source archive, in build/dist
	$(BIN)/uv build --quiet --clear --out-dir build/dist
	$(BIN)/twine check --strict build/dist/*

format: install ## let ruff format and fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove what the targets made, the environment excepted
	rm -rf build .flwr .mypy_cache .ruff_cache runs
