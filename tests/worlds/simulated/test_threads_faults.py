"""S5: what goes wrong on threads is one error that says what, where and on which ranks, and leaves
nothing behind.
"""

import gc
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.fx.experimental.proxy_tensor import make_fx

from fixtures.training import llama3_training
from pytest_gtrainer import NetModel
from pytest_gtrainer.references.simulated import simulated_eager
from pytest_gtrainer.worlds import ranks_text
from pytest_gtrainer.worlds.simulated import CollectiveMismatch, NoModel
from pytest_gtrainer.worlds.simulated.threads import (
    NotOnThreads,
    Standstill,
    TimeLimit,
    run_threads,
)
from pytest_gtrainer.worlds.simulated.threads import run as run_module
from pytest_gtrainer.worlds.simulated.threads.group import ThreadGroup
from pytest_gtrainer.worlds.simulated.threads.team import ThreadTeam, is_ours

NET = NetModel(1, 4)


def run(function, *args, **options):
    return run_threads(4, function, *args, net=NET, **{"timeout": 30, **options})


def failure_of(kind, function, *args, **options):
    with pytest.raises(kind) as caught:
        run(function, *args, **options)
    return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


@pytest.fixture(autouse=True)
def no_thread_left():
    before = threading.active_count()
    yield
    wait_until(lambda: threading.active_count() == before)
    assert not dist.is_initialized()


@pytest.fixture(scope="module")
def only_what_is_new():
    """Freeze earlier objects, so that the collector does not look at them again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def nothing_left(only_what_is_new):
    """No process group or state of the process outlives a run, failed or not."""
    yield
    gc.collect()
    gc.collect()  # tensors first; then what their hooks held
    assert not [group for group in gc.get_objects() if type(group) is ThreadGroup]
    # a world of another kind still comes up
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert init_device_mesh("cpu", (1,)).get_group().size() == 1
    dist.destroy_process_group()


leaves_nothing = pytest.mark.usefixtures("nothing_left")


def wait_until(condition):
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


# --- ranks that disagree ---


def other_operation(rank):
    dist.barrier()
    tensor = torch.ones(4)
    dist.all_reduce(tensor) if rank != 1 else dist.broadcast(tensor, 0)


def other_size(rank):
    dist.all_reduce(torch.ones(4 + (rank == 2)))


def other_dtype(rank):
    dist.reduce_scatter_single(
        torch.ones(1, dtype=torch.bfloat16 if rank == 3 else torch.float32),
        torch.ones(4, dtype=torch.bfloat16 if rank == 3 else torch.float32),
    )


def other_reduction(rank):
    dist.all_reduce(torch.ones(4), op=dist.ReduceOp.AVG if rank < 2 else dist.ReduceOp.SUM)


def other_root(rank):
    dist.broadcast(torch.ones(4), src=rank % 2)


def other_splits(rank):
    receives = [1, 1, 1, 1] if rank != 2 else [2, 0, 1, 1]
    dist.all_to_all_single(torch.empty(4, 3), torch.ones(4, 3), receives, [1, 1, 1, 1])


def other_list(rank):
    outputs = [torch.empty(2 if (rank, source) != (1, 3) else 5) for source in range(4)]
    dist.all_gather(outputs, torch.ones(2))


def other_message(rank):
    if rank == 0:
        dist.send(torch.ones(3), 1)
    if rank == 1:
        dist.recv(torch.ones(4), 0)


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (
            other_operation,
            "the ranks disagree in collective 1 of the group of ranks 0-3; "
            "ranks 0, 2, 3: all_reduce (sum) of float32[4]; rank 1: broadcast from member 0 of "
            "float32[4]",
        ),
        (
            other_size,
            "ranks 0, 1, 3: all_reduce (sum) of float32[4]; rank 2: all_reduce (sum) of float32[5]",
        ),
        (
            other_dtype,
            "ranks 0-2: reduce_scatter (sum) of float32[4]; rank 3: reduce_scatter (sum) of "
            "bfloat16[4]",
        ),
        (
            other_reduction,
            "ranks 0, 1: all_reduce (avg) of float32[4]; ranks 2, 3: all_reduce (sum) of "
            "float32[4]",
        ),
        (
            other_root,
            "ranks 0, 2: broadcast from member 0 of float32[4]; ranks 1, 3: broadcast from member "
            "1",
        ),
        (other_splits, "all_to_all: rank 0 sends 1 row to rank 2, which expects 2 from it"),
        (other_list, "all_gather: rank 3 sends 2 elements to rank 1, which expects 5 from it"),
        (other_message, "rank 0 sends float32[3] to rank 1, which receives float32[4]"),
    ],
)
def test_ranks_that_disagree(function, complaint):
    text = failure_of(CollectiveMismatch, function)
    assert complaint in text
    assert f"in {function.__name__}\n" in text  # the stacks of all ranks


def test_ranks_that_agree():
    """The twin: what the checks above refuse is the disagreement."""

    def agree(rank):
        tensor = torch.ones(4)
        dist.all_reduce(tensor)
        dist.all_to_all_single(torch.empty(4, 3), torch.ones(4, 3), [1, 1, 1, 1], [1, 1, 1, 1])
        return tensor.tolist()

    assert run(agree) == [[4.0] * 4] * 4


@leaves_nothing
def test_a_disagreement_is_told_even_if_the_rank_hides_it():
    def hides(rank):
        try:
            dist.all_reduce(torch.ones(3 + rank))
        except Exception:
            return "fine"

    assert "rank 3: all_reduce (sum) of float32[6]" in failure_of(CollectiveMismatch, hides)


def test_a_collective_that_cannot_be_right():
    with pytest.raises(
        ValueError, match=r"the input float32\[6\] must be 4 times the output float32\[2\]"
    ):
        run(lambda rank: dist.reduce_scatter_single(torch.ones(2), torch.ones(6)))
    with pytest.raises(
        ValueError, match=r"the output float32\[8\] must be 4 times the input bfloat16\[2\]"
    ):
        run(lambda rank: dist.all_gather_single(torch.ones(8), torch.ones(2, dtype=torch.bfloat16)))
    with pytest.raises(
        ValueError,
        match=r"the input has 3 rows, but its splits \[1, 1\] have 2 entries for 4 ranks",
    ):
        run(lambda rank: dist.all_to_all_single(torch.ones(2), torch.ones(3), [1, 1], [1, 1]))
    with pytest.raises(
        ValueError, match=r"a collective gives float32\[12\], but its output is float32\[8\]"
    ):
        run(lambda rank: dist.all_to_all_single(torch.ones(4, 2), torch.ones(4, 3)))


# --- ranks that wait for each other ---


def never_comes(rank):
    if rank != 1:
        dist.barrier()


def in_a_circle(rank):
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    if rank < 2:
        for group in (first, second) if rank == 0 else (second, first):
            dist.all_reduce(torch.ones(1), group=group)


@leaves_nothing
def test_a_rank_that_never_comes():
    text = failure_of(Standstill, never_comes)
    assert (
        "no rank can go on: ranks 0, 2, 3: waiting in barrier (collective 0 of the group of "
        "ranks 0-3) for rank 1, "
    ) in text
    assert ", at test_threads_faults.py:" in text
    assert "in never_comes; rank 1: ended" in text
    assert "--- ranks 0, 2, 3 ---" in text
    assert (
        text.count(f"{torch.__path__[0]}/") == 1
    )  # the collective, without torch's wrappers around it


def test_ranks_that_wait_in_a_circle():
    text = failure_of(Standstill, in_a_circle)
    assert (
        "rank 0: waiting in all_reduce (sum) of float32[1] (collective 0 of the group of ranks 0, "
        "1) for rank 1" in (text)
    )
    assert "(collective 0 of the group of ranks 0, 1 (group 2 of these)) for rank 0" in text


def test_a_message_that_is_never_sent():
    text = failure_of(Standstill, lambda rank: dist.recv(torch.ones(3), 0) if rank == 2 else None)
    assert "rank 2: waiting in recv of float32[3] from rank 0" in text


def at_depth(depth):
    if depth:
        at_depth(depth - 1)
    else:
        dist.recv(torch.ones(1), 0)


def waits_below(depth):
    return waits_below(depth - 1) if depth else dist.recv(torch.ones(1), 0)


@pytest.mark.parametrize("depth", [0, 10, 11, 12, 30])
def test_a_stack_of_many_calls_ends_at_the_line_that_waits(depth):
    with pytest.raises(Standstill) as caught:
        run_threads(2, lambda rank: waits_below(depth) if rank else None, net=NetModel(1, 2))
    text = str(caught.value)
    assert "return waits_below(depth - 1) if depth else dist.recv(torch.ones(1), 0)" in text
    assert ", in recv\n" in text, "the collective, which is the innermost call"
    assert text.count('  File "') <= 12, "the outermost calls are left out"


def test_stacks_of_many_ranks_are_told_up_to_a_number():
    with pytest.raises(Standstill) as caught:
        run_threads(9, at_depth, net=NetModel(1, 9))
    assert str(caught.value).count("--- rank ") == 6
    assert str(caught.value).endswith("... and 3 more")


# --- a rank that raises ---


@leaves_nothing
def test_the_first_error_in_time_is_raised_and_the_others_are_released():
    """A rank's code may clean up, but is not resumed."""
    cleaned, resumed = [], []

    def fails(rank):
        try:
            dist.barrier()
            if rank == 2:
                raise LookupError("nothing there")
            dist.barrier()
            resumed.append(rank)
        finally:
            cleaned.append(rank)
            if rank == 3:
                raise KeyError("second")

    started = time.monotonic()
    text = failure_of(LookupError, fails)
    assert text == "nothing there\nraised on rank 2 of 4 ranks on threads"
    assert sorted(cleaned) == [0, 1, 2, 3]
    assert not resumed
    assert time.monotonic() - started < 5


def test_the_traceback_shows_the_ranks_code():
    with pytest.raises(SystemExit) as caught:
        run(lambda rank: sys.exit(3) if rank == 1 else dist.barrier())
    assert caught.traceback[-1].path.name == "test_threads_faults.py"


@leaves_nothing
def test_an_error_in_a_backward_releases_the_others_inside_of_theirs():
    def fails(rank):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        fully_shard(
            model, mesh=init_device_mesh("cpu", (4,))
        )  # without one torch takes a GPU if there is one
        output = model(torch.ones(1, 4))
        if rank == 0:
            raise LookupError("before its backward")
        output.sum().backward()

    assert "rank 0" in failure_of(LookupError, fails)


# --- time limits ---


def loops(rank):
    while rank == 1:
        pass
    dist.barrier()


@leaves_nothing
def test_a_rank_that_does_not_end():
    """A time limit, with what every rank does, and the stacks of all."""
    started = time.monotonic()
    text = failure_of(TimeLimit, loops, timeout=1)
    assert time.monotonic() - started < 5
    assert text.startswith(
        "a rank ran for 1 seconds without coming to a collective: rank 0: waiting in barrier ("
    )
    assert ") for ranks 1-3, at test_threads_faults.py:" in text
    assert "; rank 1: running, at test_threads_faults.py:" in text
    assert "; ranks 2, 3: waiting for its turn" in text
    assert "in loops\n    dist.barrier()" in text.partition("--- rank 0 ---")[2]
    assert "in loops\n    while rank == 1:" in text.partition("--- rank 1 ---")[2]


@leaves_nothing
def test_a_rank_that_cannot_be_interrupted_is_left_to_itself(monkeypatch):
    """The others end; what it does later touches nobody."""
    monkeypatch.setattr(run_module, "_GRACE", 0.2)
    woken = []

    def sleeps(rank):
        if rank == 1:
            time.sleep(1.5)
            woken.append(rank)
        dist.barrier()

    text = failure_of(TimeLimit, sleeps, timeout=0.3)
    assert "rank 1: still in a call that cannot be interrupted" in text
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("rank ")] == [
        "rank 1"
    ]
    assert run(lambda rank: rank) == [0, 1, 2, 3]
    wait_until(lambda: not any(thread.name == "rank 1" for thread in threading.enumerate()))
    assert not woken


def test_ranks_that_take_turns_may_take_longer_together():
    def naps(rank):
        for _ in range(2):
            time.sleep(0.3)
            dist.barrier()
        return rank

    assert run(naps, timeout=2) == [0, 1, 2, 3]


def test_a_rank_that_comes_back_late_does_not_disturb_whose_turn_it_is():
    team = ThreadTeam(3)
    team.hand_on()
    team.abandon(0)
    team.end(0)
    assert team.running == 1


def test_an_interrupt_strikes_no_line_of_ours():
    """Or it would leave a lock or a queue half done."""

    def looks(rank):
        threads[rank] = threading.get_ident()
        frames = sys._current_frames()
        seen = [is_ours(frames[threads[other]]) for other in range(rank + 1)]
        dist.barrier()
        return seen

    threads = {}
    assert run(looks)[2] == [True, True, False]  # the others wait already


@leaves_nothing
@pytest.mark.parametrize("moment", ["as threads start", "as ranks run"])
def test_an_interrupt_releases_all_ranks(monkeypatch, moment):
    waits = threading.Event.wait

    def interrupted(event, timeout=None):
        if (timeout is None) != (moment == "as threads start"):
            return waits(event, timeout)
        monkeypatch.setattr(threading.Event, "wait", waits)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Event, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(loops)


@leaves_nothing
def test_no_more_threads(monkeypatch):
    start = threading.Thread.start

    def no_third(thread):
        if thread.name in ("rank 2", "rank 3"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", no_third)
    assert failure_of(RuntimeError, never_comes) == "can't start new thread"


# --- what is refused ---


def in_a_thread_of_its_own(rank):
    errors = []

    def collects():
        try:
            dist.barrier()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=collects)
    thread.start()
    thread.join()
    raise errors[0]


def waits_in_a_thread_of_its_own(rank):
    work = dist.barrier(async_op=True)
    errors = []

    def waits():
        try:
            work.wait()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=waits)
    thread.start()
    thread.join()
    raise errors[0]


doubled = torch.compile(lambda x: x * 2, backend="eager")


@pytest.mark.parametrize(
    ("function", "kind", "complaint"),
    [
        (
            lambda rank: make_fx(lambda x: x + 1)(torch.ones(1)),
            NotOnThreads,
            "make_fx inside run_threads",
        ),
        (
            lambda rank: torch.compile(nn.ReLU())(torch.ones(1)),
            NotOnThreads,
            "torch.compile inside run_threads",
        ),
        (
            lambda rank: doubled(torch.ones(1)),
            NotOnThreads,
            "torch.compile inside run_threads: ranks on threads run",
        ),
        (
            lambda rank: dist.all_reduce(torch.ones(1), op=dist.ReduceOp.BAND),
            NoModel,
            "op 'band' has no model",
        ),
        (
            lambda rank: dist.all_reduce(torch.ones(1) == 1),
            NoModel,
            "all_reduce of torch.bool has no model",
        ),
        (
            lambda rank: dist.all_reduce(torch.ones(1, device="meta")),
            NoModel,
            "^all_reduce of tensors on meta: a ",
        ),
        (lambda rank: dist.reduce(torch.ones(1), 0), NoModel, "use all_reduce"),
        (lambda rank: dist.recv(torch.ones(1)), NoModel, "recv_anysource has no model"),
        (lambda rank: dist.monitored_barrier(), (NoModel, ValueError), "monitored_barrier"),
        (
            lambda rank: dist.distributed_c10d._get_default_store().get("key"),
            NotOnThreads,
            "have no store",
        ),
        (
            in_a_thread_of_its_own,
            NotOnThreads,
            "a thread that a rank started uses torch.distributed",
        ),
        (
            waits_in_a_thread_of_its_own,
            NotOnThreads,
            "a thread that rank 0 started called a collective",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_ranks_on_threads_do_not_do(function, kind, complaint):
    """W2, S5: one sentence, which ``^`` begins."""
    assert complaint in f"^{failure_of(kind, function)}"


def test_tracing_works_again_afterwards():
    run(lambda rank: None)
    assert make_fx(lambda x: x + 1)(torch.ones(1)) is not None
    assert doubled(torch.ones(1)).item() == 2


@leaves_nothing
def test_a_training_leaves_nothing():
    """Meshes, whose groups are gone, sit in no cache of DTensor's."""
    simulated_eager(lambda mesh: llama3_training(mesh, "fp32", steps=2), NET)


def sends_to_nobody(rank):
    dist.barrier()
    if rank == 3:
        dist.isend(torch.ones(2), 0)


def sends_twice(rank):
    if rank == 0:
        dist.isend(torch.ones(2), 1, tag=5)
        dist.isend(torch.ones(2), 1, tag=5)
    if rank == 1:
        dist.recv(torch.ones(2), 0, tag=5)


def receives_from_nobody(rank):
    dist.barrier()
    if rank == 1:
        dist.irecv(torch.ones(2), 2)


def sends_under_another_tag(rank):
    if rank == 0:
        dist.isend(torch.ones(2), 1, tag=1)
    if rank == 1:
        dist.irecv(torch.ones(2), 0, tag=2)


def calls_alone(rank):
    dist.barrier()
    if rank in (0, 2):
        dist.all_reduce(torch.ones(2), async_op=True)


def calls_alone_in_a_group(rank):
    group = dist.new_group([1, 3])
    dist.barrier()
    if rank == 3:
        dist.all_reduce(torch.ones(2), group=group, async_op=True)


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (sends_to_nobody, "rank 3 sent float32[2] to rank 0, which never received it"),
        (sends_twice, "rank 0 sent float32[2] to rank 1, which never received it"),
        (
            receives_from_nobody,
            "rank 1 began to receive float32[2] from rank 2, which never sent it",
        ),
        (sends_under_another_tag, "rank 0 sent float32[2] to rank 1, which never received it"),
        (
            calls_alone,
            "ranks 0, 2 called all_reduce (sum) of float32[2] (collective 1 of the group of ranks "
            "0-3), "
            "and ended before ranks 1, 3 did",
        ),
        (
            calls_alone_in_a_group,
            "rank 3 called all_reduce (sum) of float32[2] (collective 0 of the group of ranks 1, "
            "3), "
            "and ended before rank 1 did",
        ),
    ],
)
def test_what_a_rank_begins_alone_and_does_not_wait_for(function, complaint):
    """On real ranks it would meet a later call, or hang."""
    assert failure_of(CollectiveMismatch, function) == complaint


@pytest.mark.parametrize("absent", [0, 3])
@pytest.mark.parametrize("member", [0, 3])
@pytest.mark.parametrize("times", [1, 2])
def test_a_group_that_some_ranks_do_not_make(absent, member, times):
    """A real rank waits in new_group for all others, also for those that are not in the group."""

    def makes(rank):
        for turn in range(times):
            if rank != absent or turn + 1 < times:
                dist.new_group([member, 1])
        dist.barrier()

    complaint = failure_of(CollectiveMismatch, makes)
    assert complaint.startswith("every rank has to call new_group, or to make a mesh, for groups")
    counts = [
        f"rank {absent}: {times - 1}",
        f"ranks {(absent + 1) % 4}-{(absent + 3) % 4}: {times}",
    ]
    for count in counts:
        assert count in complaint


@pytest.mark.parametrize("leaving", [[0], [3], [0, 1, 2]])
@pytest.mark.parametrize("members", [[0, 1, 2, 3], None])
def test_a_group_that_some_ranks_destroy(leaving, members):
    """A group of all ranks, also the default one."""

    def destroys(rank):
        group = dist.new_group(members) if members else None
        dist.barrier()
        if rank in leaving:
            dist.destroy_process_group(group)

    complaint = failure_of(CollectiveMismatch, destroys)
    staying = [rank for rank in range(4) if rank not in leaving]
    assert complaint.startswith(f"{ranks_text(leaving)} destroyed the group of ranks 0-3")
    assert f"and {ranks_text(staying)} did not: NCCL may wait" in complaint


@pytest.mark.parametrize("call", ["allreduce", "broadcast", "barrier", "send", "recv"])
def test_a_group_that_was_destroyed_is_used(call):
    """Its own methods are called, as by DDP; torch's functions refuse it themselves."""

    def uses(rank):
        group = dist.new_group([0, 1, 2, 3])
        dist.destroy_process_group(group)
        given = {"send": (0, 0), "recv": (0, 0), "broadcast": (dist.BroadcastOptions(),)}
        if call == "barrier":
            group.barrier()
        getattr(group, call)([torch.ones(1)], *given.get(call, ()))

    complaint = failure_of(ValueError, uses).replace("all_reduce", "allreduce")
    assert complaint.startswith(f"{call} in the group of ranks 0-3")
    assert "which rank 0 has destroyed" in complaint


COLUMNS = {
    "all_reduce": lambda x: dist.all_reduce(x[:, ::2]),
    "all_reduce of a transpose": lambda x: dist.all_reduce(x.t()),
    "broadcast": lambda x: dist.broadcast(x[:, 0], 0),
    "all_gather": lambda x: dist.all_gather_into_tensor(torch.empty(16), x[:, 0]),
    "output of all_gather": lambda x: dist.all_gather_into_tensor(x[:, 0], torch.empty(1)),
    "all_gather into a list": lambda x: dist.all_gather([x[0], x[1], x[2], x[:, 1]], x[3]),
    "reduce_scatter": lambda x: dist.reduce_scatter_tensor(torch.empty(4), x.t()),
    "all_to_all": lambda x: dist.all_to_all_single(torch.empty(4), x[:, 1]),
    "recv": lambda x: dist.recv(x[:, 1], dist.get_rank() ^ 1),
    "send": lambda x: dist.send(x[:, 1], dist.get_rank() ^ 1),
}


@pytest.mark.parametrize("call", COLUMNS)
def test_a_collective_of_a_tensor_that_is_not_contiguous(call):
    complaint = failure_of(ValueError, lambda rank: COLUMNS[call](torch.ones(4, 4)))
    words = "NCCL refuses it, and gloo may reduce the memory between its elements"
    if call in ("send", "recv"):
        words = "gloo refuses it, and NCCL moves its elements as they lie in memory"
    assert words in complaint


def test_collectives_of_images_whose_channels_are_last_and_of_parts_without_gaps():
    def together(rank):
        image = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
        dist.all_reduce(image)
        part = torch.ones(4, 4)
        dist.all_reduce(part[1:3])
        dist.all_reduce(part[:, :1][:1])
        dist.all_reduce(torch.ones(0, 3).t())
        return image.unique().item(), part.sum().item()

    assert set(run_threads(4, together, net=NET)) == {(4.0, 16 + 8 * 3 + 3)}


def test_all_ranks_destroy_a_group_and_make_it_again():
    def makes(rank):
        total = torch.ones(2)
        for _ in range(2):
            if rank in (1, 3):
                group = dist.new_group([1, 3], use_local_synchronization=True)
                dist.all_reduce(total, group=group)
                dist.destroy_process_group(group)
        dist.destroy_process_group()
        return total.tolist()

    assert run_threads(4, makes, net=NET)[2:] == [[1.0, 1.0], [4.0, 4.0]]


def test_a_rank_outside_of_a_group_may_ask_who_is_in_it():
    """``if rank in get_process_group_ranks(group)``, as on real ranks."""
    for ranks in ([0, 1], [2], [1, 2]):

        def asks(rank, ranks=ranks):
            group = dist.new_group(ranks)
            total = torch.ones(1)
            if rank in dist.get_process_group_ranks(group):
                dist.all_reduce(total, group=group)
            return total.item()

        expected = [len(ranks) if rank in ranks else 1 for rank in range(4)]
        assert run_threads(4, asks, net=NET) == expected


def test_a_group_that_its_members_make_alone():
    def makes(rank):
        if rank in (1, 3):
            group = dist.new_group([1, 3], use_local_synchronization=True)
            total = torch.ones(2)
            dist.all_reduce(total, group=group)
            return total.tolist()
        return None

    assert run_threads(4, makes, net=NET) == [None, [2.0, 2.0], None, [2.0, 2.0]]


def test_what_ranks_begin_together_need_not_be_waited_for():
    def together(rank):
        dist.all_reduce(torch.ones(2), async_op=True)
        if rank == 0:
            dist.isend(torch.ones(2), 1)
        if rank == 1:
            dist.irecv(torch.ones(2), 0)
        return rank

    assert run(together) == [0, 1, 2, 3]
