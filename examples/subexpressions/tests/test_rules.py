"""The pass, held to the rules of deduplication: parameters that are read twice are gathered once a
direction.
"""

from train.passes import merge_equal

from pytest_gtrainer.conformance import deduplication

test_merge_equal = deduplication(merge_equal, not_claimed={"D11": "it refuses no graph"})
