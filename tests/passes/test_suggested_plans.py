"""The plan that a model suggests: what travels together, and why."""

import pytest
import torch
from torch import nn

from fixtures.models import deepseek_v3, llama3
from pytest_gtrainer import TrainConfig, assert_parity, get_default_transformer_block_buckets
from pytest_gtrainer.graph.collectives import PlanError
from pytest_gtrainer.graph.suggest import suggest_plan
from pytest_gtrainer.references.config import bucket_modules


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width, bias=False)

    def forward(self, x):
        return x + self.linear(self.norm(x)).tanh()


class Decoder(nn.Module):
    """Two embeddings before the layers, a norm and a head behind them."""

    def __init__(self, tied=False):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(24, 8), nn.Embedding(4, 8)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 24, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places(torch.arange(4))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Vision(nn.Module):
    """A parameter of the model itself; layers with names, in a Sequential."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.token = nn.Parameter(torch.randn(4, 8))
        self.embed = nn.Embedding(24, 8)
        self.encoder = nn.Sequential()
        self.encoder.add_module("first", Block())
        self.encoder.add_module("second", Block())
        self.head = nn.Linear(8, 24)

    def forward(self, tokens):
        return self.head(self.encoder(self.embed(tokens) + self.token))


class TwoStacks(nn.Module):
    """An encoder with a parameter beside its layers and a norm; a decoder in a ModuleDict."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(24, 8)
        self.encoder = Encoder()
        self.middle = nn.LayerNorm(8)
        self.decoder = nn.ModuleDict({"blocks": nn.ModuleList(Block() for _ in range(2))})
        self.head = nn.Linear(8, 24)

    def forward(self, tokens):
        x = self.middle(self.encoder(self.tokens(tokens)))
        for block in self.decoder["blocks"]:
            x = block(x)
        return self.head(x)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.places = nn.Parameter(torch.randn(4, 8))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        x = x + self.places
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class NoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.up, self.down = nn.Embedding(24, 8), nn.Linear(8, 16), nn.Linear(16, 24)

    def forward(self, tokens):
        return self.down(self.up(self.embed(tokens)).tanh())


class Flat(nn.Sequential):
    """Layers of the model itself, and one without parameters."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Embedding(24, 8), Block(), nn.Tanh(), nn.Linear(8, 24))


def tied():
    return Decoder(tied=True)


PLANS = [
    (Decoder, [["tokens", "places"], "layers.0", "layers.1", ["norm", "head"]]),
    (tied, ["layers.0", "layers.1", ["tokens", "places", "norm", "head"]]),
    (Vision, ["encoder.first", "encoder.second", ""]),
    (
        TwoStacks,
        [
            "tokens",
            "encoder.blocks.0",
            "encoder.blocks.1",
            "encoder",
            "middle",
            "decoder.blocks.0",
            "decoder.blocks.1",
            "head",
        ],
    ),
    (NoLayers, [""]),
    (Flat, ["0", "1", "3"]),
]
NAMES = [factory.__name__ for factory, _ in PLANS]


@pytest.mark.parametrize(("factory", "plan"), PLANS, ids=NAMES)
def test_a_plan_has_what_a_trainer_would_wrap(factory, plan):
    suggested = suggest_plan(factory())
    assert suggested.plan == plan
    assert all(bucket.why for bucket in suggested.buckets)
    bucket_modules(factory(), suggested.plan)


def test_a_bucket_outside_of_the_layers_says_where_it_is_registered():
    """Before, between or behind them; of several stacks the first and the last layer count."""
    said = {bucket.fqns[0]: bucket.why for bucket in suggest_plan(TwoStacks()).buckets}
    assert said["tokens"] == "registered before the layers"
    assert said["middle"] == "registered between the layers"
    assert said["head"] == "registered after the layers"


@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("make", [lambda: nn.Embedding(24, 8), Block], ids=["leaf", "tree"])
@pytest.mark.parametrize("stack", ["emb_blocks", "embs", "emb2.layers"])
def test_a_module_whose_name_begins_that_of_the_layers_is_outside_of_them(stack, make, is_before):
    """``emb`` beside ``emb_blocks``: it holds no layers, and shares the bucket of its place."""
    layers = nn.ModuleList([Block(), Block()])
    container, _, name = stack.rpartition(".")
    children = [(container, nn.ModuleDict({name: layers})) if container else (name, layers)]
    outside = [("emb", make()), ("other", make())]
    model = nn.Module()
    for child, module in outside + children if is_before else children + outside:
        model.add_module(child, module)

    where = "registered before the layers" if is_before else "registered after the layers"
    suggested = suggest_plan(model)
    found = [(bucket.entry, bucket.why) for bucket in suggested.buckets if not bucket.is_layer]
    assert found == [(["emb", "other"], where)]
    assert [b.entry for b in suggested.buckets if b.is_layer] == [f"{stack}.0", f"{stack}.1"]


@pytest.mark.parametrize(("count", "is_stack"), [(1, False), (2, True), (3, True)])
def test_a_container_of_one_module_is_no_stack(count, is_stack):
    model = nn.Module()
    model.parts = nn.ModuleDict({f"part{place}": nn.Linear(2, 2) for place in range(count)})
    model.parts["shape"] = nn.Flatten()
    model.head = nn.Linear(2, 2)
    layers = [bucket.fqns[0] for bucket in suggest_plan(model).buckets if bucket.is_layer]
    assert layers == [f"parts.part{place}" for place in range(count) if is_stack]


@pytest.mark.second_tier
@pytest.mark.gt_world("simulated", size=4, nodes=2)
@pytest.mark.parametrize("factory", [factory for factory, _ in PLANS], ids=NAMES)
def test_both_sides_of_a_parity_take_the_plan(factory, gt_world, gt_mesh):
    """Eager ``fully_shard`` wrapped likewise has the same layouts and bits."""

    def step(model, tokens):
        return model(tokens).square().mean()

    def batch(step, rank):
        generator = torch.Generator().manual_seed(rank)
        return (torch.randint(24, (2, 4), generator=generator),)

    def training(mesh):
        plan = suggest_plan(factory()).plan
        return TrainConfig(
            model=factory, step=step, batch=batch, bucket_plan=plan, mesh=mesh, steps=1
        )

    parity = assert_parity(training, gt_world, invisible="report")
    payloads = parity.layout.of("reduce_scatter")
    assert len(payloads) == len(suggest_plan(factory()).plan)


def test_the_bundled_models_get_the_plan_of_torchtitan():
    """Whose parity is the main job; with experts, the rest of a layer is one entry by its name."""
    with torch.device("meta"):
        llama = llama3.Llama3(llama3.FLAVORS["8B"])
        experts = deepseek_v3.DeepSeekV3(deepseek_v3.FLAVORS["debug"])
    assert suggest_plan(llama).plan == get_default_transformer_block_buckets(32)
    suggested = suggest_plan(experts)
    assert suggested.plan == get_default_transformer_block_buckets(len(experts.layers))
    assert "routed_experts: experts travel with their layer" in suggested.notes[0]
    split = suggest_plan(experts, split_experts=True)
    assert "layers.1.moe.routed_experts" in split.plan
    assert split.notes == ()
    bucket_modules(experts, split.plan)


def test_experts_of_a_list_stay_in_their_layer():
    """``fully_shard`` refuses a ModuleList, which has no forward."""
    layer = nn.ModuleDict({"experts": nn.ModuleList(Block() for _ in range(2)), "norm": Block()})
    model = nn.Module()
    model.layers = nn.ModuleList([layer])
    assert suggest_plan(model, split_experts=True).plan == ["layers.0"]


def test_shared_experts_stay_in_their_layer():
    layer = nn.ModuleDict({"shared_experts": Block(), "experts": Block()})
    model = nn.Module()
    model.layers = nn.ModuleList([layer])
    plan = suggest_plan(model, split_experts=True).plan
    assert plan == ["layers.0", "layers.0.experts"]


def test_layers_that_share_a_parameter_have_no_plan():
    model = Decoder()
    model.layers[1].linear.weight = model.layers[0].linear.weight
    with pytest.raises(
        PlanError, match=r"layers.0.linear.weight is layers.1.linear.weight, and one"
    ):
        suggest_plan(model)
    model = Decoder()
    model.layers[1] = model.layers[0]  # one module, used twice: it has one name
    assert suggest_plan(model).plan == [["tokens", "places"], "layers.0", ["norm", "head"]]


def test_a_model_without_parameters_has_no_plan():
    with pytest.raises(PlanError, match="Tanh has no parameters: there is nothing to bucket"):
        suggest_plan(nn.Tanh())


@pytest.mark.parametrize(
    ("config", "model", "changes", "plan"),
    [
        (
            "GPT2Config",
            "GPT2LMHeadModel",
            {"n_layer": 2, "n_embd": 16, "n_head": 2},
            [
                "transformer.h.0",
                "transformer.h.1",
                ["transformer.wte", "transformer.wpe", "transformer.ln_f", "lm_head"],
            ],
        ),
        (
            "LlamaConfig",
            "LlamaForCausalLM",
            {"num_hidden_layers": 2},
            ["model.embed_tokens", "model.layers.0", "model.layers.1", ["model.norm", "lm_head"]],
        ),
        (
            "T5Config",
            "T5ForConditionalGeneration",
            {"num_layers": 1, "d_model": 16},
            [
                *("encoder.block.0", "decoder.block.0"),
                [
                    *("shared", "encoder.embed_tokens", "encoder.final_layer_norm"),
                    *("decoder.embed_tokens", "decoder.final_layer_norm", "lm_head"),
                ],
            ],
        ),
    ],
    ids=["gpt2", "llama", "t5"],
)
def test_models_of_transformers_get_a_plan(config, model, changes, plan):
    transformers = pytest.importorskip("transformers", reason="make test-transformers installs it")
    with torch.device("meta"):
        built = getattr(transformers, model)(getattr(transformers, config)(**changes))
    assert suggest_plan(built).plan == plan
    bucket_modules(built, plan)
