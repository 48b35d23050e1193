"""The deployment file: what is accepted, and that each mistake names its key."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hawk_connector.cli import commands, deployment
from hawk_connector.cli.processes import ProcessSpec
from hawk_connector.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"
SIMULATED = CONFIGS / "cpu-simulated.yaml"


def changed(path: str, value: object) -> str:
    """The simulated deployment as YAML with the key at ``path`` (dotted) set to ``value``."""
    data = yaml.safe_load(SIMULATED.read_text())
    *parents, last = path.split(".")
    inner = data
    for name in parents:
        inner = inner[name]
    inner[last] = value
    return yaml.safe_dump(data)


def flag(spec: ProcessSpec, name: str) -> str:
    return spec.argv[spec.argv.index(name) + 1]


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_file_loads(path: Path) -> None:
    config = deployment.load(path)
    assert config.url == "http://127.0.0.1:8000"
    assert {key: port for key, _, port in config.ports()} == {
        "prefill.port": 8100,
        "prefill.hawk.side_channel_port": 18550,
        "decode.port": 8200,
        "decode.hawk.side_channel_port": 18560,
        "router.port": 8000,
        "router.prometheus_port": 29000,
    }


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("modle", "x", "unknown key 'modle'. Did you mean 'model'?"),
        ("decode.prt", 1, "unknown key 'decode.prt'. Did you mean 'decode.port'?"),
        ("decode.npu.knd", "simulated", "unknown key 'decode.npu.knd'. Did you mean 'decode.npu.kind'?"),
        ("prefill.npu", {}, "unknown key 'prefill.npu'"),
        ("prefill.port", "8100", "prefill.port: Expected int, got str"),
        ("prefill.port", 70000, "prefill.port: Expected int <= 65535"),
        ("decode.npu.kind", "gpu", "decode.npu.kind: Invalid enum value 'gpu'"),
        ("env.OMP_NUM_THREADS", None, "env.OMP_NUM_THREADS: Expected"),
        ("prefill.vllm.dtype", None, "prefill.vllm.dtype: Expected"),
        ("prefill.hawk.side_channel_prt", 1, "prefill.hawk: unknown kv_connector_extra_config key"),
        (
            "prefill.hawk.peers",
            [],
            "prefill.hawk: kv_connector_extra_config key 'peers' belongs to the other",
        ),
        ("prefill.vllm.port", 1, "prefill.vllm: 'port' is not set there"),
        ("decode.vllm.kv_transfer_config", "{}", "decode.vllm: 'kv_transfer_config' is not set there"),
        ("decode.vllm.additional_config", "{}", "additional-config beside decode.npu"),
        ("router.args.prefill", "http://x", "router.args: 'prefill' is not set there"),
        ("router.port", 8200, "port 8200 is given to decode.port and router.port"),
        ("decode.hawk.side_channel_port", 8100, "port 8100 is given to prefill.port and decode.hawk.side"),
    ],
)
def test_a_mistake_names_its_key(path: str, value: object, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        deployment.parse(changed(path, value), source="file.yaml")
    assert str(caught.value).startswith("file.yaml: ")
    assert expected in str(caught.value)


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", ""])
def test_what_is_no_mapping_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        deployment.parse(text)


def test_a_missing_section_is_named() -> None:
    data = yaml.safe_load(SIMULATED.read_text())
    del data["router"]
    with pytest.raises(ConfigError, match="router"):
        deployment.parse(yaml.safe_dump(data))


def test_server_commands_carry_the_configuration() -> None:
    config = deployment.load(SIMULATED)
    (prefill, decode), (router,) = commands.process_stages(config, "/models/smol")

    assert prefill.argv[1:3] == decode.argv[1:3] == ("serve", "/models/smol")
    assert json.loads(flag(prefill, "--kv-transfer-config")) == {
        "kv_connector": "HawkConnector",
        "kv_role": "kv_producer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"side_channel_port": 18550},
    }
    assert json.loads(flag(decode, "--kv-transfer-config")) == {
        "kv_connector": "HawkConnector",
        "kv_role": "kv_consumer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"side_channel_port": 18560, "peers": ["127.0.0.1:18550"]},
    }
    assert json.loads(flag(decode, "--additional-config"))["tt_plugin"]["pool"] == "cross_layer"
    assert decode.env["HAWK_NPU"] == "simulated"
    assert "HAWK_NPU" not in prefill.env
    assert prefill.env["OMP_NUM_THREADS"] == "1"
    assert flag(prefill, "--block-size") == "128"
    assert flag(decode, "--block-size") == "64"
    assert "--enforce-eager" in prefill.argv
    assert flag(router, "--prefill") == "http://127.0.0.1:8100"
    assert flag(router, "--decode") == "http://127.0.0.1:8200"


def test_arguments_become_flags() -> None:
    given = {"max_model_len": 4096, "enforce-eager": True, "enable-prefix-caching": False, "x": [1, "a b"]}
    assert commands.flags(given) == [
        *("--max-model-len", "4096"),
        "--enforce-eager",
        "--no-enable-prefix-caching",
        *("--x", '[1, "a b"]'),
    ]


def test_an_environment_section_overrides_the_common_one() -> None:
    config = deployment.parse(changed("decode.env", {"OMP_NUM_THREADS": 2}))
    (prefill, decode), _ = commands.process_stages(config, "m")
    assert (prefill.env["OMP_NUM_THREADS"], decode.env["OMP_NUM_THREADS"]) == ("1", "2")


def test_the_printed_command_does_the_same_in_a_shell() -> None:
    show = "import os, sys; print(os.environ['WORDS'], sys.argv[1:])"
    argv = (sys.executable, "-c", show, "serve", "--config", '{"a": "it\'s $HOME"}', "--flag", "--n", "1")
    spec = ProcessSpec(name="x", argv=argv, env={"WORDS": 'two "words"'})
    text = commands.shell_text(spec)
    printed = subprocess.run(["sh", "-c", text], capture_output=True, text=True, check=True).stdout
    assert printed == f'two "words" {list(argv[3:])}\n'
    assert shlex.split(text.replace("\\\n", ""))[1:] == list(argv)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("0.0.0.0", "http://127.0.0.1:1"),
        ("::1", "http://[::1]:1"),
        ("::", "http://[::1]:1"),
        ("h", "http://h:1"),
    ],
)
def test_urls_reach_a_listening_host(host: str, expected: str) -> None:
    assert deployment.url(host, 1) == expected
