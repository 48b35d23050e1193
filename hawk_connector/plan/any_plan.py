"""What a parcel may be, mode by mode."""

from __future__ import annotations

from .block_plan import BlockPlan
from .parcel import ParcelPlan
from .raw_plan import RawPlan

__all__ = ["Plan"]

Plan = ParcelPlan | RawPlan | BlockPlan
