# Everything lives in .venv, which the first target you ask for makes. Works with GNU make 3.81 and later.
#
#   make demo    fetch the model, split it over two engines, stream an answer, leave nothing running
#   make test    lint, types, docs, tests and notebooks: what CI runs
#   make lab     JupyterLab, open on the first notebook
#
# BACKEND=cpu|cuda12|cuda13|none chooses MLX's back end on Linux; PYTHON=... the interpreter the .venv is made from.

SHELL := /bin/sh
VENV  := .venv
BIN   := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help demo test lint unit cluster-tests docs lab bench catalogue verified format clean shim
.DEFAULT_GOAL := help

help:
	@sed -n 's/^#   make/make/p' Makefile

demo: $(READY)
	@$(BIN)/mlxcel-nb demo

test: lint docs unit cluster-tests

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Two workers: the machines this is tested on have two cores.
unit: $(READY)
	$(BIN)/pytest -q -n 2 --dist loadgroup -m "not cluster" tests

# Engines, kernels and browsers. Half of these tests wait for deadlines most of the time, so two files run at once.
cluster-tests: $(READY)
	$(BIN)/pytest -n 2 --dist loadfile -m cluster --durations=10 --nbmake --nbmake-timeout=120 tests notebooks

docs: $(READY)
	@rm -rf docs/_build
	$(BIN)/sphinx-build -q -W --keep-going -b html docs docs/_build/html

# A settings folder of its own, so that your Jupyter stays as it is and no news pop up over the lesson.
lab: $(READY)
	@mkdir -p $(VENV)/lab-config/labconfig
	@echo '{"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": true}}' \
		> $(VENV)/lab-config/labconfig/page_config.json
	JUPYTER_CONFIG_DIR="$(CURDIR)/$(VENV)/lab-config" $(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) \
		--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate notebooks/01-first-tokens.ipynb

bench: $(READY)
	$(BIN)/python -m benchmarks all

# Every split of every architecture, of which `make unit` tests a part. Takes many minutes.
catalogue: $(READY)
	$(BIN)/python -m tests.catalogue -- -n 2

SPLITS := tp2,tp3,tp4,pp2,pp3,tp2xpp2,ep2,ep3

# The same for the docs: how far each split is from one process. Takes some twenty minutes; rewrites docs/verified.*
verified: $(READY)
	$(BIN)/mlxcel-nb verify --catalogue --layouts $(SPLITS) --json > $(VENV)/verified.json
	$(BIN)/python -m docs.draw_verified $(VENV)/verified.json --write

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The two prebuilt forwarders to OpenBLAS; only needed after a change of forward.c.
shim:
	cd mlxcel_nb/models/_blas && for arch in x86_64 aarch64; do \
		own=$$([ $$arch = x86_64 ] || echo -mno-outline-atomics); \
		$$arch-linux-gnu-gcc -O2 $$own -shared -fPIC -nostdlib -fno-tree-loop-distribute-patterns \
			-fno-stack-protector -fno-asynchronous-unwind-tables \
			-fvisibility=hidden -Wl,--build-id=none,-s,-z,norelro,-z,noseparate-code,--hash-style=gnu,-soname,mlxcel-forward \
			-o forward-$$arch.so forward.c || exit 1; done

clean:
	rm -rf $(VENV) docs/_build build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis test-artifacts

# The stamp is newer than pyproject.toml: nothing to do. Older: pip brings the same .venv up to date.
$(READY): pyproject.toml
	@VENV=$(VENV) PYTHON="$(PYTHON)" BACKEND="$(BACKEND)" sh .ci/venv
	@touch $(READY)
