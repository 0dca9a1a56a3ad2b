# gdrd: entry points for people and for CI. `make help` lists them.
# Every recipe that needs more than a shell lives in scripts/, so that it can be read, linted and run alone.

SHELL := /bin/bash
.DEFAULT_GOAL := help

PREFIX     ?= /usr/local
SYSCONFDIR ?= /etc
DESTDIR    ?=
# Where the binaries to install come from.
BUILD_DIR  ?= target/release

BINDIR      := $(PREFIX)/bin
LIBDIR      := $(PREFIX)/lib
UNITDIR     ?= $(LIBDIR)/systemd/system
SYSUSERSDIR ?= $(LIBDIR)/sysusers.d
TMPFILESDIR ?= $(LIBDIR)/tmpfiles.d

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: ## build, start a simulated DGX A100, move registered GPU buffers between two processes
	@scripts/setup.sh build
	@scripts/demo.sh

.PHONY: test
test: ## run every test; ends in one line 'N passed, N failed'
	@scripts/setup.sh build test
	@scripts/test.sh

.PHONY: bench
bench: ## print latency and bandwidth as ratios against floors measured in the same run
	@scripts/setup.sh build
	@scripts/bench.sh

.PHONY: lint
lint: ## format, clippy, layers, docs, licences, shell scripts: all as errors
	@scripts/setup.sh build test lint
	@scripts/lint.sh

.PHONY: setup
setup: ## install what the targets above need (apt), and check the Rust version
	@scripts/setup.sh build test lint
