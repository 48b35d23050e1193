"""Modes direct and host with vLLM's own engines: one prefill side feeds a like side and NPUs, all at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.conftest import prompt
from tests.e2e.harness import REMOTE_DECODE, Engine, decode_engine, like_engine, prefill_engine
from tests.models.tiny import TinyLlama

pytestmark = pytest.mark.e2e

LENGTHS = (1, 2, 31, 127, 128, 129, 300, 513)


@dataclass(frozen=True)
class Deployment:
    prefill: Engine
    like: Engine
    npu: Engine
    host: Engine

    def through(self, decode: Engine, prompts: list[list[int]], **more: Any) -> list[dict[str, Any]]:
        sent = self.prefill.generate(prompts, [REMOTE_DECODE] * len(prompts), max_tokens=1)
        return decode.generate(prompts, [s["params"] for s in sent], **more)

    def alone(self, prompts: list[list[int]]) -> list[list[list[int]]]:
        """What one instance answers."""
        return tokens(self.prefill.generate(prompts))


def tokens(outputs: list[dict[str, Any]]) -> list[list[list[int]]]:
    return [output["tokens"] for output in outputs]


def completed(engine: Engine) -> list[dict[str, Any]]:
    return [r for r in engine.call("reports")["reports"] if r["outcome"] == "completed"]


@pytest.fixture(scope="module")
def sides(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """float32 in blocks of 128, prefill in chunks of 192 tokens, parcels of 128; prefix caching on both sides."""
    logs = tmp_path_factory.mktemp("modes")
    chunks = {"enable_prefix_caching": True, "max_num_batched_tokens": 192}
    with ExitStack() as stack:
        engines = [
            prefill_engine(tiny, logs / "prefill.log", {"parcel_tokens": 128, "lease_s": 15.0}, **chunks),
            like_engine(tiny, logs / "like.log", enable_prefix_caching=True),
            decode_engine(tiny, logs / "npu.log"),
            decode_engine(tiny, logs / "host.log", config={"mode": "host"}),
        ]
        for engine in engines:
            stack.callback(engine.stop)
            engine.start()
        sides = Deployment(*[engine.wait_ready(300) for engine in engines])
        for decoder in (sides.like, sides.npu, sides.host):  # from here on every kind is paired
            sides.through(decoder, [prompt(9)], max_tokens=1)
        yield sides


def test_every_length_equals_one_instance(sides: Deployment) -> None:
    prompts = [prompt(n, seed=31) for n in LENGTHS]
    before = len(completed(sides.like))
    assert tokens(sides.through(sides.like, prompts)) == sides.alone(prompts)
    reports = completed(sides.like)[before:]
    assert sorted(r["tokens"] for r in reports) == sorted(LENGTHS)
    # Whole blocks of 128 tokens: K and V of 4 layers, 4 heads of 64 elements of 4 bytes.
    facts = sides.prefill.call("facts")["facts"]
    cache = facts["cache"]
    block = cache["layers"] * cache["heads"] * cache["head_dim"] * 2 * 4 * 128
    assert cache["block_bytes"] * cache["layers"] == block
    assert sum(r["wire_bytes"] for r in reports) == sum(-(-n // 128) for n in LENGTHS) * block
    sides.like.wait_idle()
    sides.prefill.wait_idle()


def test_a_prefix_that_decode_has_is_not_read_again(sides: Deployment) -> None:
    start = prompt(300, seed=32)
    prompts = [start, start + prompt(200, seed=33)]
    answers = [sides.through(sides.like, [p])[0] for p in prompts]
    assert tokens(answers) == sides.alone(prompts)
    # 500 tokens are 4 blocks, of which decode's prefix cache holds the first 2.
    assert [r["blocks"] for r in completed(sides.like)[-2:]] == [3, 2]


def test_a_like_side_and_npus_at_once(sides: Deployment) -> None:
    prompts = [prompt(40 + 37 * n, seed=40 + n) for n in range(9)]
    expected = sides.alone(prompts)
    sent = sides.prefill.generate(prompts, [REMOTE_DECODE] * 9, max_tokens=1)
    decoders = (sides.like, sides.npu, sides.host)
    before = [len(completed(decoder)) for decoder in decoders]
    for kind, decoder in enumerate(decoders):
        mine = slice(kind, None, 3)
        answers = decoder.generate(prompts[mine], [s["params"] for s in sent[mine]])
        assert tokens(answers) == expected[mine]
    assert [len(completed(d)) - n for d, n in zip(decoders, before, strict=True)] == [3, 3, 3]
    for engine in (*decoders, sides.prefill):
        engine.wait_idle()


@pytest.mark.parametrize("length", [100, 333])
def test_host_brings_the_bytes_that_hawk_brings(sides: Deployment, tmp_path: Path, length: int) -> None:
    ids = prompt(length, seed=50)
    found = {}
    for name, engine in (("hawk", sides.npu), ("host", sides.host)):
        # Computed twice in the same steps, to the last bit.
        sides.prefill.call("reset_prefix_cache")
        sent = sides.prefill.generate([ids], [REMOTE_DECODE], max_tokens=1)[0]
        held = engine.call("load_only", prompt=ids, params=sent["params"], max_tokens=4)
        assert completed(engine)[-1]["tokens"] == length
        path = tmp_path / f"{name}.npy"
        engine.call("banks", path=str(path))
        layout = engine.call("geometry")["layout"]
        banks = np.load(path)
        count = banks.shape[2]
        units = layout["layers"] * layout["heads"] * 2 * 2  # pages of 32 x 32 of a block of 64 tokens, head_dim 64
        pages = np.array(held["block_ids"])[:, None] * units + np.arange(units)
        found[name] = banks[:, :, pages % count, pages // count]
        engine.call("finish", request=held["request"])
    assert found["hawk"].any()
    different = np.unique(np.argwhere(found["hawk"] != found["host"])[:, 2:4], axis=0)
    assert not len(different), f"(block, page): {different[:10].tolist()}, {len(different)} of them"


@pytest.mark.parametrize(("dtype", "head_dim", "protocol"), [("bfloat16", 64, "tcp"), ("float32", 48, "local")])
def test_like_sides_of_other_dtypes_and_kernels(
    model_cache: Path, tmp_path: Path, dtype: str, head_dim: int, protocol: str
) -> None:
    """Over Mooncake and by reading the peer's memory; heads of 48 are kept in an order that only their kernels know.

    A side of another block size is refused.
    """
    tiny, block_size = TinyLlama(head_dim=head_dim).directory(model_cache), 32
    options = {"dtype": dtype, "block_size": block_size}
    with ExitStack() as stack:
        prefill = prefill_engine(tiny, tmp_path / "prefill.log", **options)
        like = like_engine(tiny, tmp_path / "like.log", {"protocol": protocol}, **options)
        other = like_engine(tiny, tmp_path / "other.log", **{**options, "block_size": 64})
        engines = (prefill, like, other)
        for engine in engines:
            stack.callback(engine.stop)
            engine.start()
        for engine in engines:
            engine.wait_ready(300)
        cache = prefill.call("facts")["facts"]["cache"]
        assert (cache["k"] is None) is (head_dim % 32 > 0)
        prompts = [prompt(n, seed=60) for n in (1, 31, 32, 33, 200)]
        expected = tokens(prefill.generate(prompts))
        sent = prefill.generate(prompts, [REMOTE_DECODE] * 5, max_tokens=1)
        assert tokens(like.generate(prompts, [s["params"] for s in sent])) == expected
        assert len(completed(like)) == 5
        # The other one computes for itself, and its log says what to change.
        sent = prefill.generate(prompts[-1:], [REMOTE_DECODE], max_tokens=1)
        other.generate(prompts[-1:], [sent[0]["params"]])
        assert not completed(other)
        assert f"block_size: prefill side has {block_size}, decode side has 64" in other.log.read_text()
        assert "--block-size" in other.log.read_text()
