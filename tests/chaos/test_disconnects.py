"""A hundred HTTP clients that hang up at any moment of either leg, beside others that stay: `hawk up`, real servers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from hawk_connector.address import Address
from hawk_connector.cli.status import StatusClient
from tests.chaos.deployment import IDLE_WITHIN_S
from tests.e2e.test_servers import NAME, Deployment, complete, deployment_file, texts
from tests.models.tiny import TinyLlama
from tests.transport.waiting import eventually

pytestmark = pytest.mark.e2e

DISCONNECTS = 100
LEAVERS, STAYERS = 6, 2
SEED = 1
GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
# What nobody asks for any more is given up after the lease.
LEASE_S, RENEW_S = 4.0, 1.0
REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}
TEXT = "The hawk sees the field from above and falls on what it wants in one long dive. "


@pytest.fixture(scope="module")
def up(model_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    directory = tmp_path_factory.mktemp("disconnects")
    path = deployment_file(directory, TinyLlama().directory(model_cache))
    data = yaml.safe_load(path.read_text())
    data["prefill"]["hawk"]["lease_s"] = LEASE_S
    data["decode"]["hawk"]["renew_s"] = RENEW_S
    path.write_text(yaml.safe_dump(data))
    deployment = Deployment(path, directory / "logs")
    try:
        deployment.wait_serving()
        yield deployment
    finally:
        deployment.stop()


def a_prompt(rng: random.Random) -> str:
    """Text that no other request has, so that its KV moves."""
    return f"{rng.getrandbits(40):x} " + TEXT * rng.randrange(1, 9)


def body(prompt: str, **more: Any) -> dict[str, Any]:
    return {"model": NAME, "prompt": prompt, "temperature": 0, "max_tokens": 48, "ignore_eos": True, **more}


async def leave(client: httpx.AsyncClient, up: Deployment, rng: random.Random) -> str:
    """One request that its client drops; where it was then."""
    way = rng.choice(["router", "router", "prefill", "decode"])
    prompt, params = a_prompt(rng), None
    if way == "prefill":
        params = REMOTE_DECODE
    elif way == "decode":
        asked = body(prompt, max_tokens=1, kv_transfer_params=REMOTE_DECODE)
        params = (await client.post(f"{up.prefill}/v1/completions", json=asked)).json()["kv_transfer_params"]
        if rng.random() < 0.3:
            return "between the legs"
    sent = body(prompt, stream=True) | ({"kv_transfer_params": params} if params is not None else {})
    url = {"router": up.router, "prefill": up.prefill, "decode": up.decode}[way]
    pieces = rng.choice([0, 0, 1, 3, 20])
    patience_s = rng.random() * rng.choice([0.02, 0.2, 1.0]) if pieces == 0 else 60.0
    seen = 0

    async def read() -> None:
        nonlocal seen
        async with client.stream("POST", f"{url}/v1/completions", json=sent) as response:
            async for line in response.aiter_lines():
                seen += line.startswith("data: {")
                if pieces and seen >= pieces:
                    return

    # Leaving the block, or being cancelled in it, closes the connection.
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(read(), patience_s)
    return f"{way}, {'mid-stream' if seen else 'before the first token'}"


async def stay(client: httpx.AsyncClient, up: Deployment, rng: random.Random, done: asyncio.Event) -> list[Any]:
    """Requests through the router that nobody drops, with their answers."""
    answers = []
    while not done.is_set():
        prompt = a_prompt(rng)
        response = await client.post(f"{up.router}/v1/completions", json=body(prompt))
        assert response.status_code == 200, response.text
        answers.append((prompt, response.json()["choices"][0]["text"]))
    return answers


async def crowd(up: Deployment) -> tuple[Counter[str], list[Any]]:
    left: Counter[str] = Counter()
    done = asyncio.Event()
    numbers = iter(range(DISCONNECTS))
    async with httpx.AsyncClient(timeout=120, trust_env=False, limits=httpx.Limits(max_connections=None)) as client:

        async def leaver() -> None:
            for number in numbers:
                left[await leave(client, up, random.Random(f"{SEED}/{number}"))] += 1

        staying = [asyncio.create_task(stay(client, up, random.Random(n), done)) for n in range(STAYERS)]
        await asyncio.gather(*(leaver() for _ in range(LEAVERS)))
        done.set()
        answers = [answer for answers in await asyncio.gather(*staying) for answer in answers]
    return left, answers


def gauges(url: str, *names: str) -> dict[str, float]:
    """The largest value of each of vLLM's gauges."""
    found: dict[str, float] = {}
    for line in httpx.get(f"{url}/metrics", timeout=30, trust_env=False).text.splitlines():
        name, _, value = line.replace("{", " ", 1).partition(" ")
        if name in names:
            found[name] = max(found.get(name, 0.0), float(value.rpartition(" ")[2]))
    assert found.keys() == set(names), f"{url} has no {set(names) - found.keys()}"
    return found


def test_a_hundred_clients_hang_up(up: Deployment) -> None:
    left, answers = asyncio.run(crowd(up))
    assert left.total() == DISCONNECTS
    # Both legs, and both before and after the first token.
    assert len(left) >= 5, left
    assert len(answers) >= STAYERS
    # All of it is over, and nothing is held: what the connectors hold, and vLLM's own blocks and requests.
    for side in (up.config.prefill, up.config.decode):
        address = Address.parse(f"127.0.0.1:{side.hawk['side_channel_port']}")
        with StatusClient(address) as status:

            def held(status: StatusClient = status) -> dict[str, int]:
                answer = status.ask(20.0)
                assert answer is not None
                return {name: count for name, count in answer.held.items() if count}

            eventually(lambda held=held: not held(), f"{address} holds nothing", deadline_s=IDLE_WITHIN_S)
    for url in (up.prefill, up.decode):
        complete(url, "A step, after which the gauges are set.", max_tokens=1)

        def free(url: str = url) -> bool:
            return not any(gauges(url, *GAUGES).values())

        eventually(free, f"{url} has its blocks back", deadline_s=IDLE_WITHIN_S)
    for prompt, text in answers:
        assert [text] == texts(complete(up.prefill, prompt, max_tokens=48)), json.dumps(left)
