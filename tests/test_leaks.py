"""A test that leaves a switch of torch changed is named; one that puts it back, and innocent ones,
are not.
"""

import re
from pathlib import Path

import pytest
import torch

# A run inside this process forgets what it has imported, and libraries of operators cannot be
# registered again.
import torch._dynamo
import torch._inductor.test_operators
import torch.distributed._functional_collectives
import torch.utils.flop_counter

from pytest_gtrainer import facts
from pytest_gtrainer.worlds import hygiene

LEAKY = """
    import pytest, torch

    @pytest.fixture
    def borrowed():
        torch.backends.cudnn.benchmark = True
        yield
        torch.backends.cudnn.benchmark = False

    @pytest.fixture(scope="module")
    def for_all():
        torch.set_default_dtype(torch.float64)
        yield
        torch.set_default_dtype(torch.float32)

    def test_before(borrowed): pass
    def test_leaky(): torch.backends.cudnn.deterministic = True
    def test_after(): assert torch.backends.cudnn.deterministic
    def test_puts_it_back(): torch.backends.cudnn.deterministic = False
    def test_first_of_module(for_all): pass
    def test_last_of_module(for_all): assert torch.get_default_dtype() == torch.float64
"""


@pytest.fixture(autouse=True)
def put_back(monkeypatch: pytest.MonkeyPatch):
    """Put back what these tests leak in this very process; their reports are not for the summary of
    the suite.
    """
    monkeypatch.setattr(facts, "_sinks", [])
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)


def test_the_test_that_leaks_is_named_and_no_other(pytester: pytest.Pytester):
    """K3"""
    pytester.makepyfile(LEAKY)
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(passed=6)
    warnings = [line for line in result.outlines if "LeakedFlagWarning" in line]
    assert len(warnings) == 2
    assert (
        "::test_leaky changed torch.backends.cudnn.deterministic from False to True and did "
        "not put it back" in (warnings[0])
    )
    assert (
        "::test_puts_it_back changed torch.backends.cudnn.deterministic from True to False"
        in warnings[1]
    )
    result.stdout.fnmatch_lines(
        ["leaked    1 *::test_leaky changed torch.backends.cudnn.deterministic *"]
    )


def test_a_leak_can_fail_the_test(pytester: pytest.Pytester):
    pytester.makepyfile(LEAKY)
    result = pytester.runpytest_inprocess("--gt-leaked-flags=fail")
    result.assert_outcomes(passed=6, errors=2)
    result.stdout.fnmatch_lines(["*ERROR at teardown of test_leaky*"])


def test_the_guard_can_be_switched_off(pytester: pytest.Pytester):
    pytester.makepyfile(LEAKY)
    pytester.makeini("[pytest]\ngt_leaked_flags = ignore")
    pytester.runpytest_inprocess().assert_outcomes(passed=6)


def test_an_environment_variable_counts(pytester: pytest.Pytester):
    pytester.makepyfile("""
        import os, torch
        def test_leaky(): os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    """)
    result = pytester.runpytest_inprocess()
    result.stdout.fnmatch_lines(
        ["*changed CUBLAS_WORKSPACE_CONFIG from :4096:8 to :16:8 and did not*"]
    )


def test_the_page_of_ranks_lists_what_is_put_back_and_what_stays():
    """These, and nothing else."""
    page = " ".join((Path(__file__).parents[1] / "docs" / "ranks.md").read_text().split())
    found = re.search(
        r"\*\*What is restored\*\* [^:]*: (.*?)\. \*\*What stays\*\* [^:]*: (.*?)\. [*A-Z]", page
    )
    lists = [
        re.sub(r" \([^()]*(\([^()]*\)[^()]*)?\)", "", names).split(", ") for names in found.groups()
    ]
    assert lists == [list(hygiene.kept()), list(hygiene.STAYS)]


LEFT_BEHIND = {
    "autocast": ('torch.autocast("cpu").__enter__()', "autocast from ((False"),
    "another dtype of autocast": (
        'torch.set_autocast_dtype("cpu", torch.float16)',
        "autocast from ((False",
    ),
    "a function mode": (
        "BaseTorchFunctionMode().__enter__()",
        "function modes from none to BaseTorchFunctionMode",
    ),
    "a dispatch mode": (
        "FakeTensorMode().__enter__()",
        "dispatch modes from none to FakeTensorMode",
    ),
    "two modes": (
        "FakeTensorMode().__enter__(); FlopCounterMode(display=False).__enter__()",
        "dispatch modes from none to FakeTensorMode, _FlopCounterMode",
    ),
    "modes of two kinds": (
        'torch.autocast("cpu").__enter__(); BaseTorchFunctionMode().__enter__()',
        "function modes from none to BaseTorchFunctionMode",
    ),
    "hooks of saved tensors": (
        "saved_tensors_hooks(str, str).__enter__()",
        "saved-tensor hooks from none to str and str",
    ),
    "a hook of all forwards": (
        "module.register_module_forward_hook(print)",
        "global module hooks from 0 hooks to 1",
    ),
    "a hook of all backwards": (
        "module.register_module_full_backward_hook(print)",
        "global module hooks from 0 hooks",
    ),
    "a hook of all parameters": (
        "module.register_module_parameter_registration_hook(print)",
        "from 0 hooks to 1 hook",
    ),
    "annotations": (
        'torch.fx.traceback.current_meta["custom"] = {"EP": "dispatch"}',
        "annotations of traced nodes from {} to {'EP': 'dispatch'}",
    ),
    "the default device": (
        'torch.set_default_device("meta")',
        "the default device from cpu to meta",
    ),
}

NEXT = """
    import pytest, torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.autograd.graph import saved_tensors_hooks
    from torch.nn.modules import module
    from torch.overrides import BaseTorchFunctionMode
    from torch.utils.flop_counter import FlopCounterMode

    def test_leaky(): {leak}

    def test_next():
        from torch.overrides import _get_current_function_mode_stack
        weight = torch.nn.Parameter(torch.ones(2, 2))
        made = torch.nn.Linear(2, 2)(weight)
        made.sum().backward()
        assert type(weight.grad) is torch.Tensor and weight.grad.device.type == "cpu"
        assert made.dtype == torch.float32 and not _get_current_function_mode_stack()
"""


@pytest.mark.parametrize("what", LEFT_BEHIND)
def test_a_mode_or_hook_that_is_left_behind_is_named_and_ended(
    pytester: pytest.Pytester, what: str
):
    """K3: the next test would have run under it."""
    leak, words = LEFT_BEHIND[what]
    pytester.makepyfile(NEXT.format(leak=leak))
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(passed=2, warnings=1)
    [warning] = [line for line in result.outlines if "LeakedFlagWarning" in line]
    assert "::test_leaky changed" in warning
    assert words in warning


def test_modes_that_end_with_their_test_or_belong_to_a_wide_fixture_are_no_leak(
    pytester: pytest.Pytester,
):
    """The twin."""
    pytester.makepyfile("""
        import pytest, torch
        from torch.nn.modules import module

        @pytest.fixture(scope="module")
        def mixed():
            with torch.autocast("cpu"):
                yield

        def test_puts_back():
            handle = module.register_module_forward_hook(print)
            handle.remove()
            with torch.device("meta"), torch.autocast("cpu", dtype=torch.float16):
                torch.ones(1)

        def test_first(mixed): assert torch.is_autocast_enabled("cpu")
        def test_second(mixed): assert torch.is_autocast_enabled("cpu")
        def test_third(mixed): assert torch.is_autocast_enabled("cpu")
    """)
    pytester.runpytest_inprocess().assert_outcomes(passed=4, warnings=0)
