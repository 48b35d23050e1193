"""The documentation against the code: names, fields, links, commands, keys, imports."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import typer.main
import yaml

from hawk_connector.cli import commands, deployment
from hawk_connector.cli.main import app
from hawk_connector.config import DecodeConfig, PrefillConfig
from hawk_connector.prefill.metadata import RankHandshake
from hawk_connector.prefill.scheduler import PrefillScheduler
from hawk_connector.protocol import messages
from hawk_connector.protocol.admission import VerdictKind
from hawk_connector.protocol.link import LinkState
from hawk_connector.protocol.load import FetchState
from hawk_connector.protocol.ticket import HAWK_KEY, TransferParams, parse_params
from hawk_connector.protocol.transfer import ParcelState
from hawk_connector.series import SERIES
from tt_plugin.config import LandingChoice, NpuConfig, SiliconConfig

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
PROTOCOL = (ROOT / "docs" / "protocol.md").read_text()
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()

Rows = list[list[str]]


def table(text: str, heading: str) -> Rows:
    """Cells of the table whose first heading is ``heading``; of all such tables, one after another."""
    rows: Rows = []
    inside = False
    for line in text.splitlines():
        if not line.startswith("|"):
            inside = False
            continue
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        cells = [cell.strip("| ") for cell in cells]
        if cells[0] == heading:
            inside = True
        elif inside and not cells[0].startswith("---"):
            rows.append(cells)
    assert rows, f"no table {heading!r}"
    return rows


def code(text: str) -> list[str]:
    """Every `word` in backticks."""
    return re.findall(r"`([^`\n]+)`", text)


def blocks(text: str) -> list[str]:
    """The contents of every fenced block."""
    return re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S)


# --- protocol.md


def types_of(union: Any) -> list[type[msgspec.Struct]]:
    return list(get_args(union))


@pytest.mark.parametrize(
    "message",
    types_of(messages.DecodeMessage) + types_of(messages.PrefillMessage),
    ids=lambda message: str(message.__name__),
)
def test_every_message_is_described_with_its_fields(message: type[msgspec.Struct]) -> None:
    rows = {row[0]: row for row in table(PROTOCOL, "message")}
    row = rows.get(f"{message.__name__} `{message.__struct_config__.tag}`")
    assert row is not None, f"docs/protocol.md has no {message.__name__}"
    assert code(row[1]) == list(message.__struct_fields__), f"fields of {message.__name__} in docs/protocol.md"


def test_no_message_is_described_that_does_not_exist() -> None:
    known = types_of(messages.DecodeMessage) + types_of(messages.PrefillMessage)
    assert len(table(PROTOCOL, "message")) == len(known)


def test_reasons_and_states_are_those_of_the_code() -> None:
    assert [code(row[0])[0] for row in table(PROTOCOL, "reason")] == list(get_args(messages.GoneReason))
    verdicts, states = table(PROTOCOL, "verdict"), table(PROTOCOL, "state")
    assert [row[0] for row in verdicts] == [kind.name for kind in VerdictKind]
    assert [row[0] for row in states] == [state.name for state in [*ParcelState, *LinkState]]
    held = {row[0]: row[1] == "yes" for row in states[: len(ParcelState)]}
    assert held == {state.name: state.needs_blocks for state in ParcelState}
    assert [state.name for state in FetchState if state.name not in PROTOCOL] == []
    assert f"version {messages.PROTOCOL_VERSION}." in PROTOCOL
    assert messages.MAX_MESSAGE_BYTES == 1 << 20 and "at most 1 MiB" in PROTOCOL


def test_the_parameters_shown_are_those_that_prefill_writes_and_decode_reads() -> None:
    shown = [json.loads(block) for block in blocks(PROTOCOL) if block.startswith("{")]
    request, response = shown
    parsed = parse_params(response)
    assert isinstance(parsed, TransferParams)
    scheduler = PrefillScheduler("engine")
    scheduler.set_ranks({0: RankHandshake(parsed.ranks[0].address, parsed.ranks[0].epoch)})
    scheduler.allocated("r", request, "0" * 64, 2, [1])
    scheduler.build_step([("r", [1], 2)], [], [])
    _, written = scheduler.finished("r", ended_well=True)
    assert written is not None
    assert list(written) == list(response)
    assert list(written[HAWK_KEY]) == list(response[HAWK_KEY]) == [code(row[0])[0] for row in table(PROTOCOL, "field")]
    same = ("do_remote_prefill", "do_remote_decode", "remote_host", "remote_port", "tp_size")
    assert {key: written[key] for key in same} == {key: response[key] for key in same}


def test_deadlines_have_the_defaults_of_the_configuration() -> None:
    defaults = {f.name: f.default for struct in (PrefillConfig, DecodeConfig) for f in msgspec.structs.fields(struct)}
    owners = {"prefill": PrefillConfig.__struct_fields__, "decode": DecodeConfig.__struct_fields__}
    for _, key, default, side, _ in table(PROTOCOL, "what has it"):
        (name,) = code(key)
        assert defaults[name] == float(default), name
        assert name in owners[side]


def test_rules_are_ten_and_their_tests_exist() -> None:
    rules = table(PROTOCOL, "rule")
    assert [row[0].split(".")[0] for row in rules] == [str(n) for n in range(1, 11)]
    for row in rules:
        named = code(row[1])
        assert named, f"no test is named for rule {row[0]}"
        for place in named:
            path, _, name = place.partition("::")
            source = (ROOT / path).read_text()
            assert re.search(rf"^def {name}\(", source, re.M), place


# --- architecture.md


def rooms() -> Iterator[tuple[str, list[Path]]]:
    """Each room and its files: packages of the first level, and modules beside them."""
    for package in ("hawk_connector", "tt_plugin"):
        for path in sorted((ROOT / package).iterdir()):
            if path.is_dir() and (path / "__init__.py").exists():
                yield f"{package}.{path.name}", sorted(path.rglob("*.py"))
            elif path.suffix == ".py" and path.name != "__init__.py":
                yield f"{package}.{path.stem}", [path]


def imports(path: Path) -> Iterator[list[str]]:
    """Every import in the file as a list of names, relative ones resolved."""
    package = list(path.relative_to(ROOT).with_suffix("").parts)[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            whole = base + (node.module.split(".") if node.module else [])
            yield from ([*whole, alias.name] for alias in node.names)


OUTSIDE = {"torch", "vllm", "zmq", "numba", "mooncake", "triton", "ttnn"}


def test_rooms_import_what_the_architecture_says_and_nothing_else() -> None:
    allowed: dict[str, tuple[set[str], set[str]]] = {}
    for line in ARCHITECTURE.splitlines():
        if line.startswith(("| `hawk_connector.", "| `tt_plugin.")):
            room, _, inside, outside = (cell.strip() for cell in line.strip("|").split("|"))
            names = {name if "." in name else f"hawk_connector.{name}" for name in code(inside)}
            allowed[code(room)[0]] = names, {name for name in outside.split(", ") if name}
    found = dict(rooms())
    assert sorted(allowed) == sorted(found)
    for room, paths in found.items():
        inside, outside = allowed[room]
        for path in paths:
            for names in imports(path):
                where = ".".join(names[:2])
                if names[0] in OUTSIDE:
                    assert names[0] in outside, f"{path} imports {names[0]}"
                elif names[0] in ("hawk_connector", "tt_plugin") and where in found and where != room:
                    assert where in inside, f"{path} imports {where}"


def test_floors_have_an_order() -> None:
    """Each room of the table imports only rooms above it in the table, so that none imports an upper floor."""
    seen: set[str] = set()
    for line in ARCHITECTURE.splitlines():
        if line.startswith(("| `hawk_connector.", "| `tt_plugin.")):
            room, _, inside, _ = (cell.strip() for cell in line.strip("|").split("|"))
            names = {name if "." in name else f"hawk_connector.{name}" for name in code(inside)}
            assert names <= seen, f"{room} imports {names - seen}, which stand below it"
            seen.add(code(room)[0])


# --- every page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", found.read_text(), re.M)
            assert anchor in [re.sub(r"[^\w\- ]", "", h).lower().replace(" ", "-") for h in headings], target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_exist(page: Path) -> None:
    known = ("hawk_connector", "tt_plugin")
    for name in code(page.read_text()):
        if re.fullmatch(r"[\w./-]+\.(py|md|yaml|svg)|(tests|configs|docs)/[\w./-]*", name):
            places = [ROOT / name, *(ROOT / package / name for package in known)]
            # The one file that a page names to say that it is not there.
            assert any(place.exists() for place in places) == (name != "decode/quarantine.py"), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_keys_that_are_named_exist(page: Path) -> None:
    text = page.read_text()
    group = typer.main.get_command(app)
    known = group.commands  # type: ignore[attr-defined]
    planned = re.findall(r"- \*\*Not there yet:\*\*.*?(?=\n\n|\n- |\Z)", text, re.S)
    for part in planned:
        text = text.replace(part, "")
    for place in [*code(text), *blocks(text)]:
        for name in re.findall(r"^(?:\.venv/bin/)?hawk ([a-z][\w-]*)", place, re.M):
            assert name in known, f"hawk {name}"
        for name, rest in re.findall(r"^(?:\.venv/bin/)?hawk ([a-z][\w-]*)([^|#\n]*)", place, re.M):
            command = known[name]
            for word in rest.split()[:1]:
                command = getattr(command, "commands", {}).get(word, command)
            for option in re.findall(r" (--[a-z-]+)", rest):
                assert option in [o for p in command.params for o in p.opts], f"hawk {name}{rest}: {option}"
    fields = {name for message in types_of(messages.Message) for name in message.__struct_fields__}
    shown = {name for series in SERIES for name in (series.name, *series.exposed)}
    sides = (PrefillConfig, DecodeConfig, NpuConfig, SiliconConfig, LandingChoice)
    keys = {*(name for side in sides for name in side.__struct_fields__), *fields, *shown}
    for name in code(text):
        if re.fullmatch(r"[a-z]+(_[a-z]+)*_(s|bytes|file|port|host|hosts|threads|batch|tokens|peers|transfers)", name):
            assert name in keys, name


# --- README.md


def test_every_command_is_in_the_readme() -> None:
    group = typer.main.get_command(app)
    named = {code(row[0])[0].split()[1] for row in table(README.read_text(), "command")}
    assert named == set(group.commands)  # type: ignore[attr-defined]


def test_the_request_of_the_readme_fits_the_deployment_of_the_readme() -> None:
    text = README.read_text()
    (up,) = [block for block in blocks(text) if "hawk up" in block]
    config = deployment.load(ROOT / up.split()[-1])
    (curl,) = [block for block in blocks(text) if block.startswith("curl")]
    words = shlex.split(curl.replace("\\\n", " "))
    assert words[1] == f"{config.url}/v1/chat/completions"
    assert json.loads(words[words.index("-d") + 1])["model"] == config.public_model_name
    assert f"`serving {config.public_model_name}`" in text


@pytest.mark.parametrize("name", ["prefill", "decode", "router"])
def test_the_commands_for_real_hardware_are_those_that_hawk_prints(name: str) -> None:
    config = deployment.load(ROOT / "configs" / "gpu-tenstorrent.yaml")
    specs = [spec for stage in commands.process_stages(config, config.model) for spec in stage]
    (spec,) = [spec for spec in specs if spec.name == name]
    (block,) = [block for block in blocks(README.read_text()) if block.startswith(f"# {name}\n")]
    words = shlex.split(block.partition("\n")[2].replace("\\\n", " "))
    variables = [f"{key}={value}" for key, value in spec.env.items()]
    assert words == [*variables, Path(spec.argv[0]).name, *spec.argv[1:]]


def test_extras_targets_and_packages_of_the_readme_exist() -> None:
    text = README.read_text()
    project = (ROOT / "pyproject.toml").read_text()
    extras = re.findall(r"'\.\[([\w-]+)\]'", text)
    assert len(extras) == 3
    for extra in extras:
        assert re.search(rf"^{extra} = \[", project, re.M), extra
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"\bmake ([a-z]+)\b", "\n".join([*code(text), *blocks(text)])):
        assert re.search(rf"^{target}:", makefile, re.M), target
    setup = (ROOT / "scripts" / "setup.sh").read_text()
    (debian,) = re.findall(r"apt-get install -y (.+)", text)
    named = set(debian.split())
    wanted = set(re.findall(r'"(lib[a-z0-9]+)"[,}]', setup)) | {"build-essential"}
    assert wanted <= named


def test_deployments_of_the_readme_are_the_shipped_ones() -> None:
    named = {name for name in code(README.read_text()) if name.startswith("configs/") and name.endswith(".yaml")}
    assert named == {str(path.relative_to(ROOT)) for path in (ROOT / "configs").glob("*.yaml")}
    for name in named:
        assert yaml.safe_load((ROOT / name).read_text())["router"]
