"""The transfer that the paper argues against: no packing, one read for each row of 16 elements of a face.

bfloat16 pools with K in HF order, which a row's 32 bytes lie in as they lie in the cache.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hawk_connector.errors import ConfigError
from hawk_connector.layout.tensor_layout import FACE
from hawk_connector.plan.pairing import chip_heads
from hawk_connector.plan.segments import Segments

from .cache import CacheShape
from .device import BenchPools
from .expected import Landed

__all__ = ["face_row_reads"]

_BYTES = 2


def face_row_reads(shape: CacheShape, address: int, pools: BenchPools, landed: Landed) -> Segments:
    """Reads of a request's tokens out of the cache at ``address``, in the order of the cache.

    ConfigError where the cache has no rows of bfloat16, or the pools store K in another order.
    """
    layout = pools.layout
    if shape.dtype != "bf16" or shape.family == "cpu" or layout.codec != "bfloat16" or layout.rope_interleaved:
        raise ConfigError(
            "face rows cannot be read one by one",
            expected="a GPU's cache in bf16, and bf16 pools with K in HF order",
            got=f"{shape.family} in {shape.dtype}, {layout.codec} pools",
            fix="Leave face-rows out, or use --source gpu-nhd --source-dtype bf16.",
        )
    if layout.block_size % shape.block_size:
        raise ConfigError(
            "face rows are read one block of the cache at a time",
            expected="a --block-size that is a multiple of --source-block",
            got=f"{layout.block_size} and {shape.block_size}",
        )
    remote: list[NDArray[np.int64]] = []
    local: list[NDArray[np.int64]] = []
    heads = chip_heads(shape.kv_heads, layout.chips)
    assert heads is not None
    size = layout.block_size
    for layer in range(layout.layers):
        for number, source in enumerate(landed.table):
            rows = min(shape.block_size, landed.tokens - number * shape.block_size)
            block, row = divmod(number * shape.block_size, size)
            for kv in (0, 1):
                tensor = layout.tensor_layout(kv)
                first = landed.block_ids[block] * layout.pages_per_unit + layout.first_page_of(layer)
                for chip, owned in enumerate(heads):
                    for own, head in enumerate(owned):
                        page = tensor.page_of[own, row : row + rows, ::FACE]
                        element = tensor.element_of[own, row : row + rows, ::FACE]
                        start = pools.addresses(chip, layout.pool_of(layer, kv), first + page)
                        local.append((start + element * _BYTES).reshape(-1))
                        place = shape.place(kv, layer, source, head)[:rows, ::FACE]
                        remote.append((address + place * _BYTES).reshape(-1))
    length = np.full(sum(len(each) for each in local), FACE * _BYTES, dtype=np.int64)
    return Segments(np.concatenate(remote), np.concatenate(local), length)
