# Everything from a fresh clone: `make demo`, `make test`. A second call does not install again.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: help demo test pages parity search gpu cluster attack docs examples lint format clean

help:  ## show this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

demo: $(READY)  ## train the included digits recipe in one process, then in two, and compare the runs
	$(BIN)/paceline demo

test: $(READY)  ## run the tests
	$(BIN)/python -m pytest -n 2 --dist worksteal --ignore tests/cluster --ignore tests/attack --ignore tests/docs --ignore tests/gpu --ignore tests/pages --ignore tests/parity --ignore tests/search

pages: $(READY)  ## test reports and the page of `paceline serve` in Chromium
	$(BIN)/python -m pytest -n 2 --dist worksteal tests/pages

parity: $(READY)  ## compare recipes with the code that they follow: operations, schedules, optimizers and loss curves
	$(BIN)/python -m pytest -n 2 --dist worksteal tests/parity

search: $(READY)  ## run the tests of sweeps, seeds and the search for batch size and learning rate
	$(BIN)/python -m pytest -n 2 --dist worksteal tests/search

gpu: $(READY)  ## run the slow tests of GPU paths and of the selftest, on simulated GPUs and on CPUs
	$(BIN)/python -m pytest -n 2 --dist worksteal tests/gpu

cluster: $(READY) .venv-sky/.ready  ## run the tests on simulated hosts (network namespaces) and on a local SLURM (as root)
	$(BIN)/python -m pytest -n 2 --dist worksteal tests/cluster

attack: $(READY)  ## run the fault and security tests: kills, full disks, corrupt files, hostile clients
	$(BIN)/python -m pytest -n 2 --dist worksteal tests/attack

docs: $(READY)  ## build the documentation site in build/site; broken links are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

examples: $(READY)  ## run the commands, Python blocks, recipes and notebook of the documentation, and benchmarks of training
	$(BIN)/python -m pytest -n 2 --dist worksteal tests/docs

lint: $(READY)  ## check style, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)  ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the environment and what tools left behind
	rm -rf .venv .venv-sky build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache src/*.egg-info src/paceline/data/*.so

$(READY): pyproject.toml constraints.txt $(wildcard src/paceline/data/native/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; try make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

# only its validator is used; its dependencies would get in the way of others
.venv-sky/.ready:
	$(PYTHON) -m venv .venv-sky
	.venv-sky/bin/python -m pip install --quiet --disable-pip-version-check 'skypilot>=0.10,<0.15'
	@touch $@
