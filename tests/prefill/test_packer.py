"""The packer's thread: in order, one failure costs one job, and its end waits for what was submitted."""

from __future__ import annotations

import threading

from hawk_connector.layout.kv_pool import KVPoolLayout
from hawk_connector.plan.parcel import ParcelPlan
from hawk_connector.prefill.packer import Packer
from hawk_connector.protocol.prefill_actions import Hash, Pack, Settle

PLAN = ParcelPlan(KVPoolLayout("cross_layer", 1, 1, 1, 32, 32, "bfp8", 8, 64), (), 1)


def job(number: int) -> Pack:
    return Pack(number, "t", 0, 1, 0, PLAN)


def no_settle(job: Settle) -> None:
    raise AssertionError("nothing is read in place")


def no_digest(job: Hash) -> str:
    raise AssertionError("nobody asked for a digest")


def no_digest_done(job: int, digest: str | None) -> None:
    raise AssertionError("nobody asked for a digest")


def test_jobs_are_packed_in_order_on_one_thread() -> None:
    packed: list[tuple[int, int]] = []
    settled: list[int] = []
    reported: list[tuple[int, bool, int]] = []
    packer = Packer(
        lambda pack: packed.append((pack.job, threading.get_ident())),
        lambda settle: settled.append(settle.job),
        lambda number, ok: reported.append((number, ok, threading.get_ident())),
        no_digest,
        no_digest_done,
    )
    for number in range(50):
        packer.submit(job(number) if number % 3 else Settle(number, "t"))
    packer.close(timeout_s=30)
    assert [number for number, _ in packed] == [n for n in range(50) if n % 3]
    assert settled == list(range(0, 50, 3))
    assert [(number, ok) for number, ok, _ in reported] == [(number, True) for number in range(50)]
    threads = {thread for _, thread in packed} | {thread for _, _, thread in reported}
    assert len(threads) == 1 and threading.get_ident() not in threads


def test_a_job_that_fails_is_reported_so_and_the_next_is_packed() -> None:
    reported: list[tuple[int, bool]] = []

    def pack(pack: Pack) -> None:
        if pack.job == 1:
            raise RuntimeError("out of memory")

    packer = Packer(pack, no_settle, lambda number, ok: reported.append((number, ok)), no_digest, no_digest_done)
    for number in range(3):
        packer.submit(job(number))
    packer.close(timeout_s=30)
    assert reported == [(0, True), (1, False), (2, True)]


def test_digests_stand_in_the_same_queue_and_one_that_fails_is_reported_as_none() -> None:
    done: list[tuple[str, int, object]] = []

    def digest(job: Hash) -> str:
        if job.job == 2:
            raise RuntimeError("the buffer is gone")
        return f"{job.job:032x}"

    packer = Packer(
        lambda pack: None,
        no_settle,
        lambda number, ok: done.append(("packed", number, ok)),
        digest,
        lambda number, value: done.append(("hashed", number, value)),
    )
    for each in (job(0), Hash(1, "t", 0, PLAN, 0), Hash(2, "t", 0, PLAN, 0), job(3)):
        packer.submit(each)
    packer.close(timeout_s=30)
    assert done == [("packed", 0, True), ("hashed", 1, f"{1:032x}"), ("hashed", 2, None), ("packed", 3, True)]


def test_close_does_not_wait_for_ever() -> None:
    release = threading.Event()
    entered = threading.Event()

    def pack(pack: Pack) -> None:
        entered.set()
        release.wait(60)

    packer = Packer(pack, no_settle, lambda number, ok: None, no_digest, no_digest_done)
    packer.submit(job(0))
    assert entered.wait(30)
    packer.close(timeout_s=0.05)
    assert not release.is_set()
    release.set()
