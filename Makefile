# `make demo` shows it, `make test` proves it. Everything lives in .venv and .cache; `make clean` removes both.
# CONTRIBUTING.md has a table of what runs where.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CHECKED := $(wildcard src tests tools bench)
# install.sql is only psql's \ir lines, which are not SQL.
SQL := $(filter-out %/install.sql,$(wildcard src/bartleby/sql/*.sql))
VERSIONS ?= 14 15 16 17 18
# Debian packages that tests use, named like the program in them
WANTED := chromium-headless-shell pgbouncer rabbitmq-server postgresql
PYTEST_ARGS ?=
NIGHTLY ?=

# Tests start hundreds of processes: without the bytecode cache each would compile the package again.
export PYTHONDONTWRITEBYTECODE :=
# Source files are read in UTF-8, whatever the locale says.
export PYTHONUTF8 := 1

.PHONY: demo test quick check bench matrix nightly clean system plpgsql-check
.DEFAULT_GOAL := test

demo: $(VENV)/demo
	$(BIN)/bartleby demo

# While one processor runs the checks, the other rewrites the assertions once for all processes of pytest.
test: $(VENV)/installed
	@$(BIN)/python -m pytest --collect-only --quiet >/dev/null 2>&1 &
	@$(MAKE) --no-print-directory check
	$(BIN)/python -m pytest -n 4 --dist worksteal $(PYTEST_ARGS)

# The inner loop: values and SQL.
quick: $(VENV)/installed
	$(BIN)/python -m pytest -q -n 4 --dist worksteal tests/unit tests/sql $(PYTEST_ARGS)

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

# Faults, mutants, buses, browsers, long schedules, and everything that measures. NIGHTLY="chaos timing" runs a part.
nightly: $(VENV)/installed
	$(BIN)/python tools/nightly.py $(NIGHTLY)

clean:
	rm -rf $(VENV) .cache .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist

# Only what the package needs to run, so that the demo starts within a minute. Python compiles modules on first use.
$(VENV)/demo: pyproject.toml
	@$(MAKE) --no-print-directory system WANTED=
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -e '.[speed,dev,web]'
	@touch $@

$(VENV)/installed: pyproject.toml
	@$(MAKE) --no-print-directory system plpgsql-check
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -e '.[contributor]'
	@touch $@

# What pip cannot install: as root on Debian it is installed and listed, elsewhere what is missing is listed.
# RabbitMQ and PostgreSQL come with services; the tests start servers of their own, so these are switched off.
system:
	@missing=; \
	wanted="$(WANTED)"; \
	$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || missing="$$missing python3-venv"; \
	for program in $$wanted; do \
		case $$program in postgresql) set -- /usr/lib/postgresql/*/bin/postgres; [ -x "$$1" ] && continue;; esac; \
		PATH="$$PATH:/usr/sbin" command -v $$program >/dev/null || missing="$$missing $$program"; \
	done; \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "make: installing Debian packages:$$missing"; \
		services=rabbitmq-server; \
		command -v epmd >/dev/null || services="$$services epmd.service epmd.socket"; \
		case "$$missing" in *postgresql*) mkdir -p /etc/postgresql-common; \
			[ -e /etc/postgresql-common/createcluster.conf ] \
			|| echo "create_main_cluster = false" > /etc/postgresql-common/createcluster.conf;; \
		esac; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
			-o Dpkg::Options::=--force-confold $$missing >/dev/null \
		|| echo "make: apt-get could not install:$$missing"; \
		case "$$missing" in *rabbitmq-server*) \
			systemctl disable --quiet --now $$services 2>/dev/null || true;; \
		esac; \
	else \
		echo "make: missing, and not installed because this is not root on a Debian:$$missing"; \
		for program in $$wanted; do \
			case "$$missing" in *$$program*) \
				echo "make: the tests that need $$program are skipped, and listed at the end";; \
			esac; \
		done; \
	fi

# The checker of PL/pgSQL for Debian's server; its package is named after the version that is installed by now.
plpgsql-check:
	@set -- /usr/lib/postgresql/*/bin/postgres; home=$${1%/bin/postgres}; \
	package=postgresql-$${home##*/}-plpgsql-check; \
	if [ ! -x "$$1" ] || [ -e "$$home/lib/plpgsql_check.so" ]; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "make: installing the Debian package $$package"; \
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$package >/dev/null \
		|| echo "make: apt-get could not install $$package"; \
	else \
		echo "make: missing, and not installed because this is not root on a Debian: $$package"; \
	fi
