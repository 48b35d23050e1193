"""What packing kernels are written with: a thin layer over llvmlite's builder.

A kernel is LLVM IR on vectors, so one text serves AVX2, AVX-512 and NEON: LLVM chooses the instructions.  Addresses
are 64-bit integers.  All memory is reached through ``load`` and ``store``, which is what lets a test count it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from llvmlite import ir

__all__ = ["I8", "I16", "I32", "I64", "TRACER", "Emitter", "Memory", "vector"]

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))

Memory = Literal["table", "source", "stream"]
"""What an address points to: the packer's own tables, vLLM's cache, the parcel."""

TRACER = ir.FunctionType(ir.VoidType(), [I64, I64, I64])
"""A function that is told of every access: which memory (0 table, 1 source, 2 stream), address, bytes."""
_KINDS: Sequence[Memory] = ("table", "source", "stream")


def vector(bits: int, lanes: int = 16) -> ir.VectorType:
    return ir.VectorType(ir.IntType(bits), lanes)


def size_of(type_: Any) -> int:
    """Bytes in memory."""
    if isinstance(type_, ir.VectorType):
        return type_.count * type_.element.width // 8
    return type_.width // 8


class Emitter:
    """Emits one function.  ``trace``: address of a function of type ``TRACER`` to be told of accesses, or None."""

    def __init__(self, builder: ir.IRBuilder, trace: int | None = None) -> None:
        self.b = builder
        self._trace = trace

    # --- numbers

    def number(self, value: int, type_: Any = I64) -> Any:
        """A constant; in every lane where ``type_`` is a vector."""
        if isinstance(type_, ir.VectorType):
            return ir.Constant(type_, [ir.Constant(type_.element, value)] * type_.count)
        return ir.Constant(type_, value)

    def add(self, *terms: Any) -> Any:
        total = terms[0]
        for term in terms[1:]:
            total = self.b.add(total, self._like(term, total))
        return total

    def mul(self, value: Any, by: int) -> Any:
        return self.b.mul(value, self.number(by, value.type))

    def land(self, value: Any, mask: int) -> Any:
        return self.b.and_(value, self.number(mask, value.type))

    def lor(self, value: Any, other: Any) -> Any:
        return self.b.or_(value, self._like(other, value))

    def shr(self, value: Any, by: int) -> Any:
        """Logical shift to the right."""
        return self.b.lshr(value, self.number(by, value.type)) if by else value

    def shl(self, value: Any, by: int) -> Any:
        return self.b.shl(value, self.number(by, value.type)) if by else value

    def where(self, condition: Any, value: Any, other: Any) -> Any:
        kind = value.type if hasattr(value, "type") else other.type
        pick = [self.number(each, kind) if isinstance(each, int) else each for each in (value, other)]
        return self.b.select(condition, *pick)

    def compare(self, operator: str, value: Any, other: Any) -> Any:
        """Unsigned."""
        return self.b.icmp_unsigned(operator, value, self._like(other, value))

    def least(self, value: Any, other: Any) -> Any:
        """Unsigned minimum."""
        return self._intrinsic("llvm.umin", value.type, [value, self._like(other, value)])

    def largest_lane(self, value: Any) -> Any:
        """Unsigned maximum of the lanes."""
        name = f"llvm.vector.reduce.umax.{_mangled(value.type)}"
        return self.b.call(self._declared(name, value.type.element, [value.type]), [value])

    # --- lanes

    def splat(self, value: Any, lanes: int) -> Any:
        """A scalar in every lane."""
        kind = ir.VectorType(value.type, lanes)
        one = self.b.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(I32, 0))
        return self.shuffle(one, one, [0] * lanes)

    def shuffle(self, first: Any, second: Any, lanes: Sequence[int]) -> Any:
        """Lanes of two vectors, those of the second counted on from those of the first."""
        mask = ir.Constant(ir.VectorType(I32, len(lanes)), [ir.Constant(I32, lane) for lane in lanes])
        return self.b.shuffle_vector(first, second, mask)

    def interleave(self, first: Any, second: Any) -> Any:
        """first[0], second[0], first[1] ...: a vector twice as long."""
        lanes = first.type.count
        return self.shuffle(first, second, [k * lanes + i for i in range(lanes) for k in (0, 1)])

    # --- memory

    def load(self, memory: Memory, type_: Any, address: Any, align: int = 1) -> Any:
        self._tell(memory, address, size_of(type_))
        return self.b.load(self._pointer(address), align=align, typ=type_)

    def store(self, value: Any, address: Any, align: int = 1) -> None:
        """Into the parcel, the only memory that kernels write."""
        self._tell("stream", address, size_of(value.type))
        self.b.store(value, self._pointer(address), align=align)

    def entry(self, table: Any, index: Any) -> Any:
        """Entry of a table of int64 at an address."""
        return self.load("table", I64, self.add(table, self.mul(self._like(index, table), 8)), align=8)

    # --- control

    @contextmanager
    def loop(self, first: Any, end: Any, step: int = 1) -> Iterator[Any]:
        """``for index in range(first, end, step)``."""
        first, end = (self.number(each) if isinstance(each, int) else each for each in (first, end))
        before = self.b.block
        head, body, after = (self.b.append_basic_block(name) for name in ("loop", "body", "after"))
        self.b.branch(head)
        self.b.position_at_end(head)
        index = self.b.phi(I64)
        index.add_incoming(first, before)
        self.b.cbranch(self.b.icmp_signed("<", index, end), body, after)
        self.b.position_at_end(body)
        yield index
        index.add_incoming(self.add(index, step), self.b.block)
        self.b.branch(head)
        self.b.position_at_end(after)

    # ---

    def _like(self, value: Any, other: Any) -> Any:
        return self.number(value, other.type) if isinstance(value, int) else value

    def _pointer(self, address: Any) -> Any:
        return self.b.inttoptr(address, ir.PointerType())

    def _tell(self, memory: Memory, address: Any, nbytes: int) -> None:
        if self._trace is not None:
            tracer = self.b.inttoptr(self.number(self._trace), TRACER.as_pointer())
            self.b.call(tracer, [self.number(_KINDS.index(memory)), address, self.number(nbytes)])

    def _intrinsic(self, name: str, type_: Any, arguments: list[Any]) -> Any:
        function = self._declared(f"{name}.{_mangled(type_)}", type_, [type_] * len(arguments))
        return self.b.call(function, arguments)

    def _declared(self, name: str, result: Any, arguments: list[Any]) -> Any:
        module = self.b.module
        try:
            return module.get_global(name)
        except KeyError:
            return ir.Function(module, ir.FunctionType(result, arguments), name)


def _mangled(type_: Any) -> str:
    """A type as the name of an LLVM intrinsic has it."""
    return f"v{type_.count}i{type_.element.width}" if isinstance(type_, ir.VectorType) else f"i{type_.width}"
