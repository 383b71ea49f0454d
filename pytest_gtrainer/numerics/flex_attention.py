"""FlexAttention without a GPU: the same formula on both sides of a comparison."""

from collections.abc import Iterator
from contextlib import contextmanager

from pytest_gtrainer._torch.flex_attention import dense_on_cpu


@contextmanager
def dense_flex_attention() -> Iterator[None]:
    """Compute FlexAttention by its dense formula on the CPU inside, forward and backward.

    torch refuses its backward there. Score and mask functions are those of the model, and what a
    score function captures gets its gradient. Run both sides of a comparison inside: bits are not
    those of a GPU's kernel.

        with dense_flex_attention():
            assert_runs_equal(graph, eager, control=control)

    ``torch.compile(flex_attention)`` works, too: a graph that calls FlexAttention, and that goes to
    Inductor, runs as it is. Other graphs are compiled as ever.

    Raises:
        NotImplementedError: inside, on a rank of a simulated world, if a score function captures a
            tensor that requires a gradient.
    """
    with dense_on_cpu():
        yield
