"""What tells weights apart without reading them all: digests of samples of a model's or an adapter's files.

A digest rests on what both sides can see: tensor names, types, shapes and some bytes of each.  Paths and the way a
checkpoint is split into files are left out, since two machines rarely agree on them.  It tells other weights from
these (another training run, another model of the same shape), not one element that somebody changed by hand.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

from .errors import ConfigError, UnsupportedError

__all__ = ["AdapterDigests", "adapter_digest", "hub_snapshot", "model_weights_digest"]

_TENSOR_SAMPLE = 4 << 10
_FILE_SAMPLE = 64 << 10
# All tensors of a dense model; of a large mixture of experts all K and V projections and every n-th of the rest.
_MOST_SAMPLES = 1024
_MOST_HEADER_BYTES = 100 << 20  # the safetensors format's own limit

# Separate and fused K and V projections, as the model families name them (c_attn: GPT-2, Wqkv: MPT, wk: Mistral).
_KV_NAMES = re.compile(r"(^|[._])(k_proj|v_proj|key|value|wk|wv|[kv]_lin|\w*qkv\w*|query_key_value|kv_proj|c_attn)\.")
# What trainers leave beside a model; vLLM does not load them either.
_NOT_WEIGHTS = frozenset({"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt"})
# Formats of vLLM's --load-format that read the model directory's files.
_FILE_FORMATS = frozenset(
    {"auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "pt", "npcache", "mistral", "bitsandbytes"}
    | {"runai_streamer", "runai_streamer_sharded", "sharded_state"}
)
_SAME_ID = "Set model_id to the same value on both sides, as long as both serve the same weights."


def model_weights_digest(model: str, revision: str | None, load_format: str, cache: str | None = None) -> str:
    """16 hex digits for the weights that vLLM loads for ``model``: a directory, or a hub id at ``revision``.

    ``load_format`` and ``cache`` are vLLM's ``--load-format`` and ``--download-dir``.  UnsupportedError where the
    weights cannot be seen: nothing would then tell two models of one shape apart.
    """
    if load_format not in _FILE_FORMATS:
        raise UnsupportedError(
            "a fingerprint of this model's weights",
            reason="they do not come from files of the model's directory",
            got=f"load format {load_format!r}",
            fix=_SAME_ID,
        )
    directory = Path(model) if Path(model).is_dir() else hub_snapshot(model, revision, cache)
    files = _weight_files(directory, load_format) if directory is not None else []
    if not files:
        where = f"nothing in the hub's cache for {model!r}" if directory is None else f"none in {directory}"
        raise UnsupportedError(
            "a fingerprint of this model's weights",
            reason="HAWK cannot see them on this machine",
            expected="*.safetensors, *.bin or *.pt files",
            got=where,
            fix=_SAME_ID,
        )
    return _digest(files)


def hub_snapshot(repo: str, revision: str | None, cache: str | None = None) -> Path | None:
    """Directory of ``repo`` at ``revision`` in the local hub cache; None if it is not there.  Downloads nothing."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repo, revision=revision, cache_dir=cache, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def adapter_digest(directory: Path) -> str | None:
    """16 hex digits for a LoRA adapter: its configuration and weights.  None if ``directory`` holds no weights.

    OSError or ConfigError if its files cannot be read.
    """
    files = _weight_files(directory, "auto")
    if not files:
        return None
    config: Any = {}
    if (directory / "adapter_config.json").is_file():
        try:
            config = json.loads((directory / "adapter_config.json").read_bytes())
        except ValueError as error:
            raise ConfigError(f"{directory / 'adapter_config.json'} is not JSON", got=str(error)) from None
    if isinstance(config, dict):
        config.pop("base_model_name_or_path", None)  # a path of the machine that trained it
    text = json.dumps(config, sort_keys=True) + _digest(files)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class AdapterDigests:
    """Digests of the adapters that requests name, each computed once.  One scheduler side owns one; not thread-safe.

    vLLM loads an adapter once for each id, so the digest is kept for an id and path.  ``snapshot`` finds a hub id's
    directory on this machine.
    """

    _MOST = 1024

    def __init__(self, snapshot: Callable[[str, str | None], Path | None] = hub_snapshot) -> None:
        self._snapshot = snapshot
        self._known: OrderedDict[tuple[int, str], str] = OrderedDict()

    def of(self, adapter_id: int, path: str, reload: bool = False) -> str:
        """The adapter's digest; its path as text where its files cannot be seen, which is asked again next time.

        ``reload``: vLLM loads the adapter anew under its old id.
        """
        key = (adapter_id, path)
        if reload:
            self._known.pop(key, None)
        digest = self._known.get(key)
        if digest is None:
            digest = self._look(path)
            if digest is None:
                return path
            self._known[key] = digest
            if len(self._known) > self._MOST:
                self._known.popitem(last=False)
        return digest

    def _look(self, path: str) -> str | None:
        local = Path(path).expanduser()
        try:
            directory = local if local.is_dir() else self._snapshot(path, None)
            return adapter_digest(directory) if directory is not None else None
        except (OSError, ConfigError):
            # vLLM reports an adapter that cannot be read to whoever asked for it; the engine goes on.
            return None


def _weight_files(directory: Path, load_format: str) -> list[Path]:
    """The files that vLLM loads, of one kind."""
    tensors = sorted(directory.glob("*.safetensors"))
    consolidated = [path for path in tensors if path.name.startswith("consolidated")]
    if load_format == "mistral" and consolidated:
        return consolidated
    if tensors and load_format not in ("pt", "npcache"):
        # Mistral's repositories hold the weights twice, and not every machine fetched both.
        return _indexed(directory, [path for path in tensors if path not in consolidated]) or tensors
    for pattern in ("*.pt",) if load_format == "pt" else ("*.bin", "*.pt"):
        files = [path for path in sorted(directory.glob(pattern)) if path.name not in _NOT_WEIGHTS]
        if files:
            return files
    return []


def _indexed(directory: Path, files: list[Path]) -> list[Path]:
    """Those of ``files`` that the checkpoint's index names; all if it has no index."""
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return files
    try:
        named = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(
            f"{index} cannot be read", expected="JSON with a weight_map", fix="Fetch the model again."
        ) from None
    return [path for path in files if path.name in named]


def _digest(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    if files[0].suffix == ".safetensors":
        _hash_tensors(digest, [tensor for path in files for tensor in _tensors(path)])
    else:
        _hash_files(digest, files)
    return digest.hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    path: Path
    kind: str  # dtype and shape
    begin: int  # in bytes, from the file's start
    size: int  # in bytes


def _tensors(path: Path) -> Iterable[_Tensor]:
    """The tensors that a safetensors file's header lists: its length in 8 bytes, the header as JSON, the data."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header: Any = json.loads(file.read(length)) if length <= _MOST_HEADER_BYTES else None
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                yield _Tensor(name, path, f"{entry['dtype']}{entry['shape']}", 8 + length + begin, end - begin)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(
            f"{path} is not a safetensors file",
            expected="a header that lists its tensors",
            fix="Fetch the model again; a pointer of git-lfs is not the file itself.",
        ) from None


def _hash_tensors(digest: Any, tensors: list[_Tensor]) -> None:
    """Every tensor's name, type and shape, and bytes from the middle of as many as the bound allows."""
    tensors.sort(key=lambda tensor: (tensor.name, tensor.path.name))
    for tensor in tensors:
        digest.update(f"{tensor.name}\0{tensor.kind}\0".encode())
    chosen = tensors
    if len(tensors) > _MOST_SAMPLES:
        kv = _spread([tensor for tensor in tensors if _KV_NAMES.search(tensor.name)], _MOST_SAMPLES // 2)
        taken = set(kv)
        chosen = kv + _spread([tensor for tensor in tensors if tensor not in taken], _MOST_SAMPLES - len(kv))
    samples: dict[_Tensor, bytes] = {}
    for path, own in groupby(sorted(chosen, key=lambda tensor: tensor.path), lambda tensor: tensor.path):
        with path.open("rb") as file:
            for tensor in own:
                samples[tensor] = _middle(file, tensor.begin, tensor.size, _TENSOR_SAMPLE)
    # In the order of the names, not of the files: a checkpoint that was split elsewhere is the same.
    for tensor in chosen:
        digest.update(samples[tensor])


def _hash_files(digest: Any, files: Sequence[Path]) -> None:
    """Files without a header to read: size, start, middle and end.  A torch file ends with checksums of its tensors."""
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(_FILE_SAMPLE))
            digest.update(_middle(file, 0, size, _FILE_SAMPLE))
            file.seek(max(0, size - _FILE_SAMPLE))
            digest.update(file.read(_FILE_SAMPLE))


def _middle(file: BinaryIO, begin: int, size: int, most: int) -> bytes:
    """Up to ``most`` bytes around the middle of ``size`` bytes at ``begin``."""
    file.seek(begin + max(0, size - most) // 2)
    return file.read(min(size, most))


def _spread(tensors: Sequence[_Tensor], most: int) -> list[_Tensor]:
    """At most ``most`` of ``tensors``, evenly spread."""
    if len(tensors) <= most:
        return list(tensors)
    return [tensors[n * len(tensors) // most] for n in range(most)]
