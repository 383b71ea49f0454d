"""A replayed graph computes, and does not set the attribute that the module sets.

pytorch#114844 (2023): the forward keeps an activation in ``self.x`` for later use. A CUDA graph has
the kernels and none of the Python around them, so after a replay ``self.x`` was still what it had
been. Here a graph of ``make_fx`` is replayed, which forgets in the same way; the fix returns it.
"""

import torch
from museum import exhibit, usual
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_gtrainer import BitwiseDifference, assert_bitwise_equal


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.kept = None

    def compute(self, x):
        kept = self.first(x)
        return kept, self.second(kept)

    def forward(self, x):
        self.kept, output = self.compute(x)
        return output


def eager(model, warm_up, x):
    output = model(x)
    return {"output": output, "kept": model.kept}


def replayed(bug, model, warm_up, x):
    model(warm_up)
    if bug:
        output = make_fx(model)(warm_up)(x)
    else:
        model.kept, output = make_fx(lambda x: model.compute(x))(warm_up)(x)
    return {"output": output, "kept": model.kept}


def inputs():
    return Model(), torch.randn(2, 4), torch.randn(2, 4)


def from_seed(function, *bug):
    torch.manual_seed(0)
    return function(*bug, *inputs())


@exhibit(
    "pytorch#114844",
    2023,
    kind="stale or baked values",
    found_by="bits",
    raises=BitwiseDifference,
    says="first at kept",
    usual=usual.of_results(lambda bug: from_seed(replayed, bug), lambda: from_seed(eager)),
)
def test_a_replay_leaves_what_the_module_leaves(bug):
    actual, expected = from_seed(replayed, bug), from_seed(eager)
    assert_bitwise_equal(actual, expected, what="replayed against eager")
