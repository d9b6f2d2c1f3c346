# make demo    set up, run the demo, print its table, say where the report is
# make test    set up with test tools, lint, type-check, run all tests
# make bench   measure against peers and the plain loop (BENCH='w1 --repeats 7' for a part); a quiet machine, please
# make soak    random faults, a few minutes (SOAK='--kills 1000' for more of a kind): nothing may get through
# make docs    build the docs as a site into site/, without the network
# make setup   everything: extras and test tools
# make config-docs   write docs/config.md anew from the config's keys

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: setup demo test lint bench soak docs clean config-docs

setup: .venv/.all

.venv/.core: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) --editable .
	touch $@

.venv/.all: .venv/.core
	$(PIP) --editable '.[dev]'
	touch $@

demo: .venv/.core
	@echo "DynaFed against FedAvg on twenty very different clients: a minute or two on two cores."
	$(BIN)/dynafed compare demo --methods fedavg,dynafed --out runs/demo

lint: .venv/.all
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest -n 2 --cov --cov-report=term

bench: .venv/.all
	$(BIN)/python benchmarks/run.py $(BENCH)

config-docs: .venv/.all
	$(BIN)/dynafed config --markdown > docs/config.md

docs: .venv/.all
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "built: site/index.html, to look at with $(BIN)/python -m http.server -d site --bind 127.0.0.1"

soak: .venv/.all
	$(BIN)/python soak/run.py $(SOAK)

clean:
	rm -rf .venv runs build dist site
