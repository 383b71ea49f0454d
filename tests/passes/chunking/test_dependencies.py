"""Dependencies of nodes beside their operands: writes to memory, and random numbers."""

from pytest_gtrainer import graphtext
from pytest_gtrainer.passes.chunking.regions import Region, RegionKey, Storages
from pytest_gtrainer.passes.chunking.schedule import dependencies, units_in_order

TEXT = """
if B:
  B.seen: f32[2]
  B.other: f32[2]
if I:
  I.x: f32[2]
if fwd:
  before: f32[2] = aten.mul.Tensor(B.seen, 2)
  view: f32[2] = aten.view(B.seen, [2])
  elsewhere: f32[2] = aten.mul.Tensor(B.other, 2)
  write: f32[2] = aten.add_.Tensor(view, I.x)
  after: f32[2] = aten.neg(B.seen)
  through: f32[2] = aten.exp(write)
  again: f32[2] = aten.mul_.Tensor(B.seen, 0)
  last: f32[2] = aten.sin(view)
  noise: f32[2] = aten.rand_like(I.x)
  more: f32[2] = aten.rand_like(noise)
  most: f32[2] = aten.rand_like(I.x)
if out:
  yield last
"""


def behind(*region):
    """Per unit of the graph the units that it must stand behind, by name; the nodes of ``region``
    are one.
    """
    gm = graphtext.parse(TEXT)
    nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
    body = [node for node in nodes if node.name in region]
    one = Region(RegionKey("layers.0", "fwd"), body)
    found = dependencies(list(gm.graph.nodes), dict.fromkeys(body, one), Storages(gm.graph))
    named = {unit: "the region" if unit is one else unit.name for unit in found}
    inputs = {node for node in gm.graph.nodes if node.op == "placeholder"}
    return {
        name: {named[s] for s in found[unit] if s not in inputs} for unit, name in named.items()
    }


def test_writes_and_random_numbers_keep_their_order():
    """G15: a write stands behind what has read that memory, through a view, too; a read behind the
    last write.
    """
    found = behind()
    assert found["write"] == {"view", "before"}, (
        "a write stands behind each reader of its memory, through a view, too"
    )
    assert found["after"] == found["through"] == {"write"}
    assert found["again"] == {"write", "after", "through"}, (
        "a second write, behind readers of what the first returned"
    )
    assert found["last"] == {"view", "again"}
    assert found["elsewhere"] == found["noise"] == set()
    assert (found["more"], found["most"]) == ({"noise"}, {"more"})


def test_a_region_stands_behind_what_any_of_its_nodes_does_and_not_behind_itself():
    found = behind("after", "noise", "more")
    assert found["the region"] == {"write"}
    assert found["again"] == {"write", "the region", "through"}
    assert found["most"] == {"the region"}


def test_units_come_in_order_each_once_and_as_early_as_the_graph_has_them():
    """G17: two regions whose parts stand in turns in the graph become two blocks."""
    gm = graphtext.parse(TEXT)
    nodes = list(gm.graph.nodes)
    bodies = [
        [node for node in nodes if node.name in names]
        for names in (("before", "more"), ("elsewhere", "noise"))
    ]
    first, second = (Region(RegionKey(f"layers.{i}", "fwd"), body) for i, body in enumerate(bodies))
    region_of = {node: region for region in (first, second) for node in region.body}
    units = units_in_order(nodes, region_of, Storages(gm.graph))
    found = {first: "first", second: "second"}
    calls = [
        found.get(unit) or unit.name
        for unit in units
        if unit in found or unit.op == "call_function"
    ]
    assert calls == [
        "view",
        "second",
        "first",
        "write",
        "after",
        "through",
        "again",
        "last",
        "most",
    ]
