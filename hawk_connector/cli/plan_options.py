"""What `hawk plan` can be asked for: the words of its options, and the model of the link."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Blocks", "Dtype", "LinkModel", "Pool"]


class Dtype(str, Enum):
    """The decode side's KV dtypes as vLLM's users write them."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"
    bfp8 = "bfp8"
    bfp4 = "bfp4"
    bfp2 = "bfp2"

    @classmethod
    def of_codec(cls, codec: str) -> Dtype:
        """The dtype that a layout's codec of that name stores."""
        return next(dtype for dtype in cls if dtype.codec == codec)

    @property
    def codec(self) -> str:
        return {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}.get(self.value, self.value)


class Pool(str, Enum):
    """Kinds of pool, as in KVPoolLayout."""

    cross_layer = "cross_layer"
    per_layer = "per_layer"


class Blocks(str, Enum):
    """Which ids vLLM's block pool gave to the request: neighbours decide how many reads merge."""

    scattered = "scattered"
    descending = "descending"
    consecutive = "consecutive"


@dataclass(frozen=True, slots=True)
class LinkModel:
    """Time to move bytes in reads: ``bytes / bandwidth + reads * cost of a read``, nothing overlapped.

    ``gbps``: 10^9 bits a second; the default is the paper's HDR InfiniBand (5.1), one NIC a node, shared by all ranks.
    ``read_us``: what a read costs besides its bytes. The default is a read of at most 2 KB of Mooncake 0.3.13 over
    TCP on loopback, on a quiet machine (benchmarks/read_cost.py measures it); RDMA's was not measured yet.
    """

    gbps: float = 200.0
    read_us: float = 18.0

    def bytes_s(self, nbytes: int) -> float:
        return nbytes * 8 / (self.gbps * 1e9)

    def reads_s(self, reads: int) -> float:
        return reads * self.read_us * 1e-6

    def total_s(self, nbytes: int, reads: int) -> float:
        return self.bytes_s(nbytes) + self.reads_s(reads)
