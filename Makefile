# The two commands that matter: `make report` (the main job) and `make test`. Both set up everything they need; both can be repeated.
PYTHON ?= python3
BIN := .venv/bin
PEER := .venvs/speculators
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: report lab test check bench setup chromium

report: setup                ## the main job: every notebook on the lab, as self-contained pages
	$(BIN)/workbench lab fetch
	$(BIN)/workbench report

lab: setup                   ## the workbench in JupyterLab, on the lab's examples
	$(BIN)/workbench lab fetch
	$(BIN)/jupyter lab notebooks

test: setup chromium $(PEER)/ready   ## all tests, the browser's and the peers' included
	$(BIN)/workbench lab fetch
	$(BIN)/python -m pytest

check: setup                 ## lint and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: setup $(PEER)/ready   ## benchmarks side by side with the peers (minutes to hours; tables go to benchmarks/)
	$(BIN)/python benchmarks/train_step.py

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	@echo "Setting up .venv with $$($(PYTHON) --version) (a few minutes the first time)"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e '.[test]'
	@touch $@

# speculators in an environment of its own, called as a subprocess. The vision and audio packages that it pulls in do not import beside
# a CPU build of torch and are not needed.
$(PEER)/ready: tests/peers/constraints.txt
	@echo "Setting up $(PEER) for the comparisons with speculators (a few minutes the first time)"
	$(PYTHON) -m venv $(PEER)
	$(PEER)/bin/pip install -q -c $< speculators
	$(PEER)/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	@touch $@

chromium:
	@command -v chromium >/dev/null || { echo "Installing Chromium for the browser tests"; \
	  apt-get update -qq && apt-get install -y -qq chromium >/dev/null; } || \
	  { echo "The browser tests need Chromium: install your system's chromium package, then repeat"; exit 1; }
