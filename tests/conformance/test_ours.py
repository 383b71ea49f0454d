"""Our passes hold all rules of their kinds."""

import pytest

import pytest_gtrainer as gt
from pytest_gtrainer.conformance import (
    bucketing,
    canonicalisation,
    chunking,
    deduplication,
    memory_policy,
    reassignment,
    remat,
    separate,
)

pytestmark = pytest.mark.second_tier

ours = gt.joint_transformer_block_bucketing_reordering_pass
test_our_bucketing = bucketing(ours, strict=True)
test_our_bucketing_of_separate_graphs = separate(ours, strict=True)
refuses_none = {"D11": "refuses no graph"}
test_our_canonicalisation = canonicalisation(
    gt.canonicalize_graph_pass, strict=True, not_claimed=refuses_none
)
test_our_deduplication = deduplication(
    gt.deduplicate_fsdp_unshard_chains_pass, strict=True, not_claimed=refuses_none
)
test_our_recomputation = remat(gt.selective_activation_remat_pass, strict=True)


def gathers_again(gm):
    """Our memory policy, and the recomputation that it asks for."""
    return gt.selective_activation_remat_pass(gt.tag_with_memory_policy_pass(gm))


test_our_memory_policy = memory_policy(gathers_again, strict=True, not_claimed=refuses_none)
test_our_reassignment = reassignment(
    gt.reassign_collective_pgs_pass, strict=True, not_claimed=refuses_none
)
test_our_chunking = chunking(gt.chunk_pass, strict=True)
