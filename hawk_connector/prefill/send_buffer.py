"""SendBuffer: the memory on a prefill rank in which packed parcels wait to be pulled."""

from __future__ import annotations

import torch

__all__ = ["SendBuffer"]


class SendBuffer:
    """``capacity`` bytes on ``device``; which ranges are in use is the protocol's business.

    Host memory is pinned where there is a GPU, so that its copies run beside compute.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        pinned = device.type == "cpu" and torch.cuda.is_available()
        self._memory = torch.empty(capacity, dtype=torch.uint8, device=device, pin_memory=pinned)

    @property
    def address(self) -> int:
        return int(self._memory.data_ptr())

    @property
    def nbytes(self) -> int:
        return int(self._memory.numel())

    def region(self, offset: int, nbytes: int) -> torch.Tensor:
        """The bytes at ``offset``: uint8 ``[nbytes]``."""
        return self._memory[offset : offset + nbytes]
