"""The kernel that packs TTNN tiles on a CPU: LLVM IR, made for one kind of cache and one codec.

A unit of work is a tile row of one block in one layer: 32 tokens of all heads, K and V.  Every element of it is loaded
once, encoded in registers and stored where it is read from, so a pack reads the source once and writes the streams
once.  What depends on the request comes in tables (``Table``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Any

from llvmlite import binding, ir

from ..layout.codec import codec_named
from ..layout.tilings import FACE, TILE
from .emitter import I64, Emitter, vector
from .face_rows import encode_row, load_row, transposed, zero_row

__all__ = ["Kernel", "KernelSpec", "SideSpec", "Table", "compiled", "compiled_text", "module_text"]

PAGE_ELEMENTS = TILE * TILE


@dataclass(frozen=True, slots=True)
class SideSpec:
    """K, or V.

    ``dims``: source dim of each stored dim, -1 for padding, whole tiles.  ``stride``: elements from dim to dim.
    ``columns``: 16 tokens lie side by side, so they are loaded together and transposed in registers.
    """

    dims: tuple[int, ...]
    stride: int
    columns: bool


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """All that a kernel is made for.  ``dtype``: the source's.  ``pitch``: bytes from page to page in a stream."""

    dtype: str
    codec: str
    pitch: int
    k: SideSpec
    v: SideSpec


class Table(IntEnum):
    """Entries of a kernel's argument, all int64, addresses of int64 tables but for the last two."""

    BASES = 0
    """``[layers, 2]``: addresses of K and V."""
    HEADS_K = 1
    """``[heads]``: bytes from a layer's K to the head's."""
    HEADS_V = 2
    TOKENS_K = 3
    """``[tokens of the parcel]``: bytes from a head's K to the token's."""
    TOKENS_V = 4
    STARTS = 5
    """``[positions]``: a tile row's first token, counted in the parcel."""
    COUNTS = 6
    """``[positions]``: a tile row's tokens, 0 to 32; its other rows are zeros."""
    PAGES = 7
    """``[layers, positions, heads, 2, pages]``: bytes from the parcel's start to the page, in the order of the work."""
    OUT = 8
    """Address of the parcel."""
    POSITIONS = 9
    """Number of (block, tile row)."""
    HEADS = 10
    """Number of heads."""


_TABLES_OF = ((Table.HEADS_K, Table.TOKENS_K), (Table.HEADS_V, Table.TOKENS_V))


@dataclass(frozen=True)
class Kernel:
    """Machine code; ``run(first, end, arguments)`` packs units ``first`` to ``end`` without the interpreter's lock."""

    run: Callable[[int, int, int], None]
    _owner: Any


@lru_cache(maxsize=64)
def compiled(spec: KernelSpec) -> Kernel:
    """The kernel, compiled once per process (about a tenth of a second)."""
    return compiled_text(module_text(spec))


def compiled_text(text: str) -> Kernel:
    """A kernel of an IR text, for this machine's processor."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=binding.get_host_cpu_features().flatten(), opt=3
    )
    module = binding.parse_assembly(text)
    module.verify()
    options = binding.create_pipeline_tuning_options(speed_level=2)
    # The vectors are in the text, and loops over rows are long enough as they are.
    options.loop_vectorization = options.slp_vectorization = options.loop_unrolling = False
    passes = binding.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    engine = binding.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    kind = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
    return Kernel(kind(engine.get_function_address("pack")), engine)


def module_text(spec: KernelSpec, trace: int | None = None) -> str:
    """The kernel's IR.  ``trace``: address of a function that is told of every access (``emitter.TRACER``), or None."""
    module = ir.Module("pack")
    module.triple = binding.get_default_triple()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64, I64, I64]), "pack")
    first, end, arguments = function.args
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    _Writer(Emitter(builder, trace), spec, arguments).units(first, end)
    builder.ret_void()
    return str(module)


class _Writer:
    def __init__(self, e: Emitter, spec: KernelSpec, arguments: Any) -> None:
        self._e = e
        self._spec = spec
        self._codec = codec_named(spec.codec)
        self._args = {table: e.entry(arguments, int(table)) for table in Table}

    def units(self, first: Any, end: Any) -> None:
        e, args = self._e, self._args
        widths = [len(side.dims) // TILE for side in (self._spec.k, self._spec.v)]
        with e.loop(first, end) as unit:
            layer = e.b.udiv(unit, args[Table.POSITIONS])
            position = e.b.urem(unit, args[Table.POSITIONS])
            start, count = (e.entry(args[table], position) for table in (Table.STARTS, Table.COUNTS))
            bases = [e.entry(args[Table.BASES], e.add(e.mul(layer, 2), kv)) for kv in (0, 1)]
            heads = e.b.mul(unit, args[Table.HEADS])
            with e.loop(0, args[Table.HEADS]) as head:
                page = e.mul(e.add(heads, head), sum(widths))
                for kv, side in enumerate((self._spec.k, self._spec.v)):
                    numbers = [e.add(page, kv * widths[0] + i) for i in range(widths[kv])]
                    pages = [e.add(args[Table.OUT], e.entry(args[Table.PAGES], number)) for number in numbers]
                    offsets, rows = _TABLES_OF[kv]
                    base = e.add(bases[kv], e.entry(args[offsets], head))
                    tokens = e.add(args[rows], e.mul(start, 8))
                    if side.columns:
                        self._columns(side, base, tokens, count, pages)
                    else:
                        self._rows(side, base, tokens, count, pages)
                    self._gaps(pages)

    def _rows(self, side: SideSpec, base: Any, tokens: Any, count: Any, pages: list[Any]) -> None:
        """A token at a time: its dims fill a row of every page."""
        e = self._e
        with e.loop(0, count) as row:
            address = e.add(base, e.entry(tokens, row))
            for column in range(len(side.dims) // FACE):
                dims = side.dims[column * FACE : (column + 1) * FACE]
                lanes = load_row(e, address, dims, self._spec.dtype, side.stride)
                self._store(lanes, pages, row, column)
        with e.loop(count, TILE) as row:
            for column in range(len(side.dims) // FACE):
                self._store(None, pages, row, column)

    def _store(self, lanes: Any | None, pages: Sequence[Any], row: Any, column: int) -> None:
        """Row ``row`` of the tile row's dims ``16 * column`` on; zeros where ``lanes`` is None."""
        e, codec = self._e, self._codec
        encoded = zero_row(e, codec) if lanes is None else encode_row(e, lanes, self._spec.dtype, codec)
        # Faces lie in the order (0, 0), (0, 1), (1, 0), (1, 1); a face is 16 rows of 16.
        above = e.add(e.shl(e.shr(row, 4), 9), e.shl(e.land(row, FACE - 1), 4))
        element = e.add(above, column % 2 * FACE * FACE)
        encoded.store(e, pages[column // 2], element, codec, PAGE_ELEMENTS)

    def _gaps(self, pages: list[Any]) -> None:
        """Pages are read with the gaps after them, and the parcel's memory may hold another request's bytes."""
        e, used = self._e, self._codec.page_bytes(PAGE_ELEMENTS)
        for page in pages:
            for at in range(used, self._spec.pitch, 32):
                zeros = e.number(0, vector(8, min(32, self._spec.pitch - at)))
                e.store(zeros, e.add(page, at))

    def _columns(self, side: SideSpec, base: Any, tokens: Any, count: Any, pages: list[Any]) -> None:
        """16 tokens and 16 dims at a time."""
        e = self._e
        with e.loop(0, TILE, FACE) as top:
            left = e.least(e.b.select(e.b.icmp_signed(">", count, top), e.b.sub(count, top), e.number(0)), FACE)
            with e.b.if_else(e.compare("!=", left, 0)) as (some, none):
                with some:
                    address = e.add(base, e.entry(tokens, top))
                    for column in range(len(side.dims) // FACE):
                        dims = side.dims[column * FACE : (column + 1) * FACE]
                        self._face(side, address, dims, left, pages, top, column)
                with none, e.loop(top, e.add(top, FACE)) as row:
                    for column in range(len(side.dims) // FACE):
                        self._store(None, pages, row, column)

    def _face(
        self, side: SideSpec, run: Any, dims: Sequence[int], left: Any, pages: list[Any], top: Any, column: int
    ) -> None:
        """16 tokens from address ``run`` on, of which ``left`` are the request's."""
        e = self._e
        bits = 32 if self._spec.dtype == "float32" else 16
        lanes = 256 // bits
        for first in range(0, FACE, lanes):
            kind = vector(bits, lanes)
            loaded = [
                e.number(0, kind)
                if dim < 0
                else e.load("source", kind, e.add(run, (dim * side.stride + first) * bits // 8), align=bits // 8)
                for dim in dims
            ]
            for index, row in enumerate(transposed(e, loaded), first):
                mine = e.compare(">", left, index)
                self._store(e.where(mine, row, e.number(0, row.type)), pages, e.add(top, index), column)
