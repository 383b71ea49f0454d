"""Mistakes planted in passes, and whether ``fuzz`` finds them.

    python -m tests.attack.planted_mistakes                    # the table
    python -m tests.attack.planted_mistakes "pad" "swap"       # rows with these words
    python -m tests.attack.planted_mistakes --without --seconds 300   # no mistake: no finding

A mistake is a part of a module's text and what stands there instead. Each pass is fuzzed with
settings of its own, the same for all its mistakes.
"""

import argparse
import importlib
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from torch import fx

import pytest_gtrainer
from pytest_gtrainer import graphtext
from pytest_gtrainer.attack.extract import computed
from pytest_gtrainer.attack.fuzz import Fuzzer
from pytest_gtrainer.attack.generate import mesh_of_ranks
from pytest_gtrainer.attack.oracles import world_of
from pytest_gtrainer.graph.collectives import fsdp_all_gathers, fsdp_reduce_scatters, group_of
from pytest_gtrainer.graph.nodes import BODY, FORWARD, GRAPH, annotation, direction

ROOT = Path(pytest_gtrainer.__file__).parents[1]
SECONDS = 60.0


@dataclass(frozen=True)
class Setting:
    """The way a pass is fuzzed.

    Attributes:
        module: of the pass.
        call: takes the module, graph and inputs.
        ranks, nodes, at_least: as options of the command.
    """

    module: str
    call: object
    ranks: int = 0
    nodes: int = 40
    at_least: str = "reordered"


def canonicalize(module, gm, inputs):
    return module.canonicalize_graph_pass(gm, rules=module.RULES)


def deduplicate(module, gm, inputs):
    return module.deduplicate_fsdp_unshard_chains_pass(gm)


def bucket(module, gm, inputs):
    """Bucket by module, as a plan says; of parameters that are gathered twice the first is kept."""
    gm = pytest_gtrainer.deduplicate_fsdp_unshard_chains_pass(gm)
    members = [*fsdp_all_gathers(gm), *fsdp_reduce_scatters(gm)]
    fqns = sorted({member.bucket_fqn for member in members} - {""})
    bucketing = module.joint_transformer_block_bucketing_reordering_pass
    return bucketing(gm, bucket_plan=[*fqns, ""])


def recompute(module, gm, inputs):
    """Tag three nodes of twelve for recomputation, then recompute."""
    for place, node in enumerate(gm.graph.nodes):
        if node.op == "call_function" and place // 3 % 4 == 1:
            node.meta[module.RECOMPUTE] = module.CheckpointPolicy.MUST_RECOMPUTE
    return module.selective_activation_remat_pass(gm)


def recompute_gathers(module, gm, inputs):
    """Gather parameters again in the backward."""
    return module.selective_activation_remat_pass(pytest_gtrainer.tag_with_memory_policy_pass(gm))


def split_and_join(module, gm, inputs):
    """Cut the graph of a stage into its parts, and run them in their order.

    The first results are the gradients of its inputs.
    """
    output = gm.graph.output_node()
    output.meta[module.STAGE_OUTPUTS] = (0, len(output.args[0]) // 2)
    stage = module.split_stage_graph(gm)
    graph, values = fx.Graph(), {}
    for node in gm.graph.find_nodes(op="placeholder"):
        values[node.name] = graph.node_copy(node)
    for name in module.PARTS:
        part = stage.parts[name]
        inputs_of_part = part.gm.graph.find_nodes(op="placeholder")
        copies = {}
        for node, taken in zip(inputs_of_part, part.takes, strict=True):
            copies[node] = values[taken]
        for node in part.gm.graph.nodes:
            if node.op not in ("placeholder", "output"):
                copies[node] = graph.node_copy(node, copies.__getitem__)
        for given, node in zip(part.gives, part.gm.graph.output_node().args[0], strict=True):
            values[given] = copies[node]
    graph.output(tuple(values[name] for name in stage.results))
    return fx.GraphModule(gm, graph)


def take_turns(module, gm, inputs):
    """Say that the forward's first all-to-alls are those of two chunks; these then take turns."""
    calls = []
    for node in gm.graph.nodes:
        if node.op == "call_function" and direction(node) == FORWARD:
            calls.append(node)
    of_groups = {}
    for node in calls:
        if node.target is module.ALL_TO_ALL:
            of_groups.setdefault(group_of(node), []).append(node)
    exchanges = max(of_groups.values(), key=len, default=[])
    count = len(exchanges) // 2
    if not count:
        return gm
    ends = exchanges[count - 1], exchanges[2 * count - 1]
    for node in calls:
        if node <= ends[1] and (node.target is not module.ALL_TO_ALL or node in exchanges):
            marks = annotation("experts", BODY, GRAPH, int(node > ends[0]))
            node.meta["custom"] = {**node.meta.get("custom", {}), **marks}
    return module.chunk_schedule_pass(gm)


def run_pipeline(module, gm, inputs):
    """Run the passes of a training step, with resharding after the forward."""
    members = [*fsdp_all_gathers(gm), *fsdp_reduce_scatters(gm)]
    fqns = sorted({member.bucket_fqn for member in members} - {""})
    passes = module.construct_default_graph_passes(
        bucket_plan=[*fqns, ""], reshard_after_forward=True, reduce_scatter_first=True
    )
    return module.apply_graph_passes(gm, inputs, passes, progress=None)


SETTINGS = {
    "canonicalize": Setting("pytest_gtrainer.passes.canonicalize", canonicalize),
    "dead code": Setting(
        "pytest_gtrainer.passes.canonicalize",
        lambda module, gm, inputs: module.eliminate_dead_code_pass(gm),
    ),
    "deduplicate": Setting("pytest_gtrainer.passes.collectives", deduplicate, ranks=4, nodes=30),
    "swap": Setting(
        "pytest_gtrainer.passes.collectives",
        lambda module, gm, inputs: module.reduce_scatter_before_all_reduce_pass(gm),
        ranks=4,
        nodes=30,
        # Each collective rounds what it adds to its dtype; in bf16 no order of sums explains that.
        at_least="rounds elsewhere",
    ),
    "reassign": Setting(
        "pytest_gtrainer.passes.collectives",
        lambda module, gm, inputs: module.reassign_collective_pgs_pass(gm),
        ranks=4,
        nodes=30,
    ),
    "bucket": Setting("pytest_gtrainer.passes.joint", bucket, ranks=4, nodes=30),
    "remat": Setting("pytest_gtrainer.passes.remat", recompute, nodes=30),
    "policy": Setting("pytest_gtrainer.passes.remat", recompute_gathers, ranks=4, nodes=30),
    "stages": Setting("pytest_gtrainer.passes.stages", split_and_join, ranks=4, nodes=30),
    "turns": Setting("pytest_gtrainer.passes.chunking.schedule", take_turns, ranks=4, nodes=60),
    "pipeline": Setting(
        "pytest_gtrainer.passes.pipeline",
        run_pipeline,
        ranks=4,
        nodes=30,
        at_least="rounds elsewhere",
    ),
    "merge": Setting(
        "tests.attack.newcomers_passes", lambda module, gm, inputs: module.merge_pass(gm)
    ),
    "fusion": Setting(
        "tests.attack.newcomers_passes", lambda module, gm, inputs: module.fuse_products_pass(gm)
    ),
}


@dataclass(frozen=True)
class Mistake:
    """A part of a pass's module, or of one that it imports from, that is replaced."""

    setting: str
    words: str
    old: str
    new: str
    module: str = ""

    @property
    def path(self) -> Path:
        return ROOT / ((self.module or SETTINGS[self.setting].module).replace(".", "/") + ".py")


NODES = "pytest_gtrainer.graph.nodes"
COLLECTIVES = "pytest_gtrainer.graph.collectives"
COLLECTIVE_PASSES = "pytest_gtrainer.passes.collectives"
OURS = [
    # canonicalize
    Mistake(
        "canonicalize",
        "a pad that shifts is none",
        "any(type(pad) is not int or pad != 0 for pad in pads)",
        "sum(pads) != 0",
    ),
    Mistake(
        "canonicalize",
        "a pad that is written to is dropped",
        "if is_returned or value in written_operands(user):",
        "if is_returned:",
    ),
    Mistake(
        "canonicalize",
        "a pad is dropped if its copy is not written to",
        "for value in copies | _values_sharing(source):",
        "for value in copies:",
    ),
    Mistake(
        "canonicalize",
        "a pad is dropped if its source is not written to",
        "for value in copies | _values_sharing(source):",
        "for value in _values_sharing(source):",
    ),
    Mistake(
        "canonicalize",
        "writes through a view of a pad are not seen",
        "return walk([storage], lambda value: value.users,"
        " lambda value: storage_of(value) is storage)",
        "return {node}",
    ),
    Mistake(
        "canonicalize",
        "strides are not compared",
        "zip((*ours.shape, *ours.stride()), (*theirs.shape, *theirs.stride()), strict=True)",
        "zip(ours.shape, theirs.shape, strict=True)",
    ),
    Mistake(
        "canonicalize",
        "extents are not compared",
        "zip((*ours.shape, *ours.stride()), (*theirs.shape, *theirs.stride()), strict=True)",
        "zip(ours.stride(), theirs.stride(), strict=True)",
    ),
    Mistake(
        "canonicalize",
        "one equal extent is enough",
        "return all(statically_known_true(one == other) for one, other in pairs)",
        "return any(statically_known_true(one == other) for one, other in pairs)",
    ),
    Mistake(
        "canonicalize",
        "the last extent is not compared",
        "return all(statically_known_true(one == other) for one, other in pairs)",
        "return all(statically_known_true(one == other) for one, other in list(pairs)[1:])",
    ),
    Mistake(
        "canonicalize",
        "views of more dimensions are compared in the first ones",
        "    if ours.ndim != theirs.ndim:\n        return False\n"
        "    pairs = zip((*ours.shape, *ours.stride()), (*theirs.shape, *theirs.stride()),"
        " strict=True)",
        "    pairs = zip(ours.shape, theirs.shape)",
    ),
    Mistake(
        "canonicalize",
        "any two transposes cancel",
        "return inner.target in _TRANSPOSES and _same_layout(inner.all_input_nodes[0], node)",
        "return inner.target in _TRANSPOSES",
    ),
    Mistake(
        "canonicalize",
        "a pair of transposes becomes the first one",
        "_replace_by(node, node.all_input_nodes[0].all_input_nodes[0])",
        "_replace_by(node, node.all_input_nodes[0])",
    ),
    Mistake(
        "canonicalize",
        "a transpose that others read is erased",
        "if between is not source and not between.users:",
        "if between is not source:",
    ),
    Mistake(
        "canonicalize",
        "a permute becomes a reshape",
        '"reshape" in rules and node.target in _RESHAPES:',
        '"reshape" in rules and node.target in (*_RESHAPES, aten.permute.default):',
    ),
    Mistake(
        "canonicalize",
        "an expand becomes a reshape",
        '"reshape" in rules and node.target in _RESHAPES:',
        '"reshape" in rules and node.target in (*_RESHAPES, aten.expand.default):',
    ),
    Mistake(
        "canonicalize",
        "a clone is a view",
        'aten.slice.Tensor: {"slice"},',
        'aten.slice.Tensor: {"slice"},\n    aten.clone.default: {"view"},',
    ),
    Mistake(
        "canonicalize",
        "a cast is a view",
        'aten.slice.Tensor: {"slice"},',
        'aten.slice.Tensor: {"slice"},\n    aten._to_copy.default: {"view"},',
    ),
    # dead code
    Mistake(
        "dead code",
        "writes have no effect",
        "bool(node.is_impure(impure_random=False))",
        "False",
        NODES,
    ),
    Mistake("dead code", "draws have no effect", "is_random(node) or is_coll", "is_coll", NODES),
    Mistake(
        "dead code",
        "what has one reader is dead",
        "if not node.users and not has_effect(node):",
        "if len(node.users) < 2 and not has_effect(node):",
    ),
    # deduplicate
    Mistake(
        "deduplicate",
        "any parameter is the first one",
        "key = (member.position, member.direction,",
        "key = (member.direction,",
    ),
    Mistake(
        "deduplicate",
        "groups and dtypes are not compared",
        "member.direction, member.signature, _spell",
        "member.direction, _spell",
    ),
    Mistake(
        "deduplicate",
        "what is computed of a shard is not compared",
        "member.signature, _spell_chain(member))",
        "member.signature)",
    ),
    Mistake(
        "deduplicate",
        "operands of what is computed of a shard are not compared",
        'lines.append(f"{node.target} {given}")',
        'lines.append(f"{node.target}")',
    ),
    Mistake(
        "deduplicate",
        "a gathered value that is written to is kept",
        "if written(kept.wait, after=kept.launch) or _has",
        "if _has",
    ),
    Mistake(
        "deduplicate",
        "draws of a shard are one",
        "if is_random(node):",
        "if 0:",
    ),
    Mistake(
        "deduplicate",
        "a shard that is written to in between is gathered once",
        "if any(written(shard, after=begin, before=end) for",
        "if any(0 for",
    ),
    Mistake(
        "deduplicate",
        "a write is seen behind the wait only",
        "written(shard, after=begin, before=end)",
        "written(shard, after=kept.wait, before=end)",
    ),
    Mistake(
        "deduplicate",
        "a write is seen from the first gather on",
        "begin, end = min(node, other), max(node, other)",
        "begin, end = kept.launch, member.launch",
    ),
    Mistake(
        "deduplicate",
        "a write to what is made of a shard is not seen",
        "if written(source, after=source, before=node):",
        "if 0:",
    ),
    Mistake(
        "deduplicate",
        "a duplicate that is written to is dropped",
        "elif kept is not member and not written(member.wait, after=member.launch):",
        "elif kept is not member:",
    ),
    Mistake(
        "deduplicate",
        "the kept wait stays behind the duplicate's",
        "            member.wait.prepend(kept.wait)",
        "            pass",
    ),
    Mistake(
        "deduplicate",
        "what others read is erased",
        "            if not node.users:  # a cast may feed both all-gathers\n    ",
        "",
    ),
    Mistake(
        "deduplicate",
        "writes to views are not seen",
        "writers = self._writers.get(storage_of(value), ())",
        "writers = self._writers.get(value, ())",
    ),
    # swap
    Mistake("swap", "any reductions commute", "if len(reductions) > 1 and not are_sums:", "if 0:"),
    Mistake(
        "swap",
        "groups that share more ranks are swapped",
        "return len(set(replicas) & set(shards)) == 1",
        "return True",
    ),
    Mistake(
        "swap",
        "a gradient that is written to is swapped",
        "if not is_written and _commute(launch, member.launch):",
        "if _commute(launch, member.launch):",
    ),
    Mistake(
        "swap",
        "the sum over replicas is lost",
        "        below.replace_all_uses_with(wait)\n",
        "",
    ),
    Mistake(
        "swap",
        "moved collectives keep their metadata",
        '        launch.meta["val"] = wait.meta["val"] = value\n',
        "",
    ),
    Mistake(
        "swap",
        "a relu is padding",
        "    aten.clone.default,\n    aten.view.default,",
        "    aten.clone.default,\n    aten.relu.default,\n    aten.view.default,",
    ),
    Mistake(
        "swap", "other readers of the sum get the gradient", "    if readers:\n", "    if 0:\n"
    ),
    Mistake(
        "swap",
        "the wait stands before its launch",
        "        launch.append(wait)\n",
        "        launch.prepend(wait)\n",
    ),
    # reassign
    Mistake(
        "reassign",
        "all gathers move to one group",
        "extras[group] = extra_group(group)",
        "extras[group] = next(iter(extras.values()), None) or extra_group(group)",
    ),
    # bucket
    Mistake(
        "bucket",
        "groups are merged",
        "return (self.launch.target, *settings_of(self.launch), value.dtype, value.device, second)",
        "return (self.launch.target, value.dtype, value.device, second)",
        COLLECTIVES,
    ),
    Mistake(
        "bucket",
        "dtypes are merged",
        "return (self.launch.target, *settings_of(self.launch), value.dtype, value.device, second)",
        "return (self.launch.target, *settings_of(self.launch), value.device, second)",
        COLLECTIVES,
    ),
    Mistake(
        "bucket",
        "reductions over replicas are merged",
        "return (self.launch.target, *settings_of(self.launch), value.dtype, value.device, second)",
        "return (self.launch.target, *settings_of(self.launch), value.dtype, value.device)",
        COLLECTIVES,
    ),
    Mistake(
        "bucket",
        "collectives cross writes",
        "    _check_writes(gm.graph, list(by_direction.values()), scattering, reorder)\n",
        "",
    ),
    Mistake(
        "bucket",
        "draws cross draws",
        "    _check_draws(gm.graph, list(by_direction.values()), scattering, reorder)\n",
        "",
    ),
    Mistake(
        "bucket",
        "parameters leave a bucket in reverse order",
        "zip(merge.members, columns, strict=True)",
        "zip(merge.members, columns[::-1], strict=True)",
    ),
    Mistake(
        "bucket",
        "what ranks sent is read by columns",
        'build.view(wait, [size, launch.meta["val"].numel() // size])',
        'build.view(wait, [launch.meta["val"].numel() // size, size])',
    ),
    Mistake(
        "bucket",
        "what leads to a gather stays where it is",
        "            if anchor < node:\n                anchor.prepend(node)",
        "            pass",
    ),
    Mistake(
        "bucket",
        "a bucket is waited for at its last wait",
        "first_wait=min(member.wait for member in group),",
        "first_wait=max(member.wait for member in group),",
    ),
    Mistake(
        "bucket",
        "a bucket is gathered at its last gather",
        "first_launch=group[0].launch,",
        "first_launch=group[-1].launch,",
    ),
    Mistake(
        "bucket",
        "a bucket is reduced at its first gradient",
        "last_launch=group[-1].launch,",
        "last_launch=group[0].launch,",
    ),
    Mistake(
        "bucket",
        "a single member is erased",
        "        if len(merge.members) == 1:\n            continue  # its own",
        "        if len(merge.members) == 0:\n            continue  # its own",
    ),
    Mistake(
        "bucket",
        "gradients are packed one after the other",
        "payload = build.cat(rows, 1)",
        "payload = build.cat([build.reshape(row, [1, row.meta['val'].numel()])"
        " for row in rows], 1)",
    ),
    Mistake(
        "bucket",
        "gradients leave a bucket in reverse order",
        "zip(merge.members, shards, parts, strict=True)",
        "zip(merge.members, shards, parts[::-1], strict=True)",
    ),
    Mistake(
        "bucket",
        "a bucket of gradients is not reduced over replicas",
        "        reduced = build.wait(build.launch(first.all_reduce[0], reduced, numel))\n",
        "        pass\n",
    ),
    Mistake(
        "bucket",
        "what follows a gradient stays where it is",
        "            _move_before(anchor, chain)\n",
        "            pass\n",
    ),
    Mistake(
        "bucket",
        "a shard of any strides is viewed",
        "self.call(aten.reshape.default, (node, shape)",
        "self.call(aten.view.default, (node, shape)",
    ),
    Mistake(
        "bucket",
        "the gathered payload is said to be as long as a shard",
        'build.launch(like, payload, payload.meta["val"].numel() * group_size_of(like))',
        'build.launch(like, payload, payload.meta["val"].numel())',
    ),
    Mistake(
        "bucket",
        "the next bucket is gathered in front of the last wait",
        "places.setdefault(index + 1, merges[index].first_wait)",
        "places[index + 1] = merges[index].first_wait",
    ),
    # remat
    Mistake("remat", "draws are repeated", "        if is_random(node):", "        if 0:"),
    Mistake(
        "remat",
        "what is written to is recomputed",
        "        elif storage_of(node) in written:",
        "        elif 0:",
    ),
    Mistake(
        "remat",
        "what reads written memory is recomputed",
        "if wrong is None and storage_of(source) in written:",
        "if 0:",
    ),
    Mistake(
        "remat",
        "copies stand behind their reader",
        "with gm.graph.inserting_before(reader):",
        "with gm.graph.inserting_after(reader):",
    ),
    Mistake(
        "remat",
        "keywords are lost",
        "gm.graph.create_node(node.op, node.target, args, kwargs, name)",
        "gm.graph.create_node(node.op, node.target, args, {}, name)",
    ),
    Mistake(
        "remat",
        "each value is recomputed as its first operand is",
        "            copies[node] = again\n",
        "            copies[nodes[0]] = again\n",
    ),
    Mistake(
        "remat",
        "only direct readers' values are known to be tagged",
        "return _is_tagged(node) and node not in done",
        "return _is_tagged(node)",
    ),
    # policy
    Mistake(
        "policy",
        "a shard that is updated is gathered again",
        "if wrong is None and storage_of(source) in written:",
        "if 0:",
    ),
    Mistake(
        "policy",
        "what was gathered and is written to is gathered again",
        "        elif storage_of(node) in written:",
        "        elif 0:",
    ),
    # stages
    Mistake(
        "stages",
        "draws change places",
        "ordered = [list(filter(is_random, part_of))]",
        "ordered = []",
    ),
    Mistake(
        "stages", "writes change places", "for memory in writes(gm.graph):", "for memory in ():"
    ),
    Mistake(
        "stages",
        "a part reads what runs later",
        "if part_of.get(read, 0) > part:",
        "if 0:",
    ),
    Mistake(
        "stages",
        "a part gives results only",
        "any(part_of.get(user, part) != part for user in node.users)",
        "False",
    ),
    Mistake(
        "stages",
        "what a part gives has the order of the results",
        "gives=tuple(map(str, gives)),",
        "gives=tuple(sorted(map(str, gives))),",
    ),
    # turns
    Mistake(
        "turns",
        "a reader does not wait for the last write",
        "                if storage in writer:\n",
        "                if 0:\n",
    ),
    Mistake(
        "turns",
        "a write does not wait for the readers before",
        "sources.update(dict.fromkeys(readers.pop(storage, ())))",
        "readers.pop(storage, ())",
    ),
    Mistake(
        "turns", "draws change places", "            if drawer is not None:", "            if 0:"
    ),
    Mistake(
        "turns",
        "only writes to the value itself count",
        "            storage = storages.of[source]\n",
        "            storage = source\n",
    ),
    # pipeline
    Mistake(
        "pipeline",
        "the sum over replicas is lost",
        "        below.replace_all_uses_with(wait)\n",
        "",
        COLLECTIVE_PASSES,
    ),
    Mistake(
        "pipeline",
        "any parameter is the first one",
        "key = (member.position, member.direction,",
        "key = (member.direction,",
        COLLECTIVE_PASSES,
    ),
    Mistake(
        "pipeline",
        "extents are not compared",
        "zip((*ours.shape, *ours.stride()), (*theirs.shape, *theirs.stride()), strict=True)",
        "zip(ours.stride(), theirs.stride(), strict=True)",
        "pytest_gtrainer.passes.canonicalize",
    ),
    Mistake(
        "pipeline",
        "gradients leave a bucket in reverse order",
        "zip(merge.members, shards, parts, strict=True)",
        "zip(merge.members, shards, parts[::-1], strict=True)",
        "pytest_gtrainer.passes.joint",
    ),
]
NEWCOMERS = [
    Mistake(
        "merge",
        "buffers that are written to are one",
        "for each in (node, *node.all_input_nodes))",
        "for each in node.all_input_nodes)",
    ),
    Mistake(
        "merge",
        "calls are known by their first operand",
        "key = node.target, str(node.args), str(node.kwargs)",
        "key = node.target, str(node.args[:1]), str(node.kwargs)",
    ),
    Mistake(
        "merge",
        "keywords are not compared",
        "key = node.target, str(node.args), str(node.kwargs)",
        "key = node.target, str(node.args)",
    ),
    Mistake(
        "fusion",
        "parts are given in reverse order",
        "zip(nodes, items, strict=True)",
        "zip(nodes, items[::-1], strict=True)",
    ),
    Mistake(
        "fusion",
        "all parts are as wide as the first",
        "aten.split_with_sizes.default, (product, widths, 1)",
        "aten.split.Tensor, (product, widths[0], 1)",
    ),
    Mistake(
        "fusion",
        "a left operand is known by its shape",
        "groups.setdefault(left, [])",
        "groups.setdefault(next((each for each in groups if each.meta['val'].shape =="
        " left.meta['val'].shape), left), [])",
    ),
    Mistake(
        "fusion",
        "writes are not seen",
        "if memory_of(left) in written or memory_of(right) in written:",
        "if 0:",
    ),
]


def planted(mistake: Mistake) -> ModuleType:
    """Return the module of a pass with a mistake, beside the one that is imported."""
    setting = SETTINGS[mistake.setting]
    changed = _run(mistake.path, mistake.path.read_text().replace(mistake.old, mistake.new))
    if not mistake.module:
        return changed
    module = unchanged(setting.module)
    # What it has imported from the changed module.
    original = importlib.import_module(mistake.module)
    for name, value in vars(changed).items():
        if name in vars(module) and vars(module)[name] is vars(original)[name]:
            setattr(module, name, value)
    return module


def unchanged(name: str) -> ModuleType:
    """Return a module once more, beside the one that is imported."""
    path = ROOT / (name.replace(".", "/") + ".py")
    return _run(path, path.read_text())


def _run(path: Path, text: str) -> ModuleType:
    module = ModuleType(f"planted_{path.stem}")
    sys.modules[module.__name__] = module  # dataclasses look their module up there
    exec(compile(text, str(path), "exec"), vars(module))
    return module


@dataclass
class Found:
    """The result of fuzzing a pass.

    Attributes:
        words: how it fails; "" if it does on no graph.
        seconds: until then.
        state: numbers of graphs.
        proven: how many graphs that the pass has changed were found equal.
        file: the graph, reduced if that was asked for.
        nodes: of the reduced graph.
        whole: seconds until it was reduced.
    """

    words: str
    seconds: float
    state: str
    proven: int = 0
    file: str = ""
    nodes: int = 0
    whole: float = 0.0


def search(
    setting: Setting, module: ModuleType, seconds: float, seed: int = 0, reducing: bool = False
) -> Found:
    """Fuzz a pass until it fails."""
    text, failures = "", []
    if setting.ranks:
        text = f"# gtrainer graph v2\n# mesh: {mesh_of_ranks(setting.ranks)}\n"
    with tempfile.TemporaryDirectory() as folder, world_of(text) as ranks:
        fuzzer = Fuzzer(
            lambda gm, inputs: setting.call(module, gm, inputs),
            "planted",
            setting.at_least,
            ranks,
            Path(folder),
            lambda line: None,
        )
        # Of CPU time, as others may have the processor.
        begun, report = time.process_time(), fuzzer._report

        def note(before, seed, nodes, failure):
            failures.append((failure, time.process_time() - begun))
            if reducing:
                report(before, seed, nodes, failure)
            else:
                fuzzer.found[failure.kind] = Path(f"seed {seed}")

        fuzzer._report = note
        while time.process_time() - begun < seconds and not failures:
            fuzzer._try(seed + fuzzer.tried, setting.nodes)
        spent = time.process_time() - begun
        refused = f"{fuzzer.refused.total()} refused, {fuzzer.unknown.total()} unknown"
        for words, count in (fuzzer.unknown + fuzzer.refused).most_common(2):
            refused += f" ({count}: {words[:90]})"
        state = f"{fuzzer.state(spent)}, {refused}"
        if not failures:
            return Found("", spent, state, fuzzer.changed - fuzzer.unknown.total())
        failure, spent = failures[0]
        [path] = fuzzer.found.values()
        words = f"{failure.kind}: {failure.words}"
        if not reducing:
            return Found(words, spent, state, file=str(path))
        text = path.read_text()
        nodes = len(computed(graphtext.parse(text)))
        whole = time.process_time() - begun
        return Found(words, spent, state, 0, text, nodes, whole)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="*")
    parser.add_argument("--but", action="append", default=[])
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reduce", action="store_true")
    parser.add_argument("--without", action="store_true", help="passes as they are")
    given = parser.parse_args()

    if given.without:
        for name, setting in SETTINGS.items():
            if not given.words or name in given.words:
                module = unchanged(setting.module)
                found = search(setting, module, given.seconds, given.seed, reducing=True)
                print(f"{name}: {found.state}", flush=True)
                print(f"{found.words}\n{found.file}" if found.words else "no finding", flush=True)
        return

    rows = []
    for mistake in OURS + NEWCOMERS:
        row = f"{mistake.setting}: {mistake.words}"
        is_left_out = any(words in row for words in given.but)
        if not is_left_out and (not given.words or any(words in row for words in given.words)):
            rows.append((row, mistake))
    missed = []
    for row, mistake in rows:
        setting = SETTINGS[mistake.setting]
        found = search(setting, planted(mistake), given.seconds, given.seed, given.reduce)
        outcome = f"{found.seconds:5.1f} s, {found.words[:110]}"
        if not found.words:
            outcome = f"NOT FOUND, {found.state}"
            missed.append(row)
        print(f"{row} | {outcome}", flush=True)
        if given.reduce and found.words:
            print(f"reduced to {found.nodes} nodes after {found.whole:.0f} s\n{found.file}")
    print(f"{len(rows) - len(missed)} of {len(rows)} found within {given.seconds:g} s each")


if __name__ == "__main__":
    main()
