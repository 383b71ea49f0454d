"""What torchtitan's CI runs on 4 and 8 GPUs: each command line, traced in a fake world, as a golden.

There a run says that the trainer did not crash. Here the golden has each launch and each wait of the
step, after torchtitan's passes and before a compiler.
"""

import pytest

pytest.importorskip("torchtitan", reason="torchtitan is not installed: make test-torchtitan")

import torch
from flavours import FLAVOURS, SAME_GRAPH, line_of
from whole_trainer import compiled_halves, config_of, traced_stages, traced_step

from pytest_gtrainer import graphtext

# What has no golden, and why: by a part of the command line.
BLOCKED = {
    "--compile.backend inductor": "its bucketing is a pass inside of Inductor",
    "--compile.enable_autoparallel": "autoparallel is on no index: PyPI has another package of that name",
}
# torchtitan has switched it off: a regression of PyTorch's partitioner (#2149), which 2.15 does not have.
JIT = "--compile.mode jit"
# Sizes for which a flavour needs more than two short sequences: a microbatch for each stage of a
# pipeline, a block of FlexAttention for each rank of a context.
LARGER = {
    "--parallelism.pipeline_parallel_degree 2": ("--training.local_batch_size", "4"),
    "--parallelism.context_parallel_degree 2": ("--training.seq_len", "512"),
}


def params():
    for name, flavour in FLAVOURS.items():
        marks = [pytest.mark.gt_world("fake", size=flavour.ngpu)]
        line = line_of(name)
        for part, reason in BLOCKED.items():
            if part in line:
                marks.append(pytest.mark.skip(reason=reason))
        if JIT in line and "--parallelism.pipeline_parallel_degree 2" in line:
            reason = "GraphPP requires --compile.mode aot_fx_trace"
            marks.append(pytest.mark.xfail(raises=ValueError, strict=True, reason=reason))
        if "--compile.ep_overlap.module_fqn layers.*.moe" in line:
            reason = "the chunk pass leaves its graph out of order"
            marks.append(pytest.mark.xfail(raises=RuntimeError, strict=True, reason=reason))
        if name in SAME_GRAPH or JIT in line:
            marks.append(pytest.mark.long)
        yield pytest.param(line, id=name, marks=marks)


def texts_of(graphs):
    texts = []
    for name, graph in graphs.items():
        texts.append(f"# {name}\n{graphtext.render(graph, view='schedule')}")
    return "\n".join(texts)


@pytest.mark.usefixtures("gt_dense_flex_attention", "gt_deterministic")
@pytest.mark.parametrize("line", list(params()))
def test_the_schedule(line, gt_world, gt_golden, tmp_path):
    # A guard of an earlier test's FlexAttention would ask for the number of an unknown size.
    torch._dynamo.reset()
    larger = [word for part, words in LARGER.items() if part in line for word in words]
    config = config_of(line, tmp_path, *larger)
    layers = config.model_spec.model.layers
    if JIT in line:
        config.model_spec.model.layers = layers[:2]
        gt_golden.check(texts_of(compiled_halves(config)))
    elif config.parallelism.pipeline_parallel_degree > 1:
        # Each of four stages has one.
        config.model_spec.model.layers = layers[:4]
        gt_golden.check(texts_of(traced_stages(config)))
    else:
        # One dense layer, and one with experts where there are any.
        config.model_spec.model.layers = layers[:2]
        gt_golden.check(traced_step(config).gm, view="schedule")
