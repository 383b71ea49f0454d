"""Each pressure breaks what depends on it, and no pressure breaks anything else."""

import contextlib
import importlib.util
import os
import pickle
import random
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy
import pytest
import torch

from pytest_gtrainer import (
    DebugConfig,
    Record,
    assert_bitwise_different,
    assert_bitwise_equal,
    assert_run_to_run,
    deterministic,
    facts,
)
from pytest_gtrainer._torch.random_states import random_states_kept
from pytest_gtrainer.numerics.compare import BitwiseDifference
from pytest_gtrainer.numerics.run_to_run import (
    _SWITCHES,
    PRESSURES,
    NotJudged,
    Pressure,
    _answer,
    _state,
    kept,
    once,
)
from pytest_gtrainer.worlds.hygiene import restored
from tests.numerics.samples import make_run

BY_NAME = {pressure.name: pressure for pressure in PRESSURES}
X = torch.randn(10_007, generator=torch.Generator().manual_seed(0))


def repeatable() -> dict[str, torch.Tensor]:
    return {"noise": X * torch.rand(len(X)), "sum": X.double().sum()}


def by_thread() -> dict[str, torch.Tensor]:
    parts = [part.sum() for part in X.chunk(torch.get_num_threads())]
    return {"sum": sum(parts[1:], parts[0])}


def by_number_of_threads() -> dict[str, torch.Tensor]:
    return {"threads": torch.tensor(torch.get_num_threads())}


def by_process() -> dict[str, torch.Tensor]:
    """Return what a process brings into a run.

    The last entry must not matter: the order of sets depends on it.
    """
    return {
        "module": torch.tensor(list(__name__.encode())),
        "threads": torch.tensor(torch.get_num_threads()),
        "python": torch.tensor(random.random()),
        "numpy": torch.tensor(numpy.random.rand()),
        "torch": torch.rand(2),
        "new tensors": torch.empty(1, dtype=torch.get_default_dtype()).zero_(),
        "algorithms": torch.tensor(torch.get_deterministic_debug_mode()),
        "oneDNN": torch.tensor(torch.backends.mkldnn.deterministic),
        "seed of hashes": torch.tensor(int(os.environ["PYTHONHASHSEED"])),
    }


def by_address() -> dict[str, torch.Tensor]:
    """Memory that was given back is mostly taken again for the same size."""
    sizes = range(1000, 100_000, 1000)
    return {
        "addresses": torch.tensor(
            [torch.empty(size, dtype=torch.uint8).data_ptr() for size in sizes]
        )
    }


def by_cache() -> dict[str, torch.Tensor]:
    from torch._inductor.runtime.runtime_utils import cache_dir

    return {"cache": torch.tensor(list(cache_dir().encode()))}


def by_load() -> dict[str, torch.Tensor]:
    """Count the children of this process that do nothing but calculate."""
    busy = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            parent = process.joinpath("stat").read_text().rpartition(") ")[2].split()[1]
            busy += (
                parent == str(os.getpid())
                and "sum(range" in process.joinpath("cmdline").read_text()
            )
    return {"busy": torch.tensor(busy)}


@pytest.mark.second_tier
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
        (by_load, "a busy core"),
    ],
)
def test_the_pressure_that_breaks_it_is_named(function, pressure: str):
    with pytest.raises(BitwiseDifference) as caught:
        assert_run_to_run(function, pressures=[BY_NAME[pressure]], what="the sample")
    text = str(caught.value)
    assert text.startswith(
        f"the sample does not repeat itself under this pressure: {pressure}\ndifferent: "
    )
    assert text.endswith("before that:\nequal        run 2, run 3")


def test_a_result_that_the_next_run_overwrites():
    """The bits of the first run are kept before the second run writes to the same buffer."""
    buffer = torch.zeros(3)
    with pytest.raises(BitwiseDifference, match="does not repeat itself") as caught:
        assert_run_to_run(lambda: {"buffer": buffer.add_(1)}, 2, pressures=[], what="the sample")
    assert caught.value.verdict.outcome == "different", (
        "the second run was compared with the same memory"
    )


CACHED = torch.ones(3)


def whole():
    return {"x": CACHED}


def views():
    return [CACHED.view(1, 3), CACHED[1:]]


def record():
    return RECORD


RECORD = make_run()


with torch.inference_mode():
    INFERRED = torch.ones(3)


def inferred():
    return {"x": INFERRED}


def inferred_beside_cached():
    return {"x": INFERRED, "y": CACHED}


@pytest.mark.parametrize("function", [whole, views, record, inferred, inferred_beside_cached])
def test_a_result_that_is_cached_proves_nothing(function):
    """V6: no run but the first has computed anything."""
    with (
        facts.collecting() as seen,
        pytest.raises(BitwiseDifference, match="the run returns what the first one made"),
    ):
        assert_run_to_run(function, 2, pressures=[])
    assert [fact["outcome"] for fact in facts.of_kind(seen, "verdict")] == ["unverified"]


@pytest.mark.gt_world("fake", size=2)
def test_a_dtensor_that_is_cached_proves_nothing(gt_world):
    """The twin makes it anew."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (2,))

    def made():
        return [DTensor.from_local(torch.ones(3), mesh, [Shard(0)], run_check=False)]

    cached = made()
    with pytest.raises(BitwiseDifference, match="the run returns what the first one made"):
        assert_run_to_run(lambda: cached, 2, pressures=[])
    assert assert_run_to_run(made, 2, pressures=[]).equal == ["run 2"]


@pytest.mark.gt_world("fake", size=2)
def test_a_dtensor_that_changes_its_placements_does_not_repeat_itself(gt_world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh, placements = init_device_mesh("cpu", (2,)), [Shard(0), Replicate()]

    def made():
        return [DTensor.from_local(torch.ones(3), mesh, [placements.pop()], run_check=False)]

    with pytest.raises(BitwiseDifference, match="does not repeat itself"):
        assert_run_to_run(made, 2, pressures=[])


def test_a_write_that_autograd_does_not_count_needs_a_clone():
    weight = torch.zeros(3)

    def writes():
        weight.data.fill_(1)
        return [weight]

    with pytest.raises(BitwiseDifference, match=r"return a clone, as .* through \.data"):
        assert_run_to_run(writes, 2, pressures=[])
    assert assert_run_to_run(lambda: [writes()[0].clone()], 2, pressures=[]).equal == ["run 2"]
    again = assert_run_to_run(lambda: [INFERRED.clone()], 2, pressures=[])
    assert again.equal == ["run 2"]


def computes_beside():
    return {"input": CACHED, "result": CACHED * 2}


def writes_again():
    return [CACHED.fill_(1)]


@pytest.mark.parametrize("function", [computes_beside, writes_again])
def test_a_result_that_is_computed_again_may_lie_in_the_same_memory(function):
    """The twin."""
    assert assert_run_to_run(function, 2, pressures=[]).equal == ["run 2"]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_numbers_of_threads(some_threads, count: int):
    name = f"{count} thread{'s' if count > 1 else ''}"
    with pytest.raises(
        BitwiseDifference, match=rf"under this pressure: {name}\n(.|\n)*actual   {count} "
    ):
        assert_run_to_run(by_number_of_threads, 2, pressures=[BY_NAME[name]])
    torch.set_num_threads(count)
    report = assert_run_to_run(by_number_of_threads, 2, pressures=[BY_NAME[name]])
    assert report.not_judged == {name: f"the first run had {count} already"}


@pytest.fixture
def some_threads() -> Iterator[None]:
    """A number of threads that no pressure has."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


@pytest.mark.second_tier
def test_another_process_has_the_same_random_numbers_and_switches(
    some_threads, monkeypatch: pytest.MonkeyPatch
):
    """Otherwise the settings of the first run would count as a difference.

    A module that is not on the path is found, too.
    """
    spec = importlib.util.spec_from_file_location("without_a_place_on_the_path", __file__)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    with (
        deterministic(DebugConfig(seed=5, deterministic_warn_only=True)),
        default_dtype(torch.float64),
    ):
        by_process()  # the seed is not where it starts from,
        torch.set_deterministic_debug_mode("error")  # nor are all switches those of the block
        with pytest.raises(
            BitwiseDifference, match="under this pressure: another process"
        ) as caught:
            assert_run_to_run(module.by_process, 2, pressures=[BY_NAME["another process"]])
        assert caught.value.verdict.compared == len(by_process())
    assert [difference.key.name for difference in caught.value.verdict.differences] == [
        "seed of hashes"
    ]


def test_an_answer_is_made_from_the_state_that_was_sent_along(
    tmp_path, monkeypatch: pytest.MonkeyPatch
):
    """Random states, switches and what ``deterministic`` was asked for; here all is otherwise."""
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    with (
        deterministic(DebugConfig(seed=5, deterministic_warn_only=True)),
        default_dtype(torch.float64),
    ):
        (
            random.random(),
            numpy.random.rand(),
            torch.rand(1),
        )  # the seed is not where the run starts from
        sent, expected = _state(), once(by_process)
    call = tmp_path / "call"
    call.write_bytes(pickle.dumps((by_process.__module__, __file__, "by_process", sent)))
    with restored(), random_states_kept():
        _answer(str(call))
    answer = torch.load(call.with_suffix(".answer"), weights_only=True)
    assert_bitwise_equal(answer, expected, what="the run from another start, set to what was sent")
    with random_states_kept():
        assert_bitwise_different(once(by_process)["torch"].double(), expected["torch"].double())


HELD = {
    "threads": [1, 3],
    "default dtype": [torch.float64, torch.bfloat16, torch.float32],
    "precision of products": ["high", "medium", "highest"],
    "algorithms": [2, 1, 0],
    "gradients": [False, True],
    "autocast": [
        [("cpu", is_enabled, dtype), ("cuda", is_enabled, torch.float16)]
        for is_enabled, dtype in ((True, torch.float16), (False, torch.bfloat16))
    ],
}


def by_modes():
    return [torch.ones(2, 2) @ torch.ones(2, 2), torch.tensor(torch.is_grad_enabled())]


def test_modes_around_a_run_are_sent_along(tmp_path):
    call, (_, before, _) = tmp_path / "call", _state()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        call.write_bytes(pickle.dumps((by_modes.__module__, __file__, "by_modes", _state())))
        expected = once(by_modes)
    try:
        with random_states_kept():
            _answer(str(call))
    finally:
        for name, (read, write) in _SWITCHES.items():
            if read() != before[name]:
                write(before[name])
    answer = torch.load(call.with_suffix(".answer"), weights_only=True)
    assert_bitwise_equal(answer, expected)


def test_what_another_process_is_set_to_is_what_this_one_has():
    """Each switch that is sent along is written as it was read."""
    assert _SWITCHES.keys() == HELD.keys(), (
        "a switch was added or left out: add here which values it has"
    )
    with restored():
        for name, (read, write) in _SWITCHES.items():
            for value in HELD[name]:
                write(value)
                assert read() == value, f"{name} was set to {value} and is {read()}"


@pytest.mark.second_tier
@pytest.mark.parametrize("blocks", [0, 6000], ids=["as it is", "full of holes"])
def test_addresses_change_under_their_pressure(blocks):
    """Few addresses change in plain runs (all in a heap without holes), most under pressure."""
    sizes = random.Random(0)
    held = [torch.empty(sizes.randint(64, 200_000), dtype=torch.uint8) for _ in range(blocks)]
    del held[::2]
    moved: dict[str, list[int]] = {"plain": [], "under pressure": []}
    for _ in range(12):
        before = once(by_address)["addresses"]
        moved["plain"].append(int((once(by_address)["addresses"] != before).sum()))
        before = once(by_address)["addresses"]
        after = BY_NAME["other addresses"].run(by_address)["addresses"]
        moved["under pressure"].append(int((after != before).sum()))
    assert min(moved["plain"]) < len(before) / 3 < min(moved["under pressure"]), moved


def test_what_an_address_does_is_not_blamed_on_threads():
    """Every pressure moves new tensors a little, so the one that means to comes first."""

    def by_place():
        # One alone may lie where it did by chance: in memory that nothing else of its size takes.
        made = [torch.empty(size, dtype=torch.uint8) for size in range(1024, 8192, 512)]
        return {"places": torch.tensor([each.data_ptr() for each in made])}

    with pytest.raises(BitwiseDifference, match=r"pressure: (other addresses|run [23])"):
        assert_run_to_run(by_place)


def test_a_fresh_inductor_cache_is_another_folder():
    import torch._dynamo
    import torch._inductor.utils  # noqa: F401 - without it there is nothing to judge

    by_cache()  # Inductor sets the variable at its first use in a process
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    with pytest.raises(BitwiseDifference, match="under this pressure: fresh Inductor cache"):
        assert_run_to_run(by_cache, 2, pressures=[BY_NAME["fresh Inductor cache"]])
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == before


BUILT = []


def building(gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]):
    """A backend of torch.compile that gives the graph as it is."""
    BUILT.append(gm)
    return gm.forward


def test_with_a_fresh_inductor_cache_everything_is_compiled_anew():
    import torch._inductor.utils  # without it there is nothing to judge

    compiled, before = torch.compile(lambda x: x + 1, backend=building), len(BUILT)

    def builds() -> dict[str, torch.Tensor]:
        compiled(X)
        return {"builds": torch.tensor(len(BUILT) - before)}

    with pytest.raises(
        BitwiseDifference, match="under this pressure: fresh Inductor cache"
    ) as caught:
        assert_run_to_run(builds, 3, pressures=[BY_NAME["fresh Inductor cache"]])
    assert (caught.value.verdict.first.actual, caught.value.verdict.first.expected) == ("2", "1")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Replace the GPU by a list of the requests to it. It has 32 streams of each priority."""
    asked: list[object] = []
    made: Counter[int] = Counter()

    class Stream:
        def __init__(self, priority: int = 0) -> None:
            self.priority, self.number = priority, made[priority] % 32
            made[priority] += 1

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Stream) and vars(self) == vars(other)

        __hash__ = None

    @contextlib.contextmanager
    def stream(entered: Stream) -> Iterator[None]:
        asked.append(entered)
        yield
        asked.append("left")

    for name, value in {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "get_rng_state_all": list,
        "set_rng_state_all": lambda states: None,
        "synchronize": lambda: asked.append("synchronize"),
        "_sleep": lambda cycles: asked.append(cycles),
        "Stream": Stream,
        "stream": stream,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return asked


def test_streams_are_late_by_irregular_times(gpu: list[object]):
    """All streams of torch's two pools are delayed, except the run's own."""
    BY_NAME["stream jitter"].run(lambda: gpu.append("run") or [X])
    assert [each for each in gpu if isinstance(each, str) and each != "left"] == [
        "synchronize",
        "run",
        "synchronize",
    ]
    assert [gpu[-4].priority, *gpu[-3:]] == [0, "run", "left", "synchronize"]
    sleeps = [
        (stream.priority, cycles) for stream, cycles in pairwise(gpu) if isinstance(cycles, int)
    ]
    assert Counter(priority for priority, _ in sleeps) == {0: 31, -1: 32}
    assert len(set(sleeps)) == 8
    late = [stream for stream, cycles in pairwise(gpu) if isinstance(cycles, int)]
    assert gpu[-4] not in late


def test_the_own_stream_of_a_run_is_late(gpu: list[object]):
    """And no other."""
    BY_NAME["a late stream"].run(lambda: gpu.append("run") or [X])
    synchronize, late, cycles, left, own, *rest = gpu
    assert (synchronize, left, rest) == ("synchronize", "left", ["run", "left", "synchronize"])
    assert late == own
    assert cycles >= 50_000_000


def test_what_does_not_use_the_gpu_is_not_judged_by_its_streams(
    gpu, monkeypatch: pytest.MonkeyPatch
):
    """CUDA must not start for it: some settings count only before CUDA starts."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    report = assert_run_to_run(lambda: [X.clone()], 2, pressures=[BY_NAME["stream jitter"]])
    assert (report.not_judged, gpu) == ({"stream jitter": "the run does not use CUDA"}, [])


def test_a_gpu_that_starts_in_the_first_run(gpu, monkeypatch: pytest.MonkeyPatch):
    """Its generator cannot be put back to before: the runs after it are compared."""
    states: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: bool(states))
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", states.copy)
    monkeypatch.setattr(
        torch.cuda, "set_rng_state_all", lambda before: states.__setitem__(slice(None), before)
    )

    def draw() -> list[torch.Tensor]:
        states[:] = [states[0] + 1] if states else [1]
        return [torch.tensor(states[0])]

    assert assert_run_to_run(draw, 3, pressures=[]).equal == ["run 2", "run 3"]


def test_a_run_that_never_repeats_is_found_without_pressure():
    drawn = iter(range(10))
    with pytest.raises(BitwiseDifference, match="under this pressure: run 2"):
        assert_run_to_run(lambda: [torch.tensor(next(drawn))])


ONES = "import torch\nmade = torch.ones(2)\n"


@pytest.mark.second_tier
def test_another_process_looks_for_modules_where_this_one_does(
    tmp_path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "of_a_user.py").write_text(
        "import beside_it\n\ndef ones(): return [beside_it.made.clone()]\n"
    )
    (tmp_path / "beside_it.py").write_text(ONES)
    monkeypatch.syspath_prepend(tmp_path)
    report = assert_run_to_run(
        importlib.import_module("of_a_user").ones, 2, pressures=[BY_NAME["another process"]]
    )
    assert "another process" in report.equal


def test_what_another_process_cannot_import_is_not_judged():
    report = assert_run_to_run(lambda: [X.clone()], 2, pressures=[BY_NAME["another process"]])
    assert list(report.not_judged) == ["another process"]
    assert (
        "<lambda>: define it with def at the top level of a module"
        in report.not_judged["another process"]
    )


def test_a_precision_that_torch_cannot_tell_is_not_judged_by_another_process():
    """torch has two switches for it, and raises if one is read after the other was set."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        report = assert_run_to_run(repeatable, 2, pressures=[BY_NAME["another process"]])
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert list(report.not_judged) == ["another process"]
    assert (
        "set the precision by torch.set_float32_matmul_precision alone"
        in report.not_judged["another process"]
    )


@pytest.mark.gt_world("fake", size=2)
def test_a_rank_is_not_judged_by_another_process(gt_world):
    report = assert_run_to_run(repeatable, 2, pressures=[BY_NAME["another process"]])
    assert report.not_judged == {"another process": "another process is no rank of this world"}


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


def test_every_run_is_reported():
    """The summary counts a pressure that cannot be applied as not judged, with its reason."""

    def refuse(function):
        raise NotJudged("not today")

    with facts.collecting() as seen:
        report = assert_run_to_run(
            repeatable, 3, pressures=[Pressure("weather", refuse)], what="the sample"
        )
        drawn = iter(range(10))
        with pytest.raises(BitwiseDifference):
            assert_run_to_run(lambda: [torch.tensor(next(drawn))], 2, pressures=[])
    said = [fact for fact in seen if fact["kind"] != "check"]
    assert (report.equal, said) == (
        ["run 2", "run 3"],
        [
            {"kind": "verdict", "outcome": "equal", "tensors": 2, "what": "the sample"},
            {"kind": "verdict", "outcome": "equal", "tensors": 2, "what": "the sample"},
            {
                "kind": "verdict",
                "outcome": "not judged",
                "tensors": 0,
                "what": "the sample under weather: not today",
            },
            {"kind": "verdict", "outcome": "different", "tensors": 1, "what": ""},
        ],
    )


def test_one_run_is_refused():
    with pytest.raises(ValueError, match="runs=1: one run has nothing to be compared with"):
        assert_run_to_run(repeatable, 1)


def test_a_pressure_that_is_none_is_refused():
    """Before the function runs."""
    with pytest.raises(
        TypeError, match=r"pressures has 'foo': give a Pressure\(name, run\), or some"
    ):
        assert_run_to_run(lambda: 1 / 0, pressures=(*PRESSURES, "foo"))


def test_no_tensor_is_lost_to_a_name_that_reads_like_another():
    assert len(kept({"": torch.ones(1), "the tensor": torch.zeros(1)})) == 2


def test_a_run_that_returns_none_in_a_place_of_its_own():
    """The second run returns less: no tensor differs."""
    nothing = iter([[None], [], [None]])
    with pytest.raises(BitwiseDifference, match=r"only expected has a place for a tensor at \[1\]"):
        assert_run_to_run(lambda: [torch.ones(1), *next(nothing)], 2, pressures=())


@pytest.mark.parametrize("phase", ["loss", "weight"])
@pytest.mark.parametrize("which", [0, 1])
def test_entries_of_a_record_that_read_alike_are_both_compared(phase: str, which: int):
    """A3: "loss" and "" are both the loss of a step."""
    drawn = iter(range(10))

    def run() -> Record:
        record = Record()
        for at, name in enumerate(("", phase)):
            record.add(0, 0, phase, name, torch.tensor([next(drawn) if at == which else 1.0]))
        return record

    with pytest.raises(BitwiseDifference, match="does not repeat itself"):
        assert_run_to_run(run, 2, pressures=[])


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_record_that_lacks_a_rank_is_unverified(rank: int):
    """L3"""

    def run() -> Record:
        record = Record(3)
        for each in {0, 1, 2} - {rank}:
            record.add(0, each, "loss", "loss", torch.ones(1))
        return record

    with pytest.raises(BitwiseDifference, match=f"actual has nothing of rank {rank} at step 0"):
        assert_run_to_run(run, 2, pressures=[])


def a_record() -> Record:
    record = Record(meta={"who": "anybody"})
    record.add(0, 0, "loss", "loss", X)
    return record


def test_a_record_comes_back_from_another_process():
    assert assert_run_to_run(a_record, 2, pressures=[BY_NAME["another process"]]).equal == [
        "run 2",
        "another process",
    ]


def test_places_of_a_selection_stay_apart():
    """A record has one name at many steps and phases; each of them is compared."""
    record = Record(1)
    for step in range(2):
        for phase in ("gradient", "weight"):
            record.add(step, 0, phase, "w", torch.tensor([step + 0.5]))
    assert len(kept(record.select())) == 4
    steps = iter(range(100))

    def only_the_first_step_changes():
        record = Record(1)
        record.add(0, 0, "weight", "w", torch.tensor(float(next(steps))))
        record.add(1, 0, "weight", "w", torch.tensor(1.0))
        return record.select()

    with pytest.raises(BitwiseDifference):
        assert_run_to_run(only_the_first_step_changes)


def test_pressures_are_left_out_by_name():
    names = list(BY_NAME)
    made = lambda: [torch.ones(3)]  # noqa: E731
    report = assert_run_to_run(
        made, 2, without=[name for name in names if name != "other addresses"]
    )
    assert report.equal == ["run 2", "other addresses"]
    some = [BY_NAME["other addresses"], BY_NAME["2 threads"]]
    assert assert_run_to_run(made, 2, pressures=some, without=("other addresses",)).equal == [
        "run 2",
        "2 threads",
    ]
    with pytest.raises(ValueError, match="'2 thread', which is no pressure: there are other add"):
        assert_run_to_run(made, 2, without=["2 thread"])
    with pytest.raises(TypeError, match="without is '2 threads'"):
        assert_run_to_run(made, 2, without="2 threads")
