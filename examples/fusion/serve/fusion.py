"""The fused operator, and the pass that puts it in the place of a norm and a quantisation."""

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.pattern_matcher import PatternMatcherPass, fwd_only, register_replacement

from serve.model import EPS, FP8, rms_norm, static_quant

WITH_BUG = False
"""The planted bug: the kernel takes ten times eps. It is no argument of the operator, so no graph
shows it.
"""


@torch.library.custom_op("serve::rms_norm_static_quant", mutates_args=())
def rms_norm_static_quant(x: Tensor, weight: Tensor, scale: Tensor, eps: float) -> Tensor:
    """What a kernel does in one go; here in the operators of eager, so that equal bits can be asked
    for.
    """
    return static_quant(rms_norm(x, weight, eps * 10 if WITH_BUG else eps), scale)


@rms_norm_static_quant.register_fake
def _(x: Tensor, weight: Tensor, scale: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x, dtype=FP8)


class FuseNormAndQuant(CustomGraphPass):
    """``post_grad_custom_post_pass``: a norm that only a static quantisation reads becomes one
    operator.
    """

    def __init__(self) -> None:
        self.patterns = PatternMatcherPass()
        inputs = [
            torch.empty(5, 8, dtype=torch.bfloat16),
            torch.empty(8, dtype=torch.bfloat16),
            torch.empty(()),
        ]
        register_replacement(
            lambda x, weight, scale: static_quant(rms_norm(x, weight, EPS), scale),
            lambda x, weight, scale: torch.ops.serve.rms_norm_static_quant(x, weight, scale, EPS),
            inputs,
            fwd_only,
            [self.patterns],
        )

    def __call__(self, graph: fx.Graph) -> None:
        self.patterns.apply(graph)

    def uuid(self) -> bytes:
        """Changes with this file, so that no cache gives what an older pass made."""
        return get_hash_for_files((__file__,))
