"""Twenty steps of each strategy, by either producer: chunked graphs, and the trace of eager
chunking itself.
"""

from dataclasses import replace

import pytest

from fixtures.chunking import PRODUCERS, Case, strict, train_chunked_graph, train_eager_chunked
from fixtures.models import chunkable
from fixtures.models.chunkable import net
from pytest_gtrainer import assert_bitwise_different, assert_bitwise_equal

pytestmark = pytest.mark.second_tier

CASE = Case(
    model=net(chunkable.Attention, chunkable.grouped_moe), config=strict("layers.*"), steps=20
)
STRATEGIES = {
    "transformer-batch": strict("layers.*"),
    "moe-batch": strict("layers.*.moe"),
    "moe-sequence": strict("layers.*.moe", "sequence"),
}


@pytest.fixture(scope="module")
def eager():
    """Return the results of eager chunking, by strategy."""
    return {
        name: train_eager_chunked(replace(CASE, config=config))
        for name, config in STRATEGIES.items()
    }


@pytest.mark.parametrize("producer", PRODUCERS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_twenty_losses(eager, strategy, producer):
    """G1, I3: and every gradient, weight and buffer on the way."""
    actual, _ = train_chunked_graph(replace(CASE, config=STRATEGIES[strategy]), producer)
    assert_bitwise_equal(
        actual, eager[strategy], what=f"chunked graph ({producer}) against eager chunking"
    )


@pytest.mark.parametrize("strategy", ["moe-batch", "moe-sequence"])
def test_losses_drift_apart_where_something_else_is_chunked(eager, strategy):
    """The control: other sums, other bits within twenty steps."""
    assert_bitwise_different(losses(eager[strategy]), losses(eager["transformer-batch"]))


def losses(found):
    return {name: value for name, value in found.items() if name.endswith("/loss")}
