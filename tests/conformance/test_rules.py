"""Each rule can fail: a pass that breaks it is reported, by the sentence of the rule."""

import contextlib
import copy
import fnmatch
import itertools
import operator
import signal
import sys
import threading
import time
import unittest

import pytest
import torch
import torch.distributed as dist
from torch import fx

from pytest_gtrainer import (
    ChunkError,
    canonicalize_graph_pass,
    chunk_pass,
    facts,
    selective_activation_remat_pass,
)
from pytest_gtrainer import joint_transformer_block_bucketing_reordering_pass as ours
from pytest_gtrainer._torch.passes import ALL_GATHER, ALL_TO_ALL, EXTRA_GROUP, WAIT, extra_group
from pytest_gtrainer._torch.process_groups import group_ranks
from pytest_gtrainer.conformance import Adapter, any_pass, bucketing, rules
from pytest_gtrainer.conformance.judging import RULES, as_given, cases_of, ended_within, judge
from pytest_gtrainer.conformance.recipes import graph_of
from pytest_gtrainer.graph.collectives import fsdp_all_gathers, group_of, kind_of, launches
from pytest_gtrainer.numerics.graph_run import run_graph
from pytest_gtrainer.testing.running import sample

pytestmark = [  # one world for all: a graph is traced once
    pytest.mark.gt_world("fake", size=4, rank=1),
    pytest.mark.usefixtures("gt_module_world"),
]
aten = torch.ops.aten


def found(gm, target):
    return gm.graph.find_nodes(op="call_function", target=target)


def insert_behind(node, target, *args):
    """Call ``target(node, *args)`` behind the node; whoever read the node reads the result."""
    with node.graph.inserting_after(node):
        made = node.graph.call_function(target, (node, *args))
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
    return made


def change_last_result(gm, target):
    """Return ``target`` of the last result in its place; other readers of the result stay."""
    output = gm.graph.output_node()
    (results,) = output.args
    with gm.graph.inserting_before(output):
        made = gm.graph.call_function(target, (results[-1],))
    made.meta = dict(results[-1].meta)
    output.args = ([*results[:-1], made],)
    return gm


def out_of_order(gm, plan):
    gm = ours(gm, bucket_plan=plan)
    wait = found(gm, WAIT)[0]
    wait.prepend(next(iter(wait.users)))
    return gm


def adds_each_time(gm, plan):
    gm = ours(gm, bucket_plan=plan)
    insert_behind(gm.graph.output_node().args[0][0], aten.clone.default)
    return gm


def refuses_too_late(gm, plan):
    ours(gm, bucket_plan=[entry for entry in plan if entry != "no.such.module"])
    if "no.such.module" in plan:
        raise ValueError("there is no such module")
    return gm


def takes_any_plan(gm, plan):
    return ours(gm, bucket_plan=[entry for entry in plan if entry != "no.such.module"])


def negates(gm, plan):
    return change_last_result(ours(gm, bucket_plan=plan), aten.neg.default)


def swaps_gradients(gm, plan):
    """Two of one shape."""
    gm = ours(gm, bucket_plan=plan)
    (results,) = gm.graph.output_node().args
    names = list(gm.graph.output_node().meta["gt_outputs"])
    swapped, one, other = (
        list(results),
        names.index("layers.0.w2.weight"),
        names.index("layers.0.w3.weight"),
    )
    swapped[one], swapped[other] = results[other], results[one]
    gm.graph.output_node().args = (swapped,)
    return gm


def forgets_values(gm, plan):
    gm = ours(gm, bucket_plan=plan)
    del found(gm, WAIT)[-1].meta["val"]
    return gm


def forgets_a_value_that_it_was_given(gm, plan):
    gm = ours(gm, bucket_plan=plan)
    del found(gm, aten.tanh.default)[-1].meta["val"]
    return gm


def forgets_modules(gm, plan):
    gm = ours(gm, bucket_plan=plan)
    found(gm, aten.tanh.default)[0].meta["custom"] = {}
    return gm


def asks_for_its_rank(gm, plan):
    return ours(gm, bucket_plan=plan, reorder=dist.get_rank() > 0)


def compares_all_pairs(gm, plan):
    nodes = list(gm.graph.nodes)
    sum(operator.eq(id(one), id(other)).__bool__() for one in nodes for other in nodes)
    return ours(gm, bucket_plan=plan)


def runs_twenty_times(gm, plan):
    """Linear in nodes, and slow."""
    for _ in range(20):
        copy.deepcopy(gm.graph)
    return ours(gm, bucket_plan=plan)


def loses_a_gradient(gm, plan):
    gm = change_last_result(ours(gm, bucket_plan=plan), aten.full.default)
    gradient = gm.graph.output_node().args[0][-1]
    gradient.args = (list(gradient.meta["val"].shape), 0.0)
    return gm


def cuts_a_layer(gm, plan):
    return ours(gm, bucket_plan=[*plan, "layers.0.w1"])


def packs_as_executed(gm, plan):
    return ours(gm, bucket_plan=plan, payload_order="execution")


def packs_as_registered(gm, plan):
    return ours(gm, bucket_plan=plan, payload_order="registration")


def exchanges_twice(gm, plan):
    gm = ours(gm, bucket_plan=plan)
    reduced = found(gm, torch.ops._c10d_functional.all_reduce.default)
    if reduced:
        with gm.graph.inserting_after(reduced[0]):
            gm.graph.node_copy(reduced[0], lambda node: node)
    return gm


def gathers_in_another_dtype(gm, plan):
    gm = ours(gm, bucket_plan=plan)
    for launch in found(gm, ALL_GATHER):
        value = launch.meta["val"]
        if value.dtype is torch.float32 and "fsdp_bucket" in launch.meta:
            with gm.graph.inserting_before(launch):
                smaller = gm.graph.call_function(
                    aten._to_copy.default, (launch.args[0],), {"dtype": torch.bfloat16}
                )
            smaller.meta = launch.args[0].meta | {
                "val": launch.args[0].meta["val"].to(torch.bfloat16)
            }
            launch.args = (smaller, *launch.args[1:])
            launch.meta["val"] = value.to(torch.bfloat16)
    return gm


def leaves_no_marks(gm, plan):
    gm = ours(gm, bucket_plan=plan)
    for node in gm.graph.nodes:
        node.meta.pop("fsdp_bucket", None)
    return gm


def leaves_views(gm, plan):
    """The result of a bucket's all-gather is not copied out."""
    gm = ours(gm, bucket_plan=plan)
    for clone in found(gm, aten.clone.default):
        if "fsdp_bucket" in clone.meta:
            clone.replace_all_uses_with(clone.args[0])
            for user in list(clone.args[0].users):  # a view of a strided one has its strides
                if user.target is aten.view.default:
                    user.meta["val"] = clone.args[0].meta["val"].reshape(user.args[1])
    strided = next(node for node in gm.graph.nodes if node.target is aten.t.default)
    strided.meta["val"] = strided.meta["val"].contiguous()
    return gm


def does_not_reorder(gm, plan):
    return ours(gm, bucket_plan=plan, reorder=False)


def moves_compute(gm, plan):
    """Two neighbours that do not need each other."""
    gm = ours(gm, bucket_plan=plan)
    sums = (aten.sum.dim_IntList, aten.mm.default, aten.mul.Tensor)
    for one, other in itertools.pairwise(gm.graph.nodes):
        if {one.target, other.target} <= set(sums) and one not in other.all_input_nodes:
            other.append(one)
            return gm
    raise AssertionError("no two neighbours")


def forgets_a_launchs_value(gm, plan):
    gm = ours(gm, bucket_plan=plan)
    del found(gm, ALL_GATHER)[0].meta["val"]
    return gm


def raises_an_error(gm, plan):
    raise KeyError("w2")


def orders_by_hash(gm, plan):
    return ours(
        gm,
        bucket_plan=plan,
        payload_order=list(set(gm.graph.output_node().meta["gt_managed_order"])),
    )


def refuses_half_way(gm, plan):
    found(gm, aten.tanh.default)[0].target = aten.sin.default
    return ours(gm, bucket_plan=plan)


def spoils_metadata_and_refuses(gm, plan):
    for node in found(gm, aten.tanh.default):
        node.meta["custom"] = {"module_fqn": "spoilt"}
    raise ValueError("not this one")


def copies_without_modules(gm, plan):
    made = copy.deepcopy(gm if plan is None else ours(gm, bucket_plan=plan))
    for node in made.graph.nodes:
        node.meta.pop("custom", None)
    return made


def moves_and_renames_compute(gm, plan):
    gm = moves_compute(gm, plan)
    for place, node in enumerate(gm.graph.nodes):
        if node.op == "call_function":
            node._rename(f"moved_{place}")
    return gm


def renames_and_copies_without_modules(gm, plan):
    return copies_without_modules(moves_and_renames_compute(gm, plan), None)


def packs_experts_as_executed(gm, plan):
    """Pack by module, then in the order of the graph: only experts are read in another order than
    they are registered.
    """
    executed = [member.parameter for member in fsdp_all_gathers(gm)]
    managed = list(gm.graph.output_node().meta["gt_managed_order"])
    experts = {fqn.rpartition(".")[0] for fqn in managed if ".experts." in fqn}
    place = {
        module: managed.index(next(fqn for fqn in managed if fqn.startswith(module)))
        for module in experts
    }
    order = sorted(
        managed,
        key=lambda fqn: (
            place.get(fqn.rpartition(".")[0], managed.index(fqn)),
            executed.index(fqn),
        ),
    )
    return ours(gm, bucket_plan=plan, payload_order=order)


MISTAKES = [
    ("E6", out_of_order, "left a graph out of order"),
    ("E7", adds_each_time, "the second run changes the graph"),
    ("D11", refuses_too_late, "left the graph half rewritten"),
    ("D11", spoils_metadata_and_refuses, r'left tanh\w* with another meta\["custom"\]'),
    ("D11", takes_any_plan, "was taken in silence"),
    ("D9", negates, "after negates against before"),
    ("D9", swaps_gradients, "after swaps_gradients against before"),
    ("metadata", forgets_values, 'has no meta\\["val"\\]'),
    ("metadata", forgets_a_value_that_it_was_given, 'tanh.* has no meta\\["val"\\]'),
    ("metadata", forgets_modules, "was of layers.0 fwd and is of  fwd"),
    ("metadata", copies_without_modules, "was of tok_embeddings fwd and is of  fwd"),
    ("metadata", renames_and_copies_without_modules, "was of .* and is of  fwd"),
    ("E4", renames_and_copies_without_modules, "compute has moved"),
    ("ranks", asks_for_its_rank, "rank 0 has another graph than rank 1"),
    ("growth", compares_all_pairs, "calls for 4 layers"),
    ("cost", runs_twenty_times, r"\d+ calls, a recompile \d+: \d+.\d times"),
    ("generated", negates, "the smallest model: Recipe\\("),
    ("D17", loses_a_gradient, "it is gone: reduce_scatter of "),
    ("D1", cuts_a_layer, "bucket 'layers.0', all_gather in fwd: expected one of"),
    ("D2", packs_as_executed, "layers.0.norm.weight stands where FSDP2 packs layers.0.w1.weight"),
    (
        "D4",
        packs_as_registered,
        "bucket 'layers.0', all_gather: layers.0.w1.weight sits at byte 8, expected 0",
    ),
    ("D6", exchanges_twice, "all_reduce of \\[2, 3, 8\\] over tp: 2 before the pass, 3 after it"),
    ("D7", gathers_in_another_dtype, "travelled as torch.float32, now as torch.bfloat16"),
    ("D8", leaves_no_marks, 'has no meta\\["fsdp_bucket"\\]'),
    ("D13", leaves_views, "reads operands of strides"),
    ("E1", does_not_reorder, "the gather of a bucket hides nothing"),
    ("E2", does_not_reorder, "nothing runs beside it"),
    ("E4", moves_compute, "compute has moved"),
    ("E4", moves_and_renames_compute, "compute has moved"),
    (
        "D11",
        refuses_half_way,
        "it refused a collective without a value and left the graph half rewritten",
    ),
    ("process", orders_by_hash, "another process has another graph of Recipe"),
    (
        "D2",
        packs_experts_as_executed,
        "bucket 'layers.0', all_gather: layers.0.moe.experts.w3 stands where FSDP2 packs "
        "layers.0.moe.experts.w2",
    ),
    ("E8", does_not_reorder, "are exposed where eager exposes at most 2: waits: "),
]


def drops_clones(*places):
    """A canonicalisation that takes copies, those of these numbers, for identities."""

    def drops(gm):
        gm = canonicalize_graph_pass(gm)
        for place, clone in enumerate(found(gm, aten.clone.default)):
            if place in places:
                clone.replace_all_uses_with(clone.args[0])
                gm.graph.erase_node(clone)
        return gm

    return drops


def keeps_views(gm):
    return canonicalize_graph_pass(gm, rules=["detach"])


def joins_gathers(gm, *, of="", both_directions=False):
    """Without a look at what is written in between."""
    first = {}
    for member in fsdp_all_gathers(gm):
        direction = "" if both_directions else member.direction
        kept = first.setdefault((member.parameter, direction), member)
        if kept is not member and of in member.parameter:
            member.wait.replace_all_uses_with(kept.wait)
            gm.graph.erase_node(member.wait)
            gm.graph.erase_node(member.launch)
    return gm


def joins_in_one_layer(gm):
    return joins_gathers(gm, of="layers.0")


def joins_both_directions(gm):
    """The backward reads what the forward has gathered."""
    return joins_gathers(gm, both_directions=True)


def merges_equal(*targets):
    """A deduplication that takes equal calls of these operators for one, whatever is written to
    them.
    """

    def merges(gm):
        first = {}
        joins_gathers(gm)
        for node in [node for target in targets for node in found(gm, target)]:
            kept = first.setdefault((node.target, str(node.args), str(node.kwargs)), node)
            if kept is not node and kept < node:
                node.replace_all_uses_with(kept)
                gm.graph.erase_node(node)
        return gm

    return merges


def doubles_in_place(gm):
    """A deduplication that leaves a weight twice as large: no result of this run shows it."""
    joins_gathers(gm)
    output, weight = gm.graph.output_node(), gm.graph.find_nodes(op="placeholder")[-2]
    with gm.graph.inserting_before(output):
        doubled = gm.graph.call_function(aten.mul_.Scalar, (weight, 2))
    doubled.meta = {**output.args[0][0].meta, "val": weight.meta["val"]}
    return gm


def draws_for_nobody(gm):
    joins_gathers(gm)
    output = gm.graph.output_node()
    with gm.graph.inserting_before(output):
        drawn = gm.graph.call_function(aten.rand.default, ([2],))
    drawn.meta = {**output.args[0][0].meta, "val": output.args[0][0].meta["val"].new_empty(2)}
    return gm


def reads_shards_in_order(*ranks, last=False):
    """A pass that reads the shards of one gathered parameter in another order of ranks."""

    def reads(gm):
        member = fsdp_all_gathers(gm)[-1 if last else 0]
        (rows, *_) = member.wait.meta["val"].shape
        with gm.graph.inserting_before(member.wait):
            order = gm.graph.call_function(aten.arange.default, (rows,))
            order.meta = {**member.wait.meta, "val": torch.arange(rows)}
            shards = gm.graph.call_function(aten.view.default, (order, [len(ranks), -1]))
            shards.meta = {**order.meta, "val": order.meta["val"].view(len(ranks), -1)}
            parts = []
            for rank in ranks:
                part = gm.graph.call_function(aten.select.int, (shards, 0, rank))
                part.meta = {**order.meta, "val": shards.meta["val"][rank]}
                parts.append(part)
            order_of_ranks = gm.graph.call_function(aten.cat.default, (parts,))
            order_of_ranks.meta = dict(order.meta)
        insert_behind(member.wait, aten.index_select.default, 0, order_of_ranks)
        return gm

    return reads


def bounds_tokens(most):
    """A pass that takes the last tokens of the vocabulary for the one before them."""

    def bounds(gm):
        tokens = gm.graph.find_nodes(op="placeholder")[-1]
        insert_behind(tokens, aten.clamp.default, 0, most)
        return gm

    return bounds


def bounds_activations(gm):
    """A clamp that no ordinary activation reaches."""
    joins_gathers(gm)
    for node in found(gm, aten.embedding.default):
        insert_behind(node, aten.clamp.default, -100, 100)
    return gm


def fuses_products(count, *, swaps=False):
    """The first products of one left operand, among three, become one; it stands where the last of
    them stood.
    """

    def fuses(gm):
        joins_gathers(gm)
        of_left = {}
        for node in found(gm, aten.mm.default):
            of_left.setdefault(node.args[0], []).append(node)
        for left, products in [
            (left, each[:count]) for left, each in of_left.items() if len(each) == 3
        ]:
            meta, widths = dict(products[-1].meta), [node.meta["val"].shape[1] for node in products]
            with gm.graph.inserting_before(products[-1]):
                right = gm.graph.call_function(
                    aten.cat.default, ([node.args[1] for node in products], 1)
                )
                fused = gm.graph.call_function(aten.mm.default, (left, right))
                parts = gm.graph.call_function(aten.split_with_sizes.default, (fused, widths, 1))
                made = [
                    gm.graph.call_function(operator.getitem, (parts, place))
                    for place in range(count)
                ]
            right.meta, fused.meta, parts.meta = dict(meta), dict(meta), dict(meta)
            early = {user for node in products for user in node.users if user < made[-1]}
            for reader in sorted(early, reverse=True):
                made[-1].append(reader)
            for node, part in zip(products, made[::-1] if swaps else made, strict=True):
                part.meta = dict(meta)
                node.replace_all_uses_with(part)
                gm.graph.erase_node(node)
        return gm

    return fuses


def fuses_sums(gm):
    """A sum with a product becomes one operator, which rounds once."""
    joins_gathers(gm)
    for node in found(gm, aten.add.Tensor):
        left, right = node.args
        if isinstance(right, fx.Node) and right.target is aten.mm.default and len(right.users) == 1:
            node.target, node.args = aten.addmm.default, (left, *right.args)
            gm.graph.erase_node(right)
    return gm


def recomputed(gm):
    return [node for node in gm.graph.nodes if "_recomputed" in node.name]


def forgets_the_backward(gm):
    gm = selective_activation_remat_pass(gm)
    for node in recomputed(gm):
        del node.meta["autograd_backward"]
    return gm


def does_not_look(*targets):
    """A recomputation that does not see what operators do."""

    def stand_in_for(target):
        def stand_in(*args):
            raise AssertionError(target)

        return stand_in

    def blind(gm):
        hidden = {stand_in_for(target): target for target in targets}
        for stand_in, target in hidden.items():
            for node in found(gm, target):
                node.target = stand_in
        gm = selective_activation_remat_pass(gm)
        for node in gm.graph.nodes:
            node.target = hidden.get(node.target, node.target)
        return gm

    return blind


def keeps_both(gm):
    """The recomputed value stays from the forward, too."""
    gm = selective_activation_remat_pass(gm)
    of = {node.name: node for node in gm.graph.nodes}
    with gm.graph.inserting_before(gm.graph.output_node()):
        for node in recomputed(gm):
            kept = of[node.name.partition("_recomputed")[0]]
            gm.graph.call_function(aten.clone.default, (kept,)).meta = dict(kept.meta)
    return gm


def moves(*kinds, of=lambda member: True):
    """Collectives of these kinds."""

    def moving(gm):
        for node in [
            node
            for node in gm.graph.nodes
            if launches(node.target) and kind_of(node) in kinds and of(node)
        ]:
            node.args = (
                *node.args[:-1],
                extra_group(str(group_of(node)).removesuffix(EXTRA_GROUP)),
            )
        return gm

    return moving


def moves_one(gm):
    chosen = fsdp_all_gathers(gm)[0].launch
    return moves("all_gather", of=lambda node: node is chosen)(gm)


EXTRAS = {}


def remembers_groups(gm):
    """Remember groups in a table of the module, beyond the end of a world."""
    for member in fsdp_all_gathers(gm):
        launch, ranks = member.launch, group_ranks(str(group_of(member.launch)))
        launch.args = (
            *launch.args[:-1],
            EXTRAS.setdefault(ranks, extra_group(str(group_of(launch)))),
        )
    return gm


EXTRAS_BY_NAME = {}


def remembers_names(gm):
    """Remember the name of the source: in a world whose groups have other names it finds nothing,
    and is right.
    """
    for member in fsdp_all_gathers(gm):
        launch, source = member.launch, str(group_of(member.launch))
        if source not in EXTRAS_BY_NAME:
            EXTRAS_BY_NAME[source] = dist.new_group(list(group_ranks(source))).group_name
        launch.args = (*launch.args[:-1], EXTRAS_BY_NAME[source])
    return gm


def does_not_chunk(gm, example_inputs=None, *, config, twin):
    return copies_a_result(gm)


def copies_a_result(gm):
    """So that the graph is another one, with the same values."""
    return change_last_result(gm, aten.clone.default)


def copies_chunks(gm, example_inputs=None, *, config, twin):
    gm = chunk_pass(gm, config=config, twin=twin)
    for node in found(gm, aten.split_with_sizes.default):
        for part in list(node.users):
            insert_behind(part, aten.clone.default)._rename("copied_chunk")
    return gm


def chunks_anything(gm, example_inputs=None, *, config, twin):
    try:
        return chunk_pass(gm, config=config, twin=twin)
    except ChunkError:
        return copies_a_result(gm)


def asserts_without_words(gm):
    if found(gm, aten.bernoulli_.float):
        raise AssertionError
    return selective_activation_remat_pass(gm)


def exchanges_twice_a_chunk(gm, example_inputs=None, *, config, twin):
    gm = chunk_pass(gm, config=config, twin=twin)
    for node in found(gm, ALL_TO_ALL)[:1]:
        with gm.graph.inserting_after(node):
            gm.graph.node_copy(node)
    return gm


def swaps_chunks(gm, example_inputs=None, *, config, twin):
    gm = chunk_pass(gm, config=config, twin=twin)
    for node in found(gm, aten.cat.default)[:1]:
        node.args = (node.args[0][::-1], *node.args[1:])
    return gm


def crashes_where_it_should_refuse(gm, example_inputs=None, *, config, twin):
    try:
        return chunk_pass(gm, config=config, twin=twin)
    except ChunkError:
        return {}["twin"]


def packs_gradients_as_executed(gm, *, bucket_plan):
    """Pack gradients in their order in a graph of the backward alone."""
    is_backward = "loss" not in gm.graph.output_node().meta["gt_outputs"]
    return ours(
        gm, bucket_plan=bucket_plan, payload_order="execution" if is_backward else "managed"
    )


def expects_a_loss(gm, *, bucket_plan):
    if "loss" not in gm.graph.output_node().meta["gt_outputs"]:
        raise ValueError("there is no loss")
    return ours(gm, bucket_plan=bucket_plan)


def averages_all_but_one(gm):
    """A pass for DDP's gradients."""
    loss, *gradients, last = gm.graph.output_node().args[0]
    gm.graph.output_node().args = ([loss, *gradients, last.args[0].args[0]],)
    gm.graph.eliminate_dead_code()
    return gm


def reduces(kind, change, *, last=False):
    """Return a pass that changes the first, or the last, reduction of a kind."""

    def reducing(gm):
        nodes = [node for node in gm.graph.nodes if launches(node.target) and kind_of(node) == kind]
        for node in nodes[-1:] if last else nodes[:1]:
            change(node)
        return copies_a_result(gm)

    return reducing


def sums(node):
    node.args = (node.args[0], "sum", *node.args[2:])


def over_other_ranks(node):
    groups = {str(group_of(each)) for each in node.graph.nodes if launches(each.target)}
    for other in groups:
        if group_ranks(other) != group_ranks(str(group_of(node))):
            node.args = (*node.args[:-1], other)
            return


def not_at_all(node):
    """An all-reduce in a fake world is its operand."""
    node.replace_all_uses_with(node.args[0])
    node.graph.erase_node(node)


def leaves_one_node_unmarked(gm, *, bucket_plan):
    known = {node.name for node in gm.graph.nodes}
    gm = ours(gm, bucket_plan=bucket_plan)
    made = [node for node in gm.graph.nodes if node.name not in known and not launches(node.target)]
    del made[-1].meta["fsdp_bucket"]
    return gm


def adds_on_rank_two(gm):
    return copies_a_result(gm) if dist.get_rank() == 2 else copies_a_result(copies_a_result(gm))


def does_not_wait(at, *, late=False):
    """Return a pass that drops a wait; or its readers do not wait, and it stands at the end."""

    def reading_early(gm):
        wait = found(gm, WAIT)[at]
        wait.replace_all_uses_with(wait.args[0])
        if late:
            gm.graph.output_node().prepend(wait)
        else:
            gm.graph.erase_node(wait)
        return copies_a_result(gm)

    return reading_early


def negates_where(is_so):
    """Return a pass that negates the last result of the graphs that ``is_so`` is true of."""

    def negating(gm):
        gm = copies_a_result(gm)
        return change_last_result(gm, aten.neg.default) if is_so(gm) else gm

    return negating


def has_experts(gm):
    return bool(found(gm, aten.bmm.default))


def has_two_groups(gm):
    return len({group_of(gather) for gather in found(gm, ALL_GATHER)}) > 1


def is_deep(gm):
    return any("layers.2" in str(node.meta.get("custom")) for node in gm.graph.nodes)


def is_odd_on(rank):
    def is_so(gm):
        shapes = [node.meta["val"].shape for node in gm.graph.find_nodes(op="placeholder")]
        return dist.get_rank() == rank and any(10 in shape for shape in shapes)

    return is_so


def has_replicas_on(*ranks):
    return lambda gm: dist.get_rank() in ranks and has_two_groups_of_reductions(gm)


def has_two_groups_of_reductions(gm):
    nodes = [node for node in gm.graph.nodes if launches(node.target)]
    return "all_reduce" in map(kind_of, nodes)


def gathers_twice(is_so, *, waits=True):
    """Return a pass that launches the first gather again, for nobody."""

    def gathering(gm):
        gm = copies_a_result(gm)
        gather = found(gm, ALL_GATHER)[0]
        if is_so(gm):
            with gm.graph.inserting_after(gather):
                again = gm.graph.call_function(ALL_GATHER, gather.args)
            again.meta = dict(gather.meta)
            with gm.graph.inserting_after(again):
                if waits:
                    gm.graph.call_function(WAIT, (again,)).meta = dict(gather.meta)
        return gm

    return gathering


def says_wrong(target, **change):
    """Return a pass that gives the first call of an operator another value."""

    def saying(gm):
        gm = copies_a_result(gm)
        node = found(gm, target)[0]
        node.meta["val"] = node.meta["val"].new_empty(**change)
        return gm

    return saying


def says_other_strides(gm):
    gm = copies_a_result(gm)
    value = (node := found(gm, aten.tanh.default)[0]).meta["val"]
    node.meta["val"] = value.new_empty(value.shape[::-1]).permute(*reversed(range(value.dim())))
    return gm


MISTAKES_OF_KINDS = [
    *(
        (kind, "D9", negates_where(is_so), message)
        for kind, is_so, message in (
            ("any", has_experts, "moe=True"),
            ("any", has_two_groups, "'tp', 2"),
            ("any", is_deep, "layers=4"),
            ("any", is_odd_on(0), "on rank 0: "),
            ("canonicalisation", is_odd_on(3), "on rank 3: "),
        )
    ),
    ("any", "ranks", negates_where(has_replicas_on(2, 3)), "rank 2 has another graph than rank 1"),
    # Its shards are uneven, and those of ranks 0 to 2 are equal.
    ("any", "ranks", negates_where(is_odd_on(2)), "rank 2 has another graph than rank 1"),
    ("any", "metadata", says_other_strides, r"with strides \[.*says .* with strides \["),
    (
        "any",
        "ranks",
        gathers_twice(is_odd_on(3)),
        "rank 3 launches all_gather of .* where rank 1 launches all_gather of",
    ),
    *(
        (
            "any",
            "D9",
            gathers_twice(lambda gm: True, waits=waits),
            "all_gather over .* bytes before",
        )
        for waits in (True, False)
    ),
    *(
        ("any", "metadata", says_wrong(target, **change), r'and its meta\["val"\] says')
        for target, change in (
            (aten.tanh.default, {"size": (7,)}),
            (aten.clone.default, {"size": (), "dtype": torch.float64}),
        )
    ),
    *(
        (kind, "E6", does_not_wait(at, late=late), "before it is waited for")
        for kind, at, late in (
            ("any", 0, False),
            ("any", -1, False),
            ("any", 1, True),
            ("deduplication", 3, True),
            ("remat", 0, False),
        )
    ),
    (
        "any",
        "D9",
        reduces("reduce_scatter", sums),
        "reduce_scatter avg of .*: .* elements before the pass",
    ),
    (
        "any",
        "D9",
        reduces("reduce_scatter", sums, last=True),
        "reduce_scatter avg of .*: .* elements before the pass",
    ),
    ("any", "D9", reduces("all_reduce", sums), "all_reduce avg of .*: .* elements before the pass"),
    (
        "any",
        "D9",
        reduces("all_reduce", over_other_ranks),
        r"all_reduce avg of .* over ranks \[0, 1\]: 0 elements",
    ),
    (
        "any",
        "D9",
        reduces("all_gather", over_other_ranks),
        r"all_gather over ranks \[1, 3\]: 0 elements",
    ),
    (
        "any",
        "D9",
        reduces("all_reduce", not_at_all, last=True),
        "all_reduce avg of .*: .* elements before the pass",
    ),
    ("separate", "D8", leaves_one_node_unmarked, 'has no meta\\["fsdp_bucket"'),
    ("any", "ranks", adds_on_rank_two, "rank 2 has another graph than rank 1"),
    (
        "ddp",
        "D17",
        averages_all_but_one,
        "it is gone: all_reduce of lm_head.weight in bwd, 512 bytes a rank",
    ),
    (
        "separate",
        "D2",
        packs_gradients_as_executed,
        r"on Recipe\(part=backward\):\nbucket '.*', reduce_scatter: .* stands where FSDP2 packs",
    ),
    (
        "separate",
        "E6",
        expects_a_loss,
        r"on Recipe\(part=backward\):\nexpects_a_loss raised ValueError: there is no loss",
    ),
    (
        "canonicalisation",
        "aliases",
        drops_clones(0),
        "output 0 shared memory with nothing, and shares it with input 0",
    ),
    ("canonicalisation", "aliases", drops_clones(1), "against before"),
    ("canonicalisation", "aliases", drops_clones(2), "first at output 2: stride"),
    ("canonicalisation", "spelling", keeps_views, "the same step in two spellings has two texts"),
    (
        "deduplication",
        "A11",
        joins_in_one_layer,
        r"layers.1.w1.\w+ in fwd: expected the first gather, .*, alone; found",
    ),
    (
        "deduplication",
        "A11",
        joins_both_directions,
        r" in bwd: expected the first gather, .*, alone; found none",
    ),
    ("deduplication", "written", joins_gathers, "against before"),
    *(
        ("deduplication", "fresh", merges_equal(target), "against before")
        for target in (
            aten.empty_like.default,
            aten.new_zeros.default,
            aten.zeros.default,
            aten.clone.default,
            aten.rand_like.default,
        )
    ),
    (
        "any",
        "fresh",
        merges_equal(aten.empty_like.default, aten.uniform_.default),
        "against before",
    ),
    ("any", "fresh", merges_equal(aten.empty_like.default, aten.fill_.Scalar), "against before"),
    ("any", "fresh", fuses_products(3), "against before"),
    ("any", "fresh", fuses_products(2, swaps=True), "against before"),
    ("deduplication", "fresh", fuses_sums, "against before"),
    (
        "deduplication",
        "D9",
        doubles_in_place,
        r"first at lm_head.weight afterwards, element \(0, 0\)",
    ),
    ("deduplication", "D9", draws_for_nobody, "first at random state of torch.cpu afterwards"),
    ("deduplication", "D9", bounds_activations, "against before, on inputs with large numbers"),
    *(
        (kind, rule, reads_shards_in_order(*order, last=last), "with other shards and tokens on")
        for kind, rule, order, last in (
            ("any", "D9", (1, 2, 3, 0), False),
            ("any", "D9", (0, 1, 3, 2), True),
            ("any", "fresh", (1, 0, 2, 3), False),
            ("bucketing", "D9", (3, 2, 1, 0), True),
        )
    ),
    ("any", "D9", bounds_tokens(1), "against before, on inputs with integers from 2 to 10"),
    (
        "any",
        "D9",
        bounds_tokens(14),
        "against before, on inputs with the integer 15 in graph input",
    ),
    (
        "any",
        "fresh",
        bounds_tokens(13),
        "against before, on inputs with the integer 15 in graph input",
    ),
    ("remat", "written", does_not_look(aten.mul_.Scalar), "against before"),
    ("remat", "M2", forgets_the_backward, "is computed again and not marked as the backward's"),
    (
        "remat",
        "random",
        does_not_look(aten.bernoulli_.float, aten.div_.Scalar),
        "bernoulli_.*_recomputed draws again",
    ),
    ("remat", "memory", keeps_both, "the peak was"),
    (
        "reassignment",
        "F1",
        moves("all_gather", "reduce_scatter"),
        "is no all-gather of a parameter and has moved",
    ),
    ("reassignment", "F1", moves("all_gather"), "is no all-gather of a parameter and has moved"),
    ("reassignment", "F1", moves_one, "expected another group of 0's ranks"),
    ("reassignment", "F4", remembers_groups, "of a world that is gone"),
    ("reassignment", "F4", remembers_names, "of a world that is gone"),
    ("chunking", "G1", does_not_chunk, "chunked graph against eager chunking"),
    (
        "chunking",
        "routes",
        exchanges_twice_a_chunk,
        r"moe=True, .*\n4 all-to-alls became 9: expected 2 for each",
    ),
    ("chunking", "routes", swaps_chunks, "chunked graph against eager chunking"),
    ("chunking", "G5", copies_chunks, "which is contiguous"),
    ("chunking", "G8", chunks_anything, "inside=exchanges, .* was taken in silence"),
    ("chunking", "G24", chunks_anything, "inside=mixes, .* was taken in silence"),
    ("chunking", "G8", crashes_where_it_should_refuse, "raised KeyError: 'twin'"),
    ("remat", "random", asserts_without_words, "raised AssertionError: no message"),
]


@pytest.mark.second_tier(
    "any-D9",
    "any-ranks",
    "any-metadata",
    "any-fresh",
    "deduplication-E6",
    "deduplication-written",
    "deduplication-fresh",
    "deduplication-D9",
    "remat-E6",
    "remat-written",
    "remat-random",
    "remat-memory",
    "separate-D2",
    "separate-E6",
    "ddp",
    "canonicalisation-D9",
    "canonicalisation-aliases",
    "bucketing-D9",
    "reassignment-F4",
    "reassignment-F1-moves_one",
    "chunking-G1",
    "chunking-routes",
    "chunking-G8",
    "chunking-G24",
)
@pytest.mark.parametrize(("kind", "rule", "mistake", "message"), MISTAKES_OF_KINDS)
def test_a_mistake_of_another_kind_is_reported(kind, rule, mistake, message, request):
    with pytest.raises(AssertionError, match=message):
        judge_or_fail(RULES[rule], Adapter(mistake, kind), request)


def judge_or_fail(rule, adapter, request):
    """A rule that proves nothing skips the test, which would hide that the mistake is not seen."""
    try:
        judge(rule, adapter, request)
    except pytest.skip.Exception as skipped:
        raise RuntimeError(f"{rule.id}: {skipped}") from None


def test_a_pass_that_does_not_end_is_reported(request):
    """Also one that catches all errors."""

    def never_ends(gm):
        while True:
            with contextlib.suppress(Exception):
                operator.truth(gm)

    adapter = Adapter(never_ends, limit=0.2)
    message = (
        r"never_ends on Recipe\(\) did not end within 0.2 s of CPU time; it was at .*[.]py:\d+"
    )
    with pytest.raises(AssertionError, match=message):
        judge(RULES["E6"], adapter, request)
    assert (
        signal.getitimer(signal.ITIMER_REAL) == signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
    )


def test_a_pass_that_waits_has_more_time_by_the_clock(request, monkeypatch):
    """The limit is of CPU time: on a loaded machine a pass waits for its turn. One that waits for
    ever is reported, too.
    """

    def waits(gm, plan):
        time.sleep(0.5)
        return ours(gm, bucket_plan=plan)

    judge(RULES["E6"], Adapter(waits, "bucketing", call=waits, limit=0.4), request)
    monkeypatch.setattr("pytest_gtrainer.conformance.judging.WAITING", 0.5)
    message = (
        r"waits on Recipe\(\) did not end within 0.2 s, of which it computed for 0.\d s; "
        r"it was at .*[.]py:\d+"
    )
    with pytest.raises(AssertionError, match=message):
        judge(RULES["E6"], Adapter(waits, "bucketing", call=waits, limit=0.4), request)


def test_other_threads_do_not_count_towards_the_limit():
    """Threads of torch's kernels, for example, are counted by the timer of the process."""
    stop = threading.Event()

    def spin():
        while not stop.is_set():
            pass

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        start, own = time.process_time(), time.thread_time()
        with ended_within(0.3, "a pass"):
            while time.process_time() - start < 0.6:
                time.sleep(0.05)
            assert time.thread_time() - own < 0.3
    finally:
        stop.set()
        thread.join()


def test_a_shorter_limit_of_somebody_else_stays():
    def expired(number, frame):
        raise TimeoutError

    handler = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(TimeoutError), ended_within(30, "a pass"):
            time.sleep(10)
        signal.setitimer(signal.ITIMER_REAL, 900)
        with ended_within(5, "a pass"):
            assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 301
            assert 0 < signal.getitimer(signal.ITIMER_PROF)[0] <= 6
        assert 301 < signal.getitimer(signal.ITIMER_REAL)[0] <= 900
        # What a pass has taken is taken from the timer of somebody else, too; one that would have
        # expired meanwhile expires directly afterwards.
        signal.setitimer(signal.ITIMER_REAL, 900)
        for _ in range(2):
            with ended_within(5, "a pass"):
                time.sleep(0.1)
        assert 301 < signal.getitimer(signal.ITIMER_REAL)[0] <= 899.8
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


@pytest.mark.second_tier("generated", "growth", "process", "cost-runs_twenty_times")
@pytest.mark.parametrize(
    ("rule", "mistake", "message"), MISTAKES, ids=lambda each: getattr(each, "__name__", None)
)
def test_a_mistake_is_reported(rule, mistake, message, request, tmp_path, monkeypatch):
    """The graph that it was given is kept, as a pass file."""
    monkeypatch.setattr(rules, "MOST_RUNS", 3)  # to shrink what fails on every model
    with pytest.raises(AssertionError, match=message):
        judge_or_fail(RULES[rule], Adapter(mistake, "bucketing", call=mistake), request)


OF_KINDS = {rule for _, rule, *_ in MISTAKES_OF_KINDS}


def test_every_rule_has_a_mistake():
    broken = {rule for rule, *_ in MISTAKES} | {rule for _, rule, *_ in MISTAKES_OF_KINDS}
    # Those of these rules have files of their own: test_bits, test_state_of_the_process,
    # test_order_and_messages.
    assert broken | {"bits", "nodes", "state", "order", "p2p"} == set(RULES)


# A pass that leaves the graph alone may still change the process: "state" could have failed.
@pytest.mark.second_tier
@pytest.mark.parametrize("rule", sorted(set(RULES) - {"D1", "bits", "nodes", "state"}))
def test_a_pass_that_does_nothing_holds_no_rule(rule, request, monkeypatch):
    """It could not have failed."""
    monkeypatch.setattr(rules, "EXAMPLES", 3)  # it changes none of them

    def nothing(gm: fx.GraphModule) -> fx.GraphModule:
        return gm

    with pytest.raises(pytest.skip.Exception, match="proves nothing"):
        judge(
            RULES[rule],
            Adapter(nothing, RULES[rule].kinds[0] if rule in OF_KINDS else "bucketing"),
            request,
        )
    if rule == "D2":
        with pytest.raises(
            AssertionError, match=r"D2 .* proves nothing: Recipe.*: it changes nothing"
        ):
            judge(RULES[rule], Adapter(nothing, "bucketing", strict=True), request)


@pytest.mark.parametrize("rule", ["E4", "D13", "metadata"])
def test_a_new_graph_whose_operators_have_other_names_proves_nothing(rule, request):
    """No operator can be compared with itself of before."""

    def renames(gm, plan):
        made = copies_without_modules(moves_compute(gm, plan), None)
        for place, node in enumerate(made.graph.nodes):
            if node.op == "call_function":
                node._rename(f"moved_{place}")
        return made

    with pytest.raises(pytest.skip.Exception, match="gives all operators other names"):
        judge(RULES[rule], Adapter(renames, "bucketing", call=renames), request)


def test_what_is_not_claimed_is_not_run(request):
    adapter = Adapter(
        raises_an_error, "bucketing", call=raises_an_error, not_claimed={"E*": "orders nothing"}
    )
    with pytest.raises(pytest.skip.Exception, match="not claimed: orders nothing"):
        judge(RULES["E2"], adapter, request)


def test_a_pass_that_raises_or_gives_no_graph_is_reported_and_its_graph_kept(request, gt_artifacts):
    with pytest.raises(
        AssertionError,
        match="raises_an_error raised KeyError: 'w2'\nThe graph that it was given is kept",
    ):
        judge(RULES["E6"], Adapter(raises_an_error, "bucketing", call=raises_an_error), request)
    kept = (gt_artifacts / "raises_an_error-E6.fxgraph").read_text()
    assert "# passes: raises_an_error\n" in kept
    assert "# world: fake 4, rank 1\n# mesh: fsdp=4\n" in kept

    def gives_nothing(gm, plan):
        ours(gm, bucket_plan=plan)

    with pytest.raises(
        AssertionError,
        match="returned NoneType, expected a GraphModule; if it works in place, say in_",
    ):
        judge(RULES["E6"], Adapter(gives_nothing, "bucketing", call=gives_nothing), request)
    judge(
        RULES["E6"], Adapter(gives_nothing, "bucketing", call=gives_nothing, in_place=True), request
    )


def asks_for_a_gpu(gm, plan):
    torch.zeros(1, device="cuda:63")
    return ours(gm, bucket_plan=plan)


def gives_nodes_of_another_graph(gm, plan):
    other = copy.deepcopy(ours(gm, bucket_plan=plan))
    gm.graph.output_node().args = other.graph.output_node().args
    return gm


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (
            asks_for_a_gpu,
            "asks_for_a_gpu raised (AssertionError|RuntimeError|AcceleratorError): .*(CUDA|NVIDIA)",
        ),
        (
            gives_nodes_of_another_graph,
            "returned a graph whose output reads mean, a node of another graph",
        ),
    ],
)
def test_a_pass_that_cannot_run_here_and_nodes_of_another_graph_are_reported(
    mistake, message, request, gt_artifacts
):
    """Each rule reports it in a sentence, with the graph kept; the others go on."""
    for rule in ("E6", "D9", "metadata"):
        with pytest.raises(AssertionError, match=message):
            judge(RULES[rule], Adapter(mistake, "bucketing", call=mistake), request)
        assert (gt_artifacts / f"{mistake.__name__}-{rule}.fxgraph").exists()


def test_a_graph_that_cannot_be_judged_is_reported(request):
    with (
        facts.collecting() as found_facts,
        pytest.raises(AssertionError, match="the graph cannot be judged: AttributeError: "),
    ):
        judge(
            RULES["D2"],
            Adapter(forgets_a_launchs_value, "bucketing", call=forgets_a_launchs_value),
            request,
        )
    assert [
        (fact["rule"], fact["result"]) for fact in found_facts if fact["kind"] == "conformance"
    ] == [("D2", "error")]


def test_a_rule_that_is_known_to_be_broken_has_to_fail_and_by_an_assertion():
    """So that the entry is taken out when the pass is mended, and an error is not taken for it.
    Only its own mark.
    """
    cases = cases_of(Adapter(ours, "bucketing", broken={"D2": "issue 12"}))
    marks = {
        case.id: [mark.kwargs for mark in case.marks if mark.name == "xfail"] for case in cases
    }
    assert marks.pop("D2") == [{"reason": "issue 12", "strict": True, "raises": AssertionError}]
    assert not any(marks.values())


@pytest.mark.parametrize("pattern", ["E6", "E*", "*"])
def test_what_is_broken_on_our_graphs_may_hold_on_those_of_a_user(pattern):
    models = ("my_models:tiny", "my_models:large", "my_models:tiny")
    cases = cases_of(Adapter(ours, "bucketing", broken={pattern: "issue 12"}, models=models))
    for case in cases:
        rule, _, model = case.values[0].partition(" ")
        expected = []
        if fnmatch.fnmatch(rule, pattern) and model:
            expected = [{"reason": "issue 12", "strict": False}]
        elif fnmatch.fnmatch(rule, pattern):
            expected = [{"reason": "issue 12", "strict": True, "raises": AssertionError}]
        assert [mark.kwargs for mark in case.marks if mark.name == "xfail"] == expected, case.id
        assert sum(mark.name == "gt_world" for mark in case.marks) == 1
    names = [case.values[0] for case in cases]
    assert len(names) == len(set(names))
    for model in set(models):
        own = [name for name in names if name.endswith(f" {model}")]
        assert len(own) == sum(
            rule.any_model and "bucketing" in rule.kinds for rule in RULES.values()
        )


def test_an_adapter_that_says_what_is_not_is_refused():
    with pytest.raises(
        ValueError, match=r"^kind='bucket': expected one of any, bucketing, separate, canon"
    ):
        Adapter(ours, "bucket")
    for known in ({}, {"E6": "known"}):
        for argument in ("not_claimed", "broken"):
            reasons = {argument: {**known, "D99": "never heard of"}}
            with pytest.raises(ValueError, match=r"^there is no rule 'D99'; there are E6, E7,"):
                bucketing(ours, **reasons)
    with pytest.raises(TypeError, match=r"^a pass is a function, and 'ours' is none$"):
        any_pass("ours")


def test_a_backward_of_mixed_dtypes_runs():
    """D9: torch's fake kernel says bf16 of statistics that the real one computes in fp32."""
    for recipe in as_given("separate", [rules.MIXED]):
        gm, generator = graph_of(recipe), torch.Generator().manual_seed(0)
        inputs = gm.graph.find_nodes(op="placeholder")
        run_graph(gm, [sample(node.meta["val"], generator, node.name) for node in inputs])


ENDS = {
    "skip": lambda: pytest.skip("no"),
    "xfail": lambda: pytest.xfail("no"),
    "fail": lambda: pytest.fail("no"),
    "exit": lambda: pytest.exit("no", returncode=0),
    "sys.exit": lambda: sys.exit(0),
    "unittest": lambda: unittest.TestCase().skipTest("no"),
}


@pytest.mark.parametrize("rule", ["written", "fresh"])
@pytest.mark.parametrize("name", ENDS)
def test_a_pass_that_ends_the_test_is_neither_skipped_nor_a_refusal(name, rule, request):
    def ends(gm):
        ENDS[name]()

    kind = "deduplication"
    with pytest.raises(AssertionError, match=r"ends raised (Skip|XFail|Fail|Exit|System)\w*: "):
        judge(RULES[rule], Adapter(ends, kind), request)


@pytest.mark.parametrize("limit", [0, -1, float("nan"), float("inf")])
def test_a_limit_that_is_none_is_refused(limit):
    with pytest.raises(ValueError, match=r"limit=.*: give a number of seconds, above 0"):
        Adapter(ours, limit=limit)
