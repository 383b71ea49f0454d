"""Twenty steps of each strategy, by either producer: chunked graphs, and the trace of eager chunking itself."""

from dataclasses import replace

import pytest

from fixtures.chunking import Case, check_equals_eager, strict, train_eager_chunked
from fixtures.models import chunkable
from fixtures.models.chunkable import net
from pytest_gtrainer import assert_bitwise_different, eager_chunked, trace_step

CASE = Case(model=net(chunkable.Attention, chunkable.grouped_moe), config=strict("layers.*"), steps=20)
STRATEGIES = {
    "transformer-batch": strict("layers.*"),
    "moe-batch": strict("layers.*.moe"),
    "moe-sequence": strict("layers.*.moe", "sequence"),
}


def traced_eager_chunking(traced, config):
    """The other producer: nothing is rewritten."""
    model = CASE.new_model()
    with eager_chunked(model, config):
        return trace_step(model, CASE.step, CASE.batch(0)).gm


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_graph_producer(strategy):
    check_equals_eager(replace(CASE, config=STRATEGIES[strategy]))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_eager_producer(strategy):
    """I3."""
    check_equals_eager(replace(CASE, config=STRATEGIES[strategy], rewrite=traced_eager_chunking))


def test_losses_drift_apart_for_another_number_of_chunks():
    """The control: other sums, other bits within twenty steps."""
    two, four = (train_eager_chunked(replace(CASE, config=strict("layers.*", num_chunks=n))) for n in (2, 4))
    losses = [{name: value for name, value in found.items() if name.endswith("/loss")} for found in (two, four)]
    assert_bitwise_different(*losses)
