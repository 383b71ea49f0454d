"""Our bucketing holds all rules."""

from pytest_gtrainer import joint_transformer_block_bucketing_reordering_pass as ours
from pytest_gtrainer.conformance import any_pass, bucketing

test_our_bucketing = bucketing(ours, strict=True)
test_our_bucketing_as_any_pass = any_pass(ours, strict=True, not_claimed={"generated": "held by the test above"})
