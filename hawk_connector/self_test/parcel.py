"""The self-test's parcel: known values, packed for pools on seven banks, and looked up in them again.

Seven banks, since there no two blocks begin in the same one; bfloat16, since its values come back exactly.  What landed
is looked up by ``TensorLayout.locate``, which goes from an element to its byte and knows nothing of parcels, classes,
runs and segments.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hawk_connector.errors import LocalError
from hawk_connector.layout.bases import BaseTable
from hawk_connector.layout.kv_pool import KVPoolLayout
from hawk_connector.plan.parcel import ChipShare, ParcelPlan
from hawk_connector.plan.segments import PoolPlacement, Segments, pool_segments

__all__ = ["SelfTestParcel"]

_LAYOUT = KVPoolLayout(
    kind="cross_layer",
    layers=8,
    chips=1,
    heads=2,
    block_size=64,
    head_dim=64,
    codec="bfloat16",
    banks=7,
    alignment=64,
    rope_interleaved=True,
)
_NUM_BLOCKS = 8
_BLOCK_IDS = (5, 2, 3)
_TOKENS = 150  # the last block is not full
_SOURCE_BLOCK = 16  # tokens of a block of the prefill side
_FIRST_ADDRESS = 0x100080
_UNTOUCHED = 0xA5
_SAMPLES = 4096


@dataclass(frozen=True)
class _Banks:
    """Simulated banks: uint8 ``[banks, bytes]`` and the pools' addresses in each."""

    memory: NDArray[np.uint8]
    addresses: tuple[int, ...]

    @classmethod
    def empty(cls) -> _Banks:
        size = _LAYOUT.rule.slots(_LAYOUT.pool_pages(_NUM_BLOCKS)) * _LAYOUT.page_pitch
        memory = np.full((_LAYOUT.banks, _FIRST_ADDRESS + _LAYOUT.pools * size), _UNTOUCHED, dtype=np.uint8)
        return cls(memory, tuple(_FIRST_ADDRESS + pool * size for pool in range(_LAYOUT.pools)))


class SelfTestParcel:
    """``sent``: the packed parcel, uint8.  ``banks``: memory in which it is to land, uint8.  ``packer``: who packed."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        shape = (2, _LAYOUT.layers, _LAYOUT.heads, _TOKENS, _LAYOUT.head_dim)
        bits = self._random.standard_normal(shape).astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
        self._values: NDArray[np.float32] = bits.view(np.float32)  # each is a bfloat16
        self._plan = ParcelPlan(_LAYOUT, (ChipShare(0, tuple((h, h) for h in range(_LAYOUT.heads))),), len(_BLOCK_IDS))
        self._banks = _Banks.empty()
        self.banks = self._banks.memory
        if importlib.util.find_spec("torch") is not None:
            self.sent, self.packer = _packed_by_transform(self._values, self._plan), "hawk's transform"
        else:
            self.sent, self.packer = _packed_by_layout(self._values, self._plan), "the layout, since torch is missing"

    def segments(self) -> Segments:
        """The reads that land it."""
        rows = self.banks.strides[0]
        origins = self.banks.ctypes.data + np.arange(_LAYOUT.banks, dtype=np.int64)[None, :] * rows
        placement = PoolPlacement(origins, self._banks.addresses, _NUM_BLOCKS)
        return pool_segments(self._plan, self.sent.ctypes.data, _BLOCK_IDS, placement)

    def check(self) -> int:
        """Looks elements up in the banks: values where tokens were sent, zeros past them, nothing elsewhere.

        Returns how many; LocalError names the first that is wrong.
        """
        tensors = [
            _LAYOUT.pool_tensor(kv, _NUM_BLOCKS, BaseTable((0,) * _LAYOUT.banks), self._banks.addresses[kv])
            for kv in (0, 1)
        ]
        extents = {
            "block": _NUM_BLOCKS,
            "layer": _LAYOUT.layers,
            "head": _LAYOUT.heads,
            "token": _LAYOUT.block_size,
            "dim": _LAYOUT.head_dim,
        }
        for _ in range(_SAMPLES):
            kv = int(self._random.integers(2))
            index = {axis: int(self._random.integers(extent)) for axis, extent in extents.items()}
            place = tensors[kv].locate(index)
            found = self.banks[place.bank, place.address : place.address + 2].tobytes()
            expected = self._expected(kv, index)
            if found != expected:
                raise LocalError(
                    f"the self-test's {'KV'[kv]} at {index} is wrong in bank {place.bank}, address {place.address:#x}",
                    expected=expected.hex(),
                    got=found.hex(),
                )
        return _SAMPLES

    def _expected(self, kv: int, index: dict[str, int]) -> bytes:
        if index["block"] not in _BLOCK_IDS:
            return bytes([_UNTOUCHED] * 2)
        token = _BLOCK_IDS.index(index["block"]) * _LAYOUT.block_size + index["token"]
        if token >= _TOKENS:
            return bytes(2)
        value = self._values[kv, index["layer"], index["head"], token, index["dim"]]
        return value.tobytes()[2:]  # the upper half of a float32 is the bfloat16


def _packed_by_transform(values: NDArray[np.float32], plan: ParcelPlan) -> NDArray[np.uint8]:
    """By the code that a prefill rank packs with, out of a paged cache with scattered blocks."""
    import torch

    from hawk_connector.transform.reference import LayerSource, pack_parcel

    count = -(-_TOKENS // _SOURCE_BLOCK)
    table = torch.arange(count).flip(0)
    padded = np.pad(values, [(0, 0)] * 3 + [(0, count * _SOURCE_BLOCK - _TOKENS), (0, 0)], constant_values=np.nan)
    # [kv, layer, head, token, dim] -> [kv, layer, block, head, token of the block, dim], last block first
    split = padded.reshape(*padded.shape[:3], count, _SOURCE_BLOCK, -1).transpose(0, 1, 3, 2, 4, 5)[:, :, ::-1]
    caches = torch.from_numpy(np.ascontiguousarray(split)).to(torch.bfloat16)
    out = torch.empty(plan.nbytes, dtype=torch.uint8)
    layers = [LayerSource(caches[0, layer], caches[1, layer]) for layer in range(_LAYOUT.layers)]
    pack_parcel(layers, table, plan, 0, _TOKENS, out)
    packed: NDArray[np.uint8] = out.numpy()
    return packed


def _packed_by_layout(values: NDArray[np.float32], plan: ParcelPlan) -> NDArray[np.uint8]:
    """Element by element as the row's layout says, for a host without torch."""
    (share,) = plan.shares
    words = np.zeros((plan.rows, _LAYOUT.page_pitch // 2), dtype=np.uint16)
    padding = plan.blocks * _LAYOUT.block_size - _TOKENS
    half = (np.pad(values, [(0, 0)] * 3 + [(0, padding), (0, 0)]).view(np.uint32) >> 16).astype(np.uint16)
    for kv in (0, 1):
        row = _LAYOUT.tensor_layout(kv)
        stored = half if row.dim_order is None else half[..., list(row.dim_order)]
        for layer in range(_LAYOUT.layers):
            rows = plan.page_rows(share, layer, kv).reshape(plan.blocks, -1)
            blocks = stored[kv, layer].reshape(_LAYOUT.heads, plan.blocks, _LAYOUT.block_size, -1)
            for block in range(plan.blocks):
                words[rows[block][row.page_of], row.element_of] = blocks[:, block]
    return words.view(np.uint8).reshape(-1)
