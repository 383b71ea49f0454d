"""Nothing is traced or compiled on threads (W2): torch's tracers keep process-wide state, of one rank at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pytest_gtrainer._torch.threads import tracing_hooks
from pytest_gtrainer.worlds.simulated.threads.faults import NotOnThreads


@contextmanager
def eager_only(is_rank: Callable[[int], bool]) -> Iterator[None]:
    """Refuse tracing and compiling to the threads (by identifier) that are ranks."""

    def refuse(what: str) -> None:
        if is_rank(threading.get_ident()):
            raise NotOnThreads(
                f"{what} inside run_threads: ranks on threads run eager code only; "
                "trace in the test itself and replay with train_graph"
            )

    with tracing_hooks(refuse):
        yield
