# Two commands for everybody: `make study` runs the whole loop on the embedded corpus, `make test` checks everything.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: study test check soak families fake-gpu lowering audit lowest licences docs pictures wheel ci-system clean

# Exit code 1 tells of a run that ended outside its forecast's interval, as one in ten should: a finding, no failure.
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

# What takes too long for every time: all pairs of methods, and faults by the dozen. One of 15 minutes shows where it is.
soak: $(INSTALLED)
	$(BIN)/python -m pytest -m soak --timeout 1800 -o faulthandler_timeout=900

# Five families, each from `muscale run` to a promoted run on two ranks; half an hour on two cores; run again, it continues.
families: $(INSTALLED)
	$(BIN)/python tests/benchmarks/families.py

# The memory estimate beside steps traced on the fake ranks of 64 and 1,024 GPUs, waits of the host, graphs; minutes, and no GPU.
fake-gpu: $(INSTALLED)
	$(BIN)/python -m tests.gpu_free

# What is compiled for GPUs, lowered for an H100; torch's CUDA build in an environment of its own (5.5 GB), gcc, and no GPU.
lowering: .venv/.cuda
	.venv/.cuda/bin/python -W ignore -m tests.gpu_free.lowering

.venv/.cuda: requirements.lock $(INSTALLED)
	$(PYTHON) -m venv $@
	$@/bin/python -m pip install --quiet 'uv>=0.9,<1'
	$@/bin/uv pip install --quiet --python $@/bin/python --constraint requirements.lock --editable .

# Known weaknesses of the locked packages, from the advisory database of the Python Package Index, which must be reachable.
audit: .venv/.audit
	@.venv/.audit/bin/pip-audit --requirement requirements.lock --no-deps --disable-pip >.venv/.audit/said 2>&1; code=$$?; \
	if grep -qi "connection\|max retries\|timed out" .venv/.audit/said; then \
		echo "audit: skipped, the advisory database can't be reached from here; nothing was checked"; \
	else cat .venv/.audit/said; exit $$code; fi

# A folder of its own: what audits the packages is none of them.
.venv/.audit: $(INSTALLED)
	$(PYTHON) -m venv $@
	$@/bin/python -m pip install --quiet 'pip-audit>=2.10,<3'

# The oldest versions that pyproject.toml allows, in an environment of their own.
lowest: .venv/.lowest
	.venv/.lowest/bin/python -m pytest --numprocesses 2

.venv/.lowest: pyproject.toml $(INSTALLED)
	$(PYTHON) -m venv $@
	$@/bin/python -m pip install --quiet 'uv>=0.9,<1'
	$@/bin/uv pip compile --quiet --resolution lowest-direct --extra dev --output-file $@/requirements.txt pyproject.toml
	$@/bin/uv pip install --quiet --python $@/bin/python --requirement $@/requirements.txt --editable .

# The licence of each locked package, copyleft ones marked.
licences: $(INSTALLED)
	$(BIN)/python docs/licences.py

# The reference, a page for each package, from the docstrings.
docs: $(INSTALLED)
	$(BIN)/python docs/reference.py

# What `ray job submit` ships to a cluster; docs/cluster.md.
wheel: $(INSTALLED)
	$(BIN)/muscale wheel dist

$(INSTALLED): pyproject.toml requirements.lock
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint requirements.lock --editable '.[dev]'
	touch $@

# The pictures of the report in docs/, of the study that `make study` left.
pictures: $(INSTALLED)
	$(BIN)/muscale report runs/quickstart/study.toml
	$(BIN)/python -m tests.pictures runs/quickstart/report.html docs

# Debian packages of the tests; needs root. GitHub's Ubuntu has a Chromium, of which Ubuntu has no package.
ci-system:
	apt-get update -qq
	apt-get install -y -qq --no-install-recommends g++ make postgresql python3-venv
	command -v chromium || apt-get install -y -qq --no-install-recommends chromium

clean:
	rm -rf .venv runs dist .mypy_cache .ruff_cache .pytest_cache
