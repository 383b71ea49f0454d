"""llama3: grouped queries, rotary embedding, sizes that fit together."""

from dataclasses import replace

import pytest
import torch

from fixtures.models.llama3 import FLAVORS, Attention, Llama3, Llama3Config
from fixtures.models.norm import RMSNorm
from fixtures.models.rope import apply_rope, rope_cache, rope_rows


def rope_of(x: torch.Tensor, width: int) -> torch.Tensor:
    return rope_rows(rope_cache(width, 64, 10_000.0), x)


def test_a_group_of_query_heads_shares_its_key_and_value_head():
    """Grouped attention equals attention with each key and value head's rows repeated."""
    grouped = Attention(Llama3Config(n_heads=4, n_kv_heads=2))
    every = Attention(Llama3Config(n_heads=4, n_kv_heads=4))
    state = grouped.state_dict()
    for name in ("wk.weight", "wv.weight"):
        state[name] = state[name].unflatten(0, (2, 16)).repeat_interleave(2, dim=0).flatten(0, 1)
    every.load_state_dict(state)
    x = torch.randn(2, 8, 64)
    torch.testing.assert_close(grouped(x, rope_of(x, 16)), every(x, rope_of(x, 16)))


def test_rotary_embedding_makes_scores_depend_on_distance_alone():
    q, k = torch.randn(2, 1, 1, 1, 18)
    x = torch.empty(1, 20, 1)
    turned_q, turned_k = (apply_rope(t.expand(1, 1, 20, 18), rope_of(x, 18))[0, 0] for t in (q, k))
    scores = turned_q @ turned_k.T
    torch.testing.assert_close(scores[3:, 3:], scores[:-3, :-3])
    assert not torch.allclose(scores[0], scores[0, 0].expand(20), atol=1e-3), "distance matters"


def test_rotary_embedding_of_an_odd_width_is_refused():
    with pytest.raises(ValueError, match="even; not 9"):
        rope_cache(9, 4, 1e4)


def test_rms_norm_has_unit_root_mean_square_before_its_weight():
    norm = RMSNorm(32, eps=0.0)
    norm.weight.data.fill_(3.0)
    torch.testing.assert_close(
        norm(torch.randn(4, 32) * 7).square().mean(-1), torch.full((4,), 9.0)
    )


def test_layers_and_widths_can_be_replaced():
    """Also widths that shard unevenly over 8 ranks: 36 rows of ``wk``."""
    model = Llama3(replace(FLAVORS["debug_odd"], n_layers=1, n_heads=4, n_kv_heads=2))
    model.init_weights()
    assert len(model.layers) == 1
    assert model.layers[0].attention.wk.weight.shape == (36, 72)
    assert model(torch.zeros(1, 4, dtype=torch.int64)).isfinite().all()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"n_heads": 4, "n_kv_heads": 3}, "do not divide into 3 groups"),
        ({"dim": 66}, "66 does not divide into 4"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        Llama3Config(**sizes)
