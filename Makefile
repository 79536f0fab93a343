# One environment, .venv, for everything. Use another interpreter with
# `make PYTHON=... test`.

PYTHON ?= python3.11
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-part test-oldest test-python test-cuda test-triton test-slurm sim chaos kills lint bench bench-all bench-compare study release-check clean
.PHONY: 1 2 3 4 5 6

help:
	@echo "make demo   train a small network on handwritten digits, on two workers"
	@echo "make test   run the suite that every change has to pass: under ten minutes"
	@echo "make test-all   the same, then one by one all that takes longer: an hour"
	@echo "make test-part 1   one of six parts of what test-all adds: under 15 minutes"
	@echo "make test-oldest  on the oldest versions that are allowed: half an hour, 6 GB of disk"
	@echo "make test-python PYTHON=python3.13   on another Python: ten minutes, 8 GB of disk"
	@echo "make test-cuda   fits on a CUDA device: three minutes"
	@echo "make test-triton  the kernels for CUDA, interpreted: a minute"
	@echo "make test-slurm  fits on jobs of SLURM and SGE, and over SSH, on this machine: 10 minutes; needs root"
	@echo "make sim    simulate a thousand fits whose workers and connections fail: minutes"
	@echo "make chaos  train while workers are killed, frozen, added: twenty seeds"
	@echo "make kills  kill processes while checkpoints are written: fifty times"
	@echo "make lint   formatting, lint, types, names, documentation"
	@echo "make bench  a selection of the benchmarks: ten minutes"
	@echo "make bench-all      all that run on one machine: hours"
	@echo "make bench-compare  ratios beside those of the last committed run"
	@echo "make study  compare with synchronous training: some hours"
	@echo "make release-check  packages, then all tests: hours; with QUICK=1 packages only: minutes"
	@echo "make clean  remove the environment and everything that was built"

# Each stamp is written last, so that make repeats an installation that failed.
.venv/examples: pyproject.toml constraints.txt
	@echo "installing daskdl, PyTorch and Dask into .venv: 1.5 GB, one to two minutes"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		-c constraints.txt -e ".[examples]"
	touch $@

.venv/installed: .venv/examples
	@echo "installing what the tests and the documentation need: another 1.1 GB, two to four minutes"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		-c constraints.txt -e ".[test,docs,examples]"
	touch $@

demo: .venv/examples
	$(BIN)/python examples/digits.py

# Of the suite, only test-cuda uses a GPU.
test test-all test-part test-oldest test-python test-triton test-slurm: export DASKDL_TEST_DEVICE := cpu
test-cuda: export DASKDL_TEST_DEVICE := cuda

# One process tests what needs clusters, the other all else.
test: .venv/installed
	$(BIN)/python -m pytest -n 2

# What kills, freezes, measures or trains long has the machine to itself.
APART := slow or network or learning or examples or chaos
test-all: test
	$(BIN)/python -m pytest -m "$(APART)"

# One of six parts of that: `make test-part 3`; see tests/parts.py.
test-part: N = $(word 2,$(MAKECMDGOALS))
test-part: .venv/installed
	$(BIN)/python -m pytest -m "$(APART)" --part $(N)

1 2 3 4 5 6: ; @:

# The oldest versions that pyproject.toml allows. The oldest PyTorch on PyPI brings the
# libraries of CUDA: 6 GB. Triton is removed, as processes that have it complain when
# they end.
.venv-oldest/installed: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check \
		-c constraints-oldest.txt -e ".[test]"
	.venv-oldest/bin/python -m pip uninstall --quiet --yes triton
	touch $@

# Old libraries use what newer ones deprecate.
test-oldest: .venv-oldest/installed
	.venv-oldest/bin/python -m pytest -n 2 tests/contract tests/place \
		-W ignore::DeprecationWarning -W ignore::PendingDeprecationWarning

# Another Python has an environment of its own.
OTHER := .venv-$(notdir $(PYTHON))
$(OTHER)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(OTHER)
	$(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check \
		-c constraints.txt -e ".[test]"
	touch $@

test-python: $(OTHER)/installed
	$(OTHER)/bin/python -m pytest -n 2 tests/contract tests/maths tests/place tests/cuda

test-cuda: .venv/installed
	$(BIN)/python -m pytest -n 4 -m cuda tests

# The kernels of CUDA in Triton's interpreter. Triton stays out of .venv, as processes
# that have it complain when they end.
test-triton: .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check --upgrade --target .triton triton
	TRITON_INTERPRET=1 PYTHONPATH=.triton $(BIN)/python -m pytest tests/maths/test_kernels.py -k triton

test-slurm: .venv/installed
	$(BIN)/pip install --quiet -c constraints.txt dask-jobqueue asyncssh
	$(BIN)/python -m pytest -m jobqueue tests/jobqueue

SEEDS := 1000
CHAOS_SEEDS := 20

sim: .venv/installed
	$(BIN)/python -m tests.sim --seeds $(SEEDS)

chaos: .venv/installed
	DASKDL_CHAOS_SEEDS=$(CHAOS_SEEDS) $(BIN)/python -m pytest -m chaos tests/chaos

kills: .venv/installed
	DASKDL_KILLS=50 $(BIN)/python -m pytest -m "" tests/cluster/test_kills.py

lint: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m tests.names
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict  # with --quiet, warnings do not count

SOME := single ddp ddp-powersgd post-local-sgd daskdl daskdl-16

# Without root, or without iproute2, links and peers say so and are left out.
bench: .venv/installed
	$(BIN)/python -m benchmarks encode --size 5_000_000
	$(BIN)/python -m benchmarks wire-size --repeat 11
	$(BIN)/python -m benchmarks channel --members 2 4 --seconds 3
	$(BIN)/python -m benchmarks scaling --steps 100 --seeds 0
	$(BIN)/python -m benchmarks peers --contestants $(SOME) --seconds 6 --seeds 0 1
	$(BIN)/python -m benchmarks links --contestants $(SOME) --seconds 6 --seeds 0 \
		--rates 1gbit 100mbit

bench-all: .venv/installed
	$(BIN)/python -m benchmarks encode
	$(BIN)/python -m benchmarks wire-size
	$(BIN)/python -m benchmarks channel
	$(BIN)/python -m benchmarks scaling
	$(BIN)/python -m benchmarks peers
	$(BIN)/python -m benchmarks links
	$(BIN)/python -m benchmarks time-to-accuracy
	$(BIN)/python -m benchmarks emulation
	$(BIN)/python -m benchmarks cost-model
	$(BIN)/python -m benchmarks step
	$(BIN)/python -m benchmarks first-step
	$(BIN)/python -m benchmarks plan
	$(BIN)/python -m benchmarks kill
	$(BIN)/python -m benchmarks predict
	$(BIN)/python -m benchmarks predict-in-memory
	$(BIN)/python -m benchmarks evaluate
	$(BIN)/python -m benchmarks predictor
	$(BIN)/python -m benchmarks checkpoint
	$(BIN)/python -m benchmarks data
	$(BIN)/python -m benchmarks parts

bench-compare: .venv/installed
	$(BIN)/python -m benchmarks compare

study: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		-c constraints.txt -e ".[bench]"
	rm -f benchmarks/results/convergence.jsonl
	$(BIN)/python -m benchmarks convergence --tasks digits diabetes text --jobs 2 \
		--rows benchmarks/results/convergence.jsonl --plots docs/images

# Tools for packages, without what daskdl needs: it is installed from its wheel, alone.
.venv-release/installed: constraints.txt
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/python -m pip install --quiet --disable-pip-version-check \
		-c constraints.txt build twine "readme-renderer[md]" trove-classifiers
	touch $@

# Uploads nothing.
release-check: .venv-release/installed
	.venv-release/bin/python -m tests.release $(if $(QUICK),--quick)

clean:
	rm -rf .venv .venv-oldest .venv-python* .venv-release build dist site *.egg-info
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
