# `make demo` and `make test` on a fresh clone do all there is to do. VENV and PYTHON may be set: make test PYTHON=python3.12
VENV ?= .venv
PYTHON ?= python3
export VENV PYTHON

# Options for pytest, for example: make test PYTEST="-x -k lease"
PYTEST ?=
# Long tests are bounded too, by the hour.
HOURS := -o faulthandler_timeout=7200

# Each has an environment of its own, and one is tested after the other.
ENGINES := vllm sglang lmcache
.NOTPARALLEL:

.PHONY: help demo install test test-long test-faults test-engines $(ENGINES:%=test-engine-%) check docs format constraints $(ENGINES:%=constraints-%) clean

help:
	@echo "make demo          install what is missing, then: a hybrid model resumes on another node under a lease"
	@echo "make test          install what is missing, then all tests but the long ones and those with real engines"
	@echo "make test-long     the long ones        make test-faults   kills, cuts, full disks"
	@echo "make test-engines  those that need a real engine's environment     make test-engine-vllm (-sglang, -lmcache)   one of them"
	@echo "make check         ruff, mypy, layer contracts        make format   let ruff write"
	@echo "make docs          build the documentation as a site: site/index.html"
	@echo "make constraints   write constraints.txt from what is installed        make clean   remove caches"

demo:
	@scripts/install engines
	@$(VENV)/bin/kvfabric demo

install:
	@scripts/install engines,dev

test: install
	@scripts/test $(PYTEST)

test-long: install
	$(VENV)/bin/python -m pytest -m "long and not engines" $(HOURS) $(PYTEST)

test-faults: install
	$(VENV)/bin/python -m pytest -m "faults and not long and not engines" $(PYTEST)

test-engines: $(ENGINES:%=test-engine-%)

$(ENGINES:%=test-engine-%): test-engine-%:
	@scripts/install-engines $*
	.venv-$*/bin/python -m pytest -m engines $(HOURS) $(PYTEST) tests/engines_$*

check: install
	@PYTHON=$(VENV)/bin/python scripts/check

docs:
	@scripts/install docs
	@PYTHON=$(VENV)/bin/python scripts/site && echo "site/index.html"

format: install
	@$(VENV)/bin/ruff check --quiet --fix . ; $(VENV)/bin/ruff format .

# pip and the package itself are no releases to pin; a local label (+cpu) is not on every index.
constraints: install
	@{ sed '/^[^#]/d' constraints.txt; $(VENV)/bin/python -m pip freeze --all --exclude kvfabric --exclude pip | sed 's/+[a-z0-9.]*$$//'; } > constraints.tmp
	@mv constraints.tmp constraints.txt

# Of an engine's environment, less what constraints.txt pins for all.
$(ENGINES:%=constraints-%): constraints-%:
	@scripts/install-engines $*
	@{ sed '/^[^#]/d' scripts/engines/$*.txt; .venv-$*/bin/python -m pip freeze --all --exclude kvfabric --exclude pip | sed 's/+[a-z0-9.]*$$//' \
	  | grep -vFxf .venv-$*/shared.txt | LC_ALL=C sort -f; } > constraints.tmp
	@mv constraints.tmp scripts/engines/$*.txt

clean:
	rm -rf build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
