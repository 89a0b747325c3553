# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
# pip compiles its 21,000 files on one core. Some packages hold files that are no Python of this version.
COMPILE = $(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null 2>&1 || true

# The tests start hundreds of programs. Where this is set, as in many containers, each compiles all modules again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test deploy-check lint slow docs reports audit clean

demo: $(VENV)/.ready
	$(BIN)/blocktrain demo $(ARGS)

test: $(VENV)/.ready-dev
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

# Every file under deploy/, checked or started by the program that it is for.
deploy-check: $(VENV)/.ready-dev $(VENV)/skypilot/.ready
	$(BIN)/python -m pytest tests/deploy -m '' -n 2 --dist loadfile $(ARGS)

lint: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

slow: $(VENV)/.ready-dev
	$(BIN)/python -m pytest -m slow --timeout 3600 $(ARGS)

# Without a network: make audit ADVISORIES=FOLDER, a clone of github.com/pypa/advisory-database.
audit: $(VENV)/.ready-dev
ifdef ADVISORIES
	$(BIN)/python benchmarks/offline_audit.py $(ADVISORIES) --local
else
	@$(BIN)/pip-audit --local > $(VENV)/audit.txt 2>&1; code=$$?; cat $(VENV)/audit.txt; \
	  if [ "$$(grep -c 'could not be audited' $(VENV)/audit.txt)" -gt 20 ]; then \
	    echo "Nothing was audited: no advisory database was reached. Without a network: make audit ADVISORIES=FOLDER"; \
	    exit 1; fi; exit $$code
endif

$(VENV)/.ready: pyproject.toml
	@echo "Setting up $(VENV) (once; a few minutes, most of it the torch download)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "BlockTrain needs Python 3.11 or later; try: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "venv is missing; on Debian: apt-get install python3-venv"; exit 1; }
	$(INSTALL) --upgrade 'pip>=26.2'
	$(INSTALL) -e .
	$(COMPILE)
	touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	$(INSTALL) -e '.[dev]'
	$(COMPILE)
	touch $@

# An environment of its own: SkyPilot needs other versions of libraries than ours.
$(VENV)/skypilot/.ready: | $(VENV)/.ready-dev
	$(BIN)/python -m venv --without-pip $(VENV)/skypilot
	$(BIN)/python -m pip --python $(VENV)/skypilot/bin/python install --quiet --disable-pip-version-check --no-compile \
	  'skypilot>=0.14,<0.15'
	touch $@

docs: $(VENV)/.ready
	$(BIN)/python -m blocktrain.cli.reference > docs/cli.md
	$(BIN)/python -m blocktrain.cli.reference recipe > docs/recipe.md

# Which published numbers are older than the code they measure.
reports: $(VENV)/.ready
	$(BIN)/python benchmarks/reports.py $(ARGS)

clean:
	rm -rf $(VENV)
