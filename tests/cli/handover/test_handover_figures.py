"""Samples turned into rows, prompts, groups of servers, command lines and idle shares: everything without servers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hawk_connector.cli.bench_command import _PAIRS
from hawk_connector.cli.demo_sides import Movement
from hawk_connector.cli.handover import nixl_slowed
from hawk_connector.cli.handover.client import Sample
from hawk_connector.cli.handover.idle import cpu_seconds, idle_shares
from hawk_connector.cli.handover.options import AGGREGATED, SYSTEMS, HandoverOptions
from hawk_connector.cli.handover.prompts import bench_prompts
from hawk_connector.cli.handover.rows import Measured, p90, ratios, row
from hawk_connector.cli.handover.servers import SERVER_BYTES, groups, pair, refuse_missing
from hawk_connector.config import HawkConfig
from hawk_connector.errors import CapacityError, ConfigError
from hawk_connector.metrics import TransferReport

OPTIONS = HandoverOptions(("direct", "hawk"), (1, 4), 6, 1000, 16, "model")


def sample(name: str, handover: float, step: float = 0.05, answered_at: float = 1000.0) -> Sample:
    """Sent at 10, answered at 12, then a token after ``handover`` and two more, each after ``step`` seconds."""
    first = 12.0 + handover
    return Sample(
        name, 10.0, 12.0, (first, first + step, first + 2 * step), (7, 8, 9), answered_at, answered_at + handover
    )


# --- rows


def test_a_row_has_the_percentiles_and_the_step_by_hand() -> None:
    found = Measured(SYSTEMS["direct"], 4, ("direct",))
    found.waves = {0: [sample("a", 0.1), sample("b", 0.2), sample("c", 0.3)], 1: [sample("d", 0.5, step=0.09)]}
    made = row(found, {"prefill": 0.01, "decode": 0.02})
    assert made["p50_ms"] == pytest.approx(250)
    assert made["p90_ms"] == pytest.approx(440)  # ranks 0..3: 0.9 * 3 = 2.7, between 300 and 500
    assert (made["min_ms"], made["max_ms"], made["n"]) == (pytest.approx(100), pytest.approx(500), 4)
    assert made["itl_ms"] == pytest.approx(50)
    assert made["rest_ms"] == pytest.approx(200)
    assert made["prefill_ms"] == pytest.approx(2000)
    assert made["idle_cpu"] == {"prefill": 0.01, "decode": 0.02}
    assert made["handover_ms"] == pytest.approx([100, 200, 300, 500])


def test_p90_of_one_value_is_that_value() -> None:
    assert p90([3.0]) == 3.0
    assert p90([float(value) for value in range(11)]) == pytest.approx(9.0)


def test_parts_split_the_hand_over_where_the_load_ended() -> None:
    found = Measured(SYSTEMS["hawk"], 1, ("hawk",))
    found.waves = {0: [sample("a", 0.1, answered_at=1000.0)]}
    prefill = TransferReport(transfer_id="t", request_id="cmpl-a-0", outcome="completed", pack_s=0.004)
    decode = TransferReport(
        transfer_id="t",
        request_id="cmpl-a-0",
        outcome="completed",
        pull_s=0.010,
        land_s=0.003,
        wait_s=0.002,
        landed_at=1000.030,
    )
    found.movements = {"a": Movement(prefill, decode)}
    parts = row(found, {})["parts"]
    assert parts == {
        "pack": pytest.approx(4),
        "pull": pytest.approx(7),
        "land": pytest.approx(3),
        "wait": pytest.approx(2),
        "until_landed": pytest.approx(30, abs=1e-3),
        "from_landed": pytest.approx(70, abs=1e-3),
    }
    assert parts["until_landed"] + parts["from_landed"] == pytest.approx(100, abs=1e-3)


def test_a_part_that_no_side_reports_is_left_out() -> None:
    found = Measured(SYSTEMS["direct"], 1, ("direct",))
    found.waves = {0: [sample("a", 0.1), sample("b", 0.1)]}
    report = TransferReport(transfer_id="t", request_id="cmpl-a-0", outcome="completed", pull_s=0.010, land_s=0.0)
    found.movements = {"a": Movement(TransferReport(transfer_id="t", request_id="x", outcome="completed"), report)}
    assert row(found, {})["parts"] == {"pull": pytest.approx(10), "land": 0.0}


def test_ratios_are_by_wave_and_only_of_systems_that_were_up_together() -> None:
    def measured(name: str, beside: tuple[str, ...], times: list[float], concurrency: int = 1) -> Measured:
        found = Measured(SYSTEMS[name], concurrency, beside)
        found.waves = {number: [sample("x", value)] for number, value in enumerate(times)}
        return found

    both = ("direct", "nixl-slowed")
    all_found = [
        # The machine was twice as slow in the second wave: the ratio is 0.5 in all of them.
        measured("direct", both, [0.05, 0.10, 0.05]),
        measured("nixl-slowed", both, [0.10, 0.20, 0.10]),
        measured("hawk", ("hawk",), [0.05, 0.05, 0.05]),
        measured("nixl-slowed", both, [0.10, 0.10, 0.10], concurrency=4),
    ]
    ((about, ratio),) = ratios(all_found)
    assert about == {"concurrency": 1}
    assert (ratio.of, ratio.to, ratio.value) == ("direct", "nixl-slowed", pytest.approx(0.5))


# --- options and prompts


def test_prompts_suffice_for_the_widest_run() -> None:
    assert [OPTIONS.waves(count) for count in (1, 4)] == [6, 2]
    assert OPTIONS.prompts == 8  # two waves of four


def test_one_instance_is_always_there_and_first() -> None:
    assert [system.name for system in OPTIONS.chosen] == ["aggregated", "direct", "hawk"]


def test_the_command_offers_every_pair() -> None:
    assert list(_PAIRS) == [name for name, system in SYSTEMS.items() if system is not AGGREGATED]


def test_prompts_have_their_length_and_differ_from_their_first_tokens_on() -> None:
    numbers: dict[str, int] = {}
    prompts = bench_prompts(lambda text: [numbers.setdefault(word, len(numbers)) for word in text.split()], 9, 500)
    assert [len(prompt) for prompt in prompts] == [500] * 9
    assert len({prompt[:16] for prompt in prompts}) == 9


@pytest.mark.parametrize(("count", "tokens"), [(10_000, 10), (1, 1_000_000)])
def test_more_prompts_than_the_text_has_are_refused(count: int, tokens: int) -> None:
    with pytest.raises(ConfigError, match="cut from a text"):
        bench_prompts(str.split, count, tokens)  # type: ignore[arg-type]


# --- groups


def names(room: float, *systems: str) -> list[list[str]]:
    chosen = [SYSTEMS[name] for name in systems]
    return [[system.name for system in group] for group in groups(chosen, int(room * SERVER_BYTES))]


def test_groups_hold_what_fits_in_the_given_order() -> None:
    all_ = ("aggregated", "direct", "nixl-slowed", "direct-tcp", "hawk", "nixl")
    assert names(5, *all_) == [["aggregated", "direct", "nixl-slowed"], ["direct-tcp", "hawk"], ["nixl"]]
    assert names(3.9, *all_) == [["aggregated", "direct"], ["nixl-slowed"], ["direct-tcp"], ["hawk"], ["nixl"]]


def test_stock_nixl_stands_alone_whatever_the_room() -> None:
    assert names(99, "aggregated", "nixl") == [["aggregated"], ["nixl"]]


def test_no_room_for_a_pair_is_said() -> None:
    with pytest.raises(CapacityError, match="no room for the servers of direct"):
        names(1.5, "aggregated", "direct")


def test_nixl_that_is_not_installed_is_said_with_its_package() -> None:
    systems = [SYSTEMS["direct"], SYSTEMS["nixl-slowed"]]
    with pytest.raises(ConfigError, match=r"nixl-slowed need it\. Run `pip install --no-deps nixl nixl-cu12`"):
        refuse_missing(systems, lambda module: module == "nixl")
    refuse_missing(systems, lambda module: True)
    refuse_missing(systems[:1], lambda module: False)


# --- command lines


def flag(argv: tuple[str, ...], name: str) -> str:
    return argv[argv.index(name) + 1]


@pytest.mark.parametrize("name", [name for name, system in SYSTEMS.items() if system.connector == "hawk"])
def test_hawk_servers_have_configurations_that_hawk_takes(name: str) -> None:
    running = pair(SYSTEMS[name], OPTIONS, "/model")
    configs: list[Any] = []
    for server in running.servers:
        transfer = json.loads(flag(server.argv, "--kv-transfer-config"))
        assert transfer["kv_load_failure_policy"] == "fail"
        configs.append(HawkConfig.parse(transfer["kv_connector_extra_config"], transfer["kv_role"]))
    prefill, decode = configs
    assert decode.mode == SYSTEMS[name].mode
    assert prefill.protocol == decode.protocol == SYSTEMS[name].protocol
    assert decode.peers == (f"127.0.0.1:{prefill.side_channel_port}",)
    assert [side.port for side in running.sides] == [prefill.side_channel_port, decode.side_channel_port]
    npu = running.servers[1].env.get("HAWK_NPU") == "simulated"
    assert npu == SYSTEMS[name].npu and "HAWK_NPU" not in running.servers[0].env
    # Like instances have like blocks, or they could not read from cache to cache.
    blocks = [flag(server.argv, "--block-size") for server in running.servers]
    assert (blocks[0] == blocks[1]) == (SYSTEMS[name].mode == "direct")


def test_only_the_slowed_servers_find_the_modification(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/before")
    slowed = str(Path(nixl_slowed.__file__).parent)
    for name, system in SYSTEMS.items():
        for server in pair(system, OPTIONS, "/model").servers:
            expected = f"{slowed}{os.pathsep}/before" if name == "nixl-slowed" else None
            assert server.env.get("PYTHONPATH") == expected


def test_every_port_of_a_run_is_another() -> None:
    running = pair(SYSTEMS["nixl-slowed"], OPTIONS, "/model")
    ports = [flag(server.argv, "--port") for server in running.servers]
    ports += [server.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] for server in running.servers]
    assert len(set(ports)) == 4
    assert [server.health_url for server in running.servers] == [
        f"http://127.0.0.1:{port}/health" for port in ports[:2]
    ]


def test_caches_hold_a_wave_and_one_request_more() -> None:
    (server,) = pair(AGGREGATED, OPTIONS, "/model").servers
    # 1000 + 16 + 1 tokens are 8 blocks of 128; of four requests and one: 40.
    assert flag(server.argv, "--max-model-len") == "1024"
    assert flag(server.argv, "--num-gpu-blocks-override") == "40"


# --- the modification of the baseline


def test_the_slowed_thread_pauses_for_a_millisecond_at_least(tmp_path: Path) -> None:
    """A stand-in for NIXL's bindings, whose Python API sets the pause to 0 as NIXL's does."""
    package = tmp_path / "nixl_cu12"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "_bindings.py").write_text(
        "class nixlAgentConfig:\n"
        "    def __init__(self): self._delay = 7\n"
        "    def _set(self, value): self._delay = value\n"
        "    pthrDelay = property(lambda self: self._delay, _set)\n"
    )
    script = (
        "from nixl_cu12 import _bindings\n"
        "config = _bindings.nixlAgentConfig()\n"
        "seen = [config.pthrDelay]\n"
        "for value in (0, 5000):\n"
        "    config.pthrDelay = value\n"
        "    seen += [config.pthrDelay, config._delay]\n"
        "print(seen)\n"
    )
    path = os.pathsep.join((str(Path(nixl_slowed.__file__).parent), str(tmp_path)))
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == "[7, 1000, 1000, 5000, 5000]", done.stderr


# --- idle servers


def stat(proc: Path, pid: int, name: str, group: int, user: int, system: int) -> None:
    """A line as proc(5) describes it: utime and stime are fields 14 and 15."""
    directory = proc / str(pid)
    directory.mkdir(parents=True)
    # From field 3: state, ppid, pgrp, session, seven more; then utime, stime and those of children that have ended.
    fields = ["S", "1", str(group), str(group), *["0"] * 7, str(user), str(system), "900", "900"]
    (directory / "stat").write_text(f"{pid} ({name}) {' '.join(fields)}\n")


def test_processor_time_is_that_of_the_whole_group(tmp_path: Path) -> None:
    stat(tmp_path, 10, "vllm", 10, 100, 20)
    stat(tmp_path, 11, "a) S 1 10 (b", 10, 30, 0)  # a name may hold anything
    stat(tmp_path, 12, "another", 12, 999, 999)
    (tmp_path / "self").mkdir()
    assert cpu_seconds(10, tmp_path) == pytest.approx(150 / os.sysconf("SC_CLK_TCK"))


def test_a_process_that_works_is_told_from_one_that_sleeps() -> None:
    """Each is a group of its own; the shares are of the kernel's own count."""
    commands = {"busy": "while True: pass", "asleep": "input()"}
    started = {
        name: subprocess.Popen(
            [sys.executable, "-c", f"print(flush=True)\n{text}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        for name, text in commands.items()
    }
    try:
        for process in started.values():
            assert process.stdout is not None and process.stdout.readline()
        shares = idle_shares({name: process.pid for name, process in started.items()}, 0.3)
    finally:
        for process in started.values():
            process.kill()
            process.communicate()
    assert shares["asleep"] == 0 < shares["busy"]
