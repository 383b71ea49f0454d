"""Our passes hold all rules of their kinds.

A property that a rule judges is tested here, and not in ``tests/passes``.
``tests/passes/test_mutants.py`` breaks the passes and shows that rules fail then.
"""

import pytest

import pytest_gtrainer as gt
from pytest_gtrainer.conformance import (
    Adapter,
    bucketing,
    canonicalisation,
    chunking,
    deduplication,
    memory_policy,
    reassignment,
    remat,
    separate,
)
from pytest_gtrainer.conformance.judging import RULES, judge
from tests.conformance.conftest import WITH_ALL_MODELS

second_tier = pytest.mark.second_tier
# Goldens of passes are checked in every run, each with other hashes of strings. So one pass stands
# for all in a second process, and the others start theirs before releases.
in_one_process = pytest.mark.long("process")
slow_rules = second_tier(
    "D9", "generated", "process", "growth", "cost", "ranks", "order", "p2p", "bits", "nodes"
)

ours = gt.joint_transformer_block_bucketing_reordering_pass
test_our_bucketing = slow_rules(bucketing(ours, strict=True))
test_our_bucketing_of_separate_graphs = second_tier(in_one_process(separate(ours, strict=True)))
refuses_none = {"D11": "refuses no graph"}
test_our_canonicalisation = second_tier(
    in_one_process(
        canonicalisation(gt.canonicalize_graph_pass, strict=True, not_claimed=refuses_none)
    )
)
test_our_deduplication = second_tier(
    in_one_process(
        deduplication(
            gt.deduplicate_fsdp_unshard_chains_pass, strict=True, not_claimed=refuses_none
        )
    )
)
test_our_recomputation = second_tier(
    in_one_process(remat(gt.selective_activation_remat_pass, strict=True))
)


def gathers_again(gm):
    """Our memory policy, and the recomputation that it asks for."""
    return gt.selective_activation_remat_pass(gt.tag_with_memory_policy_pass(gm))


test_our_memory_policy = second_tier(
    in_one_process(memory_policy(gathers_again, strict=True, not_claimed=refuses_none))
)
test_our_reassignment = second_tier(
    in_one_process(
        reassignment(gt.reassign_collective_pgs_pass, strict=True, not_claimed=refuses_none)
    )
)
test_our_chunking = second_tier(in_one_process(chunking(gt.chunk_pass, strict=True)))


@pytest.mark.gt_world("fake", size=4, rank=1)
def test_without_reordering_only_collective_chains_move_too(request):
    adapter = Adapter(ours, "bucketing", options={"reorder": False}, strict=True)
    judge(RULES["E4"], adapter, request)


def generated_models():
    """Yield our passes as adapters, by kind."""
    given = {
        "bucketing": ours,
        "separate": ours,
        "canonicalisation": gt.canonicalize_graph_pass,
        "deduplication": gt.deduplicate_fsdp_unshard_chains_pass,
        "remat": gt.selective_activation_remat_pass,
        "memory_policy": gathers_again,
        "reassignment": gt.reassign_collective_pgs_pass,
    }
    for kind, function in given.items():
        yield pytest.param(Adapter(function, kind, strict=True), id=kind)


@WITH_ALL_MODELS
@pytest.mark.gt_world("fake", size=4, rank=1)
@pytest.mark.parametrize("adapter", list(generated_models()))
def test_all_generated_models(adapter, request):
    judge(RULES["generated"], adapter, request)
