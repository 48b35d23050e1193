"""`hawk bench transform`: how fast a parcel is packed, beside a plain copy of the same bytes in the same rounds."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hawk_connector.errors import ConfigError, LocalError
from hawk_connector.layout.kv_pool import KVPoolLayout
from hawk_connector.plan.parcel import ChipShare, ParcelPlan
from hawk_connector.transform.packing import ParcelPacker, parcel_packer
from hawk_connector.transform.reference import pack_parcel

from .cache import CacheShape, Family, SyntheticCache
from .machine import check_memory
from .rounds import Ratio, Spread, compared, rounds
from .stopwatch import Copier, Stopwatch, device_name, stopwatch

__all__ = ["TransformOptions", "TransformRun", "run_transform"]

_CODECS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_VERIFIED_LAYERS = 2

_IN_ORDER = " in order"

Report = Callable[[str, int, int], None]
"""(what is being measured, measurements done, of how many)."""


@dataclass(frozen=True)
class TransformOptions:
    """``sources``, ``source_dtypes``, ``dtypes`` (of the pools) and ``threads`` are crossed with each other.

    A measurement packs one parcel of ``tokens`` tokens from shuffled blocks of ``source_block`` tokens.
    """

    device: str = "cpu"
    sources: tuple[Family, ...] = ("gpu-nhd", "cpu")
    source_dtypes: tuple[str, ...] = ("bf16", "fp32")
    dtypes: tuple[str, ...] = ("fp32", "bf16", "bfp8", "bfp4")
    threads: tuple[int, ...] = (1, len(os.sched_getaffinity(0)))
    layers: int = 80
    kv_heads: int = 8
    head_dim: int = 128
    tokens: int = 512
    source_block: int = 16
    block_size: int = 64
    banks: int = 8
    alignment: int = 64
    runs: int = 9
    seed: int = 1

    def layout(self, dtype: str, layers: int | None = None) -> KVPoolLayout:
        """The pools that a parcel is packed for: one chip's, all layers in one unit."""
        return KVPoolLayout(
            kind="cross_layer",
            layers=layers or self.layers,
            chips=1,
            heads=self.kv_heads,
            block_size=self.block_size,
            head_dim=self.head_dim,
            codec=_CODECS.get(dtype, dtype),
            banks=self.banks,
            alignment=self.alignment,
        )

    def shape(self, family: Family, dtype: str) -> CacheShape:
        """Twice the parcel's blocks, so that its blocks have gaps between them.  vLLM's CPU kernels want whole 32s."""
        block = max(self.source_block, 32) if family == "cpu" else self.source_block
        blocks = 2 * -(-self.tokens // block)
        return CacheShape(family, self.layers, self.kv_heads, self.head_dim, block, blocks, dtype)


@dataclass(frozen=True)
class TransformRun:
    """Rows for the file and the table, and (what it is of, ratio)."""

    rows: list[dict[str, Any]]
    ratios: list[tuple[dict[str, Any], Ratio]]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Packing:
    """One contestant: a packer, and where it packs to.  ``plan_in_order``: the same parcel without K's RoPE order."""

    dtype: str
    threads: int
    packer: ParcelPacker
    plan: ParcelPlan
    plan_in_order: ParcelPlan

    @property
    def name(self) -> str:
        return f"{self.dtype}/{self.threads}"


def run_transform(options: TransformOptions, report: Report = lambda *_: None) -> TransformRun:
    """Measures everything that ``options`` cross.

    ConfigError for a device that is not there, CapacityError where memory does not suffice, LocalError where a packer's
    bytes are not those of the reference.
    """
    device = _device(options)
    threads = (1,) if device.type == "cuda" else tuple(sorted(set(options.threads)))
    groups = [(family, dtype) for family in options.sources for dtype in options.source_dtypes]
    total = len(groups) * options.runs * (2 * len(options.dtypes) + 1) * len(threads)
    _check_memory(options)
    rows: list[dict[str, Any]] = []
    ratios: list[tuple[dict[str, Any], Ratio]] = []
    done = 0
    for family, dtype in groups:
        group = _Group(options, family, dtype, threads, device)
        times: dict[str, dict[int, float]] = {name: {} for name in group.names}
        for number, name in rounds(group.names, options.runs, options.seed):
            report(f"{family} {dtype} to {name}", done, total)
            times[name][number] = group.measure(name)
            done += 1
        for row, found in group.results(times):
            rows.append(row)
            ratios += found
    notes = (
        "gb_per_s: bytes of the source a second; memcpy: the same bytes copied by as many threads; v: half of a parcel "
        "whose K keeps its order; k: what is left of one whose K is brought into RoPE order",
    )
    return TransformRun(rows, ratios, notes)


class _Group:
    """Contestants that pack from one cache."""

    def __init__(
        self, options: TransformOptions, family: Family, dtype: str, threads: Sequence[int], device: torch.device
    ) -> None:
        self._options, self._family, self._dtype, self._device = options, family, dtype, device
        shape = options.shape(family, dtype)
        cache = SyntheticCache(shape, options.seed, device)
        self._layers = cache.sources()
        order = np.random.default_rng(options.seed).permutation(shape.blocks)
        self._table = torch.from_numpy(order[: -(-options.tokens // shape.block_size)]).to(device)
        self.nbytes = options.tokens * shape.token_bytes
        self._watch: Stopwatch = stopwatch(device)
        blocks = -(-options.tokens // options.block_size)
        self._packings = {}
        for each in threads:
            packer = parcel_packer(device, each)
            for codec in options.dtypes:
                plans = [self._plan(options.layout(codec), blocks, rope) for rope in (True, False)]
                packing = _Packing(codec, each, packer, plans[0], plans[1])
                self._packings[packing.name] = packing
        size = max(packing.plan.nbytes for packing in self._packings.values())
        self._out = torch.empty(size, dtype=torch.uint8, device=device)
        self._copiers = {each: Copier(cache.memory[: self.nbytes], each) for each in threads}
        for packing in self._packings.values():
            self._verify(packing)
            self._pack(packing, rope=True)
            self._pack(packing, rope=False)
        for copier in self._copiers.values():
            copier.copy()

    @property
    def names(self) -> list[str]:
        packs = list(self._packings)
        return [*packs, *(f"{name}{_IN_ORDER}" for name in packs), *(f"memcpy/{each}" for each in self._copiers)]

    def measure(self, name: str) -> float:
        """Seconds."""
        if name.startswith("memcpy/"):
            return self._watch.seconds(self._copiers[int(name.removeprefix("memcpy/"))].copy)
        packing = self._packings[name.removesuffix(_IN_ORDER)]
        return self._watch.seconds(lambda: self._pack(packing, rope=not name.endswith(_IN_ORDER)))

    def results(
        self, times: Mapping[str, Mapping[int, float]]
    ) -> Iterator[tuple[dict[str, Any], list[tuple[dict[str, Any], Ratio]]]]:
        """A row for each contestant, with its ratios."""
        for name, packing in self._packings.items():
            about = {
                "source": self._family,
                "source_dtype": self._dtype,
                "dtype": packing.dtype,
                "threads": packing.threads,
            }
            whole, of_values, copy = times[name], times[f"{name}{_IN_ORDER}"], times[f"memcpy/{packing.threads}"]
            value = {number: seconds / 2 for number, seconds in of_values.items()}
            # What is left of a round may be nothing where the machine was disturbed: such rounds say nothing of K.
            left = {number: seconds - value[number] for number, seconds in whole.items()}
            key = {number: seconds for number, seconds in left.items() if seconds > 0}
            spread = Spread.of(list(whole.values()))
            row = {
                **about,
                "mode": "transform",
                "device": device_name(self._device),
                "size_bytes": self.nbytes,
                "seconds_median": spread.median,
                "seconds_min": spread.least,
                "seconds_max": spread.most,
                "runs": spread.count,
                "gb_per_s": self._rate(whole),
                "k_gb_per_s": self._rate(key, 2) if key else None,
                "v_gb_per_s": self._rate(value, 2),
                "memcpy_gb_per_s": self._rate(copy),
            }
            # Times the other way round: of two contestants that move the same bytes the quicker has the higher rate.
            found = [(about, compared("memcpy", copy, "pack", whole)), (about, compared("V", value, "K", key))]
            alone = times.get(f"{packing.dtype}/1")
            if packing.threads > 1 and alone is not None:
                found.append((about, compared("1 thread", alone, f"{packing.threads} threads", whole)))
            yield row, found

    def _rate(self, seconds: Mapping[int, float], part: int = 1) -> float:
        """10^9 bytes of source a second, for 1/``part`` of the parcel."""
        return self.nbytes / part / Spread.of(list(seconds.values())).median / 1e9

    def _plan(self, layout: KVPoolLayout, blocks: int, rope: bool) -> ParcelPlan:
        from msgspec.structs import replace

        heads = tuple((head, head) for head in range(layout.heads))
        return ParcelPlan(replace(layout, rope_interleaved=rope), (ChipShare(0, heads),), blocks)

    def _pack(self, packing: _Packing, *, rope: bool) -> None:
        plan = packing.plan if rope else packing.plan_in_order
        packing.packer.pack(self._layers, self._table, plan, 0, self._options.tokens, self._out[: plan.nbytes])

    def _verify(self, packing: _Packing) -> None:
        """Nobody measures a packer that packs something else: its bytes are those of the reference."""
        options = self._options
        layers = min(_VERIFIED_LAYERS, options.layers)
        plan = self._plan(options.layout(packing.dtype, layers), 2, True)
        tokens = min(options.tokens, 2 * options.block_size) - 1
        # Not the bytes that lie there already, in which a packer that does nothing would find its own.
        found = torch.full((plan.nbytes,), 0xA5, dtype=torch.uint8, device=self._device)
        wanted = torch.full_like(found, 0x5A)
        packing.packer.pack(self._layers[:layers], self._table, plan, 0, tokens, found)
        pack_parcel(self._layers[:layers], self._table, plan, 0, tokens, wanted)
        if not torch.equal(found, wanted):
            first = int((found != wanted).nonzero()[0])
            raise LocalError(
                f"{type(packing.packer).__name__} packs other bytes than the reference ({packing.name} from "
                f"{self._family} {self._dtype})",
                expected=f"{int(wanted[first]):#04x} at byte {first}",
                got=f"{int(found[first]):#04x}",
                fix="This is a bug in the kernels; nothing was measured.",
            )


def _device(options: TransformOptions) -> torch.device:
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "no GPU can be used here", expected="a CUDA device", got="none", fix="Run it with --device cpu."
        )
    return device


def _check_memory(options: TransformOptions) -> None:
    """Source and its copy, and the largest parcel."""
    shapes = [options.shape(family, dtype) for family in options.sources for dtype in options.source_dtypes]
    source = max(shape.nbytes + options.tokens * shape.token_bytes for shape in shapes)
    whole = -(-options.tokens // options.block_size) * options.block_size
    out = 4 * 2 * options.layers * options.kv_heads * options.head_dim * whole
    if options.device == "cpu":
        check_memory(source + out, "the caches", "Lower --tokens or --layers.")
