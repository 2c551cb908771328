# Two commands for everybody: `make study` runs the whole loop on the embedded corpus, `make test` checks everything.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: study test check soak families fake-gpu lowering audit lowest licences docs pictures wheel ci-system clean

# Exit code 1 means that the run ended outside its forecast's interval. One run in ten should, so it is not a failure.
study: $(INSTALLED)
	$(BIN)/muscale init runs/quickstart --keep
	$(BIN)/muscale run runs/quickstart/study.toml || test $$? -eq 1

test: check

check: $(INSTALLED)
	sh tests/guard_platform.sh
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m pytest --numprocesses 2

# Tests that take too long for `make test`: all pairs of methods, and many faults. A test prints its stack after 15 minutes.
soak: $(INSTALLED)
	$(BIN)/python -m pytest -m soak --timeout 1800 -o faulthandler_timeout=900

# Takes five families from `muscale run` to a promoted run on two ranks: half an hour on two cores. A rerun continues.
families: $(INSTALLED)
	$(BIN)/python tests/benchmarks/families.py

# Compares the memory estimate with steps traced on 64 and 1,024 fake ranks; counts waits of the host; minutes, without a GPU.
fake-gpu: $(INSTALLED)
	$(BIN)/python -m tests.gpu_free

# Compiles for an H100 without a GPU. Needs gcc, and installs torch's CUDA build into a separate environment (5.5 GB).
lowering: .venv/.cuda
	.venv/.cuda/bin/python -W ignore -m tests.gpu_free.lowering

.venv/.cuda: requirements.lock $(INSTALLED)
	$(PYTHON) -m venv $@
	$@/bin/python -m pip install --quiet 'uv>=0.9,<1'
	$@/bin/uv pip install --quiet --python $@/bin/python --constraint requirements.lock --editable .

# Lists known vulnerabilities of the locked packages. The advisory database of the Python Package Index must be reachable.
audit: .venv/.audit
	@.venv/.audit/bin/pip-audit --requirement requirements.lock --no-deps --disable-pip >.venv/.audit/said 2>&1; code=$$?; \
	if grep -qi "connection\|max retries\|timed out" .venv/.audit/said; then \
		echo "audit: skipped, the advisory database can't be reached from here; nothing was checked"; \
	else cat .venv/.audit/said; exit $$code; fi

# A separate environment, because the auditing tool is not one of the locked packages.
.venv/.audit: $(INSTALLED)
	$(PYTHON) -m venv $@
	$@/bin/python -m pip install --quiet 'pip-audit>=2.10,<3'

# Runs the tests with the oldest versions that pyproject.toml allows, in a separate environment.
lowest: .venv/.lowest
	.venv/.lowest/bin/python -m pytest --numprocesses 2

.venv/.lowest: pyproject.toml $(INSTALLED)
	$(PYTHON) -m venv $@
	$@/bin/python -m pip install --quiet 'uv>=0.9,<1'
	$@/bin/uv pip compile --quiet --resolution lowest-direct --extra dev --output-file $@/requirements.txt pyproject.toml
	$@/bin/uv pip install --quiet --python $@/bin/python --requirement $@/requirements.txt --editable .

# Lists the licence of each locked package, and marks copyleft licences.
licences: $(INSTALLED)
	$(BIN)/python docs/licences.py

# Writes the reference from the docstrings, one page for each package.
docs: $(INSTALLED)
	$(BIN)/python docs/reference.py

# Builds the wheel that `ray job submit` copies to a cluster; docs/cluster.md.
wheel: $(INSTALLED)
	$(BIN)/muscale wheel dist

$(INSTALLED): pyproject.toml requirements.lock
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint requirements.lock --editable '.[dev]'
	touch $@

# Draws the pictures in docs/ from the report of the study that `make study` trained.
pictures: $(INSTALLED)
	$(BIN)/muscale report runs/quickstart/study.toml
	$(BIN)/python -m tests.pictures runs/quickstart/report.html docs

# Installs the Debian packages that the tests need, as root. GitHub's Ubuntu image has Chromium; Ubuntu has no package of it.
ci-system:
	apt-get update -qq
	apt-get install -y -qq --no-install-recommends g++ make postgresql python3-venv
	command -v chromium || apt-get install -y -qq --no-install-recommends chromium

clean:
	rm -rf .venv runs dist .mypy_cache .ruff_cache .pytest_cache
