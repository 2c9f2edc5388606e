# make run          set up, then serve on PORT (8080) before a simulated model server, or before UPSTREAM=http://…
# make test         all tests but those against a real vLLM and with the real clients, with coverage limits
# make check        format, lint, types, architecture, docs
# make test-vllm    tests against a real vLLM: VLLM_URL=http://…, or ../shared/real-vllm (installed on first use)
# make test-clients the real clients of OpenAI's, Anthropic's, LangChain's, Dify's … against the gateway, three minutes
# make bench        what our hop costs beside nginx, Envoy and others, about half an hour: BENCH_ARGS="--only a,b"
# make bench-quick  the same beside nginx and vllm-router, about four minutes
# make bench-guard  fails when our CPU time grew beside two of them; a minute
# make bench-overload   goodput and refusals at twice and ten times what a server can do; a minute and a half
# make bench-unsteady   10,000 requests while one of two servers turns bad in six ways; four minutes
# make bench-estimates  how good the estimates of the first token are, on real traces; six seconds
# make soak         looks for growth of memory, connections and tasks, SOAK_MINUTES (10)
# make demo         where the time of a thinking model goes, as a table
# make format       let ruff format and fix what it can
# make clean        remove what was built, but not the environments

PYTHON ?= python3
VENV ?= .venv
PORT ?= 8080
UPSTREAM ?=
SIM_PROFILE ?= demo
FIRSTTOKEN_SHARED ?= ../shared
VLLM_URL ?=
VLLM_VENV ?= .venv-vllm
CLIENT_VENVS ?= build/client-venvs
PYTEST_ARGS ?=
BENCH_ARGS ?=
SOAK_MINUTES ?= 10

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
COVERAGE_JSON := build/coverage.json
REAL_VLLM := $(FIRSTTOKEN_SHARED)/real-vllm
CLIENTS := tests/clients
CLIENT_ENVIRONMENTS := current openai1 llamaindex dify node

.PHONY: setup run demo test check format clean test-vllm test-clients help bench bench-quick bench-guard bench-estimates bench-overload bench-unsteady soak
.NOTPARALLEL:
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' Makefile

setup: $(VENV)/.installed
	@:

# A stamp, so that this runs once and again when the dependencies change.
$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 …")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade 'pip>=25.1'  # the first with --group
	$(PIP) install --editable . --group dev
	@touch $@

run: setup
ifeq ($(strip $(UPSTREAM)),)
	exec $(BIN)/firsttoken serve --sim $(SIM_PROFILE) --port $(PORT)
else
	exec $(BIN)/firsttoken serve --upstream "$(UPSTREAM)" --port $(PORT)
endif

demo: setup
	$(BIN)/firsttoken demo

test: setup
	@mkdir -p build
	$(BIN)/python -m pytest --cov --cov-report= --cov-report=json:$(COVERAGE_JSON) $(PYTEST_ARGS)
	$(BIN)/python tests/coverage_limits.py $(COVERAGE_JSON)

check: setup
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest --quiet tests/test_docs.py tests/test_reference.py tests/test_changelog.py

# Targets from PyPI get environments of their own under build/bench-venvs; see docs/performance.md.
bench: setup
	FIRSTTOKEN_SHARED="$(FIRSTTOKEN_SHARED)" $(BIN)/python -m benchmarks $(BENCH_ARGS)

bench-quick: setup
	$(BIN)/python -m benchmarks --quick $(BENCH_ARGS)

bench-guard: setup
	$(BIN)/python -m benchmarks.guard

bench-overload: setup
	$(BIN)/python -m benchmarks.overload

bench-unsteady: setup
	$(BIN)/python -m benchmarks.unsteady

bench-estimates: setup
	FIRSTTOKEN_SHARED="$(FIRSTTOKEN_SHARED)" $(BIN)/python -m benchmarks.estimates

soak: setup
	$(BIN)/python -m benchmarks.soak --minutes $(SOAK_MINUTES)

format: setup
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

ifneq ($(strip $(VLLM_URL)),)
test-vllm: $(VENV)/.installed-vllm
	VLLM_URL="$(VLLM_URL)" $(BIN)/python -m pytest tests/vllm $(PYTEST_ARGS)
else ifneq ($(wildcard $(REAL_VLLM)/setup.sh),)
test-vllm: $(VENV)/.installed-vllm $(VLLM_VENV)/.installed
	FIRSTTOKEN_SHARED="$(FIRSTTOKEN_SHARED)" VLLM_VENV="$(abspath $(VLLM_VENV))" $(BIN)/python -m pytest tests/vllm $(PYTEST_ARGS)
else
test-vllm:
	@echo "test-vllm: skipped, there is no real vLLM here. Give VLLM_URL=http://host:port, or $(REAL_VLLM)."
endif

# The real clients of those tests: openai, langchain-openai.
$(VENV)/.installed-vllm: $(VENV)/.installed
	$(PIP) install --group vllm
	@touch $@

$(VLLM_VENV)/.installed:
	bash $(REAL_VLLM)/setup.sh $(VLLM_VENV)
	@touch $@

# Versions of the clients' own dependencies clash, so each has an environment; Node.js comes from PyPI, as a wheel.
test-clients: setup $(CLIENT_ENVIRONMENTS:%=$(CLIENT_VENVS)/%/.installed)
	CLIENT_VENVS="$(abspath $(CLIENT_VENVS))" $(BIN)/python -m pytest $(CLIENTS) $(PYTEST_ARGS)

$(CLIENT_VENVS)/%/.installed: $(CLIENTS)/requirements/%.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check -qq install --requirement $<
	@touch $@

$(CLIENT_VENVS)/node/.installed: $(CLIENTS)/requirements/node.txt $(CLIENTS)/node/package.json $(CLIENTS)/node/package-lock.json
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check -qq install --requirement $<
	mkdir -p $(@D)/packages
	cp $(CLIENTS)/node/package.json $(CLIENTS)/node/package-lock.json $(@D)/packages/
	cd $(@D)/packages && PATH="$(abspath $(@D)/bin):$$PATH" npm ci --ignore-scripts --no-audit --no-fund --loglevel=error
	@touch $@

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage htmlcov
	find gateway tests -name __pycache__ -type d -prune -exec rm -rf {} +
