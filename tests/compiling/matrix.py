"""Graphs of every tracer, of five models, under every wrapping: what the matrix of
``test_matrix.py`` is made of.

Two versions of torch, each in its environment, then the two compared up to the table of spellings::

    python -m tests.compiling.matrix write build/texts-2.13 [model ...]
    python -m tests.compiling.matrix compare build/texts-2.13 build/texts-2.15
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.parallel import DistributedDataParallel

from fixtures.models import deepseek_v3, llama3
from fixtures.models.moe import MoEConfig
from pytest_gtrainer import data_parallel, graphtext, gt_compile
from pytest_gtrainer.golden.compare import difference
from pytest_gtrainer.graphtext import header
from pytest_gtrainer.worlds.fake import fake_world, make_mesh
from pytest_gtrainer.worlds.spec import make_spec

VOCABULARY = 64


class ConvNet(nn.Module):
    """Two convolutions with batch norm, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(16 if place else 3, 16, 3, padding=1, bias=False),
                nn.BatchNorm2d(16),
                nn.ReLU(),
            )
            for place in range(2)
        )
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean((2, 3)))


class Logits(nn.Module):
    """A model of ``transformers`` that returns a tensor."""

    def __init__(self, lm):
        super().__init__()
        self.lm = lm

    def forward(self, tokens):
        return self.lm(input_ids=tokens, use_cache=False).logits


def of_transformers(kind, **sizes):
    transformers = pytest.importorskip(
        "transformers", reason="needs the extra `transformers`: make test-transformers"
    )
    if (
        not torch.cuda.is_available()
    ):  # which a CUDA build of torch without CUDA's libraries asks for, and crashes
        torch.cuda.is_current_stream_capturing = lambda: False
    tokens = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
    config = getattr(transformers, f"{kind}Config")(**tokens, **sizes, tie_word_embeddings=False)
    return Logits(transformers.AutoModelForCausalLM.from_config(config))


def gpt2():
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return of_transformers("GPT2", n_layer=1, n_embd=32, n_head=4, n_positions=16, **dropouts)


def qwen3():
    heads = {
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 8,
        "max_position_embeddings": 16,
    }
    return of_transformers(
        "Qwen3", hidden_size=64, intermediate_size=64, num_hidden_layers=1, **heads
    )


def llama():
    config = replace(
        llama3.FLAVORS["debug"], n_layers=1, n_heads=8, n_kv_heads=8, vocab_size=VOCABULARY
    )
    return llama3.Llama3(config)


def deepseek():
    experts = MoEConfig(n_experts=2, top_k=1)
    sizes = {"n_layers": 1, "n_dense_layers": 0, "vocab_size": VOCABULARY, "moe": experts}
    return deepseek_v3.DeepSeekV3(replace(deepseek_v3.FLAVORS["debug"], **sizes))


MODELS = {"conv": ConvNet, "gpt2": gpt2, "qwen3": qwen3, "llama3": llama, "deepseek_v3": deepseek}
WRAPPINGS = ("plain", "ddp", "tp", "data_parallel")
HEAD = ColwiseParallel(output_layouts=Replicate())
UP, DOWN = ColwiseParallel(), RowwiseParallel()
TENSOR_PARALLEL: dict[str, dict[str, Any]] = {
    "conv": {"head": HEAD},
    "gpt2": {"lm.lm_head": HEAD},  # all else is Conv1D, of which torch has no style
    "qwen3": {"lm.model.layers.0.mlp": {"gate_proj": UP, "up_proj": UP, "down_proj": DOWN}},
    "llama3": {"layers.0.feed_forward": {"w1": UP, "w3": UP, "w2": DOWN}},
    "deepseek_v3": {"lm_head": HEAD},
}
"""Each model's styles by path, of several parts of a module by their names."""

DTENSORS = "non-fx-graphable type <class 'torch.distributed.tensor._dtensor_spec.DTensorSpec'>"
REFUSED = {
    ("ddp", "export"): "Non-recursive torch.compiler.disable is not supported with torch.export",
    ("tp", "export"): DTENSORS,
    ("data_parallel", "export"): DTENSORS,
}
"""What torch does not make, with what it says: a cell that becomes possible fails its test."""


def another_parameter(model):
    """One more parameter, before all others, at the end of the forward."""
    model.unrelated = nn.Parameter(torch.ones(VOCABULARY))
    own = type(model).forward

    def of_pixels(self, x):
        return own(self, x) * self.unrelated

    def of_tokens(self, tokens):
        return own(self, tokens) * self.unrelated

    forward = of_pixels if isinstance(model, ConvNet) else of_tokens
    model.__class__ = type("Scaled", (type(model),), {"forward": forward})


def wrapped(name, wrapping, mesh, change=None):
    torch.manual_seed(0)
    model = MODELS[name]()
    if hasattr(model, "init_weights"):
        model.init_weights(0)
    if change is not None:
        change(model)
    if wrapping == "ddp":
        # make_fx would trace the broadcast of buffers with the process group as an object, which no
        # graph can run again
        return DistributedDataParallel(model, forward_sync_buffers=False)
    if wrapping == "data_parallel":
        return data_parallel(model, mesh)
    for path, style in TENSOR_PARALLEL[name].items() if wrapping == "tp" else ():
        parallelize_module(model.get_submodule(path), mesh, style)
    return model


def batch(name):
    generator = torch.Generator().manual_seed(0)
    if name == "conv":
        return torch.randn(2, 3, 4, 4, generator=generator)
    return torch.randint(0, VOCABULARY, (2, 8), generator=generator)


def named(state, flat):
    """Flat local tensors by the names of a state, as DTensors where it has them."""
    given = dict(zip(state, flat, strict=False))
    for name, whole in state.items():
        if isinstance(whole, DTensor):
            like = {"run_check": False, "shape": whole.shape, "stride": whole.stride()}
            given[name] = DTensor.from_local(
                given[name], whole.device_mesh, whole.placements, **like
            )
    return given


def made(model, x):
    """The training step by ``make_fx``: of the local tensors of all parameters and buffers, and the
    batch.
    """
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def step(*flat):
        given = named(state, flat)
        loss = torch.func.functional_call(model, given, (flat[-1],)).float().sum()
        trained = [
            given[name] for name, tensor in state.items() if isinstance(tensor, nn.Parameter)
        ]
        return [loss, *map(local, torch.autograd.grad(loss, trained, allow_unused=True))]

    flat = [
        local(tensor).detach().requires_grad_(tensor.requires_grad) for tensor in state.values()
    ]
    return make_fx(step, tracing_mode="fake")(*flat, x)


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def graphs(name, wrapping, mesh, change=None) -> Iterator[tuple[str, str, Any, Any]]:
    """Stage, name, graph and ``names=`` of all that can be made of a cell."""
    # DDP's reducer wants a result of the fake group's all-reduce, which has none: behind all that
    # is compiled
    may_fail = suppress(RuntimeError) if wrapping == "ddp" and mesh.size() == 8 else nullcontext()
    model = wrapped(
        name, wrapping, mesh, change
    )  # without a name, DDP is collected in front of its backward, or not
    with torch._dynamo.config.patch(capture_scalar_outputs=True), gt_compile() as record, may_fail:
        torch.compile(model)(batch(name)).float().sum().backward()
    if wrapping != "ddp":  # which leaves the graph in its own forward, before the model
        record.assert_no_graph_breaks()
    record.assert_compiles(1)
    stages = {
        "dynamo": "dynamo",
        "aot": "joint forward backward",
        "post_grad": "forward_after_passes backward_after_passes",
    }
    for stage, held in stages.items():
        for each in held.split():
            yield stage, each, getattr(record, each), None
    if (wrapping, "export") not in REFUSED:
        program = torch.export.export(wrapped(name, wrapping, mesh, change), (batch(name),))
        yield "export", "export", program, None
    model = wrapped(name, wrapping, mesh, change)
    yield "make_fx", "make_fx", made(model, batch(name)), model


def texts(name, wrapping, mesh, change=None) -> dict[str, str]:
    return {
        each: graphtext.render(gm, names=names)
        for _, each, gm, names in graphs(name, wrapping, mesh, change)
    }


def write(folder: Path, names: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or MODELS:
        for wrapping in WRAPPINGS:
            with fake_world(make_spec("fake", size=8, mesh={"d": 8})) as world:
                for each, text in texts(name, wrapping, make_mesh(world)).items():
                    head = "\n".join([*header.write({"torch": torch.__version__}), ""])
                    (folder / f"{name}.{wrapping}.{each}.txt").write_text(
                        head + text.partition("\n")[2]
                    )


def compare(one: Path, other: Path) -> Mapping[str, str]:
    """Return the differences beyond the table of spellings, by file."""
    found = {}
    for path in sorted({file.name for folder in (one, other) for file in folder.iterdir()}):
        text = difference("graph", (one / path).read_text(), (other / path).read_text())
        if text is not None:
            found[path] = text
    return found


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(Path(sys.argv[2]), sys.argv[3:])
    else:
        different = compare(Path(sys.argv[2]), Path(sys.argv[3]))
        for file, text in different.items():
            print(f"{file}\n{text}\n")
        sys.exit(bool(different))
