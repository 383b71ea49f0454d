"""``gt_ranks.run`` raises one failure of several, and says the others: all in one process."""

import pickle
import re
from types import SimpleNamespace

import pytest

from pytest_gtrainer import devices
from pytest_gtrainer.ranks import caller, wire
from pytest_gtrainer.ranks.caller import RankError
from pytest_gtrainer.ranks.watch import Incident, RanksOutcome

STATE = wire.GroupState(True, 1)


def outcome(errors, incidents=(), size=3, **more):
    """The ranks that raised, each with the time and with what it waited in, if in anything."""
    answers, raised = {}, {}
    for rank in range(size):
        error = f"Traceback: of rank {rank}" if rank in errors else None
        answers[rank] = wire.CallDone(b"", error, "", (), (), STATE)
    for rank, (time, waiting_in) in errors.items():
        said, line = f"Error: {rank}", (("t.py", rank),)
        raised[rank] = wire.Raised(time, said, False, waiting_in, None, line)
    return RanksOutcome(size, answers, raised, list(incidents), **more)


def failure_of(*args, **more):
    with pytest.raises(RankError) as failure:
        caller._raise_failure(outcome(*args, **more))
    return failure.value


@pytest.mark.parametrize(("earliest", "later"), [(0, 1), (1, 0), (2, 1)])
def test_the_earliest_exception_counts(earliest, later):
    error = failure_of({later: (5.0, None), earliest: (1.0, None)})
    assert (
        str(error) == f"rank {earliest} raised Error: {earliest}\n\nTraceback: of rank {earliest}"
    )
    assert error.rank == earliest
    assert error.remote_traceback == f"Traceback: of rank {earliest}"


def test_an_exception_that_another_rank_has_caused_comes_last():
    error = failure_of({0: (1.0, "all_reduce"), 2: (5.0, None)}, dead={1})
    assert error.rank == 2


@pytest.mark.parametrize("rank", [None, 0, 2])
def test_what_happened_to_a_rank_comes_with_its_stacks_and_last_output(rank):
    details = (("stack of rank 1", "File a"), ("last output", "killed by\nhand"))
    incident = Incident(1.0, rank, "rank 1 died", details)
    for error in (failure_of({}, [incident]), failure_of({0: (2.0, None)}, [incident])):
        assert error.rank == rank
        assert str(error) == (
            "rank 1 died\n\n--- stack of rank 1 ---\nFile a\n\n--- last output ---\nkilled by\nhand"
        )
    late = Incident(9.0, 1, "rank 1 died", details)
    assert failure_of({0: (2.0, None)}, [late]).rank == 0
    assert str(failure_of({}, [late, incident])).startswith("rank 1 died\n\n--- stack")
    assert failure_of({}, [late, incident]).rank == rank, "the earlier one"


def test_an_incident_that_is_a_consequence_is_none_that_is_told():
    incident = Incident(1.0, 1, "rank 1 did not end", is_consequence=True)
    assert failure_of({2: (5.0, None)}, [incident]).rank == 2
    caller._raise_failure(outcome({}))  # nothing has failed


def inner():
    return None


def test_what_no_other_process_could_import_is_refused_by_name():
    def local():
        return None

    for function in (local, lambda: None):
        name = re.escape(function.__qualname__)
        with pytest.raises(TypeError, match=f"{name} has no name that another process could"):
            caller._payload(function, ())
    with pytest.raises(TypeError, match=r"inner or its arguments cannot be sent to another proc"):
        caller._payload(inner, (local,))


@pytest.fixture
def run_on(request):
    """Run a function on ranks of which each returns its number."""

    def run(**given):
        def answer(size, *_):
            done = [wire.CallDone(pickle.dumps(n), None, "", (), (), STATE) for n in range(size)]
            return RanksOutcome(size, dict(enumerate(done)))

        made = caller.RankCaller.__new__(caller.RankCaller)
        made._item, made._config = request.node, request.config
        made._plugin = SimpleNamespace(pool=SimpleNamespace(run=answer))
        return made.run(inner, **given)

    return run


def test_so_many_ranks_run_as_are_asked_for_and_all_by_default(run_on, request):
    slots = devices.resolve(request.config).slots
    assert run_on() == run_on(size=slots) == [*range(slots)]
    assert run_on(size=1) == [0]
    with pytest.raises(pytest.skip.Exception, match=f"{slots + 1} ranks"):
        run_on(size=slots + 1)
    for size in (0, -1, True, 2.0, "2"):
        with pytest.raises(ValueError, match=f"size is a whole number, 1 or more; not {size!r}"):
            run_on(size=size)
