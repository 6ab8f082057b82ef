# `make` lists the verbs. Everything is installed into .venv, from constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: help test check format clean
help:
	@echo "make test    set up .venv if needed and run all tests"
	@echo "make check   formatting, lint, types, spelling"
	@echo "make format  rewrite the files in house style"
	@echo "make clean   remove .venv and caches"

$(STAMP): pyproject.toml constraints.txt
	@echo "setting up .venv (a few minutes the first time)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

test: $(STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/codespell src tests docs changes README.md Makefile

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache build dist
