"""What the overlay relies on in Tenstorrent's vLLM plugin: names, signatures and orders of calls, nothing of its text.

Recorded from tenstorrent/vllm-tt-plugin at e3fc849 (2026-08-21, for vLLM 0.25.1).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Method:
    """``parameters``: after self or cls; those in ``optional`` have defaults, and others may follow with defaults."""

    module: str
    owner: str
    name: str
    parameters: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


METHODS = (
    Method("platform", "TTPlatform", "check_and_update_config", ("vllm_config",)),
    Method("scheduler", "TTScheduler", "schedule", optional=("throttle_prefills",)),
    Method("scheduler", "TTScheduler", "_schedule_prefill_only"),
    Method("scheduler", "TTScheduler", "_schedule_decode_only"),
    Method("scheduler", "TTScheduler", "_finalize_scheduler_output", ("scheduler_output",)),
    Method(
        "worker",
        "TTWorker",
        "__init__",
        ("vllm_config", "local_rank", "rank", "distributed_init_method"),
        ("is_driver_worker",),
    ),
    Method("worker", "TTWorker", "init_device"),
    Method("worker", "TTWorker", "load_model"),
    Method("worker", "TTWorker", "get_supported_tasks"),
    Method("worker", "TTWorker", "get_kv_cache_spec"),
    Method("worker", "TTWorker", "determine_available_memory"),
    Method("worker", "TTWorker", "initialize_from_config", ("kv_cache_config",)),
    Method("worker", "TTWorker", "compile_or_warm_up_model"),
    Method("worker", "TTWorker", "execute_model", ("scheduler_output",)),
    Method("worker", "TTWorker", "sample_tokens", ("grammar_output",)),
    Method("worker", "TTWorker", "check_health"),
    Method("model_runner", "TTModelRunner", "execute_model", ("scheduler_output",)),
)

BASES = {
    ("platform", "TTPlatform"): ("Platform", "CpuPlatform"),  # the stand-in's is vLLM's CPU platform
    ("scheduler", "TTScheduler"): ("AsyncScheduler",),
    ("worker", "TTWorker"): ("WorkerBase",),
}

# Attributes of self that each class sets somewhere.
ATTRIBUTES = {
    ("worker", "TTWorker"): ("mesh_device", "device", "model_runner"),
    ("model_runner", "TTModelRunner"): ("model", "kv_caches"),
}

# Calls on self.model that the runner makes, and keys of the arguments that the overlay changes or reads.
MODEL_CALLS = ("allocate_kv_cache", "prefill_forward", "decode_forward")
MODEL_KEYS = ("page_table", "kv_cache")


@dataclass(frozen=True)
class Source:
    """The package ``vllm_tt_plugin`` in the folder ``root``, read and not imported."""

    root: Path

    def tree(self, module: str) -> ast.Module:
        return ast.parse((self.root / f"{module}.py").read_text())

    def cls(self, module: str, name: str) -> ast.ClassDef:
        return next(n for n in self.tree(module).body if isinstance(n, ast.ClassDef) and n.name == name)

    def method(self, module: str, owner: str, name: str) -> ast.FunctionDef:
        found = [n for n in self.cls(module, owner).body if isinstance(n, ast.FunctionDef) and n.name == name]
        if not found:
            raise LookupError(f"{module}.{owner} has no {name}")
        return found[0]


def signature_fault(source: Source, method: Method) -> str | None:
    """What is different about ``method``, or None."""
    try:
        found = source.method(method.module, method.owner, method.name).args
    except (LookupError, StopIteration):
        return f"{method.module}.{method.owner}.{method.name} is not there"
    names = [a.arg for a in found.args][1:]
    required = names[: len(names) - len(found.defaults)]
    expected = [*method.parameters, *method.optional]
    if tuple(required) != method.parameters or names[: len(expected)] != expected:
        return f"{method.owner}.{method.name}: expected {expected}, got {names} ({len(required)} without default)"
    return None


def attributes_set(source: Source, module: str, owner: str) -> set[str]:
    """Attributes of self that are assigned in the class."""
    return {
        node.attr
        for node in ast.walk(source.cls(module, owner))
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def self_calls(function: ast.FunctionDef) -> list[str]:
    """Names of the methods of self that are called, in order of the text."""
    calls = [
        (node.lineno, node.col_offset, node.func.attr)
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "self"
    ]
    return [name for *_, name in sorted(calls)]


def returns(function: ast.FunctionDef) -> Iterator[ast.expr | None]:
    return (node.value for node in ast.walk(function) if isinstance(node, ast.Return))


def calls_on_model(source: Source) -> set[str]:
    """Methods of a ``model`` attribute that any module calls."""
    return {
        node.func.attr
        for path in source.root.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Attribute)
        and node.func.value.attr == "model"
    }


def keywords(source: Source) -> set[str]:
    """Keyword arguments and string keys of dict displays, of all modules."""
    found: set[str] = set()
    for path in source.root.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Dict):
                found |= {k.value for k in node.keys if isinstance(k, ast.Constant) and isinstance(k.value, str)}
            if isinstance(node, ast.keyword) and node.arg:
                found.add(node.arg)
    return found
