"""The parcels that a landing takes."""

from __future__ import annotations

from hawk_connector.errors import LocalError
from hawk_connector.layout.kv_pool import KVPoolLayout
from hawk_connector.plan.any_plan import Plan
from hawk_connector.plan.parcel import ParcelPlan

__all__ = ["packed_parcel"]


def packed_parcel(plan: Plan, layout: KVPoolLayout) -> ParcelPlan:
    """The plan, where it is of a parcel that was packed for pools of ``layout``; else LocalError."""
    if not isinstance(plan, ParcelPlan) or plan.layout != layout:
        got = repr(plan.layout) if isinstance(plan, ParcelPlan) else type(plan).__name__
        raise LocalError("the parcel is packed for other pools", expected=repr(layout), got=got)
    return plan
