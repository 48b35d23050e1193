"""What a pack on a CPU touches: each byte of the source once, each byte of the streams once, and no second parcel.

Accesses are counted in the kernel's own text, made with the same codelets as the one that runs, before LLVM optimises
it (which may merge accesses, never repeat one).  The counting kernel's bytes are compared too.
"""

from __future__ import annotations

import ctypes
import re
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode

from hawk_connector.transform.cpu_kernel import Kernel, KernelSpec, compiled, compiled_text, module_text
from hawk_connector.transform.cpu_packer import CpuPacker
from hawk_connector.transform.packing import ReferencePacker
from tests.transform.packs import BIG, BLOCKS, Pack, packed

pytestmark = pytest.mark.slow

TABLE, SOURCE, STREAM = range(3)
CODECS = ("float32", "bfloat16", "bfp8", "bfp4", "bfp2")


class Accesses:
    """Kernels that tell of every load and store that their text has."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, int]] = []
        kind = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
        self._tracer = kind(lambda memory, address, nbytes: self.seen.append((memory, address, nbytes)))

    def kernel(self, spec: KernelSpec) -> Kernel:
        return compiled_text(module_text(spec, ctypes.cast(self._tracer, ctypes.c_void_p).value))

    def times(self, memory: int, region: torch.Tensor) -> NDArray[np.int64]:
        """How often each byte of ``region`` was touched; nothing of this kind may lie outside it."""
        start, nbytes = region.data_ptr(), region.numel() * region.element_size()
        counts = np.zeros(nbytes, dtype=np.int64)
        for kind, address, size in self.seen:
            if kind == memory:
                assert start <= address and address + size <= start + nbytes
                counts[address - start : address - start + size] += 1
        return counts

    def total(self, memory: int) -> int:
        return sum(size for kind, _, size in self.seen if kind == memory)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("family", "tokens"), [("LBHNC", 61), ("LBNHC", 61), ("cpu", 64), ("odd", 61)], ids=str)
def test_the_source_is_read_once_and_the_streams_are_written_once(family: Any, tokens: int, codec: str) -> None:
    pack = Pack(family, codec=codec, tokens=tokens, head_dim=128, layers=2, alignment=1024, source_block=16)
    plan, memory, accesses = pack.plan, pack.memory(), Accesses()
    out = torch.full((plan.nbytes,), 0xA5, dtype=torch.uint8)
    CpuPacker(kernels=accesses.kernel).pack(pack.sources(memory), pack.table, plan, 0, tokens, out)
    assert torch.equal(out, packed(pack, ReferencePacker(), 0x5A))

    mine = torch.zeros_like(memory)
    for source in pack.sources(mine):
        for token in range(tokens):
            block, row = int(pack.table[token // 16]), token % 16
            source.k[block, :, row] = source.v[block, :, row] = 1
    wanted = np.repeat((mine != 0).numpy().reshape(-1), 2).astype(np.int64)
    np.testing.assert_array_equal(accesses.times(SOURCE, memory), wanted)
    assert accesses.total(SOURCE) == tokens * 2 * 2 * 2 * 128 * 2  # layers, K and V, heads, dims, bytes
    assert (accesses.times(STREAM, out) == 1).all()
    assert accesses.total(STREAM) == plan.nbytes
    # Beside them: eight bytes for each token of a head and for each page.
    assert accesses.total(TABLE) < accesses.total(SOURCE) // 10


@pytest.mark.parametrize("tokens", [49, 63])
def test_columns_are_read_whole_but_no_other_block(tokens: int) -> None:
    """The last 16 tokens of a column-major page are loaded together, the request's or not; once."""
    pack = Pack("cpu", tokens=tokens, source_block=16)
    accesses, memory = Accesses(), pack.memory()
    out = torch.empty(pack.plan.nbytes, dtype=torch.uint8)
    CpuPacker(kernels=accesses.kernel).pack(pack.sources(memory), pack.table, pack.plan, 0, tokens, out)
    read = accesses.times(SOURCE, memory).reshape(BLOCKS, -1)
    assert read.max() == 1
    assert sorted(np.flatnonzero(read.any(axis=1))) == sorted(pack.table.tolist())
    assert accesses.total(SOURCE) == 2 * 64 * 2 * (64 + tokens)  # heads, dims, bytes; K's and V's tokens


class Operators(TorchDispatchMode):
    """Names of torch's operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["LBHNC", "cpu"])
def test_a_pack_holds_no_second_parcel(family: Any) -> None:
    """torch computes nothing, and what Python and numpy hold at most is a hundredth of the parcel."""
    pack = replace(BIG, family=family)
    plan, sources, table = pack.plan, pack.sources(pack.memory()), pack.table
    out = torch.empty(plan.nbytes, dtype=torch.uint8)
    packer = CpuPacker()
    packer.pack(sources, table, plan, 0, pack.tokens, out)
    with Operators() as operators:
        packer.pack(sources, table, plan, 0, pack.tokens, out)
    assert set(operators.names) <= {"aten.detach.default"}  # the table as numpy sees it, which copies nothing
    tracemalloc.start()
    try:
        packer.pack(sources, table, plan, 0, pack.tokens, out)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert plan.nbytes > 4_000_000 and peak < plan.nbytes // 100


@pytest.mark.parametrize("family", ["LBHNC", "cpu", "odd"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_kernel_has_no_memory_of_its_own_and_calls_nothing(family: Any, dtype: str) -> None:
    specs: list[KernelSpec] = []

    def noted(spec: KernelSpec) -> Kernel:
        specs.append(spec)
        return compiled(spec)

    packed(Pack(family, dtype), CpuPacker(kernels=noted), 0)
    text = module_text(specs[0])
    assert "alloca" not in text
    called = set(re.findall(r"call [^@]*@\"?([\w.]+)", text))
    assert called and all(name.startswith("llvm.") for name in called), called
