# gdrd: entry points for people and for CI. `make help` lists them.
# Every recipe that needs more than a shell lives in scripts/, so that it can be read, linted and run alone.

SHELL := /bin/bash
.DEFAULT_GOAL := help

PREFIX     ?= /usr/local
SYSCONFDIR ?= /etc
DESTDIR    ?=
# Where the binaries to install come from.
BUILD_DIR  ?= $(or $(CARGO_TARGET_DIR),target)/release

# systemd looks into these folders below /usr, /usr/local and /etc only; give them for another PREFIX.
UNITDIR     := $(PREFIX)/lib/systemd/system
SYSUSERSDIR := $(PREFIX)/lib/sysusers.d
TMPFILESDIR := $(PREFIX)/lib/tmpfiles.d

export PREFIX SYSCONFDIR DESTDIR BUILD_DIR UNITDIR SYSUSERSDIR TMPFILESDIR

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
	@scripts/test.sh vm

.PHONY: model-check
model-check: ## check the models of `make test` with more preemptions, within a bound
	@scripts/setup.sh build
	@scripts/model-check.sh

.PHONY: fuzz
fuzz: ## fuzz every target of tests/fuzz for some seconds, from its saved inputs on
	@scripts/setup.sh build fuzz
	@scripts/fuzz.sh

.PHONY: vm-test
vm-test: ## run real verbs on soft RoCE in virtual machines (Debian 12 and 13); part of `make test`
	@scripts/setup.sh build
	@scripts/vm-test.sh

.PHONY: vm-bench
vm-bench: ## measure the broker on soft RoCE beside verbs of a process's own, in a virtual machine
	@scripts/setup.sh build
	@scripts/vm-bench.sh

.PHONY: bench
bench: ## measure against peers and floors of the same run; docs/performance.md keeps the figures
	@scripts/setup.sh build bench
	@scripts/bench.sh

.PHONY: device-test
device-test: ## on a machine with an NVIDIA GPU: run the checks that need one; writes docs/measured/
	@scripts/device-test.sh

.PHONY: lint
lint: ## format, clippy, layers, docs, licences, shell scripts: all as errors
	@scripts/setup.sh build test lint
	@scripts/lint.sh

.PHONY: setup
setup: ## install what the targets above need (apt), and check the Rust version
	@scripts/setup.sh build test lint

.PHONY: release
release: ## build the binaries that `make install` puts in place
	@scripts/setup.sh build
	@scripts/release.sh

# `sudo make install` after `make release`: the build belongs to the user, not to root.
.PHONY: install
install: ## install under PREFIX (/usr/local), below DESTDIR if set: binaries, manual pages, completions, units, users, folders, configuration
	@if [ -z "$$SUDO_USER" ] || [ ! -x '$(BUILD_DIR)/gdrd' ]; then $(MAKE) --no-print-directory release; fi
	@$(MAKE) --no-print-directory install-files

.PHONY: install-files
install-files:
	@scripts/install.sh install

.PHONY: uninstall
uninstall: ## remove what `make install` put in place; the configuration stays
	@scripts/install.sh uninstall
