"""A device that TTNN has opened: a card, a simulated chip or a mock one; which, the environment and the ids say.

Everything that depends on the chip is asked of it: banks, their coordinates on the chip's network, their bases and
sizes, the alignment, and from which address on its allocator hands memory out.

The host reaches the banks by raw writes and reads, one call for a run of bytes, through the driver's windows.  Copies
go through the host too: TTNN has no op that copies bytes from bank to bank, and a program of our own would have to
share the device's one command queue with the model (``copies_inside`` is false, and no plan chooses stages by itself).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hawk_connector.errors import CapacityError, ConfigError, DeviceError
from hawk_connector.plan.runs import BankCopies

from .banks import BankTable
from .interface import Written

__all__ = ["TtnnDevice"]

# Bytes of a read that flushes: one read request of the chip's network on every architecture.
_FLUSH_BYTES = 32
# A row of the tensor behind `allocate`, in bytes: a multiple of every alignment.
_ROW_BYTES = 4096


class TtnnDevice:
    """Chips that TTNN has opened as one mesh.

    ``ttnn``: the module.  ``mesh``: TTNN's device; whoever opened it closes it, unless it came from ``open``.
    ``tiles``: (x, y) on the chip's network of each bank's memory controller, equal on all chips.
    """

    copies_inside = False

    def __init__(self, mesh: Any, *, name: str = "ttnn") -> None:
        """Takes over an opened device.  ConfigError where its chips are not alike, or a number of theirs is odd."""
        self.ttnn = _ttnn()
        self._cluster = self.ttnn._ttnn.cluster
        self.mesh = mesh
        self._owned = False
        self._ids = [int(chip) for chip in mesh.get_device_ids()]
        tables = [_bank_table(self._cluster, chip) for chip in self._ids]
        if not tables or any(table != tables[0] for table in tables):
            raise ConfigError(
                "the chips of the mesh have different DRAM banks",
                expected=f"the table of chip {self._ids[0]} on all of {len(self._ids)} chips" if tables else "a chip",
                got="; ".join(
                    f"chip {chip}: {len(table)} banks" for chip, table in zip(self._ids, tables, strict=True)
                ),
                fix="Open chips of one kind, and with the same DRAM channels.",
            )
        banks = tables[0]
        sizes = {bank["bank_size"] for bank in banks}
        view = self.ttnn.get_memory_view(mesh, self.ttnn.BufferType.DRAM)
        if len(sizes) != 1 or int(view.num_banks) != len(banks):
            raise ConfigError(
                "TTNN describes the device's DRAM in two ways",
                expected=f"{int(view.num_banks)} banks of one size",
                got=f"{len(banks)} banks of {sorted(sizes)} bytes",
                fix="Use a release of ttnn that HAWK was tested with (requirements/ttnn.txt).",
            )
        size = sizes.pop()
        self.tiles = tuple((bank["noc_x"], bank["noc_y"]) for bank in banks)
        self._table = BankTable(
            name,
            tuple(bank["base_addr"] for bank in banks),
            size,
            int(self.ttnn._ttnn.bfp_utils.get_dram_alignment()),
            size - int(view.total_bytes_per_bank),
        )
        self._buffers: dict[int, Any] = {}
        # TTNN's raw access and its allocator are called from the threads that land parcels.
        self._lock = threading.Lock()

    @classmethod
    def open(cls, chips: int = 1, *, device_id: int = 0, name: str = "ttnn") -> TtnnDevice:
        """Opens chip ``device_id``, or a line of ``chips`` chips.

        DeviceError where TTNN cannot; with TT_METAL_SIMULATOR or TT_METAL_MOCK_CLUSTER_DESC_PATH set it opens those.
        """
        ttnn = _ttnn()
        try:
            mesh = (
                ttnn.open_device(device_id=device_id) if chips == 1 else ttnn.open_mesh_device(ttnn.MeshShape(1, chips))
            )
        except RuntimeError as error:
            raise DeviceError(
                f"TTNN cannot open {f'chip {device_id}' if chips == 1 else f'{chips} chips'}: {_first_line(error)}",
                fix="Look with `tt-smi` which chips there are, and who has them open.",
            ) from error
        device = cls(mesh, name=name)
        device._owned = True
        return device

    @property
    def table(self) -> BankTable:
        return self._table

    @property
    def chips(self) -> int:
        return len(self._ids)

    def allocate(self, bytes_per_bank: int, what: str = "buffer") -> int:
        """A buffer of rows dealt out over the banks, so that it takes ``bytes_per_bank`` in one piece in each."""
        if bytes_per_bank < 1:
            raise ValueError(f"{what}: a buffer needs at least one byte per bank; got {bytes_per_bank}")
        ttnn = self.ttnn
        rows = -(-bytes_per_bank // _ROW_BYTES) * self._table.banks
        tensor = self.tensor([rows, _ROW_BYTES // 4], ttnn.uint32, ttnn.ROW_MAJOR_LAYOUT, what)
        address = int(tensor.buffer_address())
        self._buffers[address] = tensor
        return address

    def free(self, address: int) -> None:
        tensor = self._buffers.pop(address, None)
        if tensor is None:
            raise ValueError(f"no buffer is held at address {address:#x}")
        with self._lock:
            self.ttnn.deallocate(tensor)

    def tensor(self, shape: Sequence[int], dtype: Any, layout: Any, what: str) -> Any:
        """An uninitialised TTNN tensor, interleaved over the DRAM banks, at the same address on every chip.

        CapacityError, naming ``what``, where it does not fit.
        """
        ttnn = self.ttnn
        try:
            with self._lock:
                return ttnn.empty(
                    list(shape), dtype=dtype, layout=layout, device=self.mesh, memory_config=ttnn.DRAM_MEMORY_CONFIG
                )
        except RuntimeError as error:
            if "Out of Memory" not in str(error):
                raise DeviceError(f"TTNN cannot allocate {what}: {_first_line(error)}") from error
            view = ttnn.get_memory_view(self.mesh, ttnn.BufferType.DRAM)
            raise CapacityError(
                f"{what} does not fit the DRAM of {self._table.name}",
                expected=f"at most {int(view.largest_contiguous_bytes_free_per_bank)} bytes per bank in one piece "
                f"({int(view.total_bytes_free_per_bank)} bytes left)",
                got=f"a tensor {list(shape)} on {self._table.banks} banks",
                fix="Give the KV cache fewer blocks, or use more chips.",
            ) from error

    def write(self, chip: int, bank: int, address: int, data: NDArray[np.uint8]) -> None:
        self._table.check_range(address, len(data))
        x, y = self.tiles[bank]
        try:
            with self._lock:
                self._cluster.write_to_core(self._ids[chip], x, y, self._table.bases[bank] + address, data.tobytes())
        except RuntimeError as error:
            raise self._failed(f"writing {len(data)} bytes to", chip, bank, error) from error

    def read(self, chip: int, bank: int, address: int, nbytes: int) -> NDArray[np.uint8]:
        self._table.check_range(address, nbytes)
        x, y = self.tiles[bank]
        try:
            with self._lock:
                data = self._cluster.read_from_core(self._ids[chip], x, y, self._table.bases[bank] + address, nbytes)
        except RuntimeError as error:
            raise self._failed(f"reading {nbytes} bytes of", chip, bank, error) from error
        return np.frombuffer(data, dtype=np.uint8)

    def copy(self, copies: BankCopies) -> None:
        columns = (copies.chip, copies.source_bank, copies.source, copies.bank, copies.address, copies.length)
        for chip, source_bank, source, bank, address, length in zip(*(c.tolist() for c in columns), strict=True):
            self.write(chip, bank, address, self.read(chip, source_bank, source, length))

    def flush(self, written: Iterable[Written]) -> None:
        """Reads the last bytes that were written to each bank: writes are posted, and a read on the same way returns
        only after they have arrived."""
        for last in written:
            nbytes = min(last.nbytes, _FLUSH_BYTES)
            self.read(last.chip, last.bank, last.address + last.nbytes - nbytes, nbytes)

    def health(self) -> Sequence[str]:
        """Writes another number into each bank of each chip, then reads them all back."""
        size = self._table.alignment
        address = self.allocate(size, "the health check's buffer")
        try:
            places = [(chip, bank) for chip in range(self.chips) for bank in range(self._table.banks)]
            marks = {place: np.full(size, 1 + index % 255, np.uint8) for index, place in enumerate(places)}
            complaints = []
            for (chip, bank), mark in marks.items():
                self.write(chip, bank, address, mark)
            for (chip, bank), mark in marks.items():
                found = self.read(chip, bank, address, size)
                if not np.array_equal(found, mark):
                    complaints.append(
                        f"chip {self._ids[chip]}, bank {bank}: expected {int(mark[0])} in every byte, "
                        f"got {found[:4].tolist()}..."
                    )
            return complaints
        finally:
            self.free(address)

    def close(self) -> None:
        """Gives the buffers back, and closes the device where ``open`` opened it."""
        for address in list(self._buffers):
            self.free(address)
        if self._owned:
            self._owned = False
            (self.ttnn.close_device if self.chips == 1 else self.ttnn.close_mesh_device)(self.mesh)

    def _failed(self, what: str, chip: int, bank: int, error: RuntimeError) -> DeviceError:
        return DeviceError(
            f"{what} bank {bank} of chip {self._ids[chip]} failed: {_first_line(error)}",
            fix="Look with `tt-smi` whether the chip answers; reset it if not.",
        )


def _ttnn() -> ModuleType:
    """TTNN, imported when a device is asked for.  ConfigError where it is not installed."""
    try:
        import ttnn
    except ImportError as error:
        raise ConfigError(
            "this Python has no ttnn",
            expected="Tenstorrent's ttnn beside HAWK on the decode side",
            got=str(error),
            fix="Install tt-metal, or the ttnn wheel of requirements/ttnn.txt (Python 3.10 or 3.12).",
        ) from None
    module: ModuleType = ttnn
    return module


def _bank_table(cluster: Any, chip: int) -> list[dict[str, int]]:
    """The chip's banks in order of their ids."""
    banks = [{key: int(value) for key, value in bank.items()} for bank in cluster.get_dram_bank_table(chip)]
    return sorted(banks, key=lambda bank: bank["bank_id"])


def _first_line(error: Exception) -> str:
    """TTNN's errors end with a backtrace of many lines; its message has at most two before that."""
    lines = [line.strip() for line in str(error).splitlines()]
    text = lines[: lines.index("backtrace:")] if "backtrace:" in lines else lines[:2]
    return " ".join(line for line in text if line and line != "info:")
