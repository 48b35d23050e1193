"""The send buffer: the bytes of a region are the bytes at its address."""

from __future__ import annotations

import ctypes

import torch

from hawk_connector.prefill.send_buffer import SendBuffer


def test_a_region_is_the_memory_at_its_address() -> None:
    buffer = SendBuffer(4096, torch.device("cpu"))
    assert buffer.nbytes == 4096
    buffer.region(0, 4096).fill_(0)
    region = buffer.region(256, 16)
    assert region.dtype == torch.uint8 and region.shape == (16,)
    region.copy_(torch.arange(16, dtype=torch.uint8))
    assert ctypes.string_at(buffer.address + 256, 16) == bytes(range(16))
    assert ctypes.string_at(buffer.address + 240, 16) == bytes(16)
    assert ctypes.string_at(buffer.address + 272, 16) == bytes(16)
