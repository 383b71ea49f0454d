"""What torchtitan's CI runs on 4 and 8 GPUs: each command line, traced in a fake world, as a golden.

There a run says that the trainer did not crash. Here the golden has each launch and each wait of the
step, after torchtitan's passes and before a compiler.
"""

import pytest

pytest.importorskip("torchtitan", reason="torchtitan is not installed: make test-torchtitan")

from torchtitan.experiments.graph_trainer.tests import integration_tests
from whole_trainer import config_of, traced_step

DEFINED = [
    *integration_tests.build_graph_trainer_test_list(),
    *integration_tests.build_graph_trainer_h100_test_list(),
    *integration_tests.build_graph_trainer_autoparallel_test_list(),
    *integration_tests.build_graph_trainer_autoparallel_h100_test_list(),
]
FLAVOURS = {flavour.test_name: flavour for flavour in DEFINED}
# What has no golden, and why: by a part of the command line.
BLOCKED = {
    "--compile.mode jit": "torchtitan switched its jit mode off (#2149)",
    "--compile.enable_autoparallel": "autoparallel is on no index",
    "--compile.ep_overlap.enabled": "the trace branches on sizes of chunks, which have no number",
    "--compile.enable_async_tensor_parallel": "so small a model has nothing to fuse",
    "--config graph_trainer_deepseek_v3_debugmodel_hybridep": "deep_ep is on no index",
    "--config graph_trainer_deepseek_v3_debugmodel_minimal_async_ep": "it needs CUDA's symmetric memory",
    "--parallelism.context_parallel_degree 2": "the CPU's attention has no strategy of context parallelism",
    "--parallelism.pipeline_parallel_degree 2": "GraphPP makes its graphs by stages, when it runs them",
}


def params():
    for name, flavour in FLAVOURS.items():
        marks = [pytest.mark.gt_world("fake", size=flavour.ngpu)]
        reasons = [reason for part, reason in BLOCKED.items() if part in flavour.override_args[0]]
        if reasons:
            marks.append(pytest.mark.skip(reason=reasons[0]))
        yield pytest.param(flavour, id=name, marks=marks)


@pytest.mark.usefixtures("gt_dense_flex_attention", "gt_deterministic")
@pytest.mark.parametrize("flavour", list(params()))
def test_the_schedule(flavour, gt_world, gt_golden, tmp_path):
    (line, *_) = flavour.override_args
    config = config_of(line, tmp_path)
    # One dense layer, and one with experts where there are any.
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    traced = traced_step(config)
    gt_golden.check(traced.gm, view="schedule")
