# Every target makes .venv and installs what it needs; nothing else has to be done first.
PYTHON ?= python3
BIN := .venv/bin
WORKERS ?= 2

.PHONY: demo test lint bench docs clean

.venv/core: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

.venv/dev: .venv/core
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $@

.venv/docs: .venv/core
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[docs]"
	touch $@

demo: .venv/core
	mkdir -p out
	$(BIN)/meshwright predict llama3-70b --on 64xh100 --train batch=512,seq=8192 \
	  --plan "tp8 pp4 vpp5 dp2 zero1 mb1" --report out/report.html --trace out/step.json.gz

test: .venv/dev
	$(BIN)/python -m pytest -n $(WORKERS)

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: .venv/dev
	$(BIN)/python -m bench

docs: .venv/docs
	$(BIN)/mkdocs build --strict

clean:
	rm -rf .venv out site build dist .pytest_cache .ruff_cache
