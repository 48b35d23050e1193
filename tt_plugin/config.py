"""The NPU's configuration: the dict under ``tt_plugin`` in vLLM's ``--additional-config``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from hawk_connector.errors import ConfigError, UnsupportedError
from hawk_connector.layout.kv_pool import KVPoolLayout
from hawk_connector.layout.tensor_layout import TILE

from .device.banks import BankTable
from .device.kv_pool import heads_per_chip

__all__ = ["CONFIG_KEY", "DEFAULT_BLOCK_SIZE", "NpuConfig"]

CONFIG_KEY = "tt_plugin"

# What Tenstorrent's own serving examples use.
DEFAULT_BLOCK_SIZE = 64

_CODECS = {
    "bfp8": "bfp8",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp32": "float32",
    "float32": "float32",
}


class NpuConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which device is simulated and how its KV pools are laid out."""

    device: Annotated[str, Meta(description="Device of the catalog (`hawk layouts` lists them).")] = "blackhole-p150"
    chips: Annotated[int, Meta(ge=1, le=64, description="Chips over which the KV heads are shared out.")] = 1
    pool: Annotated[
        Literal["cross_layer", "per_layer"],
        Meta(description="`cross_layer`: one K and one V pool for all layers; `per_layer`: two for each layer."),
    ] = "cross_layer"
    kv_dtype: Annotated[
        Literal["bfp8", "bf16", "bfloat16", "fp32", "float32"],
        Meta(description="Element type of the KV pools."),
    ] = "bfp8"
    rope_interleaved: Annotated[
        bool,
        Meta(description="K is stored in Meta's (interleaved) RoPE order, as tt_transformers' kernels expect."),
    ] = True

    @staticmethod
    def parse(additional_config: Mapping[str, Any]) -> NpuConfig:
        """The checked configuration out of vLLM's ``additional_config``.

        Raises ConfigError for an unknown key (naming the nearest right one), a value of another type or out of its
        limits, and an unknown device.
        """
        given = additional_config.get(CONFIG_KEY, {})
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"additional-config {CONFIG_KEY} is not a table", expected="keys and values", got=repr(given)
            )
        names = [field.name for field in msgspec.structs.fields(NpuConfig)]
        for key in given:
            if key not in names:
                near = difflib.get_close_matches(str(key), names, n=1)
                raise ConfigError(
                    f"{CONFIG_KEY}.{key} is not a key",
                    expected=f"one of {', '.join(names)}",
                    fix=f"Did you mean {near[0]}?" if near else None,
                )
        try:
            config = msgspec.convert(dict(given), NpuConfig)
        except msgspec.ValidationError as error:
            text = str(error)
            name = text.rpartition("$.")[2].rstrip("`") if "$." in text else ""
            raise ConfigError(
                f"{CONFIG_KEY}.{name}: {text.partition(' - at')[0]}",
                got=repr(given.get(name)),
                fix="Set it in --additional-config '{\"tt_plugin\": {...}}'.",
            ) from None
        BankTable.named(config.device)
        return config

    @property
    def codec(self) -> str:
        """Name of the pools' codec."""
        return _CODECS[self.kv_dtype]

    def layout(self, *, layers: int, kv_heads: int, head_dim: int, block_size: int) -> KVPoolLayout:
        """The pool layout of a model.  UnsupportedError says which of its numbers the device cannot take, and why."""
        if head_dim % TILE:
            raise UnsupportedError(
                f"head_dim {head_dim}",
                reason=f"TTNN keeps KV in tiles of {TILE}x{TILE} elements",
                fix=f"Choose a model whose head_dim is a multiple of {TILE}.",
            )
        if block_size % TILE and block_size != TILE // 2:
            raise UnsupportedError(
                f"block size {block_size}",
                reason=f"a block is whole tile rows of {TILE} tokens (or half of one, padded)",
                fix=f"Set --block-size to a multiple of {TILE}, or to {TILE // 2}; {DEFAULT_BLOCK_SIZE} is usual.",
            )
        try:
            heads = heads_per_chip(kv_heads, self.chips)
        except ValueError as error:
            raise UnsupportedError(
                f"{kv_heads} KV heads on {self.chips} chips",
                reason="each chip holds the same number of heads, or heads are replicated evenly",
                fix=f"Set {CONFIG_KEY}.chips so that one number divides the other.",
            ) from error
        table = BankTable.named(self.device)
        return KVPoolLayout(
            kind=self.pool,
            layers=layers,
            chips=self.chips,
            heads=heads,
            block_size=block_size,
            head_dim=head_dim,
            codec=self.codec,
            banks=table.banks,
            alignment=table.alignment,
            rope_interleaved=self.rope_interleaved,
        )
