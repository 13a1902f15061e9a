# Each target works on a fresh clone with Python 3.11 or later: it makes .venv, installs the versions of constraints.txt, runs.
PYTHON ?= python3
BIN := .venv/bin
JOBS ?= 3
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-all test-long test-cuda parity mutants cluster docs check audit clean

demo: .venv/.installed
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/deepspeed --num_gpus 2 launch/train.py --deepspeed ds_configs/zero2.json $(FLAGS)

# the fast suite; ARGS: further arguments of pytest
test: .venv/.installed-test
	$(BIN)/python -m pytest --numprocesses $(JOBS) $(ARGS)

# what else is tested of each change, and needs no root; with test-cuda
test-all: .venv/.installed-test
	$(BIN)/python -m pytest --numprocesses $(JOBS) -m "slow and not long and not cluster" $(ARGS)

# before a release: trainings of minutes, and the parity cases that test-all leaves out
test-long: .venv/.installed-test
	$(BIN)/python -m pytest --numprocesses $(JOBS) -m "long and not cluster" $(ARGS)

# on a GPU, or on a pretended one (needs g++)
test-cuda: .venv/.installed-test
	$(BIN)/python -m pytest --numprocesses $(JOBS) -m slow tests/gpu $(ARGS)

parity: .venv/.installed-test
	FMMETA_PARITY=full $(BIN)/python -m pytest -m 'not cluster' tests/distributed/test_parity.py tests/distributed/test_model_parallel.py

# plants each defect of tests/mutants/table.py and runs the fast suite until a test fails; continues where it ended
mutants: .venv/.installed-test
	$(BIN)/python -m tests.mutants.run --jobs $(JOBS)

cluster: .venv/.installed-test
	$(BIN)/python -m pytest -m cluster

# the documentation site, in build/docs
docs: .venv/bin/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "search needs a server: $(BIN)/python -m http.server --directory build/docs"

check: .venv/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

audit: .venv/.installed-test
	-$(BIN)/python -m pip install --quiet pip-audit
	$(BIN)/python -m tests.support.audit

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/.installed: pyproject.toml constraints.txt .venv/bin/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

.venv/.installed-test: pyproject.toml constraints.txt .venv/bin/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $@ .venv/.installed

clean:
	rm -rf .venv build dist *.egg-info
