"""The packer's thread: in order, one failure costs one job, and its end waits for what was submitted."""

from __future__ import annotations

import threading

from hawk_connector.layout.kv_pool import KVPoolLayout
from hawk_connector.plan.parcel import ParcelPlan
from hawk_connector.prefill.packer import Packer
from hawk_connector.protocol.prefill_actions import Pack

PLAN = ParcelPlan(KVPoolLayout("cross_layer", 1, 1, 1, 32, 32, "bfp8", 8, 64), (), 1)


def job(number: int) -> Pack:
    return Pack(number, "t", 0, 1, 0, PLAN)


def test_jobs_are_packed_in_order_on_one_thread() -> None:
    packed: list[tuple[int, int]] = []
    reported: list[tuple[int, bool, int]] = []
    packer = Packer(
        lambda pack: packed.append((pack.job, threading.get_ident())),
        lambda number, ok: reported.append((number, ok, threading.get_ident())),
    )
    for number in range(50):
        packer.submit(job(number))
    packer.close(timeout_s=30)
    assert [number for number, _ in packed] == list(range(50))
    assert [(number, ok) for number, ok, _ in reported] == [(number, True) for number in range(50)]
    threads = {thread for _, thread in packed} | {thread for _, _, thread in reported}
    assert len(threads) == 1 and threading.get_ident() not in threads


def test_a_job_that_fails_is_reported_so_and_the_next_is_packed() -> None:
    reported: list[tuple[int, bool]] = []

    def pack(pack: Pack) -> None:
        if pack.job == 1:
            raise RuntimeError("out of memory")

    packer = Packer(pack, lambda number, ok: reported.append((number, ok)))
    for number in range(3):
        packer.submit(job(number))
    packer.close(timeout_s=30)
    assert reported == [(0, True), (1, False), (2, True)]


def test_close_does_not_wait_for_ever() -> None:
    release = threading.Event()
    entered = threading.Event()

    def pack(pack: Pack) -> None:
        entered.set()
        release.wait(60)

    packer = Packer(pack, lambda number, ok: None)
    packer.submit(job(0))
    assert entered.wait(30)
    packer.close(timeout_s=0.05)
    assert not release.is_set()
    release.set()
