"""Sentences on the schedule: collectives moved against compute, and orders that results
depend on.
"""

import pytest

from pytest_gtrainer.graphtext import diff

HEAD = """\
fsdp = group(range(0, 2))
for i in P.layers[0:4]:
  P.L.w: f32[2, 4]
if I:
  I.x: f32[4, 4]
"""
OUT = "if out:\n  loss = fwd.layers[3].relu\n"
LAUNCH = """\
  with {layer}:
    _to_copy: bf16[2, 4] = aten._to_copy(P.{layer}.w, dtype=bf16)
  with bucket({layer}):
    all_gather_into_tensor: bf16[4, 4] = _c10d_functional.all_gather_into_tensor({layer}._to_copy, 2, fsdp)
"""
WAIT = """\
  with bucket({layer}):
    wait_tensor: bf16[4, 4] = _c10d_functional.wait_tensor(all_gather_into_tensor)
    view: bf16[4, 4] = aten.view(wait_tensor, [4, 4])
"""
COMPUTE = """\
  with {layer}.mlp:
    mm: f32[4, 4] = aten.mm({before}, bucket({layer}).view)
  with {layer}:
    relu: f32[4, 4] = aten.relu({layer}.mlp.mm)
"""
NORM = "  with {layer}.norm:\n    sin: f32[4, 4] = aten.sin(I.x)\n"
TAIL = "  with {layer}.norm:\n    cos: f32[4, 4] = aten.cos(sin)\n"
STEPS = {"launch": LAUNCH, "wait": WAIT, "compute": COMPUTE, "norm": NORM, "tail": TAIL}


def schedule(*steps: str) -> str:
    """A forward of four layers: ``schedule("launch 0", "wait 0", "compute 0", ...)``."""
    text = HEAD + "if fwd:\n"
    for step in steps:
        kind, number = step.split()
        before = f"layers[{int(number) - 1}].relu" if number != "0" else "I.x"
        text += STEPS[kind].format(layer=f"layers[{number}]", before=before)
    return text + OUT


def on_demand() -> list[str]:
    return [f"{step} {layer}" for layer in range(4) for step in ("launch", "wait", "compute")]


def prefetched() -> list[str]:
    """The launch for the next layer before the wait for this one."""
    steps = ["launch 0"]
    for layer in range(4):
        steps += [f"launch {layer + 1}"] if layer < 3 else []
        steps += [f"wait {layer}", f"compute {layer}"]
    return steps


def words(old: list[str], new: list[str]) -> list[str]:
    return diff(schedule(*old), schedule(*new)).partition("\n\n")[0].splitlines()


def moved(step: str, behind: str) -> list[str]:
    """The prefetched schedule with one step in another place."""
    steps = [known for known in prefetched() if known != step]
    steps.insert(steps.index(behind) + 1, step)
    return steps


def test_without_prefetching():
    assert words(prefetched(), on_demand()) == [
        "same dataflow, other schedule (6 of 24 operators moved)",
        "launch of AG layers[1..3] moved behind the compute of layers[i-1]",
    ]
    assert words(on_demand(), prefetched())[1:] == [
        "launch of AG layers[1..3] moved before the compute of layers[i-1]"
    ]


def test_launches_that_only_passed_the_wait():
    late = ["launch 0"]
    for layer in range(4):
        late += [
            f"wait {layer}",
            *([f"launch {layer + 1}"] if layer < 3 else []),
            f"compute {layer}",
        ]
    assert words(late, prefetched())[1:] == [
        "launch of AG layers[1..3] moved before the wait of AG layers[i-1]"
    ]
    assert words(prefetched(), late)[1:] == [
        "launch of AG layers[1..3] moved behind the wait of AG layers[i-1]"
    ]


def test_one_wait_moved():
    early = moved("wait 2", behind="wait 1")
    assert words(prefetched(), early)[1:] == [
        "wait of AG layers.2 moved before the compute of layers.1"
    ]
    assert words(early, prefetched())[1:] == [
        "wait of AG layers.2 moved behind the compute of layers.1"
    ]


def test_collectives_are_told_before_compute():
    """However much compute has moved."""
    backward = [
        f"if bwd:\n  with m{number}:\n    sin: f32[4, 4] = aten.sin(I.x)\n" for number in range(6)
    ]
    old = schedule(*prefetched()).replace(OUT, "".join(backward) + OUT)
    new = schedule(*moved("wait 2", behind="wait 1")).replace(OUT, "".join(backward[::-1]) + OUT)
    said = diff(old, new).partition("\n\n")[0].splitlines()
    assert said[1] == "wait of AG layers.2 moved before the compute of layers.1"
    assert said[2] == "aten.sin in bwd m0 moved behind the compute of m5/bwd (and 4 more like this)"


def test_two_layers_were_passed():
    """The last of them is named."""
    steps = prefetched()
    steps.insert(1, steps.pop(steps.index("launch 3")))
    assert words(steps, prefetched())[1:] == [
        "launch of AG layers.3 moved behind the compute of layers.1"
    ]
    assert words(prefetched(), steps)[1:] == [
        "launch of AG layers.3 moved before the compute of layers.0"
    ]


def test_collectives_of_one_module_are_numbered():
    text = "g = group(range(0, 2))\nif I:\n  I[0]: f32[2]\nif fwd:\n  with m:\n"
    lines = [
        f"    all_reduce{name}: f32[2] = _c10d_functional.all_reduce(I[0], {reduction!r}, g)\n"
        for name, reduction in (("", "sum"), ("_1", "max"))
    ]
    sin = "    sin: f32[2] = aten.sin(I[0])\n"
    later = diff(text + "".join([*lines, sin]), text + "".join([lines[0], sin, lines[1]]))
    assert later.splitlines()[1] == "launch of AR m#2 moved behind the compute of m"


def test_only_a_part_of_a_layer_was_passed():
    """The operator is named: it is not behind all that the layer computes."""
    whole = schedule(*moved("wait 2", behind="wait 1"))
    wait, relu = WAIT.format(layer="layers[2]"), "  with layers[1]:\n    relu"
    half = whole.replace(wait, "").replace(relu, wait + relu)
    assert (
        diff(whole, half).splitlines()[1]
        == "wait of AG layers.2 moved behind aten.mm in fwd layers.1.mlp"
    )
    assert (
        diff(half, whole).splitlines()[1]
        == "wait of AG layers.2 moved before aten.mm in fwd layers.1.mlp"
    )


def test_most_of_a_layer_was_passed():
    """The first operator of each layer stands before the launch that the rest of it was to hide."""
    ahead, late = (
        [
            f"{step} {layer}"
            for layer in range(4)
            for step in ("norm", *steps, "wait", "compute", "tail")
        ]
        for steps in (("launch next",), ("launch",))
    )
    ahead = [
        "launch 0",
        *(
            step.replace("next 0", "1").replace("next 1", "2").replace("next 2", "3")
            for step in ahead
        ),
    ]
    said = words([step for step in ahead if "next" not in step], late)
    assert said[1] == "launch of AG layers[1..3] moved behind most of the compute of layers[i-1]"


def test_what_serves_a_collective_moves_with_it():
    """Casts and unpacking have no sentences of their own, unless they move alone."""
    text = schedule(*prefetched())
    view = "    view: bf16[4, 4] = aten.view(wait_tensor, [4, 4])\n"
    relu = "  with layers[0]:\n    relu"
    start, end = text.split("  with layers[0].mlp:", 1)
    alone = (
        start.replace(view, "")
        + "  with bucket(layers[0]):\n"
        + view
        + "  with layers[0].mlp:"
        + end
    )
    assert diff(text, alone) == "", "the records are the same"
    cast = (
        "  with layers[1]:\n    _to_copy: bf16[2, 4] = aten._to_copy(P.layers[1].w, dtype=bf16)\n"
    )
    early = text.replace(cast, "").replace("if fwd:\n", "if fwd:\n" + cast)
    assert diff(text, early).splitlines()[:2] == [
        "same dataflow, other schedule (1 of 24 operators moved)",
        "aten._to_copy in fwd layers.1 is in another place",
    ]
    assert relu in text


def test_the_same_schedule_has_no_such_sentence():
    """The twin: the dataflow differs, and nothing has moved."""
    text = schedule(*prefetched())
    said = diff(text, text.replace("aten.relu", "aten.gelu")).partition("\n\n")[0]
    assert "moved" not in said
    assert "another place" not in said


def test_moves_are_found_in_another_dataflow_too():
    early = schedule(*moved("wait 2", behind="wait 1")).replace("aten.relu", "aten.gelu")
    assert diff(schedule(*prefetched()), early).partition("\n\n")[0].splitlines()[1:] == [
        "fwd layers[0..3]: lost aten.relu, gained aten.gelu",
        "wait of AG layers.2 moved before the compute of layers.1",
    ]


def test_reductions_of_the_backward():
    lines = [
        "with layers[1]:\n    sum: f32[4] = aten.sum(I.x)\n",
        "with bucket(layers[1]):\n    reduce_scatter_tensor: f32[2] = "
        "_c10d_functional.reduce_scatter_tensor(layers[1].sum, 'avg', 2, fsdp)\n",
        "with bucket(layers[1]):\n    wait_tensor: f32[2] = "
        "_c10d_functional.wait_tensor(reduce_scatter_tensor)\n",
        "with layers[0]:\n    sum: f32[4] = aten.sum(I.x)\n",
    ]
    text = HEAD + "if bwd:\n" + "".join(f"  {line}" for line in lines)
    late = HEAD + "if bwd:\n" + "".join(f"  {lines[place]}" for place in (0, 1, 3, 2))
    assert (
        diff(text, late).splitlines()[1]
        == "wait of RS layers.1/bwd moved behind the compute of layers.0/bwd"
    )


# -- orders that results depend on


def module(*lines: str) -> str:
    text = "if B:\n  B.count: f32[2]\nif I:\n  I[0]: f32[2]\n  I[1]: f32[2]\nif fwd:\n  with m:\n"
    for line in lines:
        if ": " not in line:
            line = line.replace(" =", ": f32[2] =")
        text += f"    {line}\n"
    return text


def exchanged(*lines: str) -> list[str]:
    """Return the difference after the first two lines are exchanged."""
    first, second, *rest = lines
    return diff(module(*lines), module(second, first, *rest)).partition("\n\n")[0].splitlines()


def test_random_numbers_drawn_in_another_order():
    assert exchanged("rand = aten.rand([2])", "randn = aten.randn([2])") == [
        "same dataflow, other schedule (1 of 2 operators moved)",
        "random numbers are drawn in another order, so results differ: aten.randn in fwd m "
        "before aten.rand in fwd m",
        "aten.rand in fwd m moved behind aten.randn in fwd m",
    ]


def test_random_operators_of_another_dataflow():
    """The number of random operators says more than their order."""
    lines = ["rand = aten.rand([2])", "sin = aten.sin(I[0])"]
    assert diff(module(*lines), module(lines[1])).partition("\n\n")[0].splitlines() == [
        "the dataflow differs, without aten.rand in fwd m",
        "fwd m: lost aten.rand",
    ]


def test_nothing_random_has_moved():
    """The twin."""
    assert exchanged("rand = aten.rand([2])", "sin = aten.sin(I[0])") == [
        "same dataflow, other schedule (1 of 2 operators moved)",
        "aten.rand in fwd m moved behind aten.sin in fwd m",
    ]


def test_a_reader_on_the_other_side_of_a_change_in_place():
    said = exchanged("sin = aten.sin(B.count)", "add_ = aten.add_.Tensor(B.count, I[0])")
    assert said[1] == (
        "results may differ: what reads count and aten.add_.Tensor in fwd m, which changes it "
        "in place, "
        "are in another order"
    )


MASK = "(f32[2], bool[2]) = aten.native_dropout(I[0], 0.5, True)"
TWINS = {
    "two draws": [
        "a = aten.rand_like(I[0])",
        "b = aten.rand_like(I[0])",
        "s = aten.sub.Tensor({0}, {1})",
    ],
    "the second results of two draws": [
        f"a: {MASK}",
        f"b: {MASK}",
        "s = aten.mul.Tensor({0}[0], {1}[1])",
    ],
    "views of two draws": ["a = aten.rand([2])", "b = aten.rand([2])"]
    + ["v = aten.view({0}, [2])", "s = aten.sub.Tensor(v, {1})"],
    "two buffers, one of which is written": ["a = aten.zeros([2])", "b = aten.zeros([2])"]
    + ["c = aten.add_.Tensor({0}, I[0])", "s = aten.sub.Tensor(a, b)"],
    "two buffers, one of which is written through a view": [
        "a = aten.sin(I[0])",
        "b = aten.sin(I[0])",
        "v = aten.view({0}, [2])",
    ]
    + ["c = aten.neg_(v)", "s = aten.sub.Tensor(a, b)"],
    "two buffers that are written, with a reader between": [
        "a = aten.zeros([2])",
        "b = aten.zeros([2])",
        "c = aten.add_.Tensor({0}, I[0])",
    ]
    + ["s = aten.sub.Tensor(a, b)", "d = aten.add_.Tensor({1}, I[0])"],
    "a buffer that is filled from one of two buffers": [
        "a = aten.zeros([2])",
        "b = aten.zeros([2])",
        "c = aten.add_.Tensor(a, I[0])",
    ]
    + ["e = aten.empty([2])", "f = aten.copy_(e, {0})", "s = aten.cos(e)"],
}


def twins(lines: list[str], *names: str) -> str:
    return module(*[line.format(*names) for line in lines]) + "if out:\n  yield fwd.m.s\n"


@pytest.mark.parametrize("case", TWINS)
def test_values_of_equal_digest_are_not_interchangeable(case):
    """Two draws, and two buffers of which one is written: results differ."""
    before, after = twins(TWINS[case], "a", "b"), twins(TWINS[case], "b", "a")
    assert diff(before, after).startswith("the dataflow differs, first at ")
    assert diff(before, before) == ""


@pytest.mark.parametrize(
    "lines",
    [
        ["a = aten.sin(I[0])", "b = aten.sin(I[0])", "s = aten.sub.Tensor({0}, {1})"],
        ["a = aten.zeros([2])", "b = aten.zeros([2])", "c = aten.add_.Tensor({0}, I[0])"]
        + ["s = aten.sub.Tensor({0}, {1})"],
        ["{0} = aten.rand([2])", "{1} = aten.rand([2])", "s = aten.sub.Tensor({0}, {1})"],
    ],
    ids=["pure", "written and read in the same place", "drawn and read in the same place"],
)
def test_twins_with_the_same_uses_are_interchangeable(lines):
    """The twin: only the spelling differs."""
    said = diff(twins(lines, "a", "b"), twins(lines, "b", "a")).splitlines()
    assert said[0] == "same dataflow, same schedule: only the spelling differs"


def with_body(inner: list[str], *lines: str) -> str:
    """Return a graph that calls a graph inside."""
    head = "def g():\n  if A:\n    A[0]: f32[2]\n  if fwd:\n    with _:\n"
    for line in inner:
        head += f"      {line.replace(' =', ': f32[2] =')}\n"
    return head + "  if out:\n    yield n\n" + module(*lines)


def test_effects_of_a_graph_inside():
    """Its order is not a spelling, and who calls it changes what it changes."""
    call = "b = higher_order.invoke_subgraph(g, I[0])"
    sin, neg = "s = aten.sin(A[0])", "n = aten.neg_(A[0])"
    said = diff(with_body([sin, neg], call), with_body([neg, sin], call)).splitlines()
    assert said[:3] == [
        "same dataflow, same schedule, other graphs inside",
        "in g: same dataflow, other schedule (1 of 2 operators moved)",
        "in g: results may differ: what reads 0 and aten.neg_ in fwd _, which changes it in "
        "place, are in another order",
    ]
    for inner, words in (
        ([neg], "results may differ: what reads 0 and higher_order.invoke_subgraph in fwd m"),
        (["n = aten.neg(A[0])"], "higher_order.invoke_subgraph in fwd m moved behind"),
    ):
        reader = "sin = aten.sin(I[0])"
        said = diff(with_body(inner, call, reader), with_body(inner, reader, call)).splitlines()
        assert said[1].startswith(words)
    # Draws inside are draws of the caller.
    draw, twice = ["n = aten.rand_like(A[0])"], "c = aten.randn([2])"
    said = diff(with_body(draw, call, twice), with_body(draw, twice, call)).splitlines()
    assert said[1].startswith("random numbers are drawn in another order")


def test_a_reader_of_something_else():
    """The twin."""
    said = exchanged("sin = aten.sin(B.count)", "zero_ = aten.zero_(I[1])")
    assert said[1:] == ["aten.sin in fwd m moved behind aten.zero_ in fwd m"]


def test_changes_in_place_in_another_order():
    said = exchanged(
        "mul_ = aten.mul_.Tensor(B.count, I[0])", "add_ = aten.add_.Tensor(B.count, I[0])"
    )
    assert said[1].startswith("results may differ: what reads count and aten.")


def test_a_reader_through_a_view():
    view = "view = aten.view(B.count, [2])"
    lines = ["sin = aten.sin(view)", "add_ = aten.add_.Tensor(B.count, I[0])"]
    said = diff(module(view, *lines), module(view, *lines[::-1])).splitlines()
    problem = "a read of a view moved behind the write, and nothing says that results may differ"
    assert said[1].startswith("results may differ: what reads count and aten.add_.Tensor"), problem


def test_readers_between_two_changes_may_change_places():
    """The twin: both read the same."""
    said = exchanged(
        "sin = aten.sin(B.count)",
        "cos = aten.cos(B.count)",
        "add_ = aten.add_.Tensor(B.count, I[0])",
    )
    assert not any("results" in sentence for sentence in said)


# -- the view of the schedule

VIEW = """\
# gtrainer graph v2
# view: schedule
fsdp = group(range(0, 2))
for i in fwd.layers[0:3]:
  launch(bucket(layers[i+1]).all_gather_into_tensor, fsdp, bf16[64], bytes=128)
  wait(bucket(L).all_gather_into_tensor)
  compute(L, mm*7, ops=59)
"""


def test_the_view_of_the_schedule():
    fewer = VIEW.replace("mm*7", "mm*6")
    assert diff(VIEW, fewer).splitlines()[0] == (
        "fwd layers[0..2]: lost compute(L, mm*7, ops=59), gained compute(L, mm*6, ops=59)"
    )
    *head, launch, wait, compute = VIEW.splitlines()
    assert diff(VIEW, "\n".join([*head, wait, launch, compute])).splitlines()[0] == (
        "fwd layers[0..2]: lines in another order"
    )
