# The two commands are `make demo` and `make test`; the others are their parts, for daily work.
# They work on a bare Debian 12 or Ubuntu machine: scripts/setup installs what is missing first,
# and is done in a moment when nothing is.

# Compilers at once; the SIMD sources need about 1 GB each.
JOBS ?= $(shell nproc)

.PHONY: help setup build test demo bench rivals format lint clean

help:
	@echo "make demo     build, train a small model with and without evenkeel, write demo-report/index.html"
	@echo "              ARGS='--model conv' and other options: ARGS=--help lists them"
	@echo "make test     everything that must hold: tests, sanitizers, fuzzer, package, style"
	@echo "make setup    install what is missing (apt packages when root, .venv)"
	@echo "make build    the dev preset, into build/dev"
	@echo "make bench    the full table, over tests/cases/peers.txt"
	@echo "make rivals   speed and accuracy beside torch and oneDNN, in an environment of their own"
	@echo "make format   rewrite C++ and Python files in the house style"
	@echo "make lint     check style and spelling without changing anything"
	@echo "make clean    remove the build folders and the demo's report"

setup:
	@scripts/setup

build: setup
	@scripts/build dev $(JOBS)

test: setup
	@.venv/bin/python scripts/test.py --jobs $(JOBS)

demo: setup
	@JOBS=$(JOBS) demo/start $(ARGS)

bench: setup
	@scripts/build release $(JOBS)
	@build/release/evenkeel-bench --cases tests/cases/peers.txt

rivals: setup .venv-rivals/done
	@scripts/build release $(JOBS) -DEVENKEEL_TORCH=ON
	@.venv-rivals/bin/python benchmarks/rivals.py
	@.venv-rivals/bin/python benchmarks/accuracy.py

.venv-rivals/done: benchmarks/requirements.txt
	@python3 -m venv --clear .venv-rivals
	@.venv-rivals/bin/python -m pip install --quiet --no-deps -r benchmarks/requirements.txt
	@touch $@

format: setup
	@scripts/lint --fix

lint: setup
	@scripts/lint

clean:
	rm -rf build demo-report
