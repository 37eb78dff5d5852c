"""Mixtral of Transformers, whose experts are chosen by ``nonzero``, with other tokens on each rank."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from hugging_face import call
from rank_pool import Ranks

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers not installed")


WAYS = {
    "eager experts": ("eager", "aot_eager"),
    "eager experts, inductor": ("eager", "inductor"),
    "grouped experts": ("grouped_mm", "aot_eager"),
}


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_ddps_and_buckets_are_launched_early(way: str, split: str, ranks: Ranks) -> None:
    experts, backend = WAYS[way]
    trained = ranks(2).run(call, "mixtral_ranks.train", experts, backend, split, compiled=True)
    for of_rank in trained:
        assert of_rank.to_ddp < 1e-4
        assert of_rank.to_whole < 1e-4
        assert of_rank.num_early >= of_rank.num_buckets - 4 > 5
        if experts == "eager":
            assert "3 regions of MixtralDecoderLayer (model.layers.0, model.layers.1, model.layers.2)" in of_rank.says
            assert "modeling_mixtral.py:" in of_rank.says
    assert trained[0].unused_experts and trained[0].unused_experts != trained[1].unused_experts
