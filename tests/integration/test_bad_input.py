"""Bad input: one clear sentence that names the value and the way out."""

import re

import pytest

from pytest_gtrainer.options import OPTIONS


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--gt-gpus=0"], "ERROR: --gt-gpus=0: expected a whole number, 1 or more"),
        (["--gt-gpus=-1"], "ERROR: --gt-gpus=-1: expected a whole number, 1 or more"),
        (["--gt-gpus=abc"], "ERROR: --gt-gpus=abc: expected a whole number, 1 or more"),
        (["-o", "gt_gpus=none"], "ERROR: gt_gpus=none: expected a whole number, 1 or more"),
        (["--gt-timeout=0"], "ERROR: --gt-timeout=0: expected a number of seconds above 0"),
        (["--gt-timeout=inf"], "ERROR: --gt-timeout=inf: expected a number of seconds above 0"),
        (["--gt-gpus="], "ERROR: --gt-gpus=: expected a whole number, 1 or more"),
        (["-o", "gt_gpus="], "ERROR: gt_gpus=: expected a whole number, 1 or more"),
        (["--gt-timeout="], "ERROR: --gt-timeout=: expected a number of seconds above 0"),
        (["--gt-require="], "ERROR: --gt-require=: expected one of ranks, cuda"),
        (
            ["--gt-unused-goldens="],
            "ERROR: --gt-unused-goldens=: expected one of warn, fail, ignore",
        ),
        (["--gt-report="], "ERROR: --gt-report=: expected a path"),
        (["--gt-artifacts="], "ERROR: --gt-artifacts=: expected a path"),
        (["--gt-device=tpu"], "ERROR: --gt-device=tpu: expected one of auto, cpu, cuda"),
        (
            ["--gt-require=cuda", "--gt-device=cpu"],
            "ERROR: --gt-require=cuda and --gt-device=cpu exclude each other, as no test would "
            "have a GPU: give one",
        ),
        (
            ["-o", "gt_require=cuda", "-o", "gt_cuda_as=cpu"],
            "ERROR: gt_require=cuda and gt_cuda_as=cpu exclude each other, as no test would have a "
            "GPU: give one",
        ),
        (
            ["--gt-device=cuda", "--gt-cuda-as=cpu"],
            "ERROR: --gt-device=cuda and --gt-cuda-as=cpu exclude each other, as ranks would be on "
            "GPUs that torch does not show: give one",
        ),
        (
            ["--gt-gpus=2", "--gt-pdb-rank=2"],
            "ERROR: --gt-pdb-rank=2: with --gt-gpus=2 ranks are 0 to 1, and none would be debugged",
        ),
        (
            ["--gt-report=x", "-o", "gt_summary=./x"],
            "ERROR: --gt-report and --gt-summary both write ./x: give two files",
        ),
        (
            ["--gt-summary=x", "--junitxml=y/../x"],
            "ERROR: --gt-summary and --junitxml both write y/../x: give two files",
        ),
        (
            ["--gt-prune-goldens", "--gt-unused-goldens=ignore"],
            "ERROR: --gt-prune-goldens and --gt-unused-goldens=ignore exclude each other: give one",
        ),
        (
            ["--gt-update-goldens", "--gt-create-goldens"],
            "ERROR: --gt-update-goldens and "
            "--gt-create-goldens exclude each other, as updating writes missing goldens too: give "
            "one",
        ),
    ],
    ids=str,
)
def test_an_option_that_makes_no_sense_is_a_usage_error(pytester, arguments, sentence):
    pytester.makepyfile("def test_never_run(): raise SystemExit('ran')")
    result = pytester.runpytest_inprocess(*arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert result.stderr.lines.count(sentence) == 1


def test_the_command_line_corrects_the_ini_file(pytester):
    pytester.makepyfile("def test_runs(): pass")
    pytester.makeini("[pytest]\ngt_require = cuda\ngt_cuda_as = cpu")
    result = pytester.runpytest_inprocess("--gt-device=cpu", "--gt-require=ranks")
    result.assert_outcomes(passed=1)


def test_no_option_takes_nothing_for_an_answer(pytester):
    """Each of them, on the command line and in the ini file; a flag takes true or false there."""
    pytester.makepyfile("def test_never_run(): raise SystemExit('ran')")
    given = [f"{option.flag}=" for option in OPTIONS if not option.is_flag]
    for said in [*given, *(f"{option.ini}=" for option in OPTIONS)]:
        result = pytester.runpytest_inprocess(*([said] if said in given else ["-o", said]))
        assert result.ret == pytest.ExitCode.USAGE_ERROR, said
        (error,) = [line for line in result.stderr.lines if line.startswith("ERROR: ")]
        assert re.fullmatch(
            rf"ERROR: ({said}:|{said[:-1]}: invalid truth value '',) expected .+", error
        ), error


def test_cuda_without_a_gpu_is_a_usage_error(pytester, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    pytester.makepyfile("def test_never_run(): raise SystemExit('ran')")
    result = pytester.runpytest_subprocess("--gt-device=cuda")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: --gt-device=cuda: no GPU is visible; use --gt-device=cpu, or auto"]
    )


MARKERS = [
    ('"gpu"', "gt_world has no kind 'gpu'; it has fake, simulated, ranks"),
    ("", "gt_world has no kind None; it has fake, simulated, ranks"),
    ('"ranks", "fake"', "gt_world takes one positional argument, the kind; not 2"),
    ('"ranks", size=0', "gt_world's size is a whole number, 1 or more; not 0"),
    ('"ranks", size="8"', "gt_world's size is a whole number, 1 or more; not '8'"),
    (
        '"ranks", size=4, mesh={"fsdp": 8}',
        "gt_world's mesh fsdp=8 multiplies to 8, but its size is 4",
    ),
    (
        '"fake", size=6, mesh={"a": 2, "b": 2}',
        "gt_world's mesh a=2 x b=2 multiplies to 4, but its size is 6",
    ),
    ('"fake", mesh=[8]', "gt_world's mesh maps dimension names to extents"),
    ('"fake", size=8, nodes=3', "gt_world's 8 ranks do not divide over 3 nodes"),
    ('"fake", size=8, rank=8', "gt_world's rank lies in 0..7; not 8"),
    ('"ranks", device="tpu"', "gt_world's device is one of cpu, cuda; not 'tpu'"),
    (
        '"simulated", device="cuda"',
        'gt_world("simulated", device="cuda"): a simulated world adds on the CPU',
    ),
    ('"fake", size=10**9', "gt_world has at most 1,048,576 ranks: take a smaller size"),
    ('"ranks", size=10**5000', "gt_world has at most 1,048,576 ranks: take a smaller size"),
    ('"simulated", mesh={"a": 10**5, "b": 10**5}', "gt_world has at most 1,048,576 ranks"),
    ('"fake", size=True', "gt_world's size is a whole number, 1 or more; not True"),
    ('"fake", mesh={"a": -2}', "gt_world's mesh dimension 'a' is a whole number, 1 or more; not"),
    ('"ranks", timeout=-1', "gt_world's timeout is a number of seconds above 0; not -1"),
    ('"ranks", sizes=8', "gt_world takes size, mesh, nodes, rank, device, timeout; not sizes"),
]


def test_a_marker_that_makes_no_sense_is_one_error_for_its_test(pytester):
    """All in one run: the others go on, a good test passes."""
    tests = [
        f"@pytest.mark.gt_world({arguments})\ndef test_{number}(gt_world): pass\n"
        for number, (arguments, _) in enumerate(MARKERS)
    ]
    pytester.makepyfile("import pytest\n" + "\n".join(tests) + "\ndef test_good(): pass\n")
    result = pytester.runpytest_subprocess("-rE")
    result.assert_outcomes(errors=len(MARKERS), passed=1)
    for number, (_, sentence) in enumerate(MARKERS):
        result.stdout.fnmatch_lines(
            [f"*ERROR at setup of test_{number} *", f"{glob_escaped(sentence)}*"]
        )
    result.stdout.no_fnmatch_line("*Traceback*")
    result.stdout.no_fnmatch_line("*plugin.py:*")


def glob_escaped(text):
    return text.replace("[", "[[]")


def test_fixtures_without_the_marker_name_it(pytester):
    pytester.makepyfile("def test_world(gt_world): pass\ndef test_mesh(gt_mesh): pass")
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(errors=2)
    result.stdout.fnmatch_lines(
        ['gt_world needs the marker *@pytest.mark.gt_world("ranks", size=8), or pytestmark*']
    )


@pytest.mark.second_tier
def test_a_list_as_size_parametrises(pytester):
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.gt_world("fake", size=[2, 4])
        def test_sizes(gt_world, gt_mesh):
            assert gt_mesh.size() == gt_world.size
        """
    )
    result = pytester.runpytest_subprocess("-v")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*test_sizes[[]size2] PASSED*", "*test_sizes[[]size4] PASSED*"])
    result.stdout.fnmatch_lines(["worlds    1 test in fake(2), 1 test in fake(4)"])
