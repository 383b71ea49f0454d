"""Graph text shows what a tensor's shape does not: placements of a DTensor, and layouts without
strides.
"""

from typing import Any

import pytest
import torch
from torch import fx
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Replicate, Shard

from pytest_gtrainer.graphtext import constants, diff, lines_of, parse, render, unfold
from pytest_gtrainer.graphtext.literals import held_as
from pytest_gtrainer.worlds.fake import fake_world
from pytest_gtrainer.worlds.spec import make_spec


@pytest.fixture(autouse=True)
def _world():
    with fake_world(make_spec("fake", size=4)):
        yield


def placed(*placements: Any, shape: tuple[int, ...] = (4,), names: Any = None) -> DTensor:
    mesh = DeviceMesh("cpu", torch.arange(4).reshape(shape), mesh_dim_names=names)
    return DTensor.from_local(
        torch.ones(4, 4), mesh, placements, run_check=False, shape=(4, 4), stride=(4, 1)
    )


def graph_of(value: Any, of: str = "neg") -> fx.GraphModule:
    """A graph in which one node has this value, as Dynamo writes it."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    several = graph.call_function(torch.ops.aten.topk.default, (x, 1))
    neg = graph.call_function(torch.ops.aten.neg.default, (several,))
    graph.output((neg,))
    nodes = {"input": x, "topk": several, "neg": neg}
    for node in nodes.values():
        node.meta["val"] = torch.ones(2)
    nodes[of].meta["val"] = value
    return fx.GraphModule({}, graph)


def held(value: Any) -> fx.GraphModule:
    root = torch.nn.Module()
    root.constant = value
    graph = fx.Graph()
    graph.output((graph.get_attr("constant"),))
    return fx.GraphModule(root, graph)


VALUES = {
    "sharded by rows": lambda: placed(Shard(0)),
    "sharded by columns": lambda: placed(Shard(1)),
    "replicated": lambda: placed(Replicate()),
    "partial": lambda: placed(Partial()),
    "partial, of the mean": lambda: placed(Partial("avg")),
    "over two dimensions": lambda: placed(Shard(0), Replicate(), shape=(2, 2)),
    "in the other order": lambda: placed(Replicate(), Shard(0), shape=(2, 2)),
    "over named dimensions": lambda: placed(
        Shard(0), Replicate(), shape=(2, 2), names=("dp", "tp")
    ),
    "plain": lambda: torch.ones(4, 4),
    "sparse": lambda: torch.eye(4).to_sparse(),
    "sparse, of another shape": lambda: torch.eye(4, 5).to_sparse(),
    "sparse, of another dtype": lambda: torch.eye(4, dtype=torch.float64).to_sparse(),
    "sparse by rows": lambda: torch.eye(4).to_sparse_csr(),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("of", ["input", "topk", "neg", "second of two"])
def test_each_value_has_a_text_of_its_own(of):
    """A golden of one would accept the other: all placements had one text, and all sparse
    tensors.
    """
    texts = {}
    for name, make in VALUES.items():
        value = make()
        gm = (
            graph_of(value, of)
            if of != "second of two"
            else graph_of((torch.ones(2), value), "topk")
        )
        texts[name] = text = render(gm)
        assert render(parse(text)) == text
        assert unfold(text) == lines_of(gm)
    assert len(set(texts.values())) == len(texts)


def test_a_placement_is_told_in_words():
    text = render(graph_of(placed(Shard(1), Partial(), shape=(2, 2), names=("dp", "tp"))))
    held = "Shard(dim=1), Partial(sum) over dp=2, tp=2 of range(0, 4)"
    assert f"neg: f32[4, 4] | held_as('{held}') = aten.neg(topk)" in text
    assert "held_as" in diff(text, render(graph_of(placed(Shard(0)))))


@pytest.mark.parametrize(
    ("places", "words"),
    [("--", ""), ("+", "S"), ("+-", "S; "), ("-+", "; S"), ("-+-", "; S; "), ("++", "S; S")],
)
def test_of_several_values_each_has_its_place(places, words):
    plain, sparse = torch.ones(4, 4), torch.eye(4).to_sparse()
    values = tuple(sparse if place == "+" else plain for place in places)
    assert held_as(values) == words.replace("S", held_as(sparse))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("of", [VALUES, {"none": 0, "one": 1}], ids=["values", "small ones"])
def test_each_constant_has_a_text_of_its_own(of):
    if "none" in of:
        made = [torch.zeros(2, n).to_sparse() for n in (0, 1, 2)]
        made += [torch.zeros(n, 2).to_sparse() for n in (0, 1)] + [torch.zeros(2, 1)]
    else:
        made = [make() for make in of.values()]
    texts = []
    for value in made:
        gm = held(value)
        texts.append(render(gm))
        assert render(parse(texts[-1], constants=constants(gm))) == texts[-1]
    assert len(set(texts)) == len(texts)
