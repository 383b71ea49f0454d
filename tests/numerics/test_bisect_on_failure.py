"""--gt-bisect: a failing comparison names the pass.

Without the flag, and in passing tests, nothing is replayed.
"""

import re

import pytest

from pytest_gtrainer import bisect_passes
from tests.numerics.test_bisect import BATCH, Net, pipeline, traced_net

pytestmark = pytest.mark.second_tier

TEST = """
    import pytest, torch
    from pytest_gtrainer import apply_graph_passes, assert_bitwise_equal, trace_step
    from tests.numerics.test_bisect import BATCH, Net, pipeline, step, HARMLESS
    from tests.numerics.test_bisect import doubles_a_weight_pass, draws_pass

    def gradients(traced, seed=0, scale=1.0):
        model = Net()
        torch.manual_seed(seed)
        traced.replay(model, *(each * scale for each in BATCH))
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    def traced_gradients(**options):
        return gradients(trace_step(Net(), step, BATCH), **options)

    def rewritten(passes):
        traced = trace_step(Net(), step, BATCH)
        return traced.with_graph(apply_graph_passes(traced.gm, traced.example_inputs, passes))

    def test_wrong():
        assert_bitwise_equal(gradients(rewritten(pipeline(2))), traced_gradients())

    def test_right():
        assert_bitwise_equal(gradients(rewritten(HARMLESS)), traced_gradients())

    def test_wrong_by_something_else():
        assert_bitwise_equal(gradients(rewritten(HARMLESS)), traced_gradients(seed=1))

    def test_wrong_without_a_graph():
        assert_bitwise_equal(torch.zeros(1), torch.ones(1))

    def weights(passes):
        model, traced = Net(), rewritten(passes)
        torch.manual_seed(0)
        for _ in range(2):
            traced.replay(model, *BATCH)
        return dict(model.named_parameters())

    def test_wrong_beside_results():
        assert_bitwise_equal(weights([*HARMLESS, doubles_a_weight_pass]), weights(HARMLESS))

    def test_wrong_random_state():
        weights([*HARMLESS, draws_pass])
        actual = torch.get_rng_state()
        weights(HARMLESS)
        assert_bitwise_equal(actual, torch.get_rng_state())

    @pytest.mark.gt_world("ranks", size=2)
    def test_wrong_on_one_rank(gt_world):
        scale = float(gt_world.rank)  # sums of zeros do not depend on their order: rank 0 is equal
        expected = traced_gradients(scale=scale)
        assert_bitwise_equal(gradients(rewritten(pipeline(2)), scale=scale), expected)
"""


@pytest.fixture(autouse=True, scope="module")
def everything_is_imported() -> None:
    """Import what the runs use: pytester forgets it, and torch cannot be imported twice."""
    bisect_passes(traced_net(), pipeline(2), (Net(), *BATCH))


def test_a_failing_comparison_names_the_pass(pytester: pytest.Pytester):
    pytester.makepyfile(test_it=TEST)
    result = pytester.runpytest_inprocess("--gt-bisect", "--gt-gpus=2")
    result.assert_outcomes(failed=6, passed=1)
    text = result.stdout.str()
    assert "bisection: introduced by pass 6 of 6, doubles_a_weight_pass" in text
    assert "  every result is equal, but not scale afterwards, element (0)" in text
    assert "E       in exact arithmetic: another function: the results differ" in text
    assert "E       in exact arithmetic: unknown: the real numbers of scale are apart" in text
    assert re.search(r"^kinds +2 another function, ", text, re.MULTILINE)
    assert "bisection: introduced by pass 6 of 6, draws_pass" in text
    assert (
        text.count("E       bisection: introduced by pass 3 of 6, reassociate_pass (7 replays)")
        == 2
    )
    assert "rank 1: BitwiseDifference" in text
    assert "bisection: all 5 passes together change no bit (2 replays)" in text
    assert (
        "bisection: no graph was rewritten by apply_graph_passes and replayed before "
        "this comparison" in text
    )


ONE_BIT = """
    import pytest, torch
    from fixtures.training import llama3_training
    from pytest_gtrainer import assert_bitwise_equal, bind_options, construct_default_graph_passes
    from pytest_gtrainer import train_eager, train_graph
    from pytest_gtrainer.passes.canonicalize import eliminate_dead_code_pass

    aten = torch.ops.aten

    def next_up_pass(gm, example_inputs, *, parameter, element, tokens):
        '''Move one element of a shard's gradient up by one ULP if the tokens sum to ``tokens``.'''
        output = gm.graph.output_node()
        view = output.args[0][output.meta["gt_outputs"].index(parameter)]
        flat, inputs = view.args[0], gm.graph.find_nodes(op="placeholder")
        size = flat.meta["val"].numel()
        with gm.graph.inserting_before(view), flat.meta["val"].fake_mode:
            def call(target, *args, **kwargs):
                node = gm.graph.call_function(target, args, kwargs)
                value = target(*torch.fx.node.map_arg(args, lambda n: n.meta["val"]), **kwargs)
                node.meta = {**view.meta, "val": value}
                return node
            now = call(aten.eq.Scalar, call(aten.sum.default, inputs[-2]), tokens)
            here = call(aten.eq.Scalar, call(aten.arange.default, size, device="cpu"), element)
            infinite = call(aten.full_like.default, flat, float("inf"))
            up = call(aten.nextafter.default, flat, infinite)
            spoiled = call(aten.where.self, call(aten.logical_and.default, now, here), up, flat)
        view.replace_input_with(flat, spoiled)
        return gm

    def config(mesh):
        return llama3_training(mesh, "fp32", steps=2, max_norm=0.1)

    @pytest.mark.gt_world("simulated", size=4, nodes=2)
    def test_it(gt_mesh, gt_world):
        training = config(gt_mesh)
        spoil = bind_options(next_up_pass, parameter="lm_head.weight", element=17 * 64 + 5,
                             tokens=int(training.batch(1, 3)[0].sum()))
        passes = construct_default_graph_passes(bucket_plan=training.bucket_plan, extra={
            "bucketing": [spoil], "concretize": [bind_options(eliminate_dead_code_pass)] * 3})
        eager = train_eager(config, world=gt_world)
        graph = train_graph(config, world=gt_world, passes=passes)
        assert_bitwise_equal(graph, eager, what="graph against eager")
"""


def test_from_a_weight_to_the_pass_in_one_message(pytester: pytest.Pytester):
    """L4: step, rank, phase, name, element, both patterns, distance, pass and node.

    The world is simulated, and the first difference is at step 1.
    """
    pytester.makepyfile(test_it=ONE_BIT)
    result = pytester.runpytest_inprocess("--gt-bisect")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "E *BitwiseDifference: graph against eager",
            "E *different: [34] of * tensors, [34] elements",
            "E *  first at step 1, rank 3, gradient of lm_head.weight, element (17, 5)",
            "E *    actual   *  0x????????",
            "E *    expected *  0x????????",
            "E *    1 ULP apart; 1 of 4096 elements of this f32[[]64, 64[]]",
            "E *bisection of step 1: introduced by pass 6 of 9, next_up_pass (7 replays)",
            "E *  first node whose value differs: view_default* = aten.view.default "
            "in the backward* on rank 3, element (17, 5)",
            "E *    actual   *  0x????????",
            "E *    expected *  0x????????",
            "E *    1 ULP apart; 1 of 4096 elements of this f32[[]64, 64[]]",
            "E *  computed from what the pass made",
            "E *    where_self = aten.where.self in the backward*",
        ]
    )


LATER = """
    import torch
    from pytest_gtrainer import apply_graph_passes, assert_bitwise_equal, trace_step
    from tests.numerics.test_bisect import BATCH, Net, pipeline, step

    def later_pass(gm):
        product = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)[0]
        with gm.graph.inserting_after(product):
            negative = gm.graph.call_function(torch.ops.aten.neg.default, (product,))
        negative.meta = dict(product.meta)
        product.replace_all_uses_with(negative, delete_user_cb=lambda user: user is not negative)
        return gm

    def results(passes):
        traced = trace_step(Net(), step, BATCH)
        gm = apply_graph_passes(traced.gm, traced.example_inputs, passes)
        torch.manual_seed(0)
        return traced.with_graph(gm).results(Net(), *BATCH)

    def test_it():
        assert_bitwise_equal(results([*pipeline(2), later_pass]), results(pipeline(2)))
"""


def test_a_pass_that_changes_bits_in_what_is_expected_too_is_not_blamed(pytester: pytest.Pytester):
    """Both sides run a pipeline whose third pass moves a sum; one side runs a pass more."""
    pytester.makepyfile(test_it=LATER)
    result = pytester.runpytest_inprocess("--gt-bisect")
    result.assert_outcomes(failed=1)
    text = result.stdout.str()
    assert "bisection: introduced by pass 7 of 7, later_pass" in text
    assert "bisection: a pipeline of 6 passes gives what is expected" in text
    assert "reassociate_pass" not in text


def test_without_the_flag_nothing_is_bisected(pytester: pytest.Pytester):
    pytester.makepyfile(test_it=TEST)
    result = pytester.runpytest_inprocess(
        "-k", "test_wrong and not rank and not beside and not state"
    )
    result.assert_outcomes(failed=3, deselected=4)
    result.stdout.no_fnmatch_line("*bisection*")


def test_without_the_flag_a_failure_behind_passes_says_how_to_find_the_pass(
    pytester: pytest.Pytester,
):
    pytester.makepyfile(test_it=TEST)
    result = pytester.runpytest_inprocess(
        "--gt-gpus=2", "-k", "test_wrong and not else and not beside and not state"
    )
    result.assert_outcomes(failed=3, deselected=4)
    hints = [line for line in result.outlines if line.startswith("which pass")]
    names = ("test_wrong", "test_wrong_on_one_rank")  # no graph was rewritten in the third
    again = "which pass it was: pytest test_it.py::{} --gt-gpus=2 --gt-bisect"
    assert hints == [again.format(name) for name in names]
