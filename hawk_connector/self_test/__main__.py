"""``python -m hawk_connector.self_test HOST tcp|rdma``: runs it and prints the report as one line of JSON."""

from __future__ import annotations

import sys
from typing import Literal, cast

import msgspec

from hawk_connector.errors import ConfigError, HawkError
from hawk_connector.transport.engine import TransferEngine
from hawk_connector.transport.mooncake import MooncakeEngine

from .carrier import carrier
from .parcel import SelfTestParcel
from .report import Report

_SEED = 7
_TIMEOUT_S = 10


def run(host: str, protocol: Literal["tcp", "rdma"]) -> Report:
    """Two engines, one with the send buffer and one with the banks; the second reads from the first."""
    parcel = SelfTestParcel(_SEED)
    segments = parcel.segments()
    engines: list[TransferEngine] = []
    transport = "unknown"
    try:
        for memory in (parcel.sent, parcel.banks):
            engines.append(MooncakeEngine(host, protocol=protocol, timeout_s=_TIMEOUT_S))
            engines[-1].register(memory.ctypes.data, memory.nbytes)
        source, target = engines
        target.read(source.session, segments)
        transport = carrier()
        checked = parcel.check()
    except HawkError as error:
        return Report(str(error), transport, parcel.packer, segments.nbytes, segments.count)
    finally:
        for engine in engines:
            engine.close()
    return Report("", transport, parcel.packer, segments.nbytes, segments.count, checked)


def main() -> None:
    host, protocol = sys.argv[1:]
    if protocol not in ("tcp", "rdma"):
        raise ConfigError("the protocol", expected="tcp or rdma", got=repr(protocol))
    report = run(host, cast(Literal["tcp", "rdma"], protocol))
    print(msgspec.json.encode(report).decode(), flush=True)


if __name__ == "__main__":
    main()
