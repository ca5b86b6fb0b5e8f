# Every target makes .venv and installs what it needs; nothing else has to be done first. What is imported is compiled then
# (--no-compile): most of torch never is.
PYTHON ?= python3
BIN := .venv/bin
# one more than cores: tests that start processes leave a fifth of two cores idle
WORKERS ?= 3
# Which torch, as pip takes it: make test TORCH='torch==2.12.1'. Left out, the newest where a GPU is found, else a version
# that is carried as a build without CUDA; what comes is said before it is downloaded (tools/torch_for_here.py).
TORCH ?=

.PHONY: demo demo-run test golden fuzz states lint bench docs clean

.venv/core: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -e .
	touch $@

.venv/torch: .venv/core
	$(BIN)/python tools/torch_for_here.py "$(TORCH)"
	touch $@

.venv/run: .venv/torch
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -e ".[run]"
	touch $@

.venv/dev: .venv/torch
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -e ".[dev]"
	touch $@

.venv/docs: .venv/core
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -e ".[docs]"
	touch $@

ASKED := llama3-70b --on 64xh100 --train batch=512,seq=8192
PLANNED := $(ASKED) --plan "tp8 pp4 vpp5 dp2 zero1 mb1"

# First what needs no torch: the README's question answered, searched and exported. Then a plan trained for real.
demo: .venv/core
	mkdir -p out
	$(BIN)/meshwright predict $(PLANNED) --report out/report.html --trace out/step.json.gz
	@echo
	$(BIN)/meshwright search $(ASKED) --for megatron --top 3 --save out/plan-of-64.toml --report out/search.html
	@echo
	$(BIN)/meshwright export out/plan-of-64.toml --to megatron --out out/pretrain.sh
	@echo; echo "Look at"
	@echo "  out/report.html     the answer with its timeline, in a browser"
	@echo "  out/step.json.gz    the same step for ui.perfetto.dev"
	@echo "  out/search.html     the search of plans that Megatron-LM runs; out/plan-of-64.toml is the one it recommends"
	@echo "  out/pretrain.sh     that plan as flags of Megatron-LM, with its launch"
	@echo; echo "Now a plan for this machine, trained for real: this part installs torch, Ctrl-C leaves it out"
	@$(MAKE) --no-print-directory demo-run || echo "training needs torch, which did not install or run here: \
	what is above needs none of it"

# Measures this machine, searches a plan for two processes, trains it for 20 steps: predicted against measured.
demo-run: export MESHWRIGHT_HOME = $(CURDIR)/out/here
demo-run: .venv/run
	test -f out/here/here.json || $(BIN)/meshwright calibrate --here --quick
	$(BIN)/meshwright search examples/tiny-llama.json --on 2xhere --train batch=16,seq=128,dtype=fp32 --top 3 \
	  --store none --save out/plan.toml
	$(BIN)/meshwright run out/plan.toml --data sample --steps 20 --trace out/measured.json.gz

test: .venv/dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# Which of the golden questions are answered otherwise than they were, to the last bit.
golden: .venv/dev
	$(BIN)/python -m tests.golden

# A random search for inputs that are not taken as they must be; goes on where it was stopped.
fuzz: .venv/dev
	$(BIN)/python -m fuzz

# The states of published systems that ship, from running every check; then what the book says of them.
states: .venv/dev
	$(BIN)/meshwright papers --check --write src/meshwright/papers/states.json
	$(BIN)/python docs/refresh.py

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: .venv/dev
	$(BIN)/python -m bench
	$(BIN)/python -m bench.process
	$(BIN)/python -m bench.emulated
	$(BIN)/python -m bench.executor
	$(BIN)/python -m bench.overhead
	$(BIN)/python -m bench.engine
	$(BIN)/python -m bench.here --rounds 5
	$(BIN)/python -m bench.training

docs: .venv/docs
	$(BIN)/mkdocs build --strict

clean:
	rm -rf .venv out site build dist .pytest_cache .ruff_cache
