"""A failure that comes from state of earlier tests in warm ranks says so."""

import re

import pytest

from tests.worlds.conftest import Suite

pytestmark = pytest.mark.second_tier

SUITE = """
import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.gt_world("ranks", size=2)
NAMES = {}
CALLS = []

class Wrapped:
    cache = {}

def name_of_group():
    return dist.new_group([0, 1]).group_name

def test_fills_a_table(): NAMES["first"] = name_of_group()

def test_reads_the_table():
    torch.ops._c10d_functional.all_reduce(torch.ones(2), "sum", NAMES["first"])

def test_fills_a_table_of_a_class(): Wrapped.cache[4] = ("gather", name_of_group())

def test_reads_the_table_of_a_class():
    torch.ops._c10d_functional.all_reduce(torch.ones(2), "sum", Wrapped.cache[4][1])

class Registry:
    group = None

    def __init__(self): self.groups = []

REGISTRY = Registry()

def test_fills_attributes():
    Registry.group = name_of_group()
    REGISTRY.groups.append(dist.new_group([0, 1]))

def reduce(name): return torch.ops._c10d_functional.all_reduce(torch.ones(2), "sum", name)

def test_reads_an_attribute_of_a_class(): reduce(Registry.group)

def test_reads_an_instance(): dist.get_rank(REGISTRY.groups[0])

def test_reduces_on_an_instance(): dist.all_reduce(torch.ones(1), group=REGISTRY.groups[0])

def test_sends_on_an_instance():
    if dist.get_rank() == 0:
        REGISTRY.groups[0].send([torch.ones(1)], 1, 0).wait()
    else:
        REGISTRY.groups[0].recv([torch.ones(1)], 0, 0).wait()

def test_only_holds_an_instance(): dist.all_reduce(torch.ones(1))

def test_reduces_from_outside_on_an_instance(gt_ranks): gt_ranks.run(reduce_on_the_instance, size=2)

def reduce_on_the_instance(): dist.all_reduce(torch.ones(1), group=REGISTRY.groups[0])

def test_only_holds_an_instance_from_outside(gt_ranks): gt_ranks.run(reduce_on_all, size=2)

def reduce_on_all(): dist.all_reduce(torch.ones(1))

def test_reads_the_key_of_a_table(): dist.get_process_group_ranks(REGISTRY.groups[0])

def test_wraps_the_error():
    try:
        reduce(Registry.group)
    except RuntimeError as error:
        raise ValueError("the step failed") from error

def test_calls_from_outside(gt_ranks): gt_ranks.run(reduce_the_attribute, size=2)

def reduce_the_attribute(): reduce(Registry.group)

def test_names_another_kind_of_group():
    raise ValueError(f"parameter group {Registry.group} has no lr")

def test_names_a_group_that_never_was():
    torch.ops._c10d_functional.all_reduce(torch.ones(2), "sum", "987")

def test_fails_the_second_time():
    CALLS.append(1)

def test_counts_calls():
    assert len(CALLS) == 0, "called before"

def test_always_fails():
    assert dist.get_rank() == 9

def test_has_a_wrong_golden(gt_golden): gt_golden.check("a line\\n")

def test_passes_behind_it():
    assert dist.get_world_size() == 2
"""


@pytest.fixture(scope="module")
def run(module_suite):
    module_suite.write("test_it.py", SUITE)
    golden = module_suite.folder / "golden" / "test_it" / "test_has_a_wrong_golden.txt"
    golden.parent.mkdir(parents=True)
    golden.write_text("another line\n")
    return module_suite.run("--gt-fresh-ranks=on-failure", "--show-capture=no", ".")


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """A run whose failures do not change its ranks; captured sections are not shown."""
    suite = Suite(tmp_path_factory.mktemp("warm") / "suite")
    suite.write("test_it.py", SUITE)
    return suite.run(
        "--show-capture=no",
        "-k",
        "attribute or instance or key or wraps or outside or another_kind",
    )


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("test_reads_an_attribute_of_a_class", "test_it.Registry.group"),
        ("test_reads_an_instance", "test_it.REGISTRY"),
        ("test_reads_the_key_of_a_table", "test_it.REGISTRY"),
        ("test_reduces_on_an_instance", "test_it.REGISTRY"),
        ("test_sends_on_an_instance", "test_it.REGISTRY"),
        ("test_reduces_from_outside_on_an_instance", "test_it.REGISTRY"),
        ("test_wraps_the_error", "test_it.Registry.group"),
        ("test_calls_from_outside", "test_it.Registry.group"),
    ],
)
def test_wherever_the_group_is_kept_and_named(warm, name, table):
    """The name or the object is found, also in the failure itself, which a JUnit file has, too."""
    said = warm.text(name)
    assert "was made by an earlier test in these processes, and has ended." in said, warm.output
    assert table in re.split(
        "[:,] ?| in ", next(line for line in said.splitlines() if "It is still in" in line)
    )


@pytest.mark.parametrize(
    "name", ["test_only_holds_an_instance", "test_only_holds_an_instance_from_outside"]
)
def test_a_group_that_is_only_held_is_no_fault(warm, name):
    """The twin; also behind a test that has used it."""
    assert warm.outcome(name) == "passed"


def test_a_group_of_parameters_is_no_process_group(warm):
    """The twin."""
    said = warm.text("test_names_another_kind_of_group")
    assert "has no lr" in said
    assert "earlier test" not in said


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("test_reads_the_table", "test_it.NAMES"),
        ("test_reads_the_table_of_a_class", "test_it.Wrapped.cache"),
    ],
)
def test_a_group_of_an_ended_world_is_named_with_the_table_that_holds_it(run, name, table):
    said = run.output.partition(f"_ {name} _")[2].partition("\n____")[0]
    assert "was made by an earlier test in these processes, and has ended." in said, run.output
    line = next(line for line in said.splitlines() if "It is still in " in line)
    assert table in re.split("[:,] ?| in ", line)
    assert line.endswith(": empty that where the world ends, in a fixture.")
    assert "pytest_gtrainer" not in line


def test_a_group_that_never_was_is_not_one_of_an_ended_world(run):
    """The twin."""
    said = run.output.partition("_ test_names_a_group_that_never_was _")[2].partition("\n____")[0]
    assert "987" in said
    assert "has ended" not in said


def test_a_failure_that_does_not_happen_on_fresh_ranks_says_so(run):
    assert run.outcome("test_counts_calls") == "failed"
    assert "The test passes on fresh ranks. Either something that earlier tests left" in run.text(
        "test_counts_calls"
    )


def test_a_failure_that_happens_again_says_so(run):
    """The twin; the next test runs on ranks that work."""
    assert run.outcome("test_always_fails") == "failed"
    assert "The test fails on fresh ranks, too." in run.text("test_always_fails")
    assert run.outcome("test_passes_behind_it") == "passed"
    assert "fresh ranks" not in run.text("test_passes_behind_it")


def test_a_golden_that_differs_does_not_come_of_the_ranks(run):
    """The ranks have passed; the parent judges goldens."""
    assert run.outcome("test_has_a_wrong_golden") == "failed"
    assert "fresh ranks" not in run.text("test_has_a_wrong_golden")


FAILS_ONCE = """
import os
import pytest

@pytest.mark.gt_world("ranks", size=1)
def test_fails_once():
    assert os.path.exists("mark") or os.mkdir("mark"), "the first time alone"
"""


def test_earlier_tests_are_not_blamed_for_a_failure_on_new_ranks(suite):
    suite.write("test_it.py", FAILS_ONCE)
    said = suite.run("--gt-fresh-ranks=on-failure").text("test_fails_once")
    assert "the first time alone" in said
    assert "The test was not run again: its ranks were new, no test had run on them." in said
    assert "passes on fresh ranks" not in said


@pytest.mark.parametrize(
    ("options", "ini", "is_rerun"),
    [
        ((), "", False),
        ((), "gt_fresh_ranks = on-failure", True),
        (("--gt-fresh-ranks=on-failure",), "", True),
    ],
)
def test_a_failure_is_tried_again_only_on_request(suite, options, ini, is_rerun):
    suite.write("pytest.ini", f"[pytest]\n{ini}\n")
    suite.write("test_it.py", SUITE)
    run = suite.run("-k", "fails_the_second or counts", *options)
    assert ("fresh ranks" in run.text("test_counts_calls")) == is_rerun
    assert run.status == 1


@pytest.mark.parametrize(
    ("options", "ini", "says"),
    [
        (("--gt-fresh-ranks=never",), "", "--gt-fresh-ranks: ignored explicit argument 'never'"),
        (
            (),
            "gt_fresh_ranks = perhaps",
            "gt_fresh_ranks=perhaps: expected one of true, false, on-failure",
        ),
    ],
)
def test_another_value_is_a_usage_error(suite, options, ini, says):
    suite.write("pytest.ini", f"[pytest]\n{ini}\n")
    suite.write("test_it.py", "def test_it(): pass")
    run = suite.run(*options)
    assert run.status == 4
    assert says in run.output
