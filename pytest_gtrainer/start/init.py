"""The command ``init``: write a first test, a golden folder and a CI job, after asking.

A file that exists is kept as it is. The model runs once before anything is written, so that the
test has inputs with which it can run. With ``--parallel`` the test compares the parallel model with
it.
"""

import argparse
import json
import math
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pytest_gtrainer.graph.collectives import PlanError
from pytest_gtrainer.graph.suggest import suggest_plan
from pytest_gtrainer.references.config import bucket_modules
from pytest_gtrainer.start.model import UsageError, build_model, check_takes_mesh
from pytest_gtrainer.start.plan import spell

_TEST = '''"""The graph of a training step is a file to review, and ranks train like eager FSDP2."""

import pytest
import torch
{imports}

from pytest_gtrainer import (
    TrainConfig,
    apply_graph_passes,
    assert_parity,
    construct_default_graph_passes,
    data_parallel,
    trace_step,
)

# The modules of an entry travel in one collective, and eager FSDP2 wraps the same.
{plan}


def model():
    torch.manual_seed(0)
    return {factory}


def step(model, *inputs):
    output = model(*inputs)
    return getattr(output, "logits", output).float().square().mean()  # put your loss here


def batch(step, rank):
    torch.manual_seed(1 + 100 * step + rank)
    return ({inputs},)


@pytest.mark.gt_world("fake", size=4)
def test_the_graph(gt_mesh, gt_golden):
    traced = trace_step(data_parallel(model(), gt_mesh), step, batch(0, 0))
    passes = construct_default_graph_passes(bucket_plan=bucket_plan)
    gt_golden.check(apply_graph_passes(traced.gm, traced.example_inputs, passes))


@pytest.mark.gt_world("ranks", size=3)
def test_ranks_train_like_eager_fsdp2(gt_mesh, gt_world):
    config = TrainConfig(
        model=model, step=step, batch=batch, bucket_plan=bucket_plan, mesh=gt_mesh, steps=1
    )
    # "report": also where gloo hides the order of a bucket; then "refuse", and odd sizes.
    assert_parity(config, gt_world, invisible="report")
'''
_PARALLEL_TEST = '''"""Each rank of the parallel model computes what the unsharded one does."""

import pytest
import torch
{imports}

from pytest_gtrainer import assert_same_model


def reference():
    return {factory}


def step(model, *inputs):
    output = model(*inputs)
    return getattr(output, "logits", output).float().square().mean()  # put your loss here


def batch(coordinate):
    """Return other inputs for each coordinate of data parallelism."""
    return ({inputs},)


# All ranks run in this process; the dimensions of the mesh are those that {parallel} uses.
@pytest.mark.gt_world("simulated", size={size}, mesh={mesh})
def test_the_parallel_model_is_the_unsharded_one(gt_mesh):
    assert_same_model({call}, reference, step, batch, mesh=gt_mesh{data_dims})
'''
_JOB = Path(".github/workflows/gtrainer.yml")
# Ranks along these have one batch. Of another dimension that is not sure, and a test with
# data_dims= that are too many fails, where one with too few may not see that gradients are not
# reduced.
_WITH_ONE_BATCH = ("tp", "cp", "pp", "sp", "tensor", "context", "pipeline", "sequence")
_README = """Expected results of tests, as text. Read a file before you commit it.
Later runs compare with it.

    {update}

writes what is missing or differs. CI never writes. A test that fails says in words what changed.
"""
_WORKFLOW = """name: gtrainer
on: [push, pull_request]
env:
  # where pytest-gtrainer is, as long as the index has none: git+https://..., or the path of a wheel
  GTRAINER: ${{{{ vars.GTRAINER }}}}
jobs:
  gtrainer:
    runs-on: ubuntu-latest
    timeout-minutes: 20
    steps:
      - uses: actions/checkout@v5
      - uses: actions/setup-python@v6
        with:
          python-version: "3.11"
      - run: pip install torch --index-url https://download.pytorch.org/whl/cpu
      - run: pip install "$GTRAINER"{project}
      # a test that lacks its ranks fails, and so does a golden that no test checks
      - run: python -m pytest {test} --gt-require=ranks --gt-unused-goldens=fail
"""


def run(given: argparse.Namespace) -> int:
    """Ask, write what is missing, and say what comes next; return the exit status."""
    try:
        if given.parallel is not None:
            files = _files_of_parallel(given)
        else:
            if given.mesh is not None:
                raise UsageError("--mesh is that of a parallel model: give --parallel, too")
            files = _files(given.model, given.inputs)
    except (UsageError, PlanError) as error:
        print(f"init: {error}", file=sys.stderr)
        return 2
    missing = {}
    for path, text in files.items():
        if path.exists() or path.is_symlink():
            print(f"keeps   {path}, which exists")
        else:
            missing[path] = text
    for path in missing:
        print(f"writes  {path}")
    if not missing:
        print("nothing to write")
    elif not given.yes and not _agrees():
        print("init: nothing was written; --yes writes without asking", file=sys.stderr)
        return 1
    elif not _write(missing):
        return 2
    test = next(iter(files))
    if _JOB.is_file() and test.name not in _JOB.read_text(encoding="utf-8", errors="replace"):
        print(f"\n{_JOB} does not name {test}: add it, unless its folder runs")
    if given.parallel is not None:
        print(f"\nnext:   python -m pytest {test}")
        print("        then put your loss into its step")
        return 0
    print(f"\nnext:   python -m pytest {test} --gt-update-goldens")
    print("        then read golden/, commit it, and run it again without the option")
    return 0


def _agrees() -> bool:
    try:
        return input("\nWrite? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:  # nobody is there to answer
        print()
        return False


def _write(files: dict[Path, str]) -> bool:
    """Write files that do not exist; return whether all were written."""
    for path, text in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8") as file:  # never over a file that came meanwhile
                file.write(text)
        except OSError as error:
            print(f"init: {path} was not written: {error}", file=sys.stderr)
            return False
        print(f"wrote   {path}")
    return True


def _files(name: str, given_inputs: str | None) -> dict[Path, str]:
    """Return each file with its text, the test first.

    Raises:
        UsageError: there is no such model, or no inputs with which it runs.
        PlanError: the model has no bucket plan.
    """
    model = build_model(name)
    suggested = suggest_plan(model)
    bucket_modules(model, suggested.plan)
    inputs = _inputs_of(model, given_inputs)
    # The test may use the name itself, as "model" or "TrainConfig".
    imports, factory = _import(name, "build", avoid=_TEST)
    test = _folder_of_tests() / "test_gtrainer.py"
    update = f"python -m pytest {test} --gt-update-goldens"
    return {
        test: _TEST.format(
            imports=imports, plan=spell(suggested), factory=f"{factory}()", inputs=inputs
        ),
        Path("golden/README.md"): _README.format(update=update),
        **_workflow(test),
    }


def _files_of_parallel(given: argparse.Namespace) -> dict[Path, str]:
    """Return each file of the test of a parallel model with its text, the test first.

    Raises:
        UsageError: there is no such model or function, no inputs with which the model runs, or the
            mesh has one rank.
    """
    mesh = _mesh(given.mesh or "dp=2,tp=2")
    check_takes_mesh(given.parallel)
    inputs = _inputs_of(build_model(given.model), given.inputs)
    # Aliases, as both names may be those that the test uses itself.
    own, factory = _import(given.model, "build", avoid=_PARALLEL_TEST)
    imports, parallel = _import(given.parallel, "build_parallel", avoid=f"{_PARALLEL_TEST} {own}")
    test = _folder_of_tests() / "test_gtrainer_parallel.py"
    data_dims = tuple(name for name in mesh if name not in _WITH_ONE_BATCH)
    text = _PARALLEL_TEST.format(
        imports=f"{own}\n{imports}",
        factory=f"{factory}()",
        inputs=inputs,
        parallel=given.parallel.partition(":")[2],
        size=math.prod(mesh.values()),
        mesh=json.dumps(mesh),
        call=parallel,
        data_dims="" if data_dims == ("dp",) else f", data_dims={data_dims}",
    )
    return {test: text, **_workflow(test)}


def _mesh(text: str) -> dict[str, int]:
    """Return the dimensions of a mesh, as of "dp=2,tp=2"."""
    mesh: dict[str, int] = {}
    for part in text.split(","):
        name, _, extent = part.strip().partition("=")
        if not name.isidentifier() or not extent.isdecimal() or int(extent) < 1 or name in mesh:
            raise UsageError(f"--mesh={text!r}: give dimensions and their sizes, as dp=2,tp=2")
        mesh[name] = int(extent)
    if math.prod(mesh.values()) < 2:
        raise UsageError(f"--mesh={text!r}: on one rank nothing is parallel, give 2 or more")
    return mesh


def _import(name: str, alias: str, *, avoid: str) -> tuple[str, str]:
    """Return how a test imports ``MODULE:FUNCTION``, and calls it.

    Args:
        alias: its name, if its own stands in the text ``avoid``.
    """
    module, _, attribute = name.partition(":")
    outer = attribute.partition(".")[0]
    if outer in re.findall(r"\w+", avoid):
        imports = f"from {module} import {outer} as {alias}"
        return imports, f"{alias}{attribute.removeprefix(outer)}"
    return f"from {module} import {outer}", attribute


def _folder_of_tests() -> Path:
    return Path("tests" if Path("tests").is_dir() else ".")


def _workflow(test: Path) -> dict[Path, str]:
    """Return the file of the CI job that runs a test."""
    project = ""
    if Path("pyproject.toml").exists() and _is_package(Path("pyproject.toml")):
        project = " -e ."
    elif Path("requirements.txt").exists():
        project = " -r requirements.txt"
    text = _WORKFLOW.format(project=project, test=test)
    return {_JOB: text}


def _is_package(path: Path) -> bool:
    """Return whether pip can install what a ``pyproject.toml`` describes."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return "project" in found or "build-system" in found


def _inputs_of(model: nn.Module, given: str | None) -> str:
    """Return inputs with which the model runs, as Python.

    Raises:
        UsageError: it does not run with those that are given, or that its first module suggests.
    """
    if given is not None:
        failure = _fails(model, given)
        if failure:
            raise UsageError(f"the model does not run with --inputs={given!r}: {failure}")
        return given
    for guess in _guesses(model):
        if not _fails(model, guess):
            return guess
    raise UsageError(
        "nobody knows what this model takes: give its inputs as Python, "
        "--inputs 'torch.randint(0, 100, (2, 16))'"
    )


def _guesses(model: nn.Module) -> Iterator[str]:
    """Yield inputs that the modules of a model suggest, those of the first ones first."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            yield f"torch.randint(0, {module.num_embeddings}, (2, 8))"
        elif isinstance(module, nn.Linear):
            yield f"torch.randn(2, {module.in_features})"
            yield f"torch.randn(2, 8, {module.in_features})"
        elif isinstance(module, nn.Conv2d):
            yield f"torch.randn(2, {module.in_channels}, 32, 32)"


def _fails(model: nn.Module, inputs: str) -> str:
    """Return why a model cannot run with inputs, or "" if it does and gives a tensor."""
    try:
        given: Any = eval(f"({inputs},)", {"torch": torch})
        with torch.no_grad():
            output = model(*given)
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
    output = getattr(output, "logits", output)
    if not isinstance(output, torch.Tensor):
        return f"it returns a {type(output).__name__}; name a model that returns a tensor"
    return ""
