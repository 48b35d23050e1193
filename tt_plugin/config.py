"""The NPU's configuration: the dict under ``tt_plugin`` in vLLM's ``--additional-config``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from hawk_connector.errors import ConfigError, UnsupportedError
from hawk_connector.layout.kv_pool import KVPoolLayout
from hawk_connector.layout.tensor_layout import TILE

from .device.banks import BankTable
from .device.kv_pool import heads_per_chip

__all__ = ["CONFIG_KEY", "DEFAULT_BLOCK_SIZE", "LandingChoice", "NpuConfig", "SiliconConfig"]

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


MIB = 1 << 20


class LandingChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How parcels get into the pools: the table under ``landing``."""

    path: Annotated[
        Literal["direct", "bounce"] | None,
        Meta(
            description="`direct`: reads end in the banks (bank windows on real chips). `bounce`: reads end in host "
            "memory, and the device is written from there. Default: `direct` on a simulated NPU, else `bounce`."
        ),
    ] = None
    placement: Annotated[
        Literal["pool", "staged"] | None,
        Meta(
            description="`pool`: where the kernels read. `staged`: in one buffer in each bank, then copied. null: by "
            "the counts of each parcel, where the device can copy by itself."
        ),
    ] = "pool"
    bounce_buffer_bytes: Annotated[
        int, Meta(ge=1 << 16, description="Host memory for parcels on the bounce path; two parcels make it overlap.")
    ] = 256 * MIB
    bounce_wait_s: Annotated[
        float, Meta(gt=0, le=3600, description="How long a parcel may wait for room in it, or in the stages.")
    ] = 20.0
    convert_threads: Annotated[
        int, Meta(ge=1, le=64, description="Threads that convert one parcel in the connector's mode `host`.")
    ] = 1
    stage_bytes_per_bank: Annotated[int, Meta(ge=1 << 12, description="Device memory for stages.")] = 16 * MIB
    device_nodes: Annotated[
        tuple[str, ...],
        Meta(description="For `direct` on real chips: the device node of each chip, in TTNN's order."),
    ] = ()


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
    landing: Annotated[LandingChoice, Meta(description="How parcels get into the pools.")] = LandingChoice()

    @staticmethod
    def parse(additional_config: Mapping[str, Any]) -> NpuConfig:
        """The checked configuration out of vLLM's ``additional_config``.

        Raises ConfigError for an unknown key (naming the nearest right one), a value of another type or out of its
        limits, and an unknown device.
        """
        config = _parsed(NpuConfig, additional_config)
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


class SiliconConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the overlay on Tenstorrent's plugin is told; the rest it reads from the device and the model's tensors."""

    pool: Annotated[
        Literal["cross_layer", "per_layer"],
        Meta(
            description="`per_layer`: as the model's code allocates its caches. `cross_layer`: one K and one V pool "
            "for all layers, for models whose code takes a page table for each layer."
        ),
    ] = "per_layer"
    rope_interleaved: Annotated[
        bool | None,
        Meta(
            description="Whether K is stored in Meta's (interleaved) RoPE order. Default: what the model says "
            "(`use_hf_rope`), or true where it does not say."
        ),
    ] = None
    landing: Annotated[LandingChoice, Meta(description="How parcels get into the pools.")] = LandingChoice()
    device: Annotated[
        str | None, Meta(description="Device of the catalog whose banks the chips must have; an error if they do not.")
    ] = None
    chips: Annotated[Annotated[int, Meta(ge=1, le=64)] | None, Meta(description="How many chips there must be.")] = None
    kv_dtype: Annotated[
        Literal["bfp8", "bf16", "bfloat16", "fp32", "float32"] | None,
        Meta(description="What the model's caches must be; its own code chooses."),
    ] = None

    @staticmethod
    def parse(additional_config: Mapping[str, Any]) -> SiliconConfig:
        """The checked configuration out of vLLM's ``additional_config``; errors as :meth:`NpuConfig.parse`."""
        config = _parsed(SiliconConfig, additional_config)
        if config.device is not None:
            BankTable.named(config.device)
        return config

    def check(self, layout: KVPoolLayout) -> None:
        """ConfigError where the pools that were found are not those that were asked for."""
        wanted: dict[str, tuple[object, object]] = {}
        if self.device is not None:
            table = BankTable.named(self.device)
            wanted["device"] = (f"{table.banks} banks, alignment {table.alignment}", _banks(layout))
        if self.chips is not None:
            wanted["chips"] = (self.chips, layout.chips)
        if self.kv_dtype is not None:
            wanted["kv_dtype"] = (_CODECS[self.kv_dtype], layout.codec)
        wrong = {key: pair for key, pair in wanted.items() if pair[0] != pair[1]}
        if wrong:
            raise ConfigError(
                f"the model's caches are not what {CONFIG_KEY} says",
                expected=", ".join(f"{key} {pair[0]}" for key, pair in wrong.items()),
                got=", ".join(f"{key} {pair[1]}" for key, pair in wrong.items()),
                fix="Change --additional-config, the chips (TT_VISIBLE_DEVICES, MESH_DEVICE) or the model's settings.",
            )


def _banks(layout: KVPoolLayout) -> str:
    return f"{layout.banks} banks, alignment {layout.alignment}"


_Config = TypeVar("_Config", NpuConfig, SiliconConfig)


def _parsed(kind: type[_Config], additional_config: Mapping[str, Any]) -> _Config:
    """The table under CONFIG_KEY as a ``kind``; ConfigError for unknown keys and wrong values."""
    given = additional_config.get(CONFIG_KEY, {})
    if not isinstance(given, Mapping):
        raise ConfigError(f"additional-config {CONFIG_KEY} is not a table", expected="keys and values", got=repr(given))
    names = [field.name for field in msgspec.structs.fields(kind)]
    for key in given:
        if key not in names:
            near = difflib.get_close_matches(str(key), names, n=1)
            raise ConfigError(
                f"{CONFIG_KEY}.{key} is not a key",
                expected=f"one of {', '.join(names)}",
                fix=f"Did you mean {near[0]}?" if near else None,
            )
    try:
        return msgspec.convert(dict(given), kind)
    except msgspec.ValidationError as error:
        text = str(error)
        name = text.rpartition("$.")[2].rstrip("`") if "$." in text else ""
        raise ConfigError(
            f"{CONFIG_KEY}.{name}: {text.partition(' - at')[0]}",
            got=repr(given.get(name)),
            fix="Set it in --additional-config '{\"tt_plugin\": {...}}'.",
        ) from None
