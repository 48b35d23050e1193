"""Prints docs/configuration.md, made from the configuration's types:

python -m hawk_connector.cli.config_reference > docs/configuration.md
"""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec

from hawk_connector.config import DecodeConfig, HawkConfig, PrefillConfig, describe_type, field_types

_HEAD = """\
# Configuration

<!-- Made by `python -m hawk_connector.cli.config_reference`. Change hawk_connector/config.py instead. -->

These keys go into `kv_connector_extra_config` of vLLM's `--kv-transfer-config`:

```
--kv-transfer-config '{"kv_connector": "HawkConnector", "kv_role": "kv_consumer",
                       "kv_connector_extra_config": {"peers": ["127.0.0.1:18550"]}}'
```

They are checked once, at start. An unknown key is an error that names the nearest right one; a key of the
other side, a value of another type or out of its limits, and values that contradict are errors too. Units
are in the names: `_s` is seconds, `_bytes` is bytes.
"""

_TAIL = """\
## Keys for other machines

The side channel listens on loopback unless it has CURVE keys. To let two machines talk:

1. Make a pair on each: `hawk keys FILE` writes it (readable by its owner alone) and prints the public key.
2. Write a known keys file on each, one `name key` a line. On the decode side the name of a prefill side is
   its `host:port`, or its `host`; the names of sides that connect to this one are yours to choose. Lines
   that begin with `#` are comments.
3. Set `curve_key_file` and `curve_known_keys_file` on both, and `side_channel_host` to the address to
   listen on.

A side that is removed from the file cannot connect any more; a connection that it has already stays.

**The KV itself is not encrypted and not guarded by these keys.** Mooncake listens on every interface,
whatever address it is given, and serves the send buffer to whoever connects. Let a firewall keep its ports
(15000 to 17000, or `MC_MIN_RPC_PORT` to `MC_MAX_RPC_PORT`) to the two sides.

## Environment

HAWK sets `MC_FORCE_TCP` (for `protocol: tcp`) and `MC_TRANSFER_TIMEOUT` (from `transfer_timeout_s`) for
Mooncake, and `MC_LOG_LEVEL=ERROR` unless it is set. Mooncake's other variables are left as they are.
"""


def reference() -> str:
    """The whole page, as Markdown."""
    common = set(HawkConfig.__struct_fields__)
    parts = [
        _HEAD,
        "## Both sides\n",
        _table(HawkConfig, set()),
        "## Prefill side (`kv_role: kv_producer`)\n",
        _table(PrefillConfig, common),
        "## Decode side (`kv_role: kv_consumer`)\n",
        _table(DecodeConfig, common),
        _TAIL,
    ]
    return "\n".join(parts)


def _table(struct: type[HawkConfig], without: set[str]) -> str:
    kinds, meanings = field_types(struct), _meanings(struct)
    rows = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for field in msgspec.structs.fields(struct):
        if field.name not in without:
            kind = describe_type(kinds[field.name]).replace("'", '"')
            rows.append(f"| `{field.name}` | {kind} | `{json.dumps(field.default)}` | {meanings[field.name]} |")
    return "\n".join(rows) + "\n"


def _meanings(struct: type[HawkConfig]) -> dict[str, str]:
    hints: dict[str, Any] = get_type_hints(struct, include_extras=True)
    return {
        name: " ".join(
            meta.description
            for meta in get_args(hint)[1:]
            if isinstance(meta, msgspec.Meta) and meta.description is not None
        )
        for name, hint in hints.items()
        if get_origin(hint) is Annotated
    }


if __name__ == "__main__":
    sys.stdout.write(reference())
