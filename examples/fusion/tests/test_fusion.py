"""The fusion pass, by pytest-gtrainer."""

import pytest
import torch
from serve.fusion import FuseNormAndQuant
from serve.model import Model

from pytest_gtrainer import assert_graph, assert_pass_bitwise

EVERY_NORM = "count 3 serve.rms_norm_static_quant\ncount 0 aten.rsqrt"


@pytest.fixture
def record(gt_compile, tokens):
    torch._dynamo.mark_dynamic(tokens, 0)
    with gt_compile() as record, torch.no_grad():
        compiled = torch.compile(
            Model(), options={"post_grad_custom_post_pass": FuseNormAndQuant()}
        )
        compiled(tokens)
        compiled(tokens[:32])
    return record


def test_the_graph_is_whole_and_compiled_once(record):
    record.assert_no_graph_breaks()
    record.assert_compiles(1)


def test_every_norm_is_fused(record, gt_golden):
    run = record.only_pass("FuseNormAndQuant", changed=True)
    assert_graph(run.after, EVERY_NORM)
    gt_golden.check(run.before, "before")
    gt_golden.check(run.after, "after")


def test_the_pass_changes_no_bit(record):
    assert_pass_bitwise(*record.passes("FuseNormAndQuant", changed=True))
