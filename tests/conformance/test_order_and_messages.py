"""The rules ``order`` and ``p2p``: what ranks would wait for is named by node and module."""

import operator

import pytest
import torch
import torch.distributed as dist

from pytest_gtrainer import joint_transformer_block_bucketing_reordering_pass as ours
from pytest_gtrainer import selective_activation_remat_pass
from pytest_gtrainer._torch.passes import ALL_REDUCE, RECEIVE, REDUCE_SCATTER, SEND, WAIT
from pytest_gtrainer._torch.process_groups import group_ranks
from pytest_gtrainer.conformance import Adapter
from pytest_gtrainer.conformance.judging import RULES, judge
from pytest_gtrainer.graph.collectives import fsdp_all_gathers, group_of, launches

pytestmark = [
    pytest.mark.second_tier,
    pytest.mark.gt_world("fake", size=4, rank=1),
    pytest.mark.usefixtures("gt_module_world"),
]
aten, functional = torch.ops.aten, torch.ops._c10d_functional


def found(gm, target):
    return gm.graph.find_nodes(op="call_function", target=target)


def wait_of(launch):
    return next(user for user in launch.users if user.target is WAIT)


def on_ranks(*ranks, change):
    """Return a pass that changes the graphs of these ranks; all graphs get a copy of the loss."""

    def changing(gm):
        output = gm.graph.output_node()
        loss, *gradients = output.args[0]
        with gm.graph.inserting_before(output):
            made = gm.graph.call_function(aten.clone.default, (loss,))
        made.meta = dict(loss.meta)
        output.args = ([made, *gradients],)
        if dist.get_rank() in ranks:
            change(gm)
        return gm

    changing.__name__ = change.__name__
    return changing


def turns_gathers_round(gm):
    """The gather of the head's weight is launched before that of the last norm."""
    *_, first, second = fsdp_all_gathers(gm)
    for node in (*second.chain, second.launch):
        first.launch.prepend(node)


def forgets_the_last_reduction(gm):
    launch = found(gm, ALL_REDUCE)[-1]
    wait = wait_of(launch)
    wait.replace_all_uses_with(launch.args[0])
    gm.graph.erase_node(wait)
    gm.graph.erase_node(launch)


def reduces_in_another_group(gm):
    groups = [str(group_of(node)) for node in gm.graph.nodes if launches(node.target)]
    launch = found(gm, REDUCE_SCATTER)[-1]
    own = str(group_of(launch))
    (other,) = {name for name in groups if group_ranks(name) != group_ranks(own)}
    launch.args = (*launch.args[:-1], other)


def sums_the_last(gm):
    launch = found(gm, ALL_REDUCE)[-1]
    launch.args = (launch.args[0], "sum", launch.args[2])


def waits_in_a_cycle(gm):
    """The last but one all-reduce over replicas waits until the last reduce-scatter is complete."""
    late, last = found(gm, ALL_REDUCE)[-2], found(gm, REDUCE_SCATTER)[-1]
    wait = wait_of(late)
    wait_of(last).append(late)
    late.append(wait)


def leaves_it_to_luck(gm):
    """The same without waits between them: ranks 0 and 3 launch the all-reduce second."""
    late, last = found(gm, ALL_REDUCE)[-2], found(gm, REDUCE_SCATTER)[-1]
    wait = wait_of(late)
    last.append(wait)
    if dist.get_rank() in (0, 3):
        last.append(late)


ORDERS = [
    (
        on_ranks(3, change=turns_gathers_round),
        r"rank 2 calls all_gather of \[2, 3\] with "
        r"bfloat16\[4\] \(all_gather_\w+ of norm\), where rank 3 calls .* of lm_head\)",
    ),
    (
        on_ranks(2, change=forgets_the_last_reduction),
        r"rank 0 waits in all_reduce of \[0, 2\] \(all_reduce_\d+ of tok_embeddings\), which rank",
    ),
    (
        on_ranks(3, change=reduces_in_another_group),
        r"rank 1 calls all_reduce .* of tok_embeddings\), where rank 3 calls reduce_scatter of",
    ),
    (
        on_ranks(1, change=sums_the_last),
        r"rank 1 calls .* with sum .* of tok_embeddings\), where rank 3 calls .* with avg",
    ),
    (
        on_ranks(0, 3, change=waits_in_a_cycle),
        r"rank 0 waits in reduce_scatter of .* of tok_embeddings\), which rank 1 has not reached\n"
        r"rank 1 waits in all_reduce of \[1, 3\] \(all_reduce_\d+ of layers.0.norm\), which rank 3",
    ),
    (
        on_ranks(0, 1, 2, 3, change=leaves_it_to_luck),
        r"only luck keeps this order: rank 0 starts reduce_scatter .* of tok_embeddings\) before "
        r"all_reduce of .* of layers.0.norm\)",
    ),
]


def judge_or_fail(rule, a_pass, request, kind="any"):
    """A rule that proves nothing would skip the test."""
    try:
        judge(RULES[rule], Adapter(a_pass, kind), request)
    except pytest.skip.Exception as skipped:
        raise RuntimeError(f"{rule}: {skipped}") from None


@pytest.mark.parametrize(
    ("mistake", "message"), ORDERS, ids=lambda each: getattr(each, "__name__", "")
)
def test_an_order_in_which_ranks_wait_is_named(mistake, message, request):
    """Q1: by the cycle, or by two ranks that call different collectives."""
    with pytest.raises(AssertionError, match=message):
        judge_or_fail("order", mistake, request)


def test_a_bucketing_that_forgets_a_reduction_on_one_rank(request):
    """Q1: the rule ``ranks`` would name another line of the graph, not who waits."""

    def forgets_here(gm, example_inputs=None, *, bucket_plan):
        gm = ours(gm, bucket_plan=bucket_plan)
        if dist.get_rank() == 2:
            forgets_the_last_reduction(gm)
        return gm

    with pytest.raises(
        AssertionError, match=r"rank 0 waits in all_reduce .* of tok_\w+\), which rank 2"
    ):
        judge_or_fail("order", forgets_here, request, "bucketing")


def drops(target):
    def dropping(gm):
        launch = found(gm, target)[-1]
        wait = wait_of(launch)
        wait.replace_all_uses_with(launch.args[0])
        gm.graph.erase_node(wait)
        gm.graph.erase_node(launch)

    return dropping


def doubles(target):
    def doubling(gm):
        launch = found(gm, target)[0]
        with gm.graph.inserting_after(wait_of(launch)):
            again = gm.graph.node_copy(launch, lambda node: node)
        with gm.graph.inserting_after(again):
            gm.graph.call_function(WAIT, (again,)).meta = dict(launch.meta)

    return doubling


def turns_round(gm):
    """The first two sends of a rank change places."""
    first, second = found(gm, SEND)[:2]
    second.append(first)
    first.append(wait_of(first))


def changes(**given):
    """Send or receive with another tag, peer, dtype or shape."""

    def changing(gm):
        launch = found(gm, SEND)[-1]
        carried, peer, tag, group = launch.args
        if "target" in given:
            with gm.graph.inserting_before(launch):
                made = gm.graph.call_function(given["target"], (carried, *given["args"]))
            made.meta = {**carried.meta, "val": given["value"](carried.meta["val"])}
            carried = made
        launch.args = (carried, given.get("peer", peer), given.get("tag", tag), group)

    return changing


def receives_first(gm):
    """A rank waits for the gradient of what it has not sent."""
    sent, received = found(gm, SEND)[-1], found(gm, RECEIVE)[0]
    wait = wait_of(received)
    received.args = (found(gm, SEND)[-2].args[0], *received.args[1:])
    sent.prepend(received)
    received.append(wait)


MISTAKES = [
    (
        (0,),
        drops(SEND),
        r"rank 0: send to 1 of tag 4, .*\(isend_3 of layers.1\): 1 message .*, 0 a",
    ),
    ((3,), drops(SEND), r"rank 3: send to 2 of tag 2, .* of layers.0\): 1 message before .*, 0 a"),
    ((3,), drops(RECEIVE), r"rank 3: recv from 2 of tag 4, bfloat16\[2, 3\] .*: 1 message .*, 0 a"),
    ((0, 1, 2, 3), drops(SEND), r"rank 0: send to 1 of tag 4, .* of layers.1\): 1 message .*, 0 a"),
    (
        (2,),
        doubles(SEND),
        r"rank 2: send to 3 of tag 0, .*\(isend of layers.0\): 1 mess.*, 2 after",
    ),
    ((1,), doubles(RECEIVE), r"rank 1: recv from 0 of tag 0, .* of layers.0\): 1 mess.*, 2 after"),
    (
        (2,),
        turns_round,
        r"rank 2 calls send to 3 with tag 1 bfloat16\[6\] \(isend_1 of layers.0\), where rank 3 "
        r"calls recv from 2 with tag 0 bfloat16\[48\] \(irecv of layers.0\)",
    ),
    ((0,), changes(tag=7), r"rank 0: send to 1 of tag 4, .* of layers.1\): 1 message before"),
    ((2,), changes(peer=0), r"on rank 2: rank 2 has a message with itself"),
    ((2,), changes(peer=5), r"on rank 2: isend_3 names rank 5 of a group of 2"),
    (
        (0,),
        changes(target=aten.view.default, args=([-1],), value=lambda value: value.view(-1)),
        r"rank 0: send to 1 of tag 4, bfloat16\[2, 3\] \(isend_3 of layers.1\): 1 message",
    ),
    (
        (0,),
        changes(
            target=torch.ops.prims.convert_element_type.default,
            args=(torch.float64,),
            value=torch.Tensor.double,
        ),
        r"rank 0: send to 1 of tag 4, bfloat16\[2, 3\] \(isend_3 of layers.1\): 1 message",
    ),
    (
        (0,),
        receives_first,
        r"rank 0 waits in recv from 1 \(irecv of layers.1\), which rank 1 has not reached\n"
        r"rank 1 waits in recv from 0 \(irecv_3 of layers.1\), which rank 0 has not reached",
    ),
]


@pytest.mark.parametrize(("ranks", "change", "message"), MISTAKES)
def test_a_message_that_has_no_other_end_is_named(ranks, change, message, request):
    """Q2: dropped, doubled, turned round, with another tag, peer, shape or dtype."""
    with pytest.raises(AssertionError, match=message):
        judge_or_fail("p2p", on_ranks(*ranks, change=change), request)


def becomes_a_batch(gm):
    """The first two messages of a rank are started together."""
    for target, kind in ((SEND, "isend"), (RECEIVE, "irecv")):
        messages = found(gm, target)
        if len(messages) < 4:
            continue
        first, second = messages[:2]
        tensors = [first.args[0], second.args[0]]
        peers, tags = [first.args[1], second.args[1]], [first.args[2], second.args[2]]
        with gm.graph.inserting_before(second):
            made = gm.graph.call_function(
                functional.batch_p2p_ops.default, ([kind] * 2, peers, tags, tensors, first.args[3])
            )
        made.meta = {**first.meta, "val": [node.meta["val"] for node in (first, second)]}
        for place, node in enumerate((first, second)):
            with gm.graph.inserting_before(second):
                item = gm.graph.call_function(operator.getitem, (made, place))
            item.meta = dict(node.meta)
            wait = wait_of(node)
            with gm.graph.inserting_before(second):
                waited = gm.graph.call_function(WAIT, (item,))
            waited.meta = dict(wait.meta)
            wait.replace_all_uses_with(waited)
            gm.graph.erase_node(wait)
            gm.graph.erase_node(node)


def test_messages_that_all_ranks_send_as_one_batch_match(request):
    """Q2: both ends are as before, so this is no mistake."""
    judge_or_fail("p2p", on_ranks(0, 1, 2, 3, change=becomes_a_batch), request)
    with pytest.raises(AssertionError, match=r"rank 2 waits in send to 3 \(batch_p2p_ops"):
        judge_or_fail("p2p", on_ranks(2, change=becomes_a_batch), request)


def test_a_message_is_not_recomputed(request):
    """Q3: our pass refuses it; one that repeats it is named."""
    judge(RULES["p2p"], Adapter(selective_activation_remat_pass, "remat", strict=True), request)


def test_a_repeated_receive_is_named(request, monkeypatch):
    """Q2 Q3: as torch's own pass, and ours before, repeat it."""
    monkeypatch.setattr("pytest_gtrainer.passes.remat.is_message", lambda node: False)
    with pytest.raises(AssertionError, match=r"recv from 0 of tag 0, .* 1 message .*, 2 after it"):
        judge_or_fail("p2p", selective_activation_remat_pass, request, "remat")


@pytest.mark.parametrize("rule", ["order", "p2p"])
def test_a_graph_on_which_ranks_wait_anyway_proves_nothing(rule, request, monkeypatch):
    def stuck(schedules):
        return "rank 0 waits in send to 1"

    monkeypatch.setattr("pytest_gtrainer.conformance.rules.find_waits", stuck)
    with pytest.raises(pytest.skip.Exception, match="without the pass ranks wait for ever, too"):
        judge(RULES[rule], Adapter(on_ranks(change=turns_round)), request)
