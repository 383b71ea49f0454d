"""Passes of graph trainers as passes of Inductor: with the names that they need, and an id for Inductor's caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from pytest_gtrainer._torch.compiling import CustomGraphPass, Watching, current_compile_id
from pytest_gtrainer.graph.foreign import adopted
from pytest_gtrainer.passes.graph_pass import BoundPass, Pass, bind_options

SLOTS = ("joint_custom_pre_pass", "joint_custom_post_pass", "post_grad_custom_pre_pass", "post_grad_custom_post_pass")

_TOLD = ("gt_input", "custom", "autograd_backward", "val")


def inductor_options(
    *passes: BoundPass | Pass, slot: str = "joint_custom_post_pass", files: Sequence[str] = ()
) -> dict[str, Any]:
    """Options of ``torch.compile`` under which Inductor runs passes of graph trainers on its graphs.

        plan = get_default_transformer_block_buckets(n_layers=2)
        bucketing = bind_options(joint_transformer_block_bucketing_reordering_pass, bucket_plan=plan)
        torch.compile(model, options=inductor_options(bucketing))

    A pass of a graph trainer is ``(gm, example_inputs, *, ...) -> gm`` and rewrites in place. Before it runs, the graph
    gets our metadata, and the FQNs of Dynamo's inputs: they are read by ``pre_grad_custom_pass``, which is therefore
    one of the options, too.

    Args:
        passes: as for ``apply_graph_passes``.
        slot: the setting that holds them. A joint graph has both directions; behind the partitioner, each is its own.
        files: what else the passes are made of. Caches hold for as long as passes, their options and these names are
            the same.

    Raises:
        ValueError: no pass, or no such slot.
    """
    if not passes:
        raise ValueError("inductor_options was given no pass")
    if slot not in SLOTS:
        raise ValueError(f"slot={slot!r}: Inductor runs passes of users in {', '.join(SLOTS)}")
    dynamo: dict[str, fx.GraphModule] = {}  # by the compilation

    def keep(gm: fx.GraphModule) -> None:
        dynamo[current_compile_id()] = adopted(gm)

    bound = [each if isinstance(each, BoundPass) else bind_options(each) for each in passes]
    names = Watching("gtrainer-names-of-inputs", keep)
    return {"pre_grad_custom_pass": names, slot: [GraphTrainerPass(each, dynamo, files) for each in bound]}


class GraphTrainerPass(CustomGraphPass):
    """One pass with its options, as Inductor calls it: with a bare graph."""

    def __init__(self, bound: BoundPass, dynamo: Mapping[str, fx.GraphModule], files: Sequence[str]) -> None:
        self.bound, self.dynamo, self.files = bound, dynamo, tuple(files)
        self.__name__ = bound.name

    def __call__(self, graph: fx.Graph) -> None:
        gm = graph.owning_module
        named = {node.name: node for node in adopted(gm, self.dynamo.get(current_compile_id())).graph.nodes}
        for node in graph.nodes:
            told = named[node.name].meta
            node.meta.update({key: told[key] for key in _TOLD if key in told})
        if self.bound.function(gm, None, **self.bound.options) is not gm:
            raise TypeError(
                f"{self.bound.name} returned another graph: a pass of Inductor rewrites the one it is given"
            )

    def uuid(self) -> tuple[str, ...]:
        return (str(self.bound), *self.files)
