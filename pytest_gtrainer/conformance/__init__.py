"""The rules of ``docs/behaviours.txt``, run against any pass; see ``docs/conformance.md``.

Each rule is one test and one line of the table at the end of the run. Its result is *held*;
*broken*, with the smallest graph and a sentence; *not claimed*; *error*, if the pass itself raised;
or *proves nothing*, if it could not have failed. For example, a pass that merges nothing has no
order in which it packs.

Read ``judging`` first, then ``rules``; ``recipes`` makes the graphs. ``report.terminal`` makes the
table.
"""

from functools import partial

from pytest_gtrainer.conformance import judging

# Importing the module registers the rules.
from pytest_gtrainer.conformance import rules as rules
from pytest_gtrainer.conformance.judging import Adapter

__all__ = [
    "Adapter",
    "any_pass",
    "bucketing",
    "canonicalisation",
    "chunking",
    "ddp",
    "deduplication",
    "memory_policy",
    "reassignment",
    "remat",
    "separate",
]

any_pass = partial(judging.test_of, "any")
bucketing = partial(judging.test_of, "bucketing")
separate = partial(judging.test_of, "separate")
canonicalisation = partial(judging.test_of, "canonicalisation")
deduplication = partial(judging.test_of, "deduplication")
remat = partial(judging.test_of, "remat")
memory_policy = partial(judging.test_of, "memory_policy")
reassignment = partial(judging.test_of, "reassignment")
ddp = partial(judging.test_of, "ddp")
chunking = partial(judging.test_of, "chunking")
