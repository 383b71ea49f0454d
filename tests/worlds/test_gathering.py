"""Objects travel between real ranks."""

import threading

import pytest
import torch.distributed as dist

from pytest_gtrainer import NetModel
from pytest_gtrainer.worlds.gathering import on_first_rank
from pytest_gtrainer.worlds.simulated.threads import run_threads


class Unsendable(Exception):
    def __init__(self):
        super().__init__("with a lock")
        self.lock = threading.Lock()


@pytest.mark.second_tier
@pytest.mark.gt_world("ranks", size=2)
def test_what_the_first_rank_makes(gt_world):
    assert on_first_rank(dist.get_rank) == 0
    assert on_first_rank(lambda: {"a": [1, None]}) == {"a": [1, None]}


@pytest.mark.second_tier
@pytest.mark.gt_world("ranks", size=2)
def test_what_the_first_rank_raises_is_raised_on_all(gt_world):
    """Also what cannot be sent: the other ranks wait for it."""

    def fails():
        raise ValueError(f"on rank {dist.get_rank()}")

    def fails_with_a_lock():
        raise Unsendable

    with pytest.raises(ValueError, match="on rank 0"):
        on_first_rank(fails)
    with pytest.raises(Exception, match="with a lock"):
        on_first_rank(fails_with_a_lock)
    with pytest.raises(RuntimeError, match="the result cannot be pickled: lock"):
        on_first_rank(threading.Lock)
    assert on_first_rank(lambda: 1) == 1


def test_ranks_of_one_process_get_what_the_first_makes_or_raises():
    """An error that cannot be sent is raised on the first rank, too: no rank goes on alone."""

    def fails():
        raise ValueError(f"on rank {dist.get_rank()}")

    def ask(rank):
        said = [on_first_rank(lambda: [rank])]
        for make in (fails, threading.Lock):
            try:
                said.append(on_first_rank(make))
            except (ValueError, RuntimeError) as error:
                said.append(str(error).removeprefix("on the first rank: "))
        return said

    lock = "the result cannot be pickled: lock"
    found = run_threads(3, ask, net=NetModel(1, 3))
    assert found == [[[0], "on rank 0", lock]] * 3
