"""Passes of graph trainers as passes of Inductor, with names of inputs and an id for its caches."""

import hashlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import fx

from pytest_gtrainer._torch.compiling import CustomGraphPass, Watching, current_compile_id
from pytest_gtrainer.graph.foreign import adopt
from pytest_gtrainer.passes.graph_pass import BoundPass, Pass, all_bound, returned

SLOTS = (
    "joint_custom_pre_pass",
    "joint_custom_post_pass",
    "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass",
)

PACKAGE = Path(__file__).parents[1]
_METADATA = ("gt_input", "custom", "autograd_backward", "val")


def inductor_options(
    *passes: BoundPass | Pass, slot: str = "joint_custom_post_pass", files: Sequence[str] = ()
) -> dict[str, Any]:
    """Return options of ``torch.compile`` with which Inductor runs passes of graph trainers.

        plan = get_default_transformer_block_buckets(n_layers=2) bucketing =
        bind_options(joint_transformer_block_bucketing_reordering_pass, bucket_plan=plan)
        torch.compile(model, options=inductor_options(bucketing))

    A pass of a graph trainer is ``(gm, example_inputs, *, ...) -> gm`` and rewrites in place.
    Before it runs, the graph gets our metadata and the FQNs of Dynamo's inputs, which the option
    ``pre_grad_custom_pass`` reads.

    Args:
        passes: as for ``apply_graph_passes``.
        slot: the setting that holds them: of the joint graph, or of forward and backward after the
            partitioner.
        files: other source files of the passes. Caches are valid while options, these files and the
            modules that define the passes are the same. Graphs of a lambda, a function inside a
            function, and an object without a ``uuid()`` are not cached, since two of them may have
            the same name.

    Raises:
        ValueError: no pass, no such slot, or a file that cannot be read.
    """
    if not passes:
        raise ValueError("inductor_options was given no pass")
    if slot not in SLOTS:
        raise ValueError(f"slot={slot!r}: Inductor runs passes of users in {', '.join(SLOTS)}")
    dynamo: dict[str, fx.GraphModule] = {}  # Dynamo's graph by the id of the compilation

    def keep(gm: fx.GraphModule) -> None:
        dynamo[current_compile_id()] = adopt(gm)

    ours = [GraphTrainerPass(each, dynamo, files) for each in all_bound(passes)]
    return {"pre_grad_custom_pass": Watching("gtrainer-names-of-inputs", keep), slot: ours}


class GraphTrainerPass(CustomGraphPass):
    """One pass with its options, as Inductor calls it: with a bare graph."""

    def __init__(
        self, bound: BoundPass, dynamo: Mapping[str, fx.GraphModule], files: Sequence[str]
    ) -> None:
        self.bound, self.dynamo, self.sources = bound, dynamo, _hash_files(files)
        self.__name__ = bound.name  # the name of its runs in a ``CompileRecord``

    def __call__(self, graph: fx.Graph) -> None:
        gm = graph.owning_module
        # ``adopt`` copies the graph, and Inductor goes on with its own: take only metadata.
        named = adopt(gm, self.dynamo.get(current_compile_id()))
        metadata = {node.name: node.meta for node in named.graph.nodes}
        for node in graph.nodes:
            for key in _METADATA:
                if key in metadata[node.name]:
                    node.meta[key] = metadata[node.name][key]
        if returned(self.bound.function(gm, None, **self.bound.options)) is not gm:
            raise TypeError(
                f"{self.bound.name} returned another graph: a pass of Inductor rewrites the one it "
                "is given"
            )

    def uuid(self) -> tuple[str, ...] | None:
        """Return the id of the pass for Inductor's caches; None if it must not be cached."""
        file = getattr(sys.modules.get(self.bound.home.partition(":")[0]), "__file__", None)
        if file is None:
            return None
        # A pass of ours uses other modules of the package; a user names other modules as ``files``.
        own = [file]
        if Path(file).is_relative_to(PACKAGE):
            own = sorted(map(str, PACKAGE.rglob("*.py")))
        return str(self.bound), self.bound.home, _hash_files(own), self.sources


def _hash_files(files: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for file in files:
        try:
            digest.update(Path(file).read_bytes())
        except OSError as error:
            raise ValueError(
                f"files={file!r}: {error.strerror}: give the source files of the passes"
            ) from None
    return digest.hexdigest()
