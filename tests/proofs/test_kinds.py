"""Each kind of equal, and what is no kind of it, on functions that a reader can check by hand."""

import contextlib
from fractions import Fraction

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_gtrainer import (
    AnotherFunction,
    assert_same_function,
    assert_same_model,
    facts,
    gt_compile,
    meaning,
    prove,
)
from pytest_gtrainer.arithmetic.formulas import given_meaning
from pytest_gtrainer.proofs.proof import MOST_NODES, kind_in_words

F = nn.functional
aten = torch.ops.aten


def tensors(*shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


X, W, B = tensors((4, 6), (8, 6), (8,))


def plain_attention(q, k, v):
    return torch.softmax(q @ k.transpose(-1, -2), -1) @ v


def online_attention(q, k, v, parts=2):
    """Compute softmax in parts of the keys (Milakov and Gimelshein, 2018)."""
    total = weight = largest = None
    for keys, values in zip(k.chunk(parts, -2), v.chunk(parts, -2), strict=True):
        scores = q @ keys.transpose(-1, -2)
        high = scores.amax(-1, keepdim=True)
        new = high if largest is None else torch.maximum(largest, high)
        part = torch.exp(scores - new)
        value, share = part @ values, part.sum(-1, keepdim=True)
        if largest is not None:
            shrink = torch.exp(largest - new)
            value, share = total * shrink + value, weight * shrink + share
        total, weight, largest = value, share, new
    return total / weight


def norm_by_hand(x, w, b):
    apart = x - x.mean(-1, keepdim=True)
    return apart * torch.rsqrt((apart * apart).mean(-1, keepdim=True) + 1e-5)


def with_norm(attention):
    """Two layers: the second exponential is one of what the first has made."""

    def layers(q, k, v):
        x = attention(q, k, v)
        x = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5)
        return attention(x, k, x)

    return layers


QKV = tensors((2, 6, 8), (2, 6, 8), (2, 6, 8), seed=1)
FUNCTIONS = {
    "the same": ("identical", lambda x, w, b: F.linear(x, w, b), lambda x, w, b: F.linear(x, w, b)),
    "times one": ("identical", lambda x, w, b: x * 1.0 + 1, lambda x, w, b: x + 1),
    "halves by two spellings": (
        "identical",
        lambda x, w, b: x / 2 * w[:4],
        lambda x, w, b: x * 0.5 * w[:4],
    ),
    "a sum in the other order": ("identical", lambda x, w, b: w[:4] + x, lambda x, w, b: x + w[:4]),
    "a cast up and down": (
        "identical",
        lambda x, w, b: x.bfloat16().float().bfloat16(),
        lambda x, w, b: x.bfloat16(),
    ),
    "a clone": ("identical", lambda x, w, b: x.clone().contiguous() + 1, lambda x, w, b: x + 1),
    "moved and moved back": (
        "identical",
        lambda x, w, b: x.flip(0).flip(0) + x,
        lambda x, w, b: x + x,
    ),
    "addmm in two operators": (
        "other kernels",
        lambda x, w, b: x @ w.t() + b,
        lambda x, w, b: F.linear(x, w, b),
    ),
    "weights side by side": (
        "other kernels",
        lambda x, w, b: torch.cat((x @ w[:4].t(), x @ w[4:].t()), -1),
        lambda x, w, b: x @ w.t(),
    ),
    "a product by rows": (
        "other kernels",
        lambda x, w, b: torch.cat([row @ w.t() for row in x.split(1)]),
        lambda x, w, b: x @ w.t(),
    ),
    "silu by hand": (
        "other kernels",
        lambda x, w, b: x * torch.sigmoid(x),
        lambda x, w, b: F.silu(x),
    ),
    "a sum in two halves": (
        "reordered",
        lambda x, w, b: x[:2].sum(0) + x[2:].sum(0),
        lambda x, w, b: x.sum(0),
    ),
    "associativity": (
        "reordered",
        lambda x, w, b: (x + w[:4]) + w[4:],
        lambda x, w, b: x + (w[:4] + w[4:]),
    ),
    "distributivity": (
        "reordered",
        lambda x, w, b: x * (w[:4] + w[4:]),
        lambda x, w, b: x * w[:4] + x * w[4:],
    ),
    "a mean as a sum": ("reordered", lambda x, w, b: x.sum(0) / 4, lambda x, w, b: x.mean(0)),
    "a long product in parts": (
        "reordered",
        lambda x, w, b: x[:, :3] @ w[:, :3].t() + x[:, 3:] @ w[:, 3:].t(),
        lambda x, w, b: x @ w.t(),
    ),
    "a norm by hand": ("reordered", norm_by_hand, lambda x, w, b: F.layer_norm(x, (6,))),
    "softmax without a maximum": (
        "reordered",
        lambda x, w, b: torch.exp(x) / torch.exp(x).sum(-1, keepdim=True),
        lambda x, w, b: F.softmax(x, -1),
    ),
    "a reciprocal": ("rounds elsewhere", lambda x, w, b: x * (1 / 6), lambda x, w, b: x / 6),
    "no rounding to bfloat16": (
        "rounds elsewhere",
        lambda x, w, b: x + 0,
        lambda x, w, b: x.bfloat16().float(),
    ),
    "rounding to eight bits": (
        "rounds elsewhere",
        lambda x, w, b: x.to(torch.float8_e4m3fn).float() @ w.to(torch.float8_e4m3fn).float().t(),
        lambda x, w, b: x @ w.t(),
    ),
    "rounding to eight bits of another kind": (
        "rounds elsewhere",
        lambda x, w, b: x.to(torch.float8_e5m2).float() @ w.to(torch.float8_e5m2).float().t(),
        lambda x, w, b: x @ w.t(),
    ),
    "float32 in the middle of bfloat16": (
        "rounds elsewhere",
        lambda x, w, b: (x.float() * w[:4].float() + 1).bfloat16(),
        lambda x, w, b: x.bfloat16() * w[:4].bfloat16() + 1,
    ),
    "another factor": ("another function", lambda x, w, b: 2 * x.sum(0), lambda x, w, b: x.sum(0)),
    "a constant off by a billionth": (
        "another function",
        lambda x, w, b: x * (1 + 2**-30),
        lambda x, w, b: x + 0,
    ),
    "another eps": (
        "another function",
        lambda x, w, b: F.layer_norm(x, (6,), eps=1e-6),
        lambda x, w, b: F.layer_norm(x, (6,)),
    ),
    "a clamp that no number meets": (
        "another function",
        lambda x, w, b: x.clamp(-100, 100),
        lambda x, w, b: x + 0,
    ),
    "a term left out": (
        "another function",
        lambda x, w, b: x @ w.t(),
        lambda x, w, b: F.linear(x, w, b),
    ),
    "two rows exchanged": (
        "another function",
        lambda x, w, b: x[[1, 0, 2, 3]] + 1,
        lambda x, w, b: x + 1,
    ),
    "a sign": ("another function", lambda x, w, b: x - w[:4], lambda x, w, b: x + w[:4]),
    "relu left out": ("another function", lambda x, w, b: x + 1, lambda x, w, b: F.relu(x) + 1),
    "gelu for gelu with tanh": (
        "another function",
        lambda x, w, b: F.gelu(x, approximate="tanh"),
        lambda x, w, b: F.gelu(x),
    ),
    "a transposed square": (
        "another function",
        lambda x, w, b: x[:, :4].t() + 1,
        lambda x, w, b: x[:, :4] + 1,
    ),
    "memory that nobody wrote": (
        "another function",
        lambda x, w, b: x + torch.empty_like(x),
        lambda x, w, b: x + 0,
    ),
    "a write to an input": ("another function", lambda x, w, b: x.mul_(2), lambda x, w, b: x * 2),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_is_told_in_its_kind(name):
    kind, actual, expected = FUNCTIONS[name]
    proof = prove(actual, expected, inputs=(X, W, B))
    assert proof.kind == kind, str(proof)


@pytest.mark.second_tier
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_graph_is_told_in_the_same_kind(name):
    kind, actual, expected = FUNCTIONS[name]
    graphs = [make_fx(function)(X.clone(), W, B) for function in (actual, expected)]
    proof = prove(*graphs)
    assert proof.kind == kind, str(proof)


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if "write" not in name])
def test_gradients_are_told_in_their_kind(name):
    """Gradients of the same function are equal; those of another function mostly are not."""
    kind, actual, expected = FUNCTIONS[name]

    def gradients(function):
        def run(x, w, b):
            made = [each.requires_grad_() for each in (x, w, b)]
            result = function(*made).float()
            weights = torch.arange(result.numel()).view(result.shape)
            (result * result * weights).sum().backward()
            return [each.grad for each in made if each.grad is not None]

        return run

    proof = prove(gradients(actual), gradients(expected), inputs=(X, W, B))
    if kind in ("reordered", "rounds elsewhere"):
        assert proof.is_at_least("rounds elsewhere"), str(proof)
    if kind in ("identical", "other kernels"):
        assert proof.is_at_least("reordered"), str(proof)


@pytest.mark.second_tier("2-two", "3")
@pytest.mark.parametrize("around", [lambda attention: attention, with_norm], ids=["one", "two"])
@pytest.mark.parametrize("parts", [2, 3])
def test_a_softmax_in_parts_is_the_same_function(around, parts):
    def in_parts(q, k, v):
        return online_attention(q, k, v, parts)

    def wrong(q, k, v):
        return online_attention(q, k, v.flip(1), parts)

    assert prove(around(in_parts), around(plain_attention), inputs=QKV).kind == "reordered"
    assert prove(around(wrong), around(plain_attention), inputs=QKV).kind == "another function"


@pytest.mark.second_tier("True")
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_is_what_its_formula_says(is_causal):
    """Also its backward, whose kernel reads the logarithms of sums that the forward keeps."""
    inputs = [each[None] for each in QKV]
    mask = torch.full((6, 6), -torch.inf).triu(1) if is_causal else torch.zeros(6, 6)

    def by_hand(q, k, v):
        return torch.softmax((q @ k.transpose(-1, -2)) * 8**-0.5 + mask, -1) @ v

    def by_torch(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    def trained(function):
        def run(q, k, v):
            (function(*(each.requires_grad_() for each in (q, k, v))) ** 2).sum().backward()
            return q.grad, k.grad, v.grad

        return run

    assert prove(by_torch, by_hand, inputs=inputs).is_at_least("reordered")
    assert prove(trained(by_torch), trained(by_hand), inputs=inputs).is_at_least("reordered")
    other = prove(
        trained(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=not is_causal)),
        trained(by_hand),
        inputs=inputs,
    )
    assert other.kind == "another function"


@pytest.mark.parametrize("reads_own", [False, True])
def test_the_backward_of_attention_reads_what_the_whole_row_is(reads_own):
    """With a part of the keys it got the gradients of attention to that part, whatever it read."""
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    go_back = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    q, k, v = (each[None] for each in QKV)

    def whole(q, k, v):
        return go_back(q, q, k, v, *attend(q, k, v), 0.0, False)

    def by_halves(q, k, v):
        kept, found = attend(q, k, v), []
        for keys, values in zip(k.chunk(2, 2), v.chunk(2, 2), strict=True):
            of_row = attend(q, keys, values) if reads_own else kept
            found.append(go_back(q, q, keys, values, *of_row, 0.0, False))
        (left, *first), (right, *second) = found
        return left + right, *(torch.cat(parts, 2) for parts in zip(first, second, strict=True))

    kind = "another function" if reads_own else "reordered"
    assert prove(by_halves, whole, inputs=(q, k, v)).kind == kind


def test_a_row_without_keys_is_0_and_has_gradients_of_0():
    mask = torch.ones(6, 6, dtype=torch.bool)
    mask[2] = False

    def by_torch(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def by_hand(q, k, v):
        weights = torch.softmax(((q @ k.mT) * 8**-0.5).masked_fill(~mask, -torch.inf), -1)
        return weights.masked_fill(~mask, 0) @ v

    def trained(function):
        def run(q, k, v):
            (function(*(each.requires_grad_() for each in (q, k, v))) ** 2).sum().backward()
            return q.grad, k.grad, v.grad

        return run

    inputs = [each[None] for each in QKV]
    assert prove(trained(by_torch), trained(by_torch), inputs=inputs).kind == "identical"
    assert prove(by_torch, by_hand, inputs=inputs).kind in ("reordered", "unknown")


@pytest.mark.parametrize(
    "factor", [Fraction(2), Fraction(1, 2), Fraction(-1), Fraction(8), Fraction(3, 7)]
)
def test_a_common_factor_is_named(factor):
    proof = prove(
        lambda x, w, b: (x @ w.t()) * factor.numerator / factor.denominator,
        lambda x, w, b: x @ w.t(),
        inputs=(X, W, B),
    )
    assert proof.factor == factor
    assert f"{factor} times what is expected" in str(proof)


def test_where_it_begins_is_the_first_value_that_the_other_never_makes():
    """Neither a bucket and its split, nor another layout, is taken for it."""

    def expected(x, w, b):
        return torch.sin(x @ w.t()) * 3

    def actual(x, w, b):
        bucket = torch.cat((w.reshape(-1), x.reshape(-1)))
        own, rows = bucket.split((w.numel(), x.numel()))
        product = rows.view(4, 6) @ own.view(8, 6).t()
        return torch.cos(product) * 3

    graphs = [make_fx(function)(X, W, B) for function in (actual, expected)]
    proof = prove(*graphs)
    assert proof.kind == "another function"
    assert proof.origin.startswith("node cos (aten.cos.default)"), proof.origin


class _Product(torch.nn.Module):
    """A product of two modules, which is in none of them."""

    def __init__(self, times):
        super().__init__()
        self.gate, self.up, self.times = torch.nn.Linear(6, 3), torch.nn.Linear(6, 3), times

    def forward(self, x):
        return self.gate(x) * self.up(x) * self.times


def test_where_it_begins_names_modules_and_lines():
    """A node in no module stands behind those that it reads; eager code has a line."""
    torch.manual_seed(0)
    model = _Product(2)
    graphs = [torch.export.export(_Product(times), (X,)).module() for times in (3, 2)]
    for gm in graphs:
        gm.load_state_dict(model.state_dict())
    origin = prove(*graphs, inputs=(X,)).origin
    assert origin.endswith("(aten.mul.Tensor), after gate, up, element [0, 0]"), origin

    def actual(model, x):
        return model(x).cos()

    proof = prove(actual, lambda model, x: model(x).sin(), inputs=(model, X))
    line = actual.__code__.co_firstlineno + 1
    assert proof.origin.startswith(f"aten.cos.default at test_kinds.py:{line}, element")


def test_an_operator_of_a_user_is_opaque_until_it_has_a_meaning():
    @torch.library.custom_op("gt_proofs::scaled", mutates_args=())
    def scaled(x: torch.Tensor, by: float) -> torch.Tensor:
        return x * by

    scaled.register_fake(lambda x, by: torch.empty_like(x))

    def by_operator(x, w, b):
        return scaled(x, 3.0) + 1

    def by_hand(x, w, b):
        return x * 3 + 1

    same = prove(by_operator, by_operator, inputs=(X, W, B))
    assert same.kind == "identical"
    assert "gt_proofs.scaled.default" in "".join(same.assumes)
    unknown = prove(by_operator, by_hand, inputs=(X, W, B))
    assert unknown.kind == "unknown"
    assert "gt_proofs.scaled.default" in unknown.reason
    with meaning("gt_proofs::scaled", lambda x, by: x * by):
        meant = prove(by_operator, by_hand, inputs=(X, W, B))
        assert meant.kind == "identical"
        assert "gt_proofs.scaled.default computes what its meaning(...) says" in meant.assumes
    with meaning("gt_proofs::scaled", lambda x, by: x * by * 2):
        assert prove(by_operator, by_hand, inputs=(X, W, B)).kind == "another function"
    assert prove(by_operator, by_hand, inputs=(X, W, B)).kind == "unknown", "it is gone"


@pytest.mark.parametrize(
    ("reference", "returns"),
    [
        (lambda x: (x.sum(-1, keepdim=True), x), "float32[2, 1], float32[2, 3]"),
        (lambda x: (x.sum(-1), x.double()), "float32[2], float64[2, 3]"),
        (lambda x: x.sum(-1), "float32[2]"),
        (lambda x: None, "no tensor"),
    ],
    ids=["another shape", "another dtype", "too few", "nothing"],
)
def test_a_meaning_that_returns_something_else_is_unknown(reference, returns):
    """Broadcasting would hide a shape: a sum over the rows of both sides would be equal."""
    x = torch.randn(2, 3)
    with torch.library._scoped_library("gt_proofs_shapes", "DEF") as library:
        library.define("both(Tensor x) -> (Tensor, Tensor)")
        library.impl("both", lambda x: (x.sum(-1), x.clone()), "CompositeExplicitAutograd")
        operator = torch.ops.gt_proofs_shapes.both.default

        def function(x):
            return operator(x)[0]

        with meaning(operator, lambda x: (x.sum(-1), x)):
            assert prove(function, lambda x: x.sum(-1), inputs=(x,)).kind == "identical"
        with meaning(operator, reference):
            proof = prove(function, lambda x: x.sum(-1), inputs=(x,))
    assert proof.kind == "unknown"
    assert "the meaning(...) of gt_proofs_shapes.both.default returns " + returns in proof.reason
    assert "and the operator float32[2], float32[2, 3]" in proof.reason


@pytest.mark.parametrize("first_ends_first", [True, False])
@pytest.mark.parametrize("is_same", [True, False])
def test_meanings_end_in_any_order(first_ends_first, is_same):
    """The one that is left counts, also if both are one function."""
    sin = torch.ops.aten.sin.default

    def one(x):
        return x

    def other(x):
        return x + x

    functions = [one, one if is_same else other]
    blocks = [meaning(sin, function) for function in functions]
    for block in blocks:
        block.__enter__()
    X = torch.ones(2)
    assert torch.equal(given_meaning(sin)(X), functions[1](X))
    ends, stays = (0, 1) if first_ends_first else (1, 0)
    blocks[ends].__exit__(None, None, None)
    assert torch.equal(given_meaning(sin)(X), functions[stays](X))
    blocks[stays].__exit__(None, None, None)
    assert given_meaning(sin) is None


@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (torch.func.hessian(lambda x: (x**3).sum()), "prims.mul.default"),
        (
            lambda x: torch.nested.nested_tensor(list(x)).to_padded_tensor(0.0),
            "aten._nested_tensor_from_tensor_list.default",
        ),
    ],
    ids=["hessian", "nested"],
)
def test_an_operator_that_runs_on_real_numbers_alone_is_named(function, operator):
    """V6: it is unknown, and no error of the program."""
    proof = prove(function, function, inputs=(X[0] if operator[0] == "p" else X,))
    assert proof.kind == "unknown"
    assert proof.reason.startswith(f"{operator} runs on real numbers alone (RuntimeError: ")


def test_an_error_of_the_program_itself_is_raised():
    """The twin: real numbers give it, too."""
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        prove(lambda x: x @ x, lambda x: x @ x, inputs=(X,))


def test_the_order_of_keys_is_no_part_of_a_result():
    def one(x, w, b):
        return {"a": x * 2, "b": (b + 1, {2: w, "2": w + 1})}

    def other(x, w, b):
        return {"b": (b + 1, {"2": w + 1, 2: w}), "a": x * 2}

    def swapped(x, w, b):
        return {"b": (b + 1, {"2": w, 2: w + 1}), "a": x * 2}

    assert prove(one, other, inputs=(X, W, B)).kind == "identical"
    graphs = [make_fx(function)(X, W, B) for function in (one, other)]
    assert prove(*graphs).kind == "identical"
    assert prove(one, swapped, inputs=(X, W, B)).kind == "another function"


def test_a_failure_says_the_kind_the_place_and_where_it_begins():
    with pytest.raises(AnotherFunction) as failure:
        assert_same_function(lambda x: x * 3, lambda x: x.clone(), inputs=(X,))
    text = str(failure.value)
    assert text.startswith("expected at least 'reordered'\nanother function:")
    assert "first output 0, element [0, 0] (24 of 24 differ)" in text
    assert "3 times what is expected" in text
    assert failure.value.proof.kind == "another function"


@pytest.mark.parametrize(
    ("at_least", "holds"),
    [
        ("identical", False),
        ("other kernels", False),
        ("reordered", True),
        ("rounds elsewhere", True),
    ],
)
def test_at_least(at_least, holds):
    def assert_it():
        assert_same_function(
            lambda x: x[:2].sum(0) + x[2:].sum(0),
            lambda x: x.sum(0),
            inputs=(X,),
            at_least=at_least,
        )

    if holds:
        assert_it()
    else:
        with pytest.raises(AnotherFunction, match="\nreordered: the same function"):
            assert_it()


def test_a_comparison_that_failed_says_its_kind_in_a_line():
    """Beyond a size it says who can say it; what a proof meets does not hide the comparison."""
    x = torch.randn(3)

    def prove_it():
        return prove(lambda x: x * 2, lambda x: x + x, inputs=(x,))

    with facts.collecting() as seen:
        line = kind_in_words(prove_it, nodes=3, call="prove(f, g)")
    assert line.startswith("in exact arithmetic: reordered: the same function, ")
    assert facts.of_kind(seen, "kind") == [{"kind": "kind", "outcome": "reordered"}]
    line = kind_in_words(prove_it, nodes=MOST_NODES + 1, call="prove(f, g)")
    assert line == "rounding or a bug? prove(f, g) says which kind of equal"
    line = kind_in_words(lambda: prove(torch.exp, torch.exp), nodes=3, call="prove(f, g)")
    assert line.startswith("in exact arithmetic: unknown, ValueError: two callables")


def _branches(first, second):
    return lambda x: (torch.cond(x.sum() > 0, first, second, (x,)),)


def _made_by(tracer, function, *inputs):
    if tracer == "function":
        return function
    if tracer == "dynamo":
        made = []
        torch._dynamo.reset()
        torch.compile(function, backend=lambda gm, _: made.append(gm) or gm)(*inputs)
        return made[0]
    return make_fx(function, tracing_mode=tracer)(*inputs)


@pytest.mark.parametrize("tracer", ["fake", "real", "dynamo"])
def test_branches_of_a_cond_are_compared(tracer):
    """Both of them: the orders take each; and a graph with the function that it is of."""
    x = torch.randn(3, 4)
    sin, cos = lambda x: x.sin(), lambda x: x.cos()
    right = _made_by(tracer, _branches(sin, cos), x)
    assert prove(right, _branches(sin, cos), inputs=(x,)).kind == "identical"
    for first, second in ((cos, cos), (sin, sin), (cos, sin)):
        wrong = _made_by(tracer, _branches(first, second), x)
        assert prove(wrong, right).kind == "another function"


def test_a_cond_of_a_given_number_takes_one_branch_and_says_so():
    x, flag = torch.randn(3, 4), torch.tensor(True)

    def by_flag(second):
        return make_fx(lambda x, flag: torch.cond(flag, torch.sin, second, (x,)))(x, flag)

    proof = prove(by_flag(torch.cos), by_flag(torch.tan), inputs=(x, flag))
    assert proof.kind == "identical"
    assert "numbers that the program reads stay what they are (2 are read)" in proof.assumes
    assert prove(by_flag(torch.cos), by_flag(torch.tan), inputs=(x, ~flag)).kind != "identical"


def test_a_graph_that_others_share_is_followed():
    """Layers of a model that are one graph, called by ``invoke_subgraph``."""

    def twice(function):
        region = torch.compiler.nested_compile_region(lambda x: function(x))
        return lambda x: region(region(x))

    x = torch.randn(3, 4)
    right = _made_by("dynamo", twice(torch.sin), x)
    assert "invoke_subgraph" in str(right.graph)
    assert prove(right, lambda x: (x.sin().sin(),), inputs=(x,)).kind == "identical"
    assert prove(right, lambda x: (x.sin().cos(),), inputs=(x,)).kind == "another function"


def test_what_a_green_proof_takes_on_trust_is_noted_for_the_summary():
    """An operator that nobody has looked into; nothing of a proof that fails."""

    @torch.library.custom_op("gt_proofs::hidden", mutates_args=())
    def hidden(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    hidden.register_fake(torch.empty_like)
    x = torch.randn(3)

    def noted(actual, expected, outcome=contextlib.nullcontext):
        with facts.collecting() as seen, outcome():
            assert_same_function(actual, expected, inputs=(x,))
        return [fact["what"] for fact in seen if fact["kind"] == "assumed"]

    said = noted(hidden, hidden)
    assert len(said) == 1
    assert said[0].startswith("gt_proofs.hidden.default depend")
    assert noted(torch.sin, torch.sin) == []
    assert noted(hidden, torch.sin, lambda: pytest.raises(AnotherFunction)) == []
    with meaning("gt_proofs::hidden", lambda x: x * 2):
        said = noted(hidden, lambda x: x * 2)
    assert len(said) == 1
    assert said[0].endswith("what its meaning(...) says")


def test_models_and_stages_note_what_they_take_on_trust():
    """An operator of every layer is noted once, and one that a model does not call never."""

    @torch.library.custom_op("gt_proofs::hidden_layer", mutates_args=())
    def hidden(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    hidden.register_fake(torch.empty_like)
    torch.library.register_autograd(
        "gt_proofs::hidden_layer", lambda ctx, grad: torch.ops.gt_proofs.hidden_layer(grad)
    )

    class Model(torch.nn.Module):
        def __init__(self, middle):
            super().__init__()
            self.first, self.last = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
            self.middle = middle

        def forward(self, x):
            return self.last(self.middle(self.middle(self.first(x))))

    def noted(check, middle):
        with facts.collecting() as seen:
            check(middle)
        return [fact["what"] for fact in seen if fact["kind"] == "assumed"]

    def models(middle):
        def build():
            return Model(middle)

        x = torch.randn(2, 3)
        assert_same_model(build, build, lambda model, x: model(x).sum(), lambda coordinate: (x,))

    def stages(middle):
        torch.compiler.reset()
        with gt_compile(lower=False) as record:
            torch.compile(Model(middle))(torch.randn(2, 3)).sum().backward()
        record.assert_same_function()

    for check in (models, stages):
        said = noted(check, hidden)
        assert len(said) == 1
        assert said[0].startswith("gt_proofs.hidden_layer.default depend")
        assert noted(check, torch.sin) == []
