"""The recorded contract against the stand-in, and against the real plugin where the user names its source."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tt_plugin.silicon import contract

STAND_IN = Path(__file__).parent / "stand_in"
VARIABLE = "HAWK_TT_PLUGIN_SOURCE"


def real() -> Path:
    given = os.environ.get(VARIABLE)
    if not given:
        pytest.skip(f"{VARIABLE} does not name a checkout of vllm-tt-plugin; the recorded contract is checked instead")
    found = [p for p in (Path(given), Path(given) / "src" / "vllm_tt_plugin", Path(given) / "vllm_tt_plugin")]
    return next(p for p in found if (p / "worker.py").is_file())


@pytest.fixture(params=["recorded", "real"])
def source(request: pytest.FixtureRequest) -> contract.Source:
    return contract.Source(STAND_IN / "vllm_tt_plugin" if request.param == "recorded" else real())


def test_methods_have_their_signatures(source: contract.Source) -> None:
    assert [fault for method in contract.METHODS if (fault := contract.signature_fault(source, method))] == []


def test_classes_have_their_bases(source: contract.Source) -> None:
    for (module, name), bases in contract.BASES.items():
        found = [base.id for base in source.cls(module, name).bases if isinstance(base, ast.Name)]
        assert found[:1] and found[0] in bases, f"{module}.{name}: {found}"


def test_attributes_are_set(source: contract.Source) -> None:
    for (module, name), attributes in contract.ATTRIBUTES.items():
        assert set(attributes) <= contract.attributes_set(source, module, name), f"{module}.{name}"


def test_the_model_is_called_by_these_names_and_keys(source: contract.Source) -> None:
    assert set(contract.MODEL_CALLS) <= contract.calls_on_model(source)
    assert set(contract.MODEL_KEYS) <= contract.keywords(source)


def test_every_step_of_the_scheduler_is_finalized_after_it_was_tried(source: contract.Source) -> None:
    schedule = source.method("scheduler", "TTScheduler", "schedule")
    for value in contract.returns(schedule):
        assert isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute), ast.dump(schedule)
        assert value.func.attr == "_finalize_scheduler_output"
    order = contract.self_calls(schedule)
    assert order.index("_schedule_prefill_only") < len(order) - 1 - order[::-1].index("_schedule_decode_only")


def test_the_platform_leaves_a_chosen_worker_and_sets_the_scheduler(source: contract.Source) -> None:
    text = ast.unparse(source.method("platform", "TTPlatform", "check_and_update_config"))
    assert "worker_cls == 'auto'" in text
    assert "scheduler_config.scheduler_cls =" in text
    assert "vllm_tt_plugin.scheduler.TTScheduler" in (source.root / "platform.py").read_text()


@pytest.mark.vllm
def test_the_overlays_classes_are_made_on_the_real_plugins() -> None:
    """Imports the overlay against the real source, beside the stand-in for ttnn where that is not installed."""
    root = real()
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]; "
        "from tt_plugin.vllm.silicon import platform, scheduler, worker; "
        "print(*[c.__mro__[1].__module__ for c in (platform.SiliconPlatform, scheduler.SiliconScheduler)], "
        "worker.TTWorker.__module__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(root.parent), str(STAND_IN)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[-3:] == ["vllm_tt_plugin.platform", "vllm_tt_plugin.scheduler", "vllm_tt_plugin.worker"]
