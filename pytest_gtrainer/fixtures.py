"""The fixtures, on one screen. Each imports what it needs when it is used."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest

from pytest_gtrainer import devices, extensions, facts
from pytest_gtrainer.marker import SHARED, spec_of
from pytest_gtrainer.worlds import KINDS

# pytest looks at each name of this module, and at names of types the longest.
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path
    from typing import Any

    from pytest_gtrainer.compiling.record import CompileRecord
    from pytest_gtrainer.golden.check import Golden
    from pytest_gtrainer.hookspecs import EnterWorld
    from pytest_gtrainer.ranks.caller import RankCaller
    from pytest_gtrainer.worlds.spec import World, WorldSpec


@contextmanager
def _world_of(spec: WorldSpec | None, request: pytest.FixtureRequest) -> Iterator[World]:
    if spec is None:
        pytest.fail(
            f"{request.fixturename} needs the marker that says which world, for example "
            '@pytest.mark.gt_world("ranks", size=8), or pytestmark of a module',
            pytrace=False,
        )

    enter: EnterWorld
    if spec.kind == "fake":
        from pytest_gtrainer.worlds.fake import fake_world as enter
    elif spec.kind == "simulated":
        from pytest_gtrainer.worlds.fake import simulated_world as enter
    elif spec.kind == "ranks":
        from pytest_gtrainer.ranks.plugin import ranks_world

        enter = partial(ranks_world, config=request.config)
    else:
        enter = extensions.worlds(request.config, KINDS)[spec.kind]

    with enter(spec) as world:
        yield world


@pytest.fixture
def gt_world(request: pytest.FixtureRequest) -> Iterator[World]:
    """The process groups that the test's ``gt_world`` marker asks for."""
    spec = spec_of(request.node)
    live = request.config.stash.get(SHARED, [])
    shared = [world for other, world in live if other == spec]
    if live and not shared and spec is not None and spec.kind != "ranks":
        other = live[-1][1]
        pytest.fail(
            f"{request.node.name} is marked {spec.kind}({spec.size}), while the world of its "
            f"module or class, {other.kind}({other.size}), is set up for wider fixtures: leave out "
            "the test's own marker, or move it out of there",
            pytrace=False,
        )
    with nullcontext(shared[0]) if shared else _world_of(spec, request) as world:
        facts.emit(
            "world", world=world.kind, size=world.size, device=world.device, backend=world.backend
        )
        if "gt_net" in request.fixturenames:
            world = replace(world, net=request.getfixturevalue("gt_net"))
        yield world


def _mesh_of(world: World) -> Any:
    from pytest_gtrainer.worlds.fake import make_mesh

    return make_mesh(world)


@pytest.fixture
def gt_mesh(gt_world: World, request: pytest.FixtureRequest) -> Any:
    """The DeviceMesh of the test's world, with the marker's dimension names."""
    return _mesh_of(gt_world)


def _shared_world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Set up the world of a module or class that is marked as a whole, for its wider fixtures."""
    spec = spec_of(request.node)
    with _world_of(spec, request) as world:
        # In a rank: the number of ranks that run the test.
        size = getattr(request.config, "workerinput", {}).get("gt_size", world.size)
        if size != world.size:
            pytest.fail(
                f"{request.fixturename}: {request.node.name} is marked "
                f"{world.kind}({world.size}), a test that shares it {world.kind}({size}): "
                "leave out the test's own marker, or use gt_world and gt_mesh there",
                pytrace=False,
            )
        shared = request.config.stash.setdefault(SHARED, [])
        shared.append((spec, world))
        yield world
        shared.pop()


gt_module_world = pytest.fixture(scope="module", name="gt_module_world")(_shared_world)
gt_class_world = pytest.fixture(scope="class", name="gt_class_world")(_shared_world)


@pytest.fixture(scope="module")
def gt_module_mesh(gt_module_world: World) -> Any:
    """The DeviceMesh of ``gt_module_world``."""
    return _mesh_of(gt_module_world)


@pytest.fixture(scope="class")
def gt_class_mesh(gt_class_world: World) -> Any:
    """The DeviceMesh of ``gt_class_world``."""
    return _mesh_of(gt_class_world)


@pytest.fixture
def gt_golden(request: pytest.FixtureRequest) -> Iterator[Golden]:
    """``gt_golden.check(value)``: compare with the golden file of this test."""
    from pytest_gtrainer.golden.check import Golden

    golden = Golden(request.node)
    yield golden
    golden.note_use()


@pytest.fixture
def gt_artifacts(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """This test's folder below ``--gt-artifacts DIR``, on each rank its own.

    It is ``tmp_path`` without the option, and, with a warning, if DIR cannot be written.
    """
    from pytest_gtrainer.golden import artifacts

    return artifacts.folder_of(request.node) or tmp_path


@pytest.fixture
def gt_ranks(request: pytest.FixtureRequest) -> RankCaller:
    """``gt_ranks.run(fn, *args)``: run a function on real ranks; the test itself stays here."""
    from pytest_gtrainer.ranks.caller import RankCaller

    return RankCaller(request)


@pytest.fixture
def gt_cuda_as_cpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let the CPU stand for CUDA during the test: its device arguments, seeds and questions."""
    from pytest_gtrainer._torch.cuda_as_cpu import cuda_as_cpu

    with cuda_as_cpu(devices.resolve(request.config).slots):
        yield


@pytest.fixture
def gt_fake_tensors(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Make every new tensor of the test a fake one, of any device; yields the mode."""
    from pytest_gtrainer._torch.fake_tensors import fake_tensors

    # Before the mode: torch reads the numbers of a mesh. Those of wider scope are there already.
    if "gt_mesh" in request.fixturenames:
        request.getfixturevalue("gt_mesh")
    with fake_tensors() as mode:
        yield mode


@pytest.fixture
def gt_dense_flex_attention() -> Iterator[None]:
    """Compute FlexAttention by its dense formula on the CPU in the test, forward and backward."""
    from pytest_gtrainer.numerics.flex_attention import dense_flex_attention

    with dense_flex_attention():
        yield


@pytest.fixture
def gt_deterministic(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Switch determinism on and set seeds for the test, here and on ranks; restore all afterwards.

    Another configuration than the default comes by
    ``@pytest.mark.parametrize("gt_deterministic", [DebugConfig(seed=5)], indirect=True)``.
    """
    from pytest_gtrainer.numerics.determinism import deterministic

    with deterministic(getattr(request, "param", None)) as settings:
        yield settings


@pytest.fixture
def gt_compile() -> Callable[..., AbstractContextManager[CompileRecord]]:
    """``with gt_compile() as record:`` records what torch.compile does inside the block."""
    from pytest_gtrainer.compiling.recorder import gt_compile

    return gt_compile
