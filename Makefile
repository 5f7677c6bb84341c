# make demo: set up and print real text from the demo model.  make test: set up and run the tests.
PYTHON ?= python3
VENV ?= .venv
BACKEND := $(if $(filter Darwin,$(shell uname -s)),,cpu)
comma := ,
extras = .[$(BACKEND)$(if $(BACKEND),$(comma))$(1)]
PROMPT ?= The history of the steam engine begins in the first century, when

.PHONY: demo test check
demo: $(VENV)/.demo
	$(VENV)/bin/turbospark generate "$(PROMPT)" --max-tokens 64

test: $(VENV)/.test
	$(VENV)/bin/python -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal

# What CI runs besides the tests: lint, format, types, import rules.
check: $(VENV)/.dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python
	$(VENV)/bin/lint-imports

$(VENV)/.demo: pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install --quiet --editable "$(call extras,demo)"
	touch $@

$(VENV)/.test: pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install --quiet --editable "$(call extras,demo$(comma)test)"
	touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install --quiet --editable "$(call extras,demo$(comma)test$(comma)dev)"
	touch $@

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("turbospark needs Python 3.11 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade pip
