"""``python -m hawk_connector.self_test HOST tcp|rdma|local``: runs it and prints the report as one line of JSON."""

from __future__ import annotations

import sys
from typing import Literal, cast

import msgspec

from hawk_connector.errors import ConfigError, HawkError
from hawk_connector.transport.engine import TransferEngine
from hawk_connector.transport.local import LocalEngine
from hawk_connector.transport.mooncake import MooncakeEngine

from .carrier import carrier
from .parcel import SelfTestParcel
from .report import Report

Protocol = Literal["tcp", "rdma", "local"]

_SEED = 7
_TIMEOUT_S = 10


def run(host: str, protocol: Protocol) -> Report:
    """Two engines, one with the send buffer and one with the banks; the second reads from the first."""
    parcel = SelfTestParcel(_SEED)
    segments = parcel.segments()
    engines: list[TransferEngine] = []
    transport = "unknown"
    try:
        for memory in (parcel.sent, parcel.banks):
            engines.append(_engine(host, protocol))
            engines[-1].register(memory.ctypes.data, memory.nbytes)
        source, target = engines
        target.read(source.session, segments)
        transport = "local" if protocol == "local" else carrier()
        checked = parcel.check()
    except HawkError as error:
        return Report(str(error), transport, parcel.packer, segments.nbytes, segments.count)
    finally:
        for engine in engines:
            engine.close()
    return Report("", transport, parcel.packer, segments.nbytes, segments.count, checked)


def _engine(host: str, protocol: Protocol) -> TransferEngine:
    if protocol == "local":
        return LocalEngine(timeout_s=_TIMEOUT_S, readable=True)
    return MooncakeEngine(host, protocol=protocol, timeout_s=_TIMEOUT_S)


def main() -> None:
    host, protocol = sys.argv[1:]
    if protocol not in ("tcp", "rdma", "local"):
        raise ConfigError("the protocol", expected="tcp, rdma or local", got=repr(protocol))
    report = run(host, cast(Protocol, protocol))
    print(msgspec.json.encode(report).decode(), flush=True)


if __name__ == "__main__":
    main()
