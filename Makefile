# Everything a newcomer needs; each target does its own set-up into .venv.
#
#   make demo      start a local cluster, generate, show where the time went
#   make test      the whole test suite
#   make check     lint, format, types
#   make bench     measure links and decoding; rows go to benchmarks/results.csv
#
# PYTHON  the interpreter that makes .venv, 3.11 or newer           (make install PYTHON=python3.12)
# TORCH   what to hand to pip for PyTorch; pinned, because an unpinned torch may fetch gigabytes of CUDA libraries
#         (make install TORCH="torch==2.11.0 --index-url URL" for another build)
# JOBS    test files that run at a time; clusters in them start several processes each  (make test JOBS=1)

PYTHON ?= python3
TORCH ?= torch==2.13.0
JOBS ?= 2
CHECKOV := checkov==3.3.30
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install promtool demo test check bench clean

help: ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 12

install: $(STAMP) ## the set-up alone, into .venv

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed; PYTHON=... names one") if sys.version_info < (3, 11) else 0'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	test -x $(VENV)/checkov/bin/python || $(BIN)/python -m venv $(VENV)/checkov
	$(VENV)/checkov/bin/python -m pip install --quiet $(CHECKOV) || echo "checkov cannot be had here; its test skips"
	@touch $(STAMP)

promtool: $(BIN)/promtool ## Prometheus' checker of rules, out of Debian's package, for two tests that skip without it

$(BIN)/promtool: | $(STAMP)
	rm -rf $(VENV)/prometheus && mkdir -p $(VENV)/prometheus
	cd $(VENV)/prometheus && apt-get download -q prometheus && dpkg-deb --extract prometheus_*.deb .
	mv $(VENV)/prometheus/usr/bin/promtool $@ && rm -rf $(VENV)/prometheus

demo: $(STAMP) ## start a cluster, generate from two prompts, show where the milliseconds went
	$(BIN)/forefetch demo

test: $(STAMP) ## run the tests that need no GPU
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu and not multigpu" -n $(JOBS) --dist loadfile

check: $(STAMP) ## lint, format, types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: $(STAMP) ## measure; appends to benchmarks/results.csv
	$(BIN)/python -m benchmarks.link_round_trip
	$(BIN)/python -m benchmarks.decode_throughput
	$(BIN)/python -m benchmarks.kv_store
	$(BIN)/python -m benchmarks.kv_prefix
	$(BIN)/python -m benchmarks.kv_handover

clean: ## remove what the other targets made
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
