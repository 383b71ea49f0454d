# Only Python (3.11 or later) and make are needed; everything else is installed into .venv.
PYTHON ?= python3
PY := .venv/bin/python
# GT_DEVICE=cpu: where there are GPUs, but fewer than eight, ranks have to be told to do without.
PYTEST := $(PY) -m pytest$(if $(GT_DEVICE), --gt-device=$(GT_DEVICE))
# A worker a core is enough: tests on ranks start processes of their own.
WORKERS ?= 2
BENCHMARKS := digest records operators simulated graphtext graphdiff threads chunking ranks passes tracing

# Tests start hundreds of processes: each would compile this package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test check gpu test-torch test-oldest-pytest test-transformers check-long chunk-matrix matrix parallel bench simulate soak mutants reach fuzz faults pictures report-check docs dist check-install lint env clean

run: env          ## the main job: trace, rewrite, pin and prove a training step on 8 ranks
	$(PYTEST) --gt-gpus=8 -m "not long" tests/parity

test: env lint    ## the fast tier, which a developer waits for
	$(PYTEST) --gt-gpus=8 -m "not long and not second_tier" -n $(WORKERS) --dist loadfile

check: env        ## the rest, long checks in short form
	$(PYTEST) --gt-gpus=8 -m "not long and second_tier" -n $(WORKERS) --dist loadfile

# For CI on CPU only: torch without CUDA's libraries (.ci/light_torch.py). It is kept in build/, 1.4 GB a version, and
# so are the environments. Not part of .ci/run: 15 minutes of CPU where 5 are allowed. Run it before a change that meets
# torch is called done.
TORCH ?= 2.15.0
TAG = $(shell $(PYTHON) -c "import sys; print(sys.implementation.cache_tag)")
LIGHT = build/test-torch-$(TORCH)-$(TAG)
# Each break that another torch brought was found in one of these.
MEETS_TORCH := $(addprefix tests/,tracing references parity models passes compiling graphtext \
	worlds/simulated worlds/test_ranks_gloo.py golden)

test-torch:       ## what meets torch, under TORCH=2.15.0 and PYTHON=python3.12; needs gcc and binutils
	$(PYTHON) .ci/light_torch.py $(TORCH) $(LIGHT)
	grep -v '^torch==' constraints.txt > $(LIGHT)/constraints.txt
	$(LIGHT)/bin/python -m pip install --quiet --disable-pip-version-check -c $(LIGHT)/constraints.txt -e '.[test]'
	$(LIGHT)/bin/python -m pytest --gt-gpus=8 -m "not long" -n $(WORKERS) --dist loadfile $(MEETS_TORCH)

# The oldest pytest that pyproject.toml allows, beside the torch of constraints.txt.
OLDEST = build/test-oldest-pytest-$(TAG)
MEETS_PYTEST := tests/test_*.py $(addprefix tests/,testing integration golden report) $(wildcard tests/worlds/test_*.py)

test-oldest-pytest: ## what meets pytest, under pytest 9.0.1
	$(PYTHON) .ci/light_torch.py $(shell sed -n 's/^torch==//p' constraints.txt) $(OLDEST)
	grep -v -e '^torch==' -e '^pytest==' constraints.txt > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check -c $(OLDEST)/constraints.txt \
		-e '.[test]' pytest==9.0.1
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check -c $(OLDEST)/constraints.txt --no-deps --upgrade \
		--target $(OLDEST)/beside pytest-timeout pytest-randomly
	$(OLDEST)/bin/python -m pytest --gt-gpus=8 -m "not long" -n $(WORKERS) --dist loadfile $(MEETS_PYTEST)

test-transformers: env ## ordinary models of the transformers package, which this installs
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[transformers]'
	$(PYTEST) --gt-gpus=8 -rs tests/integration/test_*_of_transformers.py
	$(PYTEST) --gt-gpus=8 -rs tests/compiling/test_matrix.py -k "gpt2 or qwen3"

gpu: $(if $(filter .venv/bin/python,$(PY)),env) ## what one GPU can judge, with a table of what held; PY=python3 takes an environment that has torch
	$(PYTEST) --gt-gpus=1 --gt-device=cuda --gt-require=cuda tests/gpu

check-long: env   ## the long forms too
	$(PYTEST) --gt-gpus=8

chunk-matrix: env ## every chunked block with every number of chunks and dtype, against eager chunking
	$(PYTEST) -m long tests/passes/chunking/test_equals_eager_chunking.py

parallel: env     ## FSDP, expert and tensor parallelism on 8 ranks: equal to eager, and each of three mistakes differs
	$(PYTEST) --gt-gpus=8 -rP tests/parity/test_three_mistakes.py

# A run that was cut goes on where it was, as long as the commit is the same.
RESUME = build/matrix-$(shell git rev-parse --short HEAD).jsonl

matrix: env       ## every combination of parallelism, and pipelines, on 4 and 8 ranks and 16 or 64 simulated ones, with a table; FROM="-k ..." takes some
	$(PYTEST) --gt-gpus=8 --gt-timeout=1200 -v -p tests.parity.resume --resume=$(RESUME) -m "long or not long" $(FROM) tests/parity/test_parallelism_matrix.py tests/parity/test_pipeline_matrix.py

bench: env        ## speed against yardsticks measured in the same run; fails if a goal is missed, at the end
	missed=0; for name in $(BENCHMARKS); do $(PY) -m benchmarks.$$name || missed=1; done; exit $$missed

simulate: env     ## 64, 128 and 256 simulated ranks, 25 steps: digests of the weights, graph and eager
	$(PY) -m benchmarks.simulate

pictures: env     ## the pictures of the documentation, drawn again from real runs; the page's needs Debian's chromium
	$(PY) docs/pictures.py

report-check: env ## the page of --gt-report in headless Chromium, with screenshots; needs Debian's chromium
	command -v chromium >/dev/null || apt-get install -y --no-install-recommends chromium fonts-dejavu-core
	$(PYTEST) -rP tests/report/browser_check.py

# mutmut brings twenty packages, which stand beside the environment: only this command needs them.
mutants: env      ## mutation testing: SAMPLE=200 mutants of PACKAGES="passes numerics", drawn by SEED=0; what survives is shown
	$(PY) -m pip install --quiet --disable-pip-version-check --upgrade --target build/mutants-tool "mutmut>=3.8,<4"
	$(PY) .ci/mutants.py $(PACKAGES) --sample $(or $(SAMPLE),200) --seed $(or $(SEED),0)

# The report is made though tests fail, as those of interrupts and of stacks may, which see the tracer. Ranks that are
# killed tell nothing, and so do the few that start by exec: read the report for what runs in the tests' own process.
reach: env        ## lines and branches that no test of the fast tier reaches
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt coverage
	mkdir -p build/reach && rm -f build/reach/*
	-COVERAGE_FILE=$(CURDIR)/build/reach/data $(PY) -m coverage run -m pytest -q$(if $(GT_DEVICE), --gt-device=$(GT_DEVICE)) --gt-gpus=8 -m "not long and not second_tier" -n $(WORKERS) --dist loadfile
	cd build/reach && COVERAGE_FILE=data ../../$(PY) -m coverage combine --quiet --rcfile=$(CURDIR)/pyproject.toml
	COVERAGE_FILE=build/reach/data $(PY) -m coverage report --skip-covered --show-missing

soak: env         ## 1,000 tests on ranks in one run, one in ten with a fault; and 1,000 that are slow and pass
	$(PYTEST) -s tests/worlds/test_soak.py -m long

faults: env       ## what befalls ranks, and in how many seconds it is told, at 4 and at 8 ranks: a table
	$(PYTEST) -s -m long tests/worlds/test_table_of_faults.py

fuzz: env         ## damaged graph texts and records for SECONDS=1800 of CPU time each; examples are drawn from SEED=0 on
	GT_FUZZ_SECONDS=$(or $(SECONDS),1800) GT_FUZZ_SEED=$(or $(SEED),0) $(PYTEST) -s -m long tests/test_fuzz.py

docs:             ## the site, in build/site; a warning fails, and so does a page that loads from the network. It needs no torch
	# python3 -m http.server -d build/site: its search needs a server, the pages do not
	test -x build/docs/bin/python || $(PYTHON) -m venv build/docs
	build/docs/bin/python -m pip install --quiet --disable-pip-version-check \
		"mkdocs>=1.6,<2" "mkdocstrings[python]>=0.30,<2" "pytest>=9,<10"
	PYTHONPATH=. build/docs/bin/python -m mkdocs build --strict

dist:             ## the wheel and the source archive, in dist/, as an index would take them
	test -x build/dist/bin/python || $(PYTHON) -m venv build/dist
	build/dist/bin/python -m pip install --quiet --disable-pip-version-check "build>=1.2" "twine>=6.1"
	rm -rf dist
	build/dist/bin/python -m build --quiet
	build/dist/bin/python -m twine check --strict dist/*

check-install: env ## the documentation, followed in clean environments of Python 3.11 to 3.13 that hold the wheel alone
	$(PYTEST) -rs tests/integration/test_clean_install.py

lint: env
	$(PY) -m ruff check .
	$(PY) -m mypy

env: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	# plugins that one test runs beside ours, and that would shuffle and time out every other one; a reader of logs
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps --upgrade \
		--target .venv/beside pytest-timeout pytest-randomly tlparse
	touch $@

clean:
	rm -rf .venv build dist *.egg-info
