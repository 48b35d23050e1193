"""Parts of the overlay that need no engine: layers, page tables, the order of K, what is asked for and found."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hawk_connector.decode.metadata import DecodeStep, LoadRequest, RefusedLoad
from hawk_connector.errors import ConfigError, UnsupportedError
from hawk_connector.layout.kv_pool import KVPoolLayout
from hawk_connector.protocol.ticket import Ticket
from tt_plugin.config import SiliconConfig
from tt_plugin.vllm.silicon.layers import every_layer
from tt_plugin.vllm.silicon.page_tables import CrossLayerModel, layer_page_tables
from tt_plugin.vllm.silicon.pools import interleaved_rope


class Model:
    """What tt_transformers' models have for the runner; remembers what it was given."""

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}
        self.vocabulary = 32

    def allocate_kv_cache(self, shape: tuple[int, ...], dtype: str, layers: int) -> Any:
        self.given = {"shape": shape, "dtype": dtype, "layers": layers}
        return [[[f"{kv}{layer}" for kv in "kv"] for layer in range(layers)]]

    def prefill_forward(self, tokens: Any = None, page_table: Any = None, page_tables_per_layer: Any = None) -> None:
        self.given = {"page_table": page_table, "tables": page_tables_per_layer}

    def decode_forward(self, page_table: Any = None, page_tables_per_layer: Any = None, **kwargs: Any) -> None:
        self.given = {"page_table": page_table, "tables": page_tables_per_layer}


class OneTable(Model):
    def decode_forward(self, page_table: Any = None) -> None:  # type: ignore[override]
        raise AssertionError("never called")


class AnyKeyword(Model):
    """As tt_transformers' classes are: what lies below them may drop the tables, and all layers would share blocks."""

    def prefill_forward(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("never called")


def test_a_layer_finds_its_pool_block() -> None:
    """Layer l of block b is pool block b * layers + l; what is absent stays absent."""
    table = torch.tensor([[4, 1, -1], [0, -1, -1]], dtype=torch.int32)
    found = layer_page_tables(table, 3)
    assert [t.tolist() for t in found] == [
        [[12, 3, -1], [0, -1, -1]],
        [[13, 4, -1], [1, -1, -1]],
        [[14, 5, -1], [2, -1, -1]],
    ]
    assert all(t.dtype == torch.int32 for t in found)


@pytest.mark.parametrize("forward", ["prefill_forward", "decode_forward"])
def test_a_model_with_one_pool_gets_a_table_for_each_layer(forward: str) -> None:
    model = Model()
    shared = CrossLayerModel(model, 2)
    caches = shared.allocate_kv_cache((10, 2, 64, 128), "bfp8", 2)
    assert model.given == {"shape": (20, 2, 64, 128), "dtype": "bfp8", "layers": 1}
    assert caches == [[["k0", "v0"], ["k0", "v0"]]]
    getattr(shared, forward)(page_table=torch.tensor([[3]]))
    assert [t.tolist() for t in model.given["tables"]] == [[[6]], [[7]]]
    assert shared.vocabulary == 32


def test_models_and_pools_that_cannot_be_cross_layer_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="decode_forward takes one page table for all layers"):
        CrossLayerModel(OneTable(), 2)
    with pytest.raises(UnsupportedError, match="prefill_forward takes one page table for all layers, or does not say"):
        CrossLayerModel(AnyKeyword(), 2)
    with pytest.raises(UnsupportedError, match=r"at most 65535 in all, got 65536"):
        CrossLayerModel(Model(), 32).allocate_kv_cache((2048, 2, 64, 128), "bfp8", 32)


def test_one_spec_stands_for_all_layers_and_named_ones_stay() -> None:
    assert every_layer({"foo": 1}, 2) == {"model.layers.0.self_attn.attn": 1, "model.layers.1.self_attn.attn": 1}
    named = {"layers.0": 1, "layers.1": 1}
    assert every_layer(named, 2) == named
    with pytest.raises(UnsupportedError, match="3 attention layers of which 2 keep KV"):
        every_layer(named, 3)
    with pytest.raises(UnsupportedError, match="cannot be told apart"):
        every_layer({"foo": 1, "bar": 1}, 2)


@pytest.mark.parametrize(
    ("said", "configured", "interleaved"),
    [(None, None, True), (None, False, False), (False, None, True), (True, None, False), (True, False, False)],
)
def test_the_order_of_k_is_the_models(said: bool | None, configured: bool | None, interleaved: bool) -> None:
    arguments = SimpleNamespace() if said is None else SimpleNamespace(use_hf_rope=said)
    for model in (SimpleNamespace(model_args=arguments), SimpleNamespace(model_args=[arguments])):
        assert interleaved_rope(model, configured) is interleaved


def test_an_order_of_k_that_contradicts_the_model_is_refused() -> None:
    model = SimpleNamespace(model_args=[SimpleNamespace(use_hf_rope=True)])
    with pytest.raises(ConfigError, match=r"expected False .*use_hf_rope True.*got True"):
        interleaved_rope(model, True)


def test_what_was_asked_for_is_compared_with_what_was_found() -> None:
    layout = KVPoolLayout("per_layer", 2, 4, 2, 64, 128, "bfp8", 7, 64)
    SiliconConfig(device="blackhole-p100", chips=4, kv_dtype="bfp8").check(layout)
    with pytest.raises(ConfigError) as caught:
        SiliconConfig(device="blackhole-p150", chips=1, kv_dtype="bf16").check(layout)
    text = str(caught.value)
    assert "expected device 8 banks, alignment 64, chips 1, kv_dtype bfloat16" in text
    assert "got device 7 banks, alignment 64, chips 4, kv_dtype bfp8" in text


def test_a_step_that_was_given_up_comes_before_the_next() -> None:
    first = LoadRequest("a", Ticket("0" * 32, "1" * 32, "2" * 64, 64, ()), 0, (1,))
    second = LoadRequest("b", Ticket("3" * 32, "4" * 32, "5" * 64, 64, ()), 0, (2,))
    refused = RefusedLoad("c", (3,), "circuit", "why")
    earlier = DecodeStep(loads=[first], refused=[refused], admissions=3)
    both = DecodeStep(loads=[second], aborted=["a"], admissions=1).following(earlier)
    assert both == DecodeStep(loads=[first, second], refused=[refused], aborted=["a"], admissions=1)
