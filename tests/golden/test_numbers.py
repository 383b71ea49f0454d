"""Numbers as goldens: exact, one entry an environment, never judged by those of another."""

import json
import math
import struct

import pytest
import torch  # once for all runs in this process

from pytest_gtrainer.golden import values
from pytest_gtrainer.golden.compare import judge

FILE = "test_it/test_loss.numbers.json"
SOURCE = "def test_loss(gt_golden): gt_golden.check({})"
LOSSES = {"losses": [0.1 + 0.2, 1e-300, 2.0], 10: True, 9: None, "digest": "xxh3_128:5f0c"}


def environments(goldens) -> list[dict[str, object]]:
    return [entry["environment"] for entry in json.loads(goldens()[FILE])["entries"]]


def of_another(text: str) -> str:
    """A golden as another machine would have made it."""
    content = json.loads(text)
    (entry,) = content["entries"]
    entry["environment"] |= {"torch": "2.12.0", "threads": 64}
    entry["values"] = [7.0]
    return json.dumps(content)


def test_a_file_tells_the_environment_and_every_bit(run_here, goldens):
    run_here(SOURCE.format(LOSSES), "--gt-create-goldens").assert_outcomes(passed=1)
    content = json.loads(goldens()[FILE])
    (entry,) = content.pop("entries")
    assert content == {
        "gtrainer": "numbers v1",
        "test": "test_it.py::test_loss",
        "remake": "pytest test_it.py::test_loss --gt-update-goldens",
    }
    assert entry["environment"] == {
        "torch": torch.__version__.partition("+")[0],
        "device": "cpu",
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }
    assert list(entry["values"]) == ["9", "10", "digest", "losses"]
    assert entry["values"]["losses"] == LOSSES["losses"]
    run_here(None).stdout.fnmatch_lines(["goldens   1 equal"])


def test_the_last_bit_counts_and_is_named(run_here, goldens):
    run_here(SOURCE.format([1.0, 2.0]), "--gt-create-goldens")
    before = goldens()
    result = run_here(SOURCE.format([1.0, math.nextafter(2.0, 3.0)]))
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            f"*golden/{FILE} differs",
            "*in this environment (torch 2*, device cpu, instructions *, threads *)",
            "*[[]1[]]: 2.0 became 2.0000000000000004",
            "*pytest test_it.py::test_loss --gt-update-goldens",
            "goldens   1 different",
        ]
    )
    assert goldens() == before


def test_in_another_environment_they_are_recorded_and_not_judged(run_here, goldens, pytester):
    run_here(SOURCE.format([1.0]), "--gt-create-goldens")
    file = pytester.path / "golden" / FILE
    file.write_text(of_another(file.read_text()))
    before = goldens()
    result = run_here(None, "--gt-artifacts=out")
    result.assert_outcomes(passed=1)
    recorded = "out/test_it/test_loss/obtained.numbers.json"
    result.stdout.fnmatch_lines(
        [
            "goldens   1 not judged",
            f"not judged: golden/{FILE} has no numbers for this environment (torch 2*, threads *), "
            f"but for torch 2.12.0, *, threads 64; obtained: {recorded}",
        ]
    )
    (entry,) = json.loads((pytester.path / recorded).read_text())["entries"]
    assert entry["values"] == [1.0]
    assert goldens() == before


@pytest.mark.second_tier("--gt-update-goldens")
@pytest.mark.parametrize("flag", ["--gt-update-goldens", "--gt-create-goldens"])
def test_a_flag_adds_this_environment_and_keeps_the_others(run_here, goldens, pytester, flag):
    run_here(SOURCE.format([1.0]), "--gt-create-goldens")
    file = pytester.path / "golden" / FILE
    file.write_text(of_another(file.read_text()))
    run_here(None, flag).stdout.fnmatch_lines(["goldens   1 created"])
    assert [entry["values"] for entry in json.loads(goldens()[FILE])["entries"]] == [[7.0], [1.0]]
    run_here(None).stdout.fnmatch_lines(["goldens   1 equal"])
    run_here(SOURCE.format([2.0]), "--gt-update-goldens").stdout.fnmatch_lines(
        ["goldens   1 updated"]
    )
    assert [entry["values"] for entry in json.loads(goldens()[FILE])["entries"]] == [[7.0], [2.0]]


@pytest.mark.second_tier("{release}+git", "{release}+cu", "{release}-cpu")
@pytest.mark.parametrize(
    ("made", "device", "outcome"),
    [
        ("{release}+cpu", "cpu", "equal"),
        ("{release}+cu132", "cpu", "equal"),
        ("{release}", "cpu", "equal"),
        ("{release}+git1f2e3d", "cpu", "not judged"),
        ("2.12.0+cpu", "cpu", "not judged"),
        ("{release}+cpu", "cuda NVIDIA H100", "not judged"),
    ],
)
def test_the_tag_of_a_wheel_changes_no_bit_on_the_cpu(
    run_here, goldens, pytester, made, device, outcome
):
    """Neither in files of before, which hold it; another source, a build of one's own, another
    device do.
    """
    run_here(SOURCE.format([1.0]), "--gt-create-goldens")
    content = json.loads(goldens()[FILE])
    release = torch.__version__.partition("+")[0]
    content["entries"][0]["environment"] |= {
        "torch": made.format(release=release),
        "device": device,
    }
    (pytester.path / "golden" / FILE).write_text(json.dumps(content))
    run_here(None).stdout.fnmatch_lines([f"goldens   1 {outcome}"])


def test_of_the_environment_the_tag_of_a_wheel_counts_on_a_gpu_alone():
    """The tag identifies cuBLAS and cuDNN there."""
    found = [
        values.decisive({"torch": "2.13.0+cu130", "device": device})["torch"]
        for device in ("cpu", "cuda H100")
    ]
    assert found == ["2.13.0", "2.13.0+cu130"]


def test_an_entry_keeps_its_place_among_those_of_other_environments():
    fields, (one, two, three) = {"test": "a"}, [values.Entry({"threads": n}, n) for n in (1, 2, 3)]
    golden, again = (
        values.text_of(fields, [one, two, three]),
        values.text_of(fields, [values.Entry({"threads": 2}, 7)]),
    )
    assert [entry.values for entry in values.entries_of(values.merged(golden, again))] == [1, 7, 3]


def test_wheels_of_one_release_share_an_entry(run_here, goldens, pytester):
    run_here(SOURCE.format([1.0]), "--gt-create-goldens")
    content = json.loads(goldens()[FILE])
    content["entries"][0]["environment"]["torch"] += "+cu132"
    (pytester.path / "golden" / FILE).write_text(json.dumps(content))
    run_here(SOURCE.format([2.0]), "--gt-update-goldens").stdout.fnmatch_lines(
        ["goldens   1 updated"]
    )
    assert [entry["values"] for entry in json.loads(goldens()[FILE])["entries"]] == [[2.0]]


NAN = struct.unpack("<d", struct.pack("<Q", 0xFFF8000000000000))[0]
SPELLINGS = [{1: 0.5}, {"1": 0.5}, {"'1'": 0.5}, {"NaN": 1, -2: 0}, {"x": NAN}, [{3: {4: NAN}}]]


@pytest.mark.parametrize("numbers", SPELLINGS, ids=str)
def test_keys_keep_their_quotes_when_a_golden_is_updated(numbers):
    """Keys of the entry that is replaced, and of the others."""
    fields = {"test": "a"}
    plain = values.plain(numbers)
    entries = [values.Entry({"threads": threads}, plain) for threads in (1, 2)]
    golden = values.text_of(fields, entries)
    assert values.merged(golden, values.text_of(fields, entries[1:])) == golden


def test_an_accepted_change_of_numbers_by_step_is_equal_afterwards(run_here, goldens):
    run_here(SOURCE.format({1: 0.5}), "--gt-create-goldens")
    run_here(SOURCE.format({1: 0.25}), "--gt-update-goldens")
    run_here(None).assert_outcomes(passed=1)
    assert [entry["values"] for entry in json.loads(goldens()[FILE])["entries"]] == [{"1": 0.25}]


CHANGES = ("torch.set_num_threads(torch.get_num_threads() + 1)", "torch.set_default_device('meta')")


@pytest.mark.parametrize("change", CHANGES, ids=["threads", "device"])
def test_the_environment_is_the_one_of_the_check(run_here, goldens, change):
    run_here(SOURCE.format([1.0]), "--gt-create-goldens")
    setup = f"""
import pytest, torch

@pytest.fixture
def f():
    threads = torch.get_num_threads()
    {change}
    yield
    torch.set_num_threads(threads)
    torch.set_default_device(None)

"""
    result = run_here(setup + SOURCE.format([1.0]).replace("(gt_golden)", "(gt_golden, f)"))
    result.stdout.fnmatch_lines(["goldens   1 not judged"])


CPU, CUDA_WHEEL = ({"torch": f"2.13.0+{tag}", "device": "cpu"} for tag in ("cpu", "cu132"))


def file_of(*entries: dict[str, object], **others: object) -> str:
    """A golden with these entries, of an empty environment if they name none."""
    complete = [{"environment": {}, **entry} if "values" in entry else entry for entry in entries]
    return json.dumps({"gtrainer": "numbers v1", "entries": complete, **others})


DAMAGED = [
    ("{", "is not JSON (*): restore or remake it"),
    ("[" * 100_000, "is nested too deeply: restore or remake it"),
    ("[]", 'does not say "gtrainer": "numbers v1": restore or remake it'),
    (
        '{"gtrainer": "numbers v1"}',
        "has no list of entries with environment and values: restore or remake it",
    ),
    (
        '{"gtrainer": "numbers v1", "entries": [{"values": 1}]}',
        "has no list of entries *: restore or remake it",
    ),
    (
        '{"gtrainer": "numbers v9"}',
        "has format v9 and this pytest-gtrainer reads v1: * a newer one, so upgrade",
    ),
    ('{"gtrainer": "numbers v1", "entries": []}', "has no list of entries *: restore or remake it"),
    ('{"gtrainer": "numbers v1", "entries": {}}', "has no list of entries *: restore or remake it"),
    (file_of({"values": 1}, {"environment": {}}), "has no list of entries *: restore or remake it"),
    (
        file_of({"values": 1}, {"values": 2}),
        "has two entries with different values for one environment *: remove one",
    ),
    (file_of({"values": 1}, {"values": 1.0}), "has two entries with different values for *"),
    (
        file_of({"environment": {"threads": 1}, "values": 1}, {"values": 1}, {"values": 2}),
        "has two entries with *",
    ),
    (
        file_of({"environment": CPU, "values": 1}, {"environment": CUDA_WHEEL, "values": 2}),
        "has two entries with different values for one environment (torch 2.13.0, device cpu): "
        "remove one",
    ),
    (
        file_of({"values": 2}).replace('"values": 2', '"values": 1, "values": 2'),
        "has the key 'values' twice *",
    ),
    (
        file_of({"values": {"a": 1}}).replace('"a": 1', '"a": 1, "a": 2'),
        "has the key 'a' twice in one object: *",
    ),
    (
        file_of({"values": 1}, entries_=[]).replace("entries_", "entries"),
        "has the key 'entries' twice *",
    ),
    (file_of({"values": 1}, value=2), "has the unknown key 'value', which nothing compares: *"),
    (
        file_of({"values": 1, "Values": 2}),
        "has the unknown key 'Values', which nothing compares: *",
    ),
    (file_of({"values": 1}).replace(": 1}", ": nan}"), "is not JSON (*): restore or remake it"),
    ("<<<<<<< ours\n{}", "has merge conflict marks at line 1: resolve the merge, or remake it"),
]


@pytest.mark.parametrize(("text", "sentence"), DAMAGED)
def test_a_damaged_file_is_one_sentence_and_kept(run_here, put_goldens, goldens, text, sentence):
    """The entries of other environments are in it."""
    put_goldens(FILE, text=text)
    result = run_here(SOURCE.format(1), "--gt-update-goldens")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"*golden/{FILE} differs", f"*the golden {sentence}"])
    assert goldens() == {FILE: text}


@pytest.mark.parametrize(
    "text",
    [
        file_of(
            {"environment": CPU, "values": float("nan")},
            {"environment": CUDA_WHEEL, "values": float("nan")},
        ),
        file_of({"values": {"b": 1, "a": 2}}, {"values": {"a": 2, "b": 1}}),
    ],
)
def test_two_entries_that_say_the_same_are_no_damage(text):
    """Files of before have one for each wheel."""
    assert len(values.entries_of(text)) == 2


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([float("nan")], "[0] is NaN: other *, so it proves nothing"),
        (
            {"loss": 1.0, "norm": float("-inf"), "last": [float("nan")]},
            "last[0] is NaN, and 1 more: *",
        ),
        ([1e308], None),
        (["NaN"], None),
        ({"losses": []}, "no value is in it: other *, so it proves nothing"),
        ([], "no value is in it: *"),
        ({"losses": [], "steps": 0}, None),
    ],
)
@pytest.mark.parametrize(
    "flag", ["--gt-create-goldens", "--gt-unused-goldens=warn"], ids=["created", "equal"]
)
def test_numbers_that_prove_nothing_are_named_in_the_summary(run_here, value, said, flag):
    """V6"""
    run_here("from math import inf, nan\n" + SOURCE.format(value), "--gt-create-goldens")
    result = run_here(None, flag)
    result.assert_outcomes(passed=1)
    lines = [line for line in result.outlines if line.startswith("idle ")]
    assert len(lines) == (said is not None)
    if said is not None:
        result.stdout.fnmatch_lines([f"idle      1 golden/{FILE}: {said.replace('[', '[[]')}"])


# -- values


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0.0, -0.0),
        (1, 1.0),
        (True, 1),
        ([], {}),
        ([1], [1, 2]),
        ({"a": 1}, {"a": 1, "b": None}),
        (float("inf"), 1e308),
        ("1", 1),
        (None, False),
        ([[], 1], [[1], 1]),
    ],
)
def test_what_is_not_the_same_differs(one, other):
    entries = [
        values.text_of({}, [values.Entry({}, values.plain(value))]) for value in (one, other)
    ]
    assert judge("numbers", *entries).outcome == "different"
    assert judge("numbers", entries[0], entries[0]).outcome == "equal"


@pytest.mark.parametrize(
    "value", [float("nan"), 5e-324, 0.1, -0.0, 2**70, "ü\n\u2028", {"a.b": {"": []}}]
)
def test_a_value_survives_its_text(value):
    """NaN included, which is not equal to itself."""
    (entry,) = values.entries_of(
        values.text_of({}, [values.Entry({"torch": "x"}, values.plain(value))])
    )
    assert repr(entry.values) == repr(value)


def nan_of(bits):
    return struct.unpack("<d", struct.pack("<Q", bits))[0]


ALIKE = [
    {1: 0},
    {"1": 0},
    {"'1'": 0},
    {1: 0, "1": 0},
    {-1: 0},
    {"-1": 0},
    {"01": 0},
    float("nan"),
    -nan_of(0x7FF8000000000000),
    nan_of(0x7FF8000000000001),
    nan_of(0xFFF8000000000001),
    nan_of(0x7FF0000000000001),
    "NaN",
    {"NaN": "0xfff8000000000000"},
    {"NaN": float("nan")},
    {"'NaN'": "0xfff8000000000000"},
]


@pytest.mark.parametrize("one", range(len(ALIKE)))
def test_keys_and_nans_that_look_alike_differ(one):
    texts = []
    for value in ALIKE:
        entry = values.Entry({"torch": "x"}, values.plain({"nested": [value]}))
        texts.append(values.text_of({}, [entry]))
    equal = [judge("numbers", texts[one], each).outcome == "equal" for each in texts]
    assert equal == [other == one for other in range(len(ALIKE))]


def test_a_nan_of_other_bits_is_named_as_one():
    assert values.not_a_proof(values.plain({"loss": [nan_of(0xFFF8000000000000)]})) == [
        "loss[0] is NaN 0xfff8000000000000"
    ]


def test_the_order_of_keys_does_not_count():
    one, other = values.plain({"b": 1, "a": 2}), values.plain({"a": 2, "b": 1})
    assert values.text_of({}, [values.Entry({}, one)]) == values.text_of(
        {}, [values.Entry({}, other)]
    )


@pytest.mark.parametrize(
    ("value", "error", "sentence"),
    [
        ([{"a": {1}}], TypeError, "numbers are made of int, *; not of set at [0]['a']"),
        (
            [torch.zeros(2)],
            TypeError,
            "*; not of Tensor at [0]: give its digest, or item() of a single value",
        ),
        ({1.5: 0}, TypeError, "keys of numbers are str or int; not 1.5"),
    ],
)
def test_what_is_no_number_is_refused_with_its_place(value, error, sentence):
    from fnmatch import fnmatchcase

    with pytest.raises(error) as raised:
        values.plain(value)
    assert fnmatchcase(str(raised.value), sentence.replace("[", "[[]"))


@pytest.mark.parametrize("sign", [1, -1])
def test_integers_of_which_python_reads_no_text_are_refused(sign):
    longest = sign * (10**4300 - 1)
    json.loads(values.text_of({}, [values.Entry({}, values.plain([longest]))]))
    for value, place in (
        (longest + sign, "an integer has more"),
        ({"a": [0, longest + sign]}, r"an integer at \['a'\]\[1\] has more"),
        ({longest + sign: 0}, "an integer at .* has more"),
    ):
        with pytest.raises(ValueError, match=rf"{place} than 4,300 digits, .*: give hex\(number\)"):
            values.plain(value)


def test_keys_of_many_digits_are_sorted_as_numbers():
    names = ["9" * 5000, "10" * 3000, "7", "07", "x.12", "x.3", "0"]
    ordered = ["0", "7", "07", "9" * 5000, "10" * 3000, "x.3", "x.12"]
    assert list(values.plain(dict.fromkeys(names, 0))) == [
        f"'{name}'" if name.isdecimal() else name for name in ordered
    ]


def test_numbers_nested_in_themselves_are_refused():
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(ValueError, match="nested more than 50 deep"):
        values.plain(endless)


def test_a_difference_names_a_dozen_places_at_most():
    said = values.differences(list(range(100)), list(range(1, 101)))
    assert said[0] == "[0]: 0 became 1"
    assert said[-1] == "… and 88 more of 100 values"
    assert len(said) == 13
