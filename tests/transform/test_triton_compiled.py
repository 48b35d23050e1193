"""What Triton makes of the kernels for NVIDIA GPUs, compiled on any machine: what the interpreter cannot show."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from hawk_connector.layout.kv_pool import KVPoolLayout
from hawk_connector.transform.gpu_triton import kernel_constants

pytestmark = pytest.mark.slow

THREADS = 4 * 32
POINTERS = {"layers": "*i64", "blocks": "*i32", "heads": "*i32", "rows": "*i32", "dims": "*i32", "out": "*u8"}


def ptx_of(codec: str, kv: int, dtype: torch.dtype, aligned: bool, capability: int, head_dim: int = 128) -> str:
    """PTX of the kernel, as a launch would compile it for rows of ``head_dim`` neighbours; ptxas has taken it, too."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from hawk_connector.transform.gpu_kernels import pack_pages

    layout = KVPoolLayout("cross_layer", 2, 1, 8, 64, head_dim, codec, 8, 64)
    constants = {**kernel_constants(layout, kv, 16, dtype, aligned=aligned), "dim_stride": 1}
    names = [name for name in pack_pages.arg_names if name not in constants]
    signature = {name: POINTERS.get(name, "i32") for name in names} | dict.fromkeys(constants, "constexpr")
    places = {name: place for place, name in enumerate(pack_pages.arg_names)}
    # Strides, the pitch and all addresses are multiples of 16; of numbers that vary the compiler is told nothing.
    varying = {param.name for param in pack_pages.params if param.do_not_specialize}
    assert varying == {"first_token", "tokens", "head_count", "block_count"}
    multiples = {(places[name],): [["tt.divisibility", 16]] for name in names if name not in varying}
    source = ASTSource(pack_pages, signature, constants, multiples)
    compiled: Any = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
    assert compiled.asm["cubin"]
    return str(compiled.asm["ptx"])


def vector_bytes(ptx: str, operation: str) -> int:
    """Bytes that a program moves by instructions of 8 or 16 bytes a thread."""
    widths = re.findall(rf"\b{operation}\.global(?:\.\w+)*?\.v([24])\.b32", ptx)
    return THREADS * sum(4 * int(width) for width in widths)


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else Triton would hand out what an earlier run compiled."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("kv", [0, 1], ids=["k", "v"])
@pytest.mark.parametrize(
    ("codec", "dtype", "loaded", "stored"),
    [
        # Four pages of 1,024 elements; exponents are stored by smaller words.
        ("bfloat16", torch.bfloat16, 8192, 8192),
        ("bfp8", torch.bfloat16, 8192, 4096),
        ("bfp4", torch.bfloat16, 8192, 2048),
        ("bfp8", torch.float32, 16384, 4096),
        ("float32", torch.float32, 16384, 16384),
        ("bfloat16", torch.float16, 8192, 8192),
    ],
)
def test_a_program_reads_its_elements_once_and_writes_its_pages_once_in_wide_words(
    codec: str, dtype: torch.dtype, loaded: int, stored: int, kv: int
) -> None:
    ptx = ptx_of(codec, kv, dtype, True, 90)
    assert vector_bytes(ptx, "ld") == loaded
    assert vector_bytes(ptx, "st") == stored
    assert ".local" not in ptx  # nothing is spilled to memory by the compiler before ptxas


def test_rows_that_are_not_aligned_are_read_by_elements() -> None:
    """Wide loads from them would be errors of the GPU, which end the process' use of it."""
    ptx = ptx_of("bfp8", 1, torch.bfloat16, False, 90)
    assert vector_bytes(ptx, "ld") == 0
    assert vector_bytes(ptx, "st") == 4096


@pytest.mark.parametrize("capability", [75, 89, 100])
def test_compiles_for_other_generations_and_heads_that_are_no_whole_tiles(capability: int) -> None:
    assert ptx_of("bfp8", 0, torch.bfloat16, True, capability, head_dim=80)


@pytest.mark.parametrize("codec", ["float32", "bfloat16", "bfp8", "bfp4", "bfp2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_compiles_for_every_pair_of_dtypes(codec: str, dtype: torch.dtype) -> None:
    assert ptx_of(codec, 0, dtype, True, 80)
