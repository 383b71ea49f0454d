"""Every pressure breaks what depends on it, by name; what depends on none of them passes under all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
import torch

from pytest_gtrainer import assert_run_to_run
from pytest_gtrainer.numerics.assertions import BitwiseDifference
from pytest_gtrainer.numerics.run_to_run import PRESSURES, NotJudged, Pressure, _other_addresses

BY_NAME = {pressure.name: pressure for pressure in PRESSURES}
X = torch.randn(10_007, generator=torch.Generator().manual_seed(0))


def repeatable() -> dict[str, torch.Tensor]:
    return {"noise": X * torch.rand(len(X)), "sum": X.double().sum()}


def by_thread() -> dict[str, torch.Tensor]:
    parts = [part.sum() for part in X.chunk(torch.get_num_threads())]
    return {"sum": sum(parts[1:], parts[0])}


def by_hash() -> dict[str, torch.Tensor]:
    """The order of sets depends on it."""
    return {"seed of hashes": torch.tensor(int(os.environ["PYTHONHASHSEED"]))}


def by_cache() -> dict[str, torch.Tensor]:
    from torch._inductor.runtime.runtime_utils import cache_dir

    return {"cache": torch.tensor(list(cache_dir().encode()))}


def by_load() -> dict[str, torch.Tensor]:
    """How many processes this one has started, and still has, that do nothing but calculate."""
    busy = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            parent = process.joinpath("stat").read_text().rpartition(") ")[2].split()[1]
            busy += parent == str(os.getpid()) and "sum(range" in process.joinpath("cmdline").read_text()
    return {"busy": torch.tensor(busy)}


def test_what_repeats_itself_passes_under_every_pressure():
    """Random numbers start from the same states, also in the other process."""
    report = assert_run_to_run(repeatable, what="the sample")
    assert {*report.equal, *report.not_judged} == {"run 2", "run 3", *BY_NAME}
    assert {"other addresses", "another process", "a busy core", "3 threads"} <= {*report.equal}
    if not torch.cuda.is_available():
        assert report.not_judged["stream jitter"] == "needs a GPU"
        assert "not judged   stream jitter: needs a GPU" in str(report)


@pytest.mark.parametrize(
    ("function", "pressure"),
    [
        (by_thread, "3 threads"),
        (by_hash, "another process"),
        (by_load, "a busy core"),
    ],
)
def test_the_pressure_that_breaks_it_is_named(monkeypatch: pytest.MonkeyPatch, function, pressure: str):
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    with pytest.raises(BitwiseDifference) as caught:
        assert_run_to_run(function, pressures=[BY_NAME[pressure]], what="the sample")
    text = str(caught.value)
    assert text.startswith(f"the sample does not repeat itself under this pressure: {pressure}\ndifferent: ")
    assert text.endswith("before that:\nequal        run 2, run 3")


def test_addresses_change_under_their_pressure():
    """Memory that was given back is mostly taken again for the same size; under pressure it lies elsewhere."""

    def addresses() -> list[int]:
        return [torch.empty(size, dtype=torch.uint8).data_ptr() for size in range(1000, 100_000, 1000)]

    addresses()
    again = sum(a == b for a, b in zip(addresses(), addresses(), strict=True))
    before = addresses()
    with _other_addresses():
        under_pressure = sum(a == b for a, b in zip(before, addresses(), strict=True))
    assert under_pressure < again


def test_a_fresh_inductor_cache_is_another_folder():
    import torch._dynamo
    import torch._inductor.utils  # noqa: F401 - without it there is nothing to judge

    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    with pytest.raises(BitwiseDifference, match="under this pressure: fresh Inductor cache"):
        assert_run_to_run(by_cache, 2, pressures=[BY_NAME["fresh Inductor cache"]])
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == before


def test_a_run_that_never_repeats_is_found_without_pressure():
    drawn = iter(range(10))
    with pytest.raises(BitwiseDifference, match="under this pressure: run 2"):
        assert_run_to_run(lambda: [torch.tensor(next(drawn))])


def test_what_another_process_cannot_import_is_not_judged():
    report = assert_run_to_run(lambda: [X.clone()], 2, pressures=[BY_NAME["another process"]])
    assert list(report.not_judged) == ["another process"]
    assert "<lambda>: define it with def at the top level of a module" in report.not_judged["another process"]


def test_threads_and_random_states_are_restored():
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    with pytest.raises(BitwiseDifference):
        assert_run_to_run(by_thread, pressures=[BY_NAME["3 threads"]])
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_a_pressure_of_ones_own():
    def refuse(function):
        raise NotJudged("not today")

    report = assert_run_to_run(repeatable, 2, pressures=[Pressure("weather", refuse)])
    assert report.not_judged == {"weather": "not today"}


def test_one_run_is_refused():
    with pytest.raises(ValueError, match="runs=1: one run has nothing to be compared with"):
        assert_run_to_run(repeatable, 1)
