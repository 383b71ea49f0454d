"""Tensors and numbers in the file of a record: written, and read back."""

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from pytest_gtrainer.graph.nodes import spell_dtype
from pytest_gtrainer.numerics.bits import byte_view
from pytest_gtrainer.over_time.files import Entry, Writer, entry_of, read_run, rows_of, values_of
from pytest_gtrainer.over_time.fingerprints import MODULUS, fingerprint

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32)
DTYPES += (torch.int16, torch.uint8, torch.bool, torch.complex64)


def read_back(folder, phases, *, values=True, places=None):
    """Write entries as one step of a record, and read them."""
    writer = Writer(folder, values=values)
    writer.begin({"world_size": 1})
    writer.step(3, phases, places or {})
    writer.end(None)
    writer.close()
    run = read_run(folder)
    assert run.notes == []
    return run.steps[3]


def with_bytes(data, dtype, shape):
    """A tensor of these bytes, whose last two dimensions may have changed places."""
    made = torch.tensor(data, dtype=torch.uint8).view(dtype).view(shape)
    return made.transpose(-1, -2).contiguous().transpose(-1, -2) if len(shape) > 1 else made


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(DTYPES[:-2]))
    shape = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    length = dtype.itemsize
    for size in shape:
        length *= size
    data = draw(st.lists(st.integers(0, 255), min_size=length, max_size=length))
    return with_bytes(data, dtype, shape) if length else torch.empty(shape, dtype=dtype)


@hypothesis.given(st.lists(tensors(), min_size=1, max_size=4))
@hypothesis.settings(deadline=None, max_examples=30)
def test_tensors_are_read_as_they_were_written(tmp_path_factory, given):
    """Several in one step, each with its own bytes, also after the trainer has changed them."""
    folder = tmp_path_factory.mktemp("a") / "run"
    entries, expected = {}, {}
    for number, tensor in enumerate(given):
        entries[f"w{number}"], expected[f"w{number}"] = entry_of(tensor, keep=True), tensor.clone()
        tensor.zero_()
    found = read_back(folder, {"clip": entries})["clip"]
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        [entry] = found[name][0]
        number = f"{int(fingerprint(tensor)) % MODULUS:016x}"
        assert entry == Entry((number,), spell_dtype(tensor.dtype), tuple(tensor.shape))
        assert str(entry) == f"{spell_dtype(tensor.dtype)}{list(tensor.shape)}"
        kept = values_of(folder, 0, entry)
        if not tensor.numel():
            assert kept is None
            continue
        assert kept.dtype == tensor.dtype
        assert torch.equal(byte_view(kept), byte_view(tensor))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.tensor(2**62 + 1), f"{2**62 + 1} as i64[]"),
        (torch.tensor(-7, dtype=torch.int32), "-7 as i32[]"),
        (torch.tensor(True), "1 as b8[]"),
        (torch.tensor(0.1, dtype=torch.float64), "0.1 as f64[]"),
        (torch.tensor(0.5, dtype=torch.bfloat16), "0.5 as bf16[]"),
        (torch.tensor(float("nan")), "nan as f32[]"),
        (torch.tensor(float("-inf")), "-inf as f32[]"),
        (0.25, "0.25"),
        (3, "3"),
        (True, "True"),
        ("not recorded: it is on the meta device", "not recorded: it is on the meta device"),
    ],
)
def test_numbers_are_read_as_they_are(tmp_path, value, words):
    entry = value if isinstance(value, str) else entry_of(value)
    [found] = read_back(tmp_path / "a", {"loss": {"root": entry}})["loss"]["root"][0]
    assert str(found) == words


def test_numbers_of_several_dtypes_stand_in_one_step_each_at_its_name(tmp_path):
    given = {}
    for place in range(12):
        dtype = (torch.float32, torch.int64, torch.float64)[place % 3]
        given[f"w{place}"] = entry_of(torch.tensor(place, dtype=dtype))
    given["t"] = entry_of(torch.arange(3.0))
    found = read_back(tmp_path / "a", {"load": given, "loss": {"root": {"calls": [0.5]}}})
    for place in range(12):
        [entry] = found["load"][f"w{place}"][0]
        assert float(entry.numbers[0]) == place
    words = f"{int(fingerprint(torch.arange(3.0))) % MODULUS:016x}"
    assert found["load"]["t"][0][0].numbers == (words,)
    assert [each.numbers for each in found["loss"]["root"][0]] == [("0.5",)]


def test_calls_of_a_name_go_on_in_the_next_line_of_a_step(tmp_path):
    """Each optimiser of a step ends a line; other entries are replaced."""
    writer = Writer(tmp_path / "a")
    writer.begin({"world_size": 1})
    for value in (1.0, 2.0):
        phases = {"loss": {"root": {"calls": [value, value + 0.5]}}, "clip": {f"w{value}": value}}
        writer.step(0, {**phases, "optimiser": {"lr": value}}, {"step": f"a.py:{value}"})
    writer.step(5, {}, {"step": "b.py:1"})
    writer.end(ValueError("x"))
    writer.close()
    run = read_run(tmp_path / "a")
    assert [each.numbers[0] for each in run.steps[0]["loss"]["root"][0]] == [
        *("1.0", "1.5", "2.0", "2.5")
    ]
    assert list(run.steps[0]["clip"]) == ["w1.0", "w2.0"]
    assert run.steps[0]["optimiser"]["lr"][0][0].numbers == ("2.0",)
    assert run.places == {0: {"step": "a.py:1.0"}, 5: {"step": "b.py:1"}}
    assert run.notes == ["rank 0 ended after step 5 by ValueError"]


@pytest.mark.parametrize("rows", [0, 1, 2, 1023, 1024, 1025])
def test_a_batch_of_up_to_1024_rows_has_a_fingerprint_for_each(tmp_path, rows):
    batch = torch.arange(2 * rows).view(rows, 2)
    [found] = read_back(tmp_path / "a", {"data": {"x": rows_of(batch)}})["data"]["x"][0]
    assert found.shape == (rows, 2)
    if 0 < rows <= 1024:
        assert (found.part, found.kind) == ("rows", "i64[2]")
        assert found.numbers == tuple(f"{int(fingerprint(row)) % MODULUS:016x}" for row in batch)
    else:
        assert (found.part, found.kind, len(found.numbers)) == (None, f"i64[{rows}, 2]", 1)


def test_a_number_as_input_and_a_complex_number_have_no_rows(tmp_path):
    phases = {"data": {"x": rows_of(torch.tensor(2)), "z": rows_of(torch.tensor(1 + 2j))}}
    found = read_back(tmp_path / "a", phases)["data"]
    assert str(found["x"][0][0]) == "2 as i64[]"
    assert (found["z"][0][0].dtype, found["z"][0][0].shape) == ("c64", ())
    assert found["z"][0][0].numbers == (f"{int(fingerprint(torch.tensor(1 + 2j))) % MODULUS:016x}",)


@pytest.mark.parametrize("place", [None, (0, 7), (0, 9), (9, 8), (999, 8), (0, 0), (0, -8)])
def test_bytes_that_are_not_those_of_the_tensor_are_no_values(tmp_path, place):
    (tmp_path / "rank0.values").write_bytes(bytes(16))
    entry = Entry(("0",), "f32", (2,), place=place)
    assert values_of(tmp_path, 0, Entry(("0",), "f32", (2,), place=(0, 8))).tolist() == [0, 0]
    assert values_of(tmp_path, 0, entry) is None
    assert values_of(tmp_path, 1, Entry(("0",), "f32", (2,), place=(0, 8))) is None
    assert values_of(tmp_path, 0, Entry(("0",), "f128", (2,), place=(0, 8))) is None


def test_bytes_of_a_part_have_the_shape_of_the_part(tmp_path):
    (tmp_path / "rank2.values").write_bytes(bytes([0, 1, 2, 3]))
    entry = Entry(("0",), "u8", (8, 2), ((4, 0), (2, 2)), (0, 4))
    assert values_of(tmp_path, 2, entry).tolist() == [[0, 1], [2, 3]]


@pytest.mark.gt_world("fake", size=4)
def test_parts_of_a_tensor_are_those_of_its_own_placements(gt_world):
    """Also where mesh and shape are the same, and one tensor comes after the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(12.0).view(4, 3)
    parts = []
    for placements in (
        (Shard(0), Shard(0)),
        (Shard(0), Replicate()),
        (Shard(0), Shard(1)),
        (Replicate(), Replicate()),
        (Replicate(), Partial()),
    ):
        if Partial() in placements:
            part = DTensor.from_local(whole, mesh, placements)
        else:
            part = distribute_tensor(whole, mesh, placements)
        parts.append(entry_of(part).rest[2])
    assert parts == [
        *([[0, 0], [1, 3]], [[0, 0], [2, 3]], [[0, 0], [2, 2]], [[0, 0], [4, 3]], "partial"),
    ]


@pytest.mark.parametrize("values", [False, True])
def test_a_folder_that_holds_a_record_is_refused_before_anything_is_written(tmp_path, values):
    read_back(tmp_path / "a", {"loss": {"root": 1.0}}, values=values)
    names = ["rank0.jsonl", "rank0.values"] if values else ["rank0.jsonl"]
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == names
    with pytest.raises(ValueError, match=r"a holds a record already: name another folder, or rem"):
        Writer(tmp_path / "a")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"file/a cannot be made: Not a directory"):
        Writer(tmp_path / "file" / "a")
