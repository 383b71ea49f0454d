"""Layouts of graphs that torch's own passes have bucketed: nobody is lost, and eager's layout
judges them by name.
"""

import copy
import re
from itertools import accumulate

import pytest
from torch import fx

from fixtures.training import deepseek_v3_training, llama3_training
from pytest_gtrainer import assert_same_layout, bucket_layout, eager_bucket_layout
from pytest_gtrainer.conformance.recipes import Recipe, graph_of
from pytest_gtrainer.graph.collectives import fsdp_all_gathers, fsdp_reduce_scatters
from pytest_gtrainer.graph.layout import LayoutDifference
from pytest_gtrainer.graphtext import lines_of
from pytest_gtrainer.passes.canonicalize import canonicalize_graph_pass
from pytest_gtrainer.references.config import new_model
from pytest_gtrainer.references.eager import shard_eagerly
from pytest_gtrainer.references.graph import shard_traceably, trace_config

pytestmark = pytest.mark.gt_world("fake", size=4, mesh={"fsdp": 4}, rank=1)
MODELS = {"llama3": llama3_training, "deepseek_v3": deepseek_v3_training}


TRACED: dict[tuple[str, str], fx.GraphModule] = {}
"""By model and group: each is traced once."""


def traced(mesh, model: str) -> fx.GraphModule:
    key = model, mesh.get_group().group_name
    if key not in TRACED:
        config = MODELS[model](mesh, "bf16_fp32")
        TRACED[key] = canonicalize_graph_pass(
            trace_config(config, shard_traceably(new_model(config), config)).gm
        )
    gm = copy.deepcopy(TRACED[key])
    for node in gm.graph.nodes:  # a copy of a graph shares what its nodes' metadata holds
        node.meta = {
            name: copy.copy(held) if isinstance(held, dict) else held
            for name, held in node.meta.items()
        }
    return gm


def bucketed(gm: fx.GraphModule, mode: str, megabytes: float = 0.05) -> dict[str, set]:
    """Bucket both kinds by torch's own functions; what each bucket must hold, by torch's own choice
    of members.
    """
    from torch._inductor.fx_passes import bucketing
    from torch._inductor.pattern_matcher import stable_topological_sort

    expected = {}
    for kind, members, choose, merge in (
        (
            "all_gather",
            fsdp_all_gathers,
            bucketing.bucket_all_gather_by_mb,
            bucketing.merge_all_gather,
        ),
        (
            "reduce_scatter",
            fsdp_reduce_scatters,
            bucketing.bucket_reduce_scatter_by_mb,
            bucketing.merge_reduce_scatter,
        ),
    ):
        mode_here = mode.replace("_multidtype", "") if kind == "reduce_scatter" else mode
        held = {member.launch: (member.parameter, sent(member)) for member in members(gm)}
        buckets = choose(gm, lambda index: megabytes, None, mode_here)
        alone = [[node] for node in held if not any(node in bucket for bucket in buckets)]
        if mode == "coalesced" and kind == "reduce_scatter":  # every member is sent as it is
            alone += [[node] for bucket in buckets for node in bucket]
        else:
            alone += buckets
            assert max(map(len, buckets)) > 1
        expected[kind] = {slots([held[node] for node in bucket]) for bucket in alone}
        merge(gm, buckets, mode_here)
        stable_topological_sort(gm.graph)
    gm.graph.lint()
    return expected


def sent(member) -> int:
    """Bytes of one rank's slice of an unbucketed collective."""
    value = member.value
    return value.numel() * value.element_size() // (4 if "gather" in member.launch.name else 1)


def slots(parts) -> tuple:
    offsets = accumulate((size for _, size in parts), initial=0)
    return tuple((name, at, size) for (name, size), at in zip(parts, offsets, strict=False))


def held(gm: fx.GraphModule, kind: str) -> set:
    payloads = bucket_layout(gm).of(kind)
    return {
        tuple((slot.parameter, slot.offset, slot.nbytes) for slot in payload.slots)
        for payload in payloads
    }


@pytest.mark.second_tier("deepseek_v3", "llama3-custom_ops_multidtype", "llama3-coalesced")
@pytest.mark.parametrize("mode", ["default", "custom_ops", "custom_ops_multidtype", "coalesced"])
@pytest.mark.parametrize("model", MODELS)
def test_every_member_of_torchs_buckets_is_read(gt_mesh, model, mode):
    """D17: each parameter at its byte, in torch's order, and in the direction that it serves."""
    gm = traced(gt_mesh, model)
    expected = bucketed(gm, mode)
    assert {kind: held(gm, kind) for kind in expected} == expected
    assert {payload.directions for payload in bucket_layout(gm).of("reduce_scatter")} == {("bwd",)}
    lines = [line.text for line in lines_of(gm, "layout")]  # with every layer
    assert sum(": at(" in line for line in lines) == sum(
        len(bucket) for kind in expected.values() for bucket in kind
    )


@pytest.mark.second_tier("deepseek_v3")
@pytest.mark.parametrize("model", MODELS)
def test_buckets_of_torchs_scheduler_are_judged_by_name_against_eager(gt_mesh, model):
    """Manual overlap bucketing packs in execution order: the sets are eager's, the places are not
    (D2).
    """
    config = MODELS[model](gt_mesh, "bf16_fp32")
    gm = traced(gt_mesh, model)
    before = {
        slot.parameter for payload in bucket_layout(gm).of("all_gather") for slot in payload.slots
    }
    from fixtures.torch_passes import manually_bucketed

    gm = manually_bucketed(gm, config.bucket_plan)
    layout = bucket_layout(gm)
    assert {
        slot.parameter for payload in layout.of("all_gather") for slot in payload.slots
    } == before
    eager = new_model(config)
    shard_eagerly(eager, config)
    config.step(eager, *config.batch(0, 1)).backward()
    with pytest.raises(LayoutDifference) as failure:
        assert_same_layout(layout, eager_bucket_layout(eager))
    differences = str(failure.value).splitlines()[1:]
    other = [
        line
        for line in differences
        if not re.search(r"sits at byte|more parameters? of it|more differences", line)
    ]
    assert not other, "\n".join(other)
    assert "bucket 'layers.0', reduce_scatter:" in str(failure.value)


def test_members_that_a_bucket_casts_to_the_widest_dtype_are_read():
    """``schedule_overlap_bucketing`` merges a bucket in bfloat16 with parameters in float32."""
    from fixtures.torch_passes import overlapped

    gm = graph_of(Recipe(mixed=True))
    layout = bucket_layout(overlapped(graph_of(Recipe(mixed=True))))
    gathered = [
        payload for payload in layout.of("all_gather") if "lm_head.weight" in payload.parameters
    ]
    assert len(gathered[0].slots) > 1
    for payload in layout.of("all_gather"):
        for slot in payload.slots:
            member = next(
                p for p in bucket_layout(gm).of("all_gather") if p.parameters == (slot.parameter,)
            )
            assert (slot.nbytes, payload.dtype) == (member.slots[0].nbytes, member.dtype)
