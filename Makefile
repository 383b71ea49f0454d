# Only Python (3.11 or later) and make are needed; everything else is installed into .venv.
PYTHON ?= python3
PY := .venv/bin/python
# GT_DEVICE=cpu: where there are GPUs, but fewer than eight, ranks have to be told to do without.
PYTEST := $(PY) -m pytest$(if $(GT_DEVICE), --gt-device=$(GT_DEVICE))
# A worker a core is enough: tests on ranks start processes of their own.
WORKERS ?= 2
BENCHMARKS := digest records operators simulated graphtext graphdiff threads chunking ranks passes tracing proofs recording unused

# Tests start hundreds of processes: each would compile this package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test check gpu test-torch test-oldest-pytest test-torchtitan test-transformers bench mutants docs dist lint env

run: env          ## the main job on one small model: goldens, bits on 8 ranks, a proof, two planted mistakes; a page
	mkdir -p build
	$(PYTEST) --gt-gpus=8 --gt-report=build/run.html examples/first

test: env lint    ## the fast tier, which a developer waits for
	$(PYTEST) --gt-gpus=8 -m "not long and not second_tier" -n $(WORKERS) --dist loadfile --durations=20 --durations-min=4

check: env        ## the rest, long checks in short form
	$(PYTEST) --gt-gpus=8 -m "not long and second_tier" -n $(WORKERS) --dist loadfile --durations=40 --durations-min=5

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

# A trainer that is not ours, its own tests included. In an environment of its own: 1.9 GB, torch counted.
TITAN = build/torchtitan-$(TAG)
MARK ?= not long

test-torchtitan:  ## torchtitan 0.3.0: its graph_trainer and the tests of it, on CPU; needs gcc and binutils. MARK=long runs the rest
	$(PYTHON) .ci/light_torch.py 2.15.0 $(TITAN)
	$(TITAN)/bin/python -m pip install --quiet --disable-pip-version-check -r examples/torchtitan/requirements.txt -e .
	# Ranks share two cores: a thread each is enough.
	cd examples/torchtitan && OMP_NUM_THREADS=1 ../../$(TITAN)/bin/python -m pytest --gt-gpus=8 --gt-cuda-as=cpu -rs \
		-n $(WORKERS) --dist loadfile -m "$(MARK)" tests

test-transformers: env ## ordinary models of the transformers package, which this installs
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[transformers]'
	$(PYTEST) --gt-gpus=8 --gt-cuda-as=cpu -rs tests/integration/test_*_of_transformers.py
	# without --gt-cuda-as: under its mode Dynamo calls torch._tensor.split, which no text of a graph may call
	$(PYTEST) --gt-gpus=8 -rs tests/compiling/test_matrix.py -k "gpt2 or qwen3"

gpu: $(if $(filter .venv/bin/python,$(PY)),env) ## what one GPU can judge, with a table of what held; PY=python3 takes an environment that has torch
	$(PYTEST) --gt-gpus=1 --gt-device=cuda --gt-require=cuda tests/gpu

bench: env        ## speed against yardsticks measured in the same run; fails if a goal is missed, at the end
	missed=0; for name in $(BENCHMARKS); do $(PY) -m benchmarks.$$name || missed=1; done; exit $$missed

# mutmut brings twenty packages, which stand beside the environment: only this command needs them.
mutants: env      ## mutation testing: SAMPLE=200 mutants of PACKAGES="passes numerics", drawn by SEED=0; what survives is shown
	$(PY) -m pip install --quiet --disable-pip-version-check --upgrade --target build/mutants-tool "mutmut>=3.8,<4"
	$(PY) .ci/mutants.py $(PACKAGES) --sample $(or $(SAMPLE),200) --seed $(or $(SEED),0)

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
