# Each line is a command a person could type. PYTHON picks the interpreter for the virtual environment (3.11 or 3.12).
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup demo demo-all test check format

setup: .venv/installed

.venv/installed: constraints.txt pyproject.toml
	$(PYTHON) -c "import sys; assert (3, 11) <= sys.version_info[:2] <= (3, 12), 'DLoop is pinned for Python 3.11 and 3.12, found ' + sys.version.split()[0] + ': try make PYTHON=python3.12'"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,slurm]"
	touch .venv/installed

demo: setup
	$(BIN)/snakemake --cores 2 --configfile config/demo.yaml --rerun-incomplete --show-failed-logs

demo-all: setup
	$(BIN)/snakemake --cores 2 --configfile config/demo.yaml config/demo-all.yaml --rerun-incomplete --show-failed-logs

test: setup
	$(BIN)/python -m pytest -n 2

check: setup
	$(BIN)/ruff format --check dloop tests benchmarks
	$(BIN)/ruff check dloop tests benchmarks
	$(BIN)/mypy
	$(BIN)/snakefmt --check Snakefile workflow
	$(BIN)/snakemake --lint

format: setup
	$(BIN)/ruff format dloop tests benchmarks
	$(BIN)/ruff check --fix dloop tests benchmarks
	$(BIN)/snakefmt Snakefile workflow
