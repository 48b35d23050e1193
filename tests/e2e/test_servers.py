"""What a user does: `hawk up` with a deployment file, requests through vllm-router, metrics, and servers that die."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from hawk_connector.cli import commands
from hawk_connector.cli import deployment as deployments
from hawk_connector.cli.free_ports import free_ports
from hawk_connector.protocol.messages import PROTOCOL_VERSION
from tests.models.tiny import TinyLlama
from tests.transport.waiting import eventually

pytestmark = pytest.mark.e2e

CONFIG = Path(__file__).parents[2] / "configs" / "cpu-simulated.yaml"
READY_S = 300
NAME = "tiny"
PROMPTS = [
    "The hawk sees the field",
    "A cache holds keys and values; one side writes them. " * 4,
    "Seven banks, eight banks or twelve banks: " * 12,
]
HELLO_DEADLINE_S = 2.0


def deployment_file(directory: Path, model: Path, decode: dict[str, Any] | None = None) -> Path:
    """The shipped deployment with a tiny model, small caches and free ports; ``decode``: vLLM arguments there."""
    data = yaml.safe_load(CONFIG.read_text())
    ports = free_ports(6)
    data |= {"model": str(model), "served_model_name": NAME, "ready_timeout_s": READY_S}
    small = {"max-model-len": 1024, "kv-cache-memory-bytes": 64 << 20}
    data["prefill"] |= {"port": ports[0], "hawk": {"side_channel_port": ports[1], "send_buffer_bytes": 64 << 20}}
    data["decode"] |= {
        "port": ports[2],
        "hawk": {
            "side_channel_port": ports[3],
            "peers": [f"127.0.0.1:{ports[1]}"],
            "hello_deadline_s": HELLO_DEADLINE_S,
        },
    }
    data["router"] |= {"port": ports[4], "prometheus_port": ports[5]}
    for name in ("prefill", "decode"):
        data[name]["vllm"] |= small
    data["decode"]["vllm"] |= decode or {}
    path = directory / "deployment.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


class Deployment:
    """`hawk up` as a process of its own."""

    def __init__(self, path: Path, logs: Path) -> None:
        self.config = deployments.load(path)
        self.logs = logs
        self._output = logs.with_name("hawk-up.log")
        self.prefill = deployments.url(self.config.prefill.host, self.config.prefill.port)
        self.decode = deployments.url(self.config.decode.host, self.config.decode.port)
        self.router = self.config.url
        hawk = Path(sys.executable).with_name("hawk")
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                [str(hawk), "up", str(path), "--logs", str(logs)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def printed(self) -> str:
        return self._output.read_text()

    def wait_serving(self) -> None:
        def serving() -> bool:
            assert self.process.poll() is None, self.printed
            return f"serving {NAME} at" in self.printed

        eventually(serving, "hawk up serves", deadline_s=READY_S)

    def kill(self, role: str) -> None:
        """kill -9 of the server process with this kv_role."""
        (victim,) = [
            child
            for child in psutil.Process(self.process.pid).children()
            if "serve" in child.cmdline() and f'"kv_role": "{role}"' in child.cmdline()[-1]
        ]
        victim.kill()

    def wait_end(self) -> int:
        return self.process.wait(60)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(90)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)


@pytest.fixture(scope="module")
def up(model_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    directory = tmp_path_factory.mktemp("up")
    model = TinyLlama().directory(model_cache)
    deployment = Deployment(deployment_file(directory, model), directory / "logs")
    try:
        deployment.wait_serving()
        yield deployment
    finally:
        deployment.stop()


def post(url: str, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(url + path, json={"model": NAME, "temperature": 0, **body}, timeout=120, trust_env=False)


def complete(url: str, prompt: Any, **more: Any) -> dict[str, Any]:
    response = post(url, "/v1/completions", {"prompt": prompt, "max_tokens": 16, "ignore_eos": True, **more})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def texts(answer: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in sorted(answer["choices"], key=lambda c: c["index"])]


def stream(url: str, path: str, body: dict[str, Any]) -> tuple[str, int]:
    """(text, pieces that it came in) of a streamed answer."""
    pieces: list[str] = []
    asked = {"model": NAME, "temperature": 0, "stream": True, **body}
    with httpx.stream("POST", url + path, json=asked, timeout=120, trust_env=False) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            (choice,) = json.loads(line.removeprefix("data: "))["choices"] or [{}]
            pieces.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
    return "".join(pieces), sum(1 for piece in pieces if piece)


def metrics(url: str) -> dict[str, float]:
    """The hawk_* series: name, with its outcome where it has one, and value."""
    found: dict[str, float] = {}
    for line in httpx.get(f"{url}/metrics", timeout=30, trust_env=False).text.splitlines():
        match = re.fullmatch(r"(hawk_\w+)(\{.*\})? (\S+)", line)
        if match:
            outcome = re.search(r'outcome="(\w+)"', match[2] or "")
            key = match[1] + (f"/{outcome[1]}" if outcome else "")
            if "_bucket" not in key:
                found[key] = found.get(key, 0.0) + float(match[3])
    return found


def grown(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Counters that have changed."""
    return {k: v - before.get(k, 0.0) for k, v in after.items() if v != before.get(k, 0.0) and "_created" not in k}


# --- a deployment that lives


def test_completions_through_the_router_are_one_instances(up: Deployment) -> None:
    for prompt in PROMPTS:
        alone = complete(up.prefill, prompt)
        through = complete(up.router, prompt)
        assert texts(through) == texts(alone)
        assert through["usage"] == alone["usage"]
        body = {"prompt": prompt, "max_tokens": 16, "ignore_eos": True}
        text, pieces = stream(up.router, "/v1/completions", body)
        assert [text] == texts(alone)
        assert pieces > 1


def test_chat_through_the_router_is_one_instances(up: Deployment) -> None:
    for prompt in PROMPTS:
        body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 16, "ignore_eos": True}
        alone = post(up.prefill, "/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
        through = post(up.router, "/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
        assert through == alone
        text, pieces = stream(up.router, "/v1/chat/completions", body)
        assert text == alone
        assert pieces > 1


def test_a_list_prompt_and_n_through_the_router(up: Deployment) -> None:
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[0], PROMPTS[2], PROMPTS[1]]
    assert texts(complete(up.router, prompts)) == [texts(complete(up.prefill, p))[0] for p in prompts]
    # vLLM has no n above 1 for temperature 0; one candidate to choose from is as good.
    two = texts(complete(up.router, PROMPTS[1], n=2, temperature=1, top_k=1))
    assert two == texts(complete(up.prefill, PROMPTS[1])) * 2


def test_what_is_printed_can_be_run_and_shows_the_pairing(up: Deployment) -> None:
    printed = up.printed
    for spec in (spec for stage in commands.process_stages(up.config, up.config.model) for spec in stage):
        assert commands.shell_text(spec) in printed
        assert (up.logs / f"{spec.name}.log").is_file()
    address = f"127.0.0.1:{up.config.prefill.hawk['side_channel_port']}"
    # Four heads on one chip, rank's head -> chip's head.
    heads = "chip 0: heads 0->0, 1->1, 2->2, 3->3"
    assert f"pairing: {address} paired: rank 0 of 1, float32, block size 128; {heads}" in " ".join(printed.split())


def test_metrics_count_what_was_moved(up: Deployment) -> None:
    before = {url: metrics(url) for url in (up.prefill, up.decode)}
    answers = [complete(up.router, f"{number} {prompt}") for number, prompt in enumerate(PROMPTS)]
    tokens = sum(a["usage"]["prompt_tokens"] for a in answers)
    blocks = sum(-(-a["usage"]["prompt_tokens"] // 64) for a in answers)
    # One decode block: layers x K and V x heads x 64 tokens x head_dim fp32 elements.
    model = TinyLlama()
    wire_bytes = blocks * model.layers * 2 * model.kv_heads * 64 * model.head_dim * 4

    def moved(url: str) -> dict[str, float]:
        complete(url, "A step, which tells the metrics of what has ended meanwhile.", max_tokens=1)
        return grown(before[url], metrics(url))

    for url in (up.prefill, up.decode):
        eventually(lambda url=url: moved(url).get("hawk_transfers_total/completed") == 3, f"{url} counts", 60)
    decode, prefill = moved(up.decode), moved(up.prefill)
    assert decode["hawk_tokens_total"] == prefill["hawk_tokens_total"] == tokens
    assert decode["hawk_wire_bytes_total"] == prefill["hawk_wire_bytes_total"] == wire_bytes
    assert decode["hawk_blocks_total"] == blocks
    # fp32 pages of this model: U = 4 layers x 4 heads x 2 x 2 tiles = 64 pages on 8 banks, K and V.
    assert 2 * 8 * 3 <= decode["hawk_segments_total"] <= 2 * 8 * blocks
    assert decode["hawk_pull_seconds_count"] == prefill["hawk_pack_seconds_count"] == 3
    assert decode["hawk_handover_seconds_count"] == decode["hawk_segment_bytes_count"] == 3
    assert decode["hawk_handover_seconds_sum"] >= decode["hawk_pull_seconds_sum"] > 0
    # All of each prompt came from prefill; vLLM computes the last token again, to have its logits.
    assert decode["hawk_external_tokens_total"] == tokens
    assert metrics(up.decode)["hawk_ready"] == metrics(up.prefill)["hawk_ready"] == 1
    gauges = [f"hawk_{name}" for name in ("leases", "regions", "quarantined", "quarantined_bytes", "waiting")]
    gauges_of = {up.prefill: {*gauges[:2], gauges[-1]}, up.decode: set(gauges[2:])}
    for url in (up.prefill, up.decode):

        def held(url: str = url) -> dict[str, float]:
            moved(url)
            return {name: value for name, value in metrics(url).items() if name in gauges}

        eventually(lambda held=held: not any(held().values()), f"{url} holds nothing", 60)
        # Each side has the gauges that it can fill.
        assert {name for name in held() if name in gauges} == gauges_of[url]


def test_hawk_status_shows_a_live_transfer(up: Deployment) -> None:
    sent = complete(up.prefill, PROMPTS[0], max_tokens=1, kv_transfer_params={"do_remote_decode": True})
    transfer = sent["kv_transfer_params"]["hawk"]["transfer"]
    sides = [side.hawk for side in (up.config.prefill, up.config.decode)]
    addresses = [f"127.0.0.1:{hawk['side_channel_port']}" for hawk in sides]
    command = [sys.executable, "-m", "hawk_connector.cli.main", "status", *addresses]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    prefill, decode = (each["status"] for each in json.loads(done.stdout))
    (seen,) = [each for each in prefill["transfers"] if each["transfer"] == transfer]
    assert (seen["phase"], seen["waits_for"]) == ("offered", "a decode side's Pull")
    assert seen["request"].startswith(sent["id"])
    assert [(peer["peer"], peer["state"]) for peer in decode["pairings"]] == [(addresses[0], "paired")]
    done = subprocess.run([*command, "--ready"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "".join(f"{address}: ready\n" for address in addresses))
    complete(up.decode, PROMPTS[0], kv_transfer_params=sent["kv_transfer_params"])  # and so it does not wait


@pytest.mark.parametrize(
    "params",
    [
        {"do_remote_prefill": True},
        {"do_remote_prefill": True, "hawk": "junk"},
        {"do_remote_prefill": True, "hawk": {"v": PROTOCOL_VERSION, "transfer": "00" * 16, "tokens": 1, "ranks": []}},
        {"do_remote_prefill": True, "remote_host": "192.0.2.1", "remote_port": 1, "remote_block_ids": [1]},
    ],
    ids=["empty", "junk", "no ranks", "another connector's"],
)
def test_malformed_params_straight_to_decode(up: Deployment, params: dict[str, Any]) -> None:
    expected = texts(complete(up.prefill, PROMPTS[1]))
    assert texts(complete(up.decode, PROMPTS[1], kv_transfer_params=params)) == expected


def test_params_of_another_prompt_straight_to_decode(up: Deployment) -> None:
    sent = complete(up.prefill, PROMPTS[2], max_tokens=1, kv_transfer_params={"do_remote_decode": True})
    params = sent["kv_transfer_params"]
    for prompt in (PROMPTS[1], PROMPTS[2], PROMPTS[2]):
        expected = texts(complete(up.prefill, prompt))
        assert texts(complete(up.decode, prompt, kv_transfer_params=params)) == expected


# --- sides that do not fit, and servers that die


def test_another_dtype_is_refused_and_answered_by_decode_alone(model_cache: Path, tmp_path: Path) -> None:
    """Policy recompute.  Then decode is killed."""
    model = TinyLlama().directory(model_cache)
    path = deployment_file(tmp_path, model, decode={"dtype": "bfloat16"})
    deployment = Deployment(path, tmp_path / "logs")
    try:
        deployment.wait_serving()
        printed = " ".join(deployment.printed.split())
        verdict = "dtype: prefill side has float32, decode side has bfloat16 (give both sides the same --dtype)"
        assert f"refused: {verdict}" in printed
        expected = texts(complete(deployment.decode, PROMPTS[1]))
        assert texts(complete(deployment.router, PROMPTS[1])) == expected
        assert verdict in " ".join((deployment.logs / "decode.log").read_text().split())
        deployment.kill("kv_consumer")
        assert deployment.wait_end() == 1
        assert_names_the_dead(deployment, "decode")
    finally:
        deployment.stop()


def assert_names_the_dead(deployment: Deployment, name: str) -> None:
    # Once it has ended nothing of it is left.
    for url in (deployment.prefill, deployment.decode, deployment.router):
        with pytest.raises(httpx.ConnectError):
            httpx.get(url, timeout=5, trust_env=False)
    printed = " ".join(deployment.printed.split())
    assert f"{name} was killed by SIGKILL. Its log is {deployment.logs / name}.log" in printed


def test_another_model_and_then_no_prefill_under_policy_fail(up: Deployment, model_cache: Path, tmp_path: Path) -> None:
    """The last test of the shared deployment: it kills its prefill server."""
    (port,) = free_ports(1)
    spec = commands.decode_process(up.config, str(TinyLlama(seed=1).directory(model_cache)))
    transfer = json.loads(spec.argv[-1])
    transfer["kv_load_failure_policy"] = "fail"
    del transfer["kv_connector_extra_config"]["side_channel_port"]
    argv = [*spec.argv[:-1], json.dumps(transfer), "--port", str(port)]
    log = tmp_path / "other.log"
    with log.open("w") as output:
        other = subprocess.Popen(
            argv, env={**os.environ, **spec.env}, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"

        def ready() -> bool:
            assert other.poll() is None, log.read_text()[-3000:]
            try:
                return httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code == 200
            except httpx.HTTPError:
                return False

        eventually(ready, "the other decode server is ready", deadline_s=READY_S)
        alone = texts(complete(url, PROMPTS[1]))
        first, second = (
            complete(up.prefill, PROMPTS[1], max_tokens=1, kv_transfer_params={"do_remote_decode": True})
            for _ in range(2)
        )
        refused = post(
            url, "/v1/completions", {"prompt": PROMPTS[1], "kv_transfer_params": first["kv_transfer_params"]}
        )
        assert_openai_error(refused)
        assert "model: prefill side has" in log.read_text()
        # Others are served as before.
        assert texts(complete(url, PROMPTS[1])) == alone
        up.kill("kv_producer")
        assert up.wait_end() == 1
        assert_names_the_dead(up, "prefill")
        began = time.monotonic()
        down = post(url, "/v1/completions", {"prompt": PROMPTS[1], "kv_transfer_params": second["kv_transfer_params"]})
        assert_openai_error(down)
        # A deadline of seconds, on a machine that may be busy with other things.
        assert time.monotonic() - began < HELLO_DEADLINE_S + 30
        assert f"no answer within {HELLO_DEADLINE_S:g} s" in log.read_text()
        assert texts(complete(url, PROMPTS[1])) == alone
    finally:
        other.terminate()
        try:
            other.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(other.pid, signal.SIGKILL)
            other.wait(10)


def assert_openai_error(response: httpx.Response) -> None:
    assert response.status_code >= 500, response.text
    error = response.json()["error"]
    assert error["message"] and error["type"] and error["code"] == response.status_code
