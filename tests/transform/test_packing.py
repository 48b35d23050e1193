"""The CPU's kernels: bit for bit the reference whatever the layout, block floats against the oracle, pieces of work."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as with_fields

from hawk_connector.plan.parcel import ParcelPlan
from hawk_connector.transform.cpu_kernel import Kernel, KernelSpec, compiled
from hawk_connector.transform.cpu_packer import CpuPacker
from hawk_connector.transform.packing import ReferencePacker, parcel_packer
from hawk_connector.transform.reference import LayerSource
from tests.oracle.scalar import Codec, encode_page, tile_position
from tests.transform.packs import BIG, BLOCKS, Pack, packed

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
CODECS = ("float32", "bfloat16", "bfp8", "bfp4", "bfp2")


def assert_same(pack: Pack, packer: Any) -> None:
    # Regions that hold different bytes before: a byte that is not written shows.
    found, wanted = packed(pack, packer, 0xA5), packed(pack, ReferencePacker(), 0x5A)
    wrong = (found != wanted).nonzero()
    assert not len(wrong), f"{len(wrong)} of {len(wanted)} bytes differ, the first at {int(wrong[0])}: {pack}"


@st.composite
def packs(draw: st.DrawFn) -> Pack:
    family = draw(st.sampled_from(["LBHNC", "LBNHC", "cpu", "odd"]))
    source_block = draw(st.sampled_from([16, 32, 48] if family == "cpu" else [8, 16, 20, 48]))
    block_size = draw(st.sampled_from([16, 24, 32, 48, 64]))
    blocks = draw(st.integers(1, 3))
    heads = draw(st.integers(1, 4))
    chosen = st.lists(st.integers(0, heads - 1), min_size=1, max_size=heads, unique=True).map(tuple)
    share = draw(chosen)
    # Another chip may have the same heads, or others; as many.
    other = draw(st.permutations(range(heads)).map(lambda order: tuple(order[: len(share)])))
    return Pack(
        family=family,
        dtype=draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        codec=draw(st.sampled_from(CODECS)),
        head_dim=draw(st.sampled_from([32, 40, 64, 96])),
        source_block=source_block,
        block_size=block_size,
        layers=draw(st.integers(1, 2)),
        heads=heads,
        shares=draw(st.sampled_from([(share,), (share, other)])),
        rotary_dim=draw(st.sampled_from([None, 16, 20, 32])),
        rope_interleaved=draw(st.booleans()),
        alignment=draw(st.sampled_from([32, 64, 128])),
        banks=draw(st.sampled_from([1, 7, 8, 12])),
        kind=draw(st.sampled_from(["per_layer", "cross_layer"])),
        tokens=draw(st.integers(1, BLOCKS * source_block)),
        first_block=draw(st.integers(0, 2)),
        blocks=blocks,
        seed=draw(st.integers(0, 1 << 20)),
    )


@given(packs())
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_bytes_of_the_reference(pack: Pack) -> None:
    """Random bits, so NaNs, infinities and denormals too."""
    assert_same(pack, parcel_packer(CPU))


@pytest.mark.parametrize("codec", ["bfp8", "bfp4", "bfp2"])
def test_every_bfloat16_under_every_shared_exponent(codec: Codec) -> None:
    """All 256 numbers of each exponent, 0 to 9 and many below the group's largest: the 16-bit arithmetic is exact."""
    rows = []
    for largest in range(256):
        for below in {*range(10), 16, 24, largest} & set(range(largest + 1)):
            numbers = [sign << 15 | (largest - below) << 7 | m for sign in (0, 1) for m in range(128)]
            numbers += numbers[: -len(numbers) % 15]
            leader = (largest % 2) << 15 | largest << 7 | 0x55
            rows += [[*numbers[i : i + 15], leader] for i in range(0, len(numbers), 15)]
    rows += [[0] * 16] * (-len(rows) % 64)
    bits = np.array(rows, dtype=np.uint16).reshape(-1, 1024)  # pages, in page order
    # NaNs are the reference's affair: Python's floats do not keep them.
    bits = np.where((bits & 0x7F80 == 0x7F80) & (bits & 0x7F != 0), bits | 0x40, bits)
    place = np.array([[tile_position(r, c) for c in range(32)] for r in range(32)])
    tiles = bits[:, place]
    values = torch.from_numpy(tiles.astype(np.int16)).view(torch.bfloat16).view(len(bits), 1, 32, 32)
    pack = Pack(codec=codec, heads=1, shares=((0,),), head_dim=32, banks=1, alignment=32, rope_interleaved=False)
    plan = replace(pack, kind="per_layer", blocks=len(bits)).plan
    out = torch.empty(plan.nbytes, dtype=torch.uint8)
    source = LayerSource(torch.zeros_like(values), values)
    CpuPacker().pack([source], torch.arange(len(bits)), plan, 0, 32 * len(bits), out)
    found = out.view(2, len(bits), -1)[1]  # V's pool comes after K's
    wide = (tiles.astype(np.uint32) << 16).view(np.float32)
    for page in range(len(bits)):
        assert found[page].numpy().tobytes() == encode_page(wide[page].tolist(), codec), f"page {page}"


# ---- threads, and what is refused


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_share_the_units(threads: int) -> None:
    pack = BIG
    runs: list[tuple[int, int]] = []

    def recording(spec: KernelSpec) -> Kernel:
        real = compiled(spec)

        def run(first: int, end: int, arguments: int) -> None:
            runs.append((first, end))
            real.run(first, end, arguments)

        return Kernel(run, real)

    assert_same(pack, CpuPacker(threads, recording))
    units = 16 * 8  # layers, and blocks of one tile row
    pieces = sorted(runs)
    assert [first for first, _ in pieces] == [0, *(end for _, end in pieces[:-1])] and pieces[-1][1] == units
    assert len(pieces) == (1 if threads == 1 else 4)  # a megabyte each


def test_a_small_parcel_stays_on_one_thread() -> None:
    assert_same(Pack(), CpuPacker(4, _only_once(compiled)))


def _only_once(make: Callable[[KernelSpec], Kernel]) -> Callable[[KernelSpec], Kernel]:
    def made(spec: KernelSpec) -> Kernel:
        real, calls = make(spec), []

        def run(first: int, end: int, arguments: int) -> None:
            calls.append(first)
            assert len(calls) == 1
            real.run(first, end, arguments)

        return Kernel(run, real)

    return made


def test_one_packer_serves_several_plans_and_caches() -> None:
    packer = CpuPacker()
    for family, codec in (("LBHNC", "bfp8"), ("cpu", "bfp8"), ("LBHNC", "bfloat16"), ("LBHNC", "bfp8")):
        assert_same(Pack(family, codec=codec), packer)  # type: ignore[arg-type]


def test_layers_that_are_not_alike_are_packed_too() -> None:
    one, other = Pack("LBHNC"), Pack("cpu")
    sources = [*one.sources(one.memory()), *other.sources(other.memory())]
    plan = replace(one, layers=2).plan
    outs = [torch.full((plan.nbytes,), fill, dtype=torch.uint8) for fill in (1, 2)]
    for packer, out in zip((CpuPacker(), ReferencePacker()), outs, strict=True):
        packer.pack(sources, one.table, plan, 0, one.tokens, out)
    assert torch.equal(*outs)


def test_other_tilings_are_packed_by_the_reference() -> None:
    pack = Pack(codec="bfloat16")
    layout = with_fields(pack.plan.layout, tiling="ascend-nz", channels="linear", banks=1, rope_interleaved=False)
    plan = replace(pack.plan, layout=layout)
    outs = [torch.full((plan.nbytes,), fill, dtype=torch.uint8) for fill in (1, 2)]
    for packer, out in zip((parcel_packer(CPU), ReferencePacker()), outs, strict=True):
        packer.pack(pack.sources(pack.memory()), pack.table, plan, 0, pack.tokens, out)
    assert torch.equal(*outs)


def test_a_rank_whose_heads_another_one_sends() -> None:
    """Two ranks with copies of one head, one chip: the second has nothing to pack."""
    pack = Pack()
    plan = ParcelPlan(pack.plan.layout, (), 2)
    assert plan.nbytes == 0
    CpuPacker().pack(pack.sources(pack.memory()), pack.table, plan, 0, 61, torch.empty(0, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([0, 1, 2, BLOCKS], "0..11; got 0 to 12"),
        ([-1, 1, 2, 3], "got -1 to 3"),
        ([0, 1, 2], "need 4 blocks of 16; got 3"),
    ],
)
def test_blocks_that_the_cache_does_not_have(table: list[int], message: str) -> None:
    """Before any memory is looked at."""
    pack = Pack()
    out = torch.empty(pack.plan.nbytes, dtype=torch.uint8)
    with pytest.raises(IndexError, match=re.escape(message)):
        CpuPacker().pack(pack.sources(pack.memory()), torch.tensor(table), pack.plan, 0, pack.tokens, out)


def test_a_worker_that_packs_nothing_does_not_load_a_compiler() -> None:
    code = "import sys, hawk_connector.transform.packing as p; print(*sorted({'llvmlite', 'numba'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout.strip() == ""
