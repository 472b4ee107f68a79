# `make demo` and `make test` set up all they need in .venv; PYTHON, VENV and PIP_ARGS can be set from outside,
# for example PIP_ARGS="--extra-index-url URL" for an index that has CPU builds of torch.
PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
OUT ?= demo
BIN := $(VENV)/bin
SEQDIFF := $(BIN)/seqdiff

.PHONY: help install install-test install-readers demo test test-slow lint clean

help:
	@echo "make demo             train on the embedded traffic, sample 64 joint futures a scene, evaluate, write $(OUT)/review.html"
	@echo "make test             lint, types and the fast tests"
	@echo "make test-slow        the tests that take minutes"
	@echo "make install-readers  trajdata, av2, commonroad-io and SUMO, for \`seqdiff prepare\` and tools/record_traffic.py"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core: pyproject.toml requirements/lock.txt | $(BIN)/python
	$(BIN)/python -m pip install $(PIP_ARGS) -q -c requirements/lock.txt -e .
	touch $@

$(VENV)/.test: $(VENV)/.core
	$(BIN)/python -m pip install $(PIP_ARGS) -q -c requirements/lock.txt -e ".[test]"
	touch $@

$(VENV)/.readers: $(VENV)/.core requirements/no-deps.txt
	$(BIN)/python -m pip install $(PIP_ARGS) -q -c requirements/lock.txt -e ".[av2,commonroad,traffic,trajdata]"
	$(BIN)/python -m pip install $(PIP_ARGS) -q --no-deps -r requirements/no-deps.txt
	touch $@

install: $(VENV)/.core
install-test: $(VENV)/.test
install-readers: $(VENV)/.readers

demo: $(VENV)/.core
	@rm -rf $(OUT)
	$(SEQDIFF) fit experiment=demo run=$(OUT)/run
	$(SEQDIFF) sample ckpt=$(OUT)/run split=test k=64 steps=4 seed=0 limit=40 out=$(OUT)/samples
	$(SEQDIFF) evaluate samples=$(OUT)/samples
	$(SEQDIFF) review samples=$(OUT)/samples out=$(OUT)/review.html
	@echo; echo "Open $(OUT)/review.html in a browser."

test: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-slow: $(VENV)/.test
	$(BIN)/python -m pytest -m slow

clean:
	rm -rf $(VENV) $(OUT) build *.egg-info
