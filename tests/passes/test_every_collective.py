"""Every collective that torch registers, in a small graph: each reader shows it, or refuses it by
name.
"""

from typing import Any

import pytest
import torch
import torch.distributed._symmetric_memory
from torch import fx

from pytest_gtrainer import bucket_layout, timeline
from pytest_gtrainer._torch.graph_text import operator_names, operator_overload
from pytest_gtrainer._torch.passes import WAIT
from pytest_gtrainer._torch.values import schema
from pytest_gtrainer.graph.collectives import _STANDS_BESIDE, kind_of, launches
from pytest_gtrainer.graph.nodes import COMMUNICATING
from pytest_gtrainer.graph.same_on_ranks import collective_lines
from pytest_gtrainer.graphtext import parse, render
from pytest_gtrainer.graphtext.operators import refuse_hidden_groups

pytestmark = pytest.mark.gt_world("fake", size=2, mesh={"fsdp": 2})


def operators() -> list[Any]:
    names = [name for name in operator_names() if name.partition("::")[0] in COMMUNICATING]
    parts = [
        (name.partition("::")[0], *name.partition("::")[2].partition(".")[::2])
        for name in sorted(names)
    ]
    return [
        found
        for space, name, overload in parts
        if (found := operator_overload(space, name, overload))
    ]


def graph_of(operator: Any, group: str) -> tuple[fx.GraphModule, fx.Node]:
    """One parameter, the operator on it, its result returned as the parameter's gradient; arguments
    by their types.
    """
    graph, value = fx.Graph(), torch.empty(8, device="meta")
    parameter = graph.placeholder("parameter")
    parameter.meta.update(val=value, gt_input={"kind": "parameter", "fqn": "layers.0.w"})
    others = {"str": "sum", "int": 0, "bool": False, "SymInt": 2, "number": 0}
    args, kwargs = [], {}
    for argument in schema(operator).arguments:
        kind, made = str(argument.type), None
        if argument.name == "group_name":
            made = group
        elif argument.name in ("group_size", "ranks"):
            made = [0, 1] if argument.name == "ranks" else 2
        elif argument.name.startswith("out") and "Tensor" in kind:
            made = graph.call_function(torch.ops.aten.empty.memory_format, ([8],))
            made.meta["val"] = value
            made = [[made]] if "List[List" in kind else [made] if "List" in kind else made
        elif "Tensor" in kind:
            made = (
                [[parameter]]
                if "List[List" in kind
                else [parameter]
                if "List" in kind
                else parameter
            )
        elif "List" in kind:
            made = []
        else:
            made = next((given for name, given in others.items() if kind.startswith(name)), None)
        (kwargs if argument.kwarg_only else {}).setdefault(argument.name, made)
        args += [] if argument.kwarg_only else [made]
    node = graph.call_function(operator, tuple(args), kwargs)
    node.meta["val"] = (
        value if "List" not in str([r.type for r in schema(operator).returns]) else [value]
    )
    node.meta["autograd_backward"] = True
    result = node
    if isinstance(node.meta["val"], list):
        result = graph.call_function(torch.ops.aten.alias.default, (node,))
        result = graph.call_function(__import__("operator").getitem, (node, 0))
        result.meta["val"] = value
    if schema(operator).name.startswith("_c10d_functional::"):
        result = graph.call_function(WAIT, (result,))
        result.meta["val"] = value
    output = graph.output((result,))
    output.meta["gt_outputs"] = ("layers.0.w",)
    return fx.GraphModule(torch.nn.Module(), graph), node


READERS = {
    "layout": lambda gm: str(bucket_layout(gm)),
    "schedule": lambda gm: render(gm, "schedule"),
    "timeline": lambda gm: " ".join(f"{span.kind} {span.label}" for span in timeline(gm).spans),
    "sequence": lambda gm: " ".join(line.text for line in collective_lines(gm)),
    "golden": lambda gm: refuse_hidden_groups(gm) or render(gm),
}


def outcome_of(reader: str, gm: fx.GraphModule, node: fx.Node) -> str:
    """``shown``, ``refused`` where the message names the node, else what came."""
    name = schema(node.target).name.partition("::")[2]
    try:
        text = READERS[reader](gm)
    except ValueError as error:
        return (
            "refused"
            if node.name in str(error) or name in str(error)
            else f"an error without its name: {error}"
        )
    if reader == "layout":
        return "shown" if "layers.0.w" in text else "silent"
    if reader == "schedule":
        return (
            "shown"
            if f"launch(_.{node.name}" in text or f"{name}," in text.partition("launch(")[2]
            else "silent"
        )
    return "shown" if name in text and (reader != "timeline" or "collective" in text) else "silent"


def test_every_reader_tells_each_collective_or_refuses_it_by_name(gt_mesh):
    """D19: layouts, schedules, timelines, sequences of ranks, goldens."""
    group = gt_mesh.get_group().group_name
    table = {}
    for operator in operators():
        gm, node = graph_of(operator, group)
        if launches(operator):
            table[str(operator)] = {reader: outcome_of(reader, gm, node) for reader in READERS} | {
                "kind": kind_of(node)
            }
    assert len(table) > 60
    lost = {
        name: row
        for name, row in table.items()
        if {*row.values()} - {"shown", "refused", row["kind"]}
    }
    assert not lost, "\n".join(f"{name}: {row}" for name, row in lost.items())
    functional = {name: row for name, row in table.items() if name.startswith("_c10d_functional.")}
    moved = [
        row["layout"]
        for row in functional.values()
        if row["kind"] in ("all_gather", "reduce_scatter")
    ]
    assert set(moved) == {"shown"}
    fused = {name: row["layout"] for name, row in table.items() if ".fused_" in name}
    assert {*fused.values()} == {"refused"}, f"what it is multiplied by was not moved: {fused}"


def test_what_stands_beside_collectives_is_listed_by_name():
    """A name that torch no longer has, or never had, would hide nothing and look as if it did."""
    names = {name.partition("::")[2].partition(".")[0] for name in operator_names()}
    assert _STANDS_BESIDE - names <= {"wait_tensors"}  # from torch 2.15 on


COALESCED = """
# gtrainer graph v2
fsdp = group(range(0, 2))
if P:
  P.a: f32[4]
  P.b: f32[2]
if fwd:
  with _:
    half: bf16[2] = aten._to_copy(P.b, dtype=bf16)
    whole: [f32[8], bf16[4]] = _c10d_functional.all_gather_into_tensor_coalesced([P.a, half], 2, fsdp)
    b: bf16[4] = _c10d_functional.wait_tensor(whole[1])
    a: f32[8] = _c10d_functional.wait_tensor(whole[0])
if bwd:
  with _:
    part: [f32[4], bf16[2]] = _c10d_functional.reduce_scatter_tensor_coalesced([fwd._.a, fwd._.b], "avg", 2, fsdp)
    b: bf16[2] = _c10d_functional.wait_tensor(part[1])
    a: f32[4] = _c10d_functional.wait_tensor(part[0])
if out:
  a = bwd._.a
  b = bwd._.b
"""


def test_a_coalesced_collective_has_a_payload_of_each_member():
    """In the collective's order, whichever is read first, and each in its own dtype."""
    members = [("a", torch.float32, 16), ("b", torch.bfloat16, 4)]
    found = [
        (payload.collective, payload.parameters, payload.dtype, payload.slots[0].nbytes)
        for payload in bucket_layout(parse(COALESCED.lstrip())).payloads
    ]
    assert found == [
        (kind, (name,), dtype, nbytes)
        for kind in ("all_gather", "reduce_scatter")
        for name, dtype, nbytes in members
    ]
