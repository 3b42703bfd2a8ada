# `make demo` shows it, `make test` proves it. Everything lives in .venv and .cache; `make clean` removes both.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CHECKED := $(wildcard src tests tools bench)
# install.sql is only psql's \ir lines, which are not SQL.
SQL := $(filter-out %/install.sql,$(wildcard src/bartleby/sql/*.sql))
VERSIONS ?= 14 15 16 17 18
# Debian packages that tests use, named like the program in them
WANTED := pgbouncer
PYTEST_ARGS ?=

.PHONY: demo test check bench matrix torture clean system
.DEFAULT_GOAL := test

demo: $(VENV)/demo
	$(BIN)/bartleby demo

test: check
	$(BIN)/python -m pytest -n 2 $(PYTEST_ARGS)

check: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(CHECKED)
	$(BIN)/lint-imports
	$(if $(SQL),$(BIN)/squawk $(SQL),@echo "squawk: no SQL files yet")

bench: $(VENV)/installed
	$(BIN)/python -m bench --json bench/results.json --chart bench/chart.svg

matrix: $(VENV)/installed
	$(BIN)/python tools/matrix.py $(VERSIONS)

torture: $(VENV)/installed
	$(BIN)/python -m pytest tests -m slow --timeout 7200 $(PYTEST_ARGS)

clean:
	rm -rf $(VENV) .cache .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist

# What the package needs to run, and no more: the demo is the first minute.
$(VENV)/demo: pyproject.toml
	@$(MAKE) --no-print-directory system WANTED=
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[speed,dev]'
	@touch $@

$(VENV)/installed: pyproject.toml
	@$(MAKE) --no-print-directory system
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[contributor]'
	@touch $@

# What pip cannot bring. Only root on a Debian is helped, and told so; everybody else is told what is missing.
system:
	@missing=; \
	wanted="$(WANTED)"; \
	$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || missing="$$missing python3-venv"; \
	for program in $$wanted; do \
		PATH="$$PATH:/usr/sbin" command -v $$program >/dev/null || missing="$$missing $$program"; \
	done; \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "make: installing Debian packages:$$missing"; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing >/dev/null \
		|| echo "make: apt-get could not install:$$missing"; \
	else \
		echo "make: missing, and not installed because this is not root on a Debian:$$missing"; \
		case "$$missing" in *pgbouncer*) \
			echo "make: the tests that need pgbouncer are skipped, and listed at the end";; \
		esac; \
	fi
