# Two commands matter: `make up` and `make test`. Everything they need they make themselves, below .trainyard/ and in the user's cache.
PYTHON ?= python3
RUN ?=
TESTS ?= tests
VENV := .trainyard/venv/bin
CODE := __main__.py infra training local tests benchmarks

.DEFAULT_GOAL := help
.PHONY: help up down destroy clean purge preview status logs tools test check fmt schema requirements

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

up: ## set everything up, deploy the local stack, train, show the result (RUN=name follows that run)
	@$(PYTHON) -m local up $(RUN)

status: ## the node, the queues, the runs and the events that matter
	@$(PYTHON) -m local status

logs: ## the log of a run (RUN=name)
	@$(PYTHON) -m local logs $(RUN)

preview: ## what make up would change
	@$(PYTHON) -m local preview

destroy: ## remove what the stack deployed: the way out of a cluster of your own
	@$(PYTHON) -m local destroy

down: ## stop the node, leave nothing running; its data stay for the next make up
	@$(PYTHON) -m local down

clean: ## down, and remove everything generated in this checkout
	@$(PYTHON) -m local clean

purge: ## clean, and remove the cache of built tools and image layers
	@$(PYTHON) -m local purge

tools: ## build what is missing and list every tool: version, where from, size, seconds
	@$(PYTHON) -m local tools

test: ## everything, from nothing: checks, then all tests on the real engine and a real node (TESTS=path limits them)
	@$(PYTHON) -m local environment
	@$(MAKE) --no-print-directory static
	@$(PYTHON) -m local test $(TESTS)

check: ## the inner loop: format, lint, types, import directions, pure tests
	@$(PYTHON) -m local environment
	@$(MAKE) --no-print-directory static
	@$(VENV)/python -m pytest -q tests/unit tests/program

.PHONY: static
static:
	@$(VENV)/ruff format --check --quiet $(CODE)
	@$(VENV)/ruff check --quiet $(CODE)
	@$(VENV)/pyright --warnings
	@$(VENV)/lint-imports --no-logo > .trainyard/imports.log || (cat .trainyard/imports.log; exit 1)
	@$(VENV)/python -m infra.schema

fmt: ## format the code
	@$(PYTHON) -m local environment
	@$(VENV)/ruff check --fix --quiet $(CODE)
	@$(VENV)/ruff format $(CODE)

schema: ## JSON schemas of the stack and run files, for editors
	@$(PYTHON) -m local environment
	@$(VENV)/python -m infra.schema

UV := $(VENV)/uv pip compile --quiet --generate-hashes --python-version 3.11 --no-header
requirements: ## compile the requirement files from their .in files
	@$(PYTHON) -m local environment
	@$(UV) --universal requirements-bootstrap.in -o requirements-bootstrap.txt
	@$(UV) --universal tools/requirements.in -o tools/requirements.txt
	@$(UV) --python-platform linux requirements.in -o requirements.txt
	@$(UV) --python-platform linux training/requirements.in -c requirements.txt -o training/requirements.txt
	@$(UV) --python-platform linux requirements-dev.in -c requirements.txt -c training/requirements.txt -o requirements-dev.txt
