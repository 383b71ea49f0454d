"""Bucket plans: modules that travel together."""

from types import SimpleNamespace

import pytest
from torch import nn

from pytest_gtrainer import get_default_transformer_block_buckets
from pytest_gtrainer.graph.bucket_plan import (
    Plan,
    expert_fsdp_degree,
    managed_order,
    managed_order_of,
    sort_key,
)
from pytest_gtrainer.graph.collectives import PlanError

DENSE_PARTS = ["attention_norm", "attention", "ffn_norm", "moe.router", "moe.shared_experts"]


def test_a_dense_model_has_one_bucket_a_layer():
    """B1."""
    plan = get_default_transformer_block_buckets(3)
    assert plan == ["tok_embeddings", "layers.0", "layers.1", "layers.2", ["norm", "lm_head"]]


def test_the_loss_joins_the_last_bucket_only_if_it_is_chunked():
    """B2."""
    assert get_default_transformer_block_buckets(1, chunked_loss_enabled=True)[-1] == [
        "norm",
        "lm_head",
        "loss",
    ]
    assert get_default_transformer_block_buckets(1)[-1] == ["norm", "lm_head"]


def test_a_moe_layer_has_two_buckets_where_experts_are_sharded():
    """B3: and stays one where they are not."""
    plan = get_default_transformer_block_buckets(2, moe_layers=[1], expert_fsdp_degree=2)
    assert plan[1:4] == [
        "layers.0",
        [f"layers.1.{part}" for part in DENSE_PARTS],
        "layers.1.moe.routed_experts",
    ]
    assert "layers.1" in get_default_transformer_block_buckets(
        2, moe_layers=[1], expert_fsdp_degree=1
    )


@pytest.mark.parametrize(
    ("arguments", "degree"),
    [
        ({"mesh": {"efsdp": 4, "ep": 2}}, 4),
        ({"mesh": {"fsdp": 8}}, 1),
        ({"dp_shard": 8, "cp": 2, "tp": 1, "ep": 4}, 4),
        ({"dp_shard": 4, "tp": 4, "ep": 2}, 8),
        ({"dp_shard": 2, "tp": 4, "ep": 2}, 4),
        ({"dp_shard": 2, "cp": 3, "tp": 5}, 30),
        ({"dp_shard": 2, "ep": 8}, 1),
    ],
)
def test_the_expert_fsdp_degree(arguments, degree):
    """B4: the mesh wins; never below 1."""
    assert expert_fsdp_degree(**arguments) == degree


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (
            [["layers.0.w1", "layers.1.w1"]],
            r"bucket 'layers.0.w1\+layers.1.w1' spans layers.0 and layers.1",
        ),
        ([["norm", "layers.1"]], "spans layers.1 and no layer"),
        (["layers.0", "layers.0"], "names 'layers.0' twice"),
        (["layers.0", []], "entry 1 of the bucket plan is empty"),
        (
            "layers.0",
            r"the bucket plan is the word 'layers.0': give a list of entries, \['layers.0'\]",
        ),
        (
            ["norm", ["layers.0", 3]],
            "entry 1 of the bucket plan has 3: expected FQNs, or lists of FQNs",
        ),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused_by_name(entries, words):
    """B5."""
    with pytest.raises(PlanError, match=words):
        Plan(entries)


def test_moe_layers_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match=r"moe_layers names \[4\], the model has layers 0..1"):
        get_default_transformer_block_buckets(2, moe_layers=[4])


def test_sizes_that_no_model_has_are_refused():
    with pytest.raises(ValueError, match="n_layers=0: a model has at least one layer"):
        get_default_transformer_block_buckets(0)
    with pytest.raises(ValueError, match="ep=0: experts are on one rank at least"):
        expert_fsdp_degree(dp_shard=8, ep=0)


NESTED = ["", "layers.1", "layers.1.moe", "layers.1.moe.routed_experts"]


@pytest.mark.parametrize(
    "entries", [NESTED, NESTED[::-1]], ids=["outermost first", "innermost first"]
)
def test_the_innermost_entry_decides(entries):
    plan = Plan(entries)
    found = {
        fqn: plan.bucket_of(fqn).label
        for fqn in (
            "layers.1.moe.routed_experts.w1",
            "layers.1.moe.routed_experts",
            "layers.1.moe.router",
            "layers.1",
            "layers.10",
        )
    }
    assert found == {
        "layers.1.moe.routed_experts.w1": "layers.1.moe.routed_experts",
        "layers.1.moe.routed_experts": "layers.1.moe.routed_experts",
        "layers.1.moe.router": "layers.1.moe",
        "layers.1": "layers.1",
        "layers.10": "the root",
    }


def test_what_no_entry_covers_is_in_no_bucket():
    plan = Plan([["layers.1.attention", "layers.1.moe.router"], "layers.10"])
    assert plan.bucket_of("layers.1.attention.wq").label == "layers.1.attention+layers.1.moe.router"
    assert plan.bucket_of("layers.1") is None


SIMILAR = ["norm_out", "norm_out_proj", "layers.1", "layers.10", "layers.1_extra"]


def test_names_that_begin_alike_are_other_modules():
    """A bucket has the names that equal an entry, or that begin with the entry and a dot."""
    for entries in (SIMILAR, SIMILAR[::-1]):
        plan = Plan(entries)
        assert {fqn: plan.bucket_of(f"{fqn}.weight").label for fqn in SIMILAR} == {
            fqn: fqn for fqn in SIMILAR
        }
    plan = Plan(["norm_out", "layers.1"])
    assert [
        plan.bucket_of(fqn)
        for fqn in ("norm_out_proj", "layers.10", "layers.1_extra", "norm_ou", "layers")
    ] == [None] * 5
    with pytest.raises(PlanError, match=r"names 'norm_out', 'layers\.1', which"):
        plan.check_names(["norm_out_proj.linear", "layers.10.attention"])


@pytest.mark.parametrize(
    "roots", [["norm_out", "norm_out_proj"], ["norm_out_proj", "norm_out"]], ids=" then ".join
)
def test_payloads_follow_the_entry_where_names_begin_alike(roots):
    """D2: FSDP2 takes the modules in the order given; a parameter belongs to its own, not to one
    that begins alike.
    """
    (bucket,) = Plan([roots]).buckets
    members = [
        SimpleNamespace(parameter=f"{fqn}.weight") for fqn in reversed(roots)
    ]  # as registered
    key = sort_key("managed", [member.parameter for member in members], lambda member: 0)
    ordered = sorted(members, key=lambda member: key(bucket, member))
    assert [member.parameter for member in ordered] == [f"{fqn}.weight" for fqn in roots]


def test_the_managed_order_of_names_that_begin_alike():
    names = ["out.a.weight", "out_proj.weight", "out.weight", "outer.b.weight", "out_scale"]
    assert managed_order(names) == [
        "out.a.weight",
        "out.weight",
        "out_proj.weight",
        "outer.b.weight",
        "out_scale",
    ]


def test_a_layer_split_into_two_lists_is_wrapped_as_the_lists():
    """A list is its layer's root only where it is the layer's one list."""
    one = Plan([["layers.0.a", "layers.0.b"], "layers.0.experts"])
    two = Plan([["layers.0.a", "layers.0.b"], ["layers.0.c", "layers.0.d"]])
    assert [bucket.roots for bucket in one.buckets] == [("layers.0",), ("layers.0.experts",)]
    assert [bucket.roots for bucket in two.buckets] == [
        ("layers.0.a", "layers.0.b"),
        ("layers.0.c", "layers.0.d"),
    ]


def test_the_order_that_fsdp2_manages_parameters_in():
    """D2: children before a module's own; of modules that know each other, each counts once."""
    parent, child = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
    parent.child, child.parent = child, parent
    assert managed_order_of(parent) == ["child.weight", "weight", "bias"]
    assert managed_order([name for name, _ in parent.named_parameters()]) == [
        "child.weight",
        "weight",
        "bias",
    ]
