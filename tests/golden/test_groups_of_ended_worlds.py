"""A table of process groups that outlives its world, as torchtitan's registry of extra
groups does.
"""

import sys

import pytest
import torch
import torch.distributed as dist
from torch import fx

from pytest_gtrainer import graphtext
from pytest_gtrainer.graphtext.operators import HiddenGroup
from pytest_gtrainer.worlds.fake import fake_world
from pytest_gtrainer.worlds.spec import make_spec
from tests.graphtext.toy import small_graph

REGISTRY: dict[str, dist.ProcessGroup] = {}
"""The extra group of each group, made once."""
NAMES: dict[str, str] = {}
"""The same by name."""
LISTED: list[dist.ProcessGroup | str] = ["kept"]
COLLECTED: set[dist.ProcessGroup | str] = {"kept"}


def extra_of(name: str) -> str:
    """Make a group on first use and remember it, like torchtitan."""
    if name not in REGISTRY:
        REGISTRY[name] = dist.new_group(list(range(dist.get_world_size())))
    return NAMES.setdefault(name, REGISTRY[name].group_name)


def reducing_in(group: str) -> fx.GraphModule:
    gm = small_graph(lambda x: x.relu(), torch.zeros(4))
    (relu,) = [node for node in gm.graph.nodes if node.op == "call_function"]
    relu.target, relu.args = (
        torch.ops._c10d_functional.all_reduce.default,
        (relu.args[0], "sum", group),
    )
    return gm


def test_a_golden_refuses_a_group_that_does_not_exist_here(gt_golden):
    """F5: its text would say group(None), and so would that of any other group that is gone."""
    with fake_world(make_spec("fake", size=4)):
        for _ in range(3):
            dist.new_group([0, 1])  # so that the next world has none of that name
        gm = reducing_in(extra_of("0"))
        assert "group(range(0, 4))" in graphtext.render(gm)
    with fake_world(make_spec("fake", size=4)):
        stale = reducing_in(NAMES["0"])
        assert "group(None)" in graphtext.render(stale)
        for view in ("full", "schedule"):
            with pytest.raises(
                HiddenGroup, match=r"all_reduce.* process group '.*outlived the world"
            ):
                gt_golden.check(stale, view, view=view)
    NAMES.clear()


def test_the_end_of_a_world_empties_tables_of_groups():
    """F4."""
    with fake_world(make_spec("fake", size=4)):
        extra_of("0")
        assert REGISTRY
        LISTED.append(REGISTRY["0"])
        COLLECTED.update(REGISTRY.values())
    assert not REGISTRY
    assert LISTED == [*COLLECTED] == ["kept"]
    NAMES.clear()


def test_what_the_end_of_a_world_cannot_empty_is_named(monkeypatch):
    module = sys.modules[__name__]
    warning = pytest.warns(
        UserWarning,
        match=r"test_groups_of_ended_worlds\.KEPT still holds a process group of a world",
    )
    with warning, fake_world(make_spec("fake", size=2)):
        monkeypatch.setattr(module, "KEPT", (dist.new_group([0, 1]),), raising=False)
