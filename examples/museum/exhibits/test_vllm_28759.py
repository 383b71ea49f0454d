"""Two models share a compiled graph, as the key of the cache does not say what differs.

vllm#28759 (2025) is titled a collision of the compilation cache for models whose graphs have the
same shapes and other inputs; the rest is rebuilt from that title. Here a graph's text names its
constants and does not hold them, so the second model gets the first one's.
"""

import torch
from museum import exhibit, usual
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_gtrainer import BitwiseDifference, assert_bitwise_equal


class Model(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = torch.tensor([scale])

    def forward(self, x):
        return (x * self.scale).sin()


def compiled(model, x, cache, bug):
    gm = make_fx(model)(x)
    key = (gm.code, x.shape)
    if not bug:
        key += (model.scale.item(),)
    return cache.setdefault(key, gm)


X = torch.arange(4.0)


def outputs(bug):
    cache = {}
    first, second = Model(1.0), Model(2.0)
    return {
        "first model": compiled(first, X, cache, bug)(X),
        "second model": compiled(second, X, cache, bug)(X),
    }


def eager():
    return {"first model": Model(1.0)(X), "second model": Model(2.0)(X)}


@exhibit(
    "vllm#28759",
    2025,
    kind="stale or baked values",
    found_by="bits",
    raises=BitwiseDifference,
    says="first at second model",
    usual=usual.of_results(outputs, eager),
)
def test_each_model_runs_its_own_graph(bug):
    assert_bitwise_equal(outputs(bug), eager(), what="compiled against eager")
