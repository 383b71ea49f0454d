"""Records: what is kept, under which name, merged over ranks, on disk."""

import math
from pathlib import Path

import pytest
import torch

from pytest_gtrainer import Record, assert_bitwise_different, assert_bitwise_equal, compare, digest
from pytest_gtrainer.numerics import record as records
from pytest_gtrainer.numerics.bits import NoBytes
from pytest_gtrainer.numerics.record import LARGE, entries, normalised
from pytest_gtrainer.numerics.verdict import PHASES, Key
from tests.numerics.samples import ALL, flip_bit, make_run


def test_it_keeps_a_copy():
    record, weight = Record(), torch.nn.Parameter(torch.ones(2, 3).t())
    record.add(0, 0, "weight", "w", weight)
    with torch.no_grad():
        weight.zero_()
    kept = record[0, 0, "weight", "w"]
    assert kept.tolist() == [[1, 1]] * 3
    assert not kept.requires_grad
    assert kept.is_contiguous()


def test_it_keeps_values_where_new_tensors_have_none():
    """A model that is made on the meta device records nothing there."""
    weight, record = torch.ones(2), Record()
    with torch.device("meta"):
        record.add(0, 0, "weight", "w", weight)
    assert record[0, 0, "weight", "w"].tolist() == [1, 1]


def test_it_keeps_only_what_it_was_given_of_a_large_buffer():
    record = Record()
    record.add(0, 0, "weight", "w", torch.ones(1000)[:2])
    assert record[0, 0, "weight", "w"].untyped_storage().nbytes() == 8


def test_a_dtensor_is_kept_as_its_local_shard():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (4,))
        record = Record(4, rank=1)
        record.add(
            0,
            1,
            "weight",
            "w",
            DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False),
        )
        assert type(record[0, 1, "weight", "w"]) is torch.Tensor
        assert record[0, 1, "weight", "w"].tolist() == [1, 1]
    finally:
        torch.distributed.destroy_process_group()


def test_look_ups():
    record = make_run()
    assert (record.world_size, record.ranks, record.steps, len(record)) == (2, (0, 1), (0, 1), 28)
    assert list(record.select(step=1, rank=0, phase="loss")) == [Key(1, 0, "loss", "loss")]
    assert len(record.select(name="lm_head.weight")) == 12
    assert (0, 0, "loss", "loss") in record
    assert repr(record) == "Record(world_size=2, 28 tensors)"


@pytest.mark.parametrize(
    ("name", "normal"),
    [
        ("wq.weight", "wq.weight"),
        ("_orig_mod.wq.weight", "wq.weight"),
        ("module._orig_mod.layers.0._checkpoint_wrapped_module.wq.weight", "layers.0.wq.weight"),
        ("_orig_mod.module.wq.weight", "wq.weight"),
        ("encoder.module.weight", "encoder.module.weight"),
        ("module.module.wq.weight", "wq.weight"),
        (
            "layers.0._orig_mod.attention._checkpoint_wrapped_module.wq.weight",
            "layers.0.attention.wq.weight",
        ),
        ("module", "module"),
    ],
)
def test_names_lose_the_prefixes_of_wrappers(name: str, normal: str):
    assert normalised(name) == normal


def test_ranks_merge_into_the_whole():
    whole = Record.merged([make_run(rank=1), make_run(rank=0)])
    assert whole.missing == ()
    assert_bitwise_equal(whole, make_run())


def test_a_rank_that_is_missing_is_known():
    assert Record.merged([make_run(rank=1)]).missing == ((0, 0), (1, 0))
    assert make_run(rank=1).missing == ()


def test_a_rank_that_stopped_early_is_known():
    assert Record.merged([make_run(steps=2, rank=0), make_run(steps=1, rank=1)]).missing == (
        (1, 1),
    )


def test_saved_and_loaded_it_is_the_same(tmp_path):
    record = make_run(rank=1)
    record.meta["torch"] = "2.13"
    for dtype in (torch.float8_e4m3fn, torch.complex64, torch.bool):
        record.add(2, 1, "buffer", str(dtype), torch.ones(3, 0, 2).to(dtype))
    record.save(tmp_path / "run.pt")
    loaded = Record.load(tmp_path / "run.pt")
    assert_bitwise_equal(loaded, record)
    assert digest(loaded) == digest(record)
    assert (loaded.meta, loaded.rank, list(loaded)) == (record.meta, 1, list(record))


def test_another_file_is_refused(tmp_path):
    torch.save({"w": torch.ones(1)}, tmp_path / "w.pt")
    with pytest.raises(ValueError, match=r"w\.pt does not hold a record"):
        Record.load(tmp_path / "w.pt")


@pytest.mark.parametrize("left", [20, 100, -1])
def test_a_file_that_was_cut_off_is_refused(tmp_path, left: int):
    make_run().save(tmp_path / "run")
    whole = (tmp_path / "run").read_bytes()
    (tmp_path / "run").write_bytes(whole[:left])
    with pytest.raises(ValueError, match=r"run (was cut off|does not hold a record)"):
        Record.load(tmp_path / "run")


DAMAGE = [
    ('"world_size": 2', '"world_size": "2"'),
    ('"world_size": 2', '"world_size": 0'),
    ('"rank": null', '"rank": 9'),
    ('"meta": {', '"meta": 1, "m": {'),
    ('"begins"', '"begin"'),
    ('"begins": ', '"begins": {}, "b": '),
    ('"float32"', '"Tensor"'),
    ('"float32"', '"no_such"'),
    ('"float32"', "7"),
    ('"tensors": [', '"tensors": [[], '),
    ('"tensors": [', '"tensors": [7, '),
    ('"tensors": [', '"tensors": [[0, 0, "weight", "w", "float32", [2], 1000000000], '),
    ('"tensors": [', '"tensors": [[0, 0, "weight", "w", "float32", [2], -8], '),
    ('"tensors": [', '"tensors": [[0, 0, "weight", "w", "float32", ["x"], 8], '),
    ('"tensors": [', '"tensors": [[0, 0, "weight", "w", "float32", [1e400], 8], '),
    ('"tensors": [', '"tensors": [[0, 0, "weight", [], "float32", [1], 64], '),
    ('"tensors": [', '"tensors": [[null, 0, "weight", "x", "float32", [1], 64], '),
    ('"tensors": [', '"tensors": [[0, 7, "weight", "x", "float32", [1], 64], '),
    ('"tensors": [', '"tensors": [[0, "0", "weight", "x", "float32", [1], 64], '),
    ('"tensors": [', '"tensors": [[0, 0, "no phase", "x", "float32", [1], 64], '),
    ('"tensors": [', '"tensors": [[0, 0, "weight", 7, "float32", [1], 64], '),
    ('"world_size": 2', '"world_size": 2.0'),
    ('"world_size": 2', '"world_size": 1e400'),
    ('"world_size": 2', '"world_size": 1000000000000000000000000000000'),
]


@pytest.mark.parametrize(("old", "new"), DAMAGE)
def test_a_damaged_index_is_one_documented_error(tmp_path, old: str, new: str):
    make_run().save(tmp_path / "run")
    whole = (tmp_path / "run").read_bytes()
    start = whole.rindex(b'{"world_size"')
    index = whole[start:-8].decode()
    assert index.count(old) >= 1, index[:300]
    damaged = index.replace(old, new, 1).encode()
    (tmp_path / "run").write_bytes(whole[:start] + damaged + len(damaged).to_bytes(8, "little"))
    with pytest.raises(
        ValueError, match=r"run was cut off or damaged: its index cannot be read \("
    ):
        Record.load(tmp_path / "run")


def test_an_index_with_a_dtype_that_no_record_has_is_read_as_bytes(tmp_path):
    """Found by fuzzing: the empty tensor had no bytes, and the record could not be saved again."""
    make_run().save(tmp_path / "run")
    whole = (tmp_path / "run").read_bytes()
    start = whole.rindex(b'{"world_size"')
    index = whole[start:-8].replace(
        b'"tensors": [', b'"tensors": [[0, 0, "weight", "x", "qint8", [0], 0], ', 1
    )
    (tmp_path / "run").write_bytes(whole[:start] + index + len(index).to_bytes(8, "little"))
    read = Record.load(tmp_path / "run")
    assert read[0, 0, "weight", "x"].shape == (0,)
    read.save(tmp_path / "again")
    assert_bitwise_equal(Record.load(tmp_path / "again"), read)


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_every_dtype_survives_the_disk(tmp_path, dtype: torch.dtype):
    record = Record()
    for name, shape in (("matrix", (3, 5)), ("scalar", ()), ("empty", (0, 2))):
        record.add(
            0,
            0,
            "weight",
            name,
            (torch.arange(15) % 3)[: math.prod(shape)].reshape(shape).to(dtype),
        )
    record.save(tmp_path / "run")
    assert_bitwise_equal(Record.load(tmp_path / "run"), record)
    flip_bit(record[0, 0, "weight", "matrix"].view(torch.uint8), -1)
    assert_bitwise_different(Record.load(tmp_path / "run"), record)


@pytest.mark.parametrize("name", ["missing", "a_file"])
def test_a_spool_that_is_no_folder(tmp_path, name: str):
    """At once, not at the first large tensor."""
    (tmp_path / "a_file").write_text("")
    with pytest.raises(ValueError, match=rf"spool='.*{name}' is no folder: make it before the run"):
        Record(spool=tmp_path / name)


def test_large_tensors_are_written_piece_by_piece(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """A spooled record maps its file at once, so the last piece may not wait in a buffer."""
    monkeypatch.setattr(records, "_PIECE", 64)
    monkeypatch.setattr(records, "LARGE", 100)
    in_memory, spooled = Record(), Record(spool=tmp_path)
    for size in (64, 128, 150, 1001):
        for record in (in_memory, spooled):
            record.add(0, 0, "weight", str(size), torch.arange(size).to(torch.uint8))
    in_memory.save(tmp_path / "run")
    assert_bitwise_equal(spooled, in_memory)
    assert_bitwise_equal(Record.load(tmp_path / "run"), in_memory)
    flip_bit(in_memory[0, 0, "weight", "1001"], -1)
    assert_bitwise_different(Record.load(tmp_path / "run"), in_memory)


def test_bytes_that_a_file_does_not_have_are_refused(tmp_path):
    """A word in the middle is missing: each later tensor would be read eight bytes too early."""
    make_run().save(tmp_path / "run")
    whole = (tmp_path / "run").read_bytes()
    (tmp_path / "run").write_bytes(whole[:80] + whole[88:])
    with pytest.raises(ValueError, match=r"run was cut off: 8 bytes before its index are missing"):
        Record.load(tmp_path / "run")


def test_the_first_record_that_says_something_about_a_run_stands():
    parts = [
        Record(2, rank, {"side": side, side: "yes"}) for rank, side in enumerate(("eager", "graph"))
    ]
    assert Record.merged(parts).meta == {"side": "eager", "eager": "yes", "graph": "yes"}


def test_a_loaded_record_is_mapped_and_changing_it_changes_no_file(tmp_path):
    make_run().save(tmp_path / "run")
    loaded = Record.load(tmp_path / "run")
    flip_bit(loaded[1, 1, "weight", "lm_head.weight"])
    assert_bitwise_different(loaded, make_run())
    assert_bitwise_equal(Record.load(tmp_path / "run"), make_run())


def test_saving_that_fails_leaves_no_file(tmp_path):
    record = make_run()
    record.meta["no text"] = object()
    with pytest.raises(TypeError):
        record.save(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_large_tensors_of_a_spooled_record_are_on_disk_and_leave_nothing(tmp_path):
    record, large = Record(spool=tmp_path), torch.arange(LARGE, dtype=torch.uint8)
    record.add(0, 0, "weight", "large", large)
    record.add(0, 0, "weight", "small", large[:10])
    assert "deleted" in _mapping_of(record[0, 0, "weight", "large"])
    assert "deleted" not in _mapping_of(record[0, 0, "weight", "small"])
    assert list(tmp_path.iterdir()) == []
    in_memory = Record()
    for key, tensor in record.items():
        in_memory.add(*key, tensor)
    assert_bitwise_equal(record, in_memory)
    record.save(tmp_path / "run")
    assert_bitwise_equal(Record.load(tmp_path / "run"), in_memory)


def _mapping_of(tensor: torch.Tensor) -> str:
    """The line of /proc that says what this memory is mapped from."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(bound, 16) for bound in line.split()[0].split("-"))
        if start <= tensor.data_ptr() < end:
            return line
    raise AssertionError("the tensor is mapped nowhere")


def test_phases_come_in_the_order_of_a_step():
    """L4: random states before the loss, gradients before clipping before those after it."""
    one, other = Record(), Record()
    for phase in reversed(PHASES):
        one.add(0, 0, phase, "w", torch.zeros(1))
        other.add(0, 0, phase, "w", torch.ones(1))
    found = [difference.key.phase for difference in compare(one, other).differences]
    assert found == ["rng", "loss", "gradient", "clipped", "weight", "optimizer", "buffer"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Record(0), "a record of a run on 0 ranks"),
        (lambda: Record(2, rank=2), "rank 2 is not in a world of 2"),
        (
            lambda: Record().add(0, 0, "grad", "w", torch.ones(1)),
            "unknown phase 'grad': one of rng, loss, gradient",
        ),
        (
            lambda: Record().add(0, 1, "loss", "", torch.ones(1)),
            r"rank 1 does not belong to Record\(world_size=1",
        ),
        (
            lambda: Record(2, rank=1).add(0, 0, "loss", "", torch.ones(1)),
            r"rank 0 does not belong to Record\(world_size=2, rank=1",
        ),
        (lambda: make_run().add(0, 0, "loss", "loss", torch.ones(1)), "is recorded already"),
        (lambda: Record.merged([]), r"got world sizes \[\]"),
        (lambda: Record.merged([Record(2), Record(4)]), r"got world sizes \[2, 4\]"),
        (
            lambda: Record.merged([make_run(rank=0), make_run()]),
            r"ranks \[0\] are in more than one",
        ),
    ],
)
def test_bad_input(make, message: str):
    with pytest.raises(ValueError, match=message):
        make()


def test_tensors_are_named_by_their_way_through_containers():
    """The names are those of a state dict, so a difference is easy to find."""
    layer = torch.nn.BatchNorm1d(1)
    state = {
        "model": {"norm": layer, "w": torch.ones(1)},
        "optimizer": [{"exp_avg": torch.ones(1)}, layer, None],
    }
    norm = ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
    assert [key.name for key in entries(state)] == [
        *(f"model.norm.{name}" for name in norm),
        "model.w",
        "optimizer[0].exp_avg",
        *(f"optimizer[1].{name}" for name in norm),
    ]
    assert {key[:3] for key in entries(state)} == {(0, 0, "")}


def test_a_buffer_that_two_modules_share_is_there_under_both_names():
    """L1, as tied weights: a copy that only one side shares is no difference of names."""
    table, layers = torch.arange(3.0), torch.nn.ModuleList([torch.nn.Module(), torch.nn.Module()])
    for layer in layers:
        layer.register_buffer("rope", table)
    assert [key.name for key in entries(layers)] == ["0.rope", "1.rope"]


def test_a_tensor_without_values_is_refused():
    with pytest.raises(NoBytes, match="a meta tensor holds no values"):
        Record().add(0, 0, "weight", "w", torch.ones(1, device="meta"))
