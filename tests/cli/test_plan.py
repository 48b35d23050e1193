"""`hawk plan` as a user runs it, against published figures and the scalar oracle's counts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.oracle.scalar import Pool, expected_segments

pytestmark = pytest.mark.slow  # most of these start the command

LLAMA_70B = ("--model", "llama-3.1-70b", "--tp", "4", "--chips", "4", "--tokens", "1024", "--pool", "cross_layer")


def hawk(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hawk_connector.cli.main", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def plan(*words: str) -> dict[str, Any]:
    done = hawk("plan", *words, "--json")
    assert done.returncode == 0, done.stderr
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def config_file(directory: Path, **figures: Any) -> str:
    base = {"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512}
    path = directory / "config.json"
    path.write_text(json.dumps(base | figures))
    return str(path)


def test_llama_70b_in_scattered_blocks() -> None:
    """178,257,920 bytes: 167,772,160 elements of 17/16 bytes; a block is 174,080 bytes in every bank, K and V apart."""
    figures = plan(*LLAMA_70B, "--dtype", "bfp8", "--blocks", "scattered")
    assert figures["wire_bytes"] == 178_257_920
    assert figures["segments"] == 1_024
    assert figures["bytes_per_segment"] == 174_080
    assert figures["smallest_segment"] == figures["largest_segment"] == 174_080
    assert figures["bf16_wire_bytes"] == 335_544_320
    assert figures["eager"] is True
    assert figures["streams"] == 2 * 4 * 8  # parcels x chips x page classes
    assert [rank["segments"] for rank in figures["ranks"]] == [256] * 4
    assert [rank["chips"] for rank in figures["ranks"]] == [[0], [1], [2], [3]]


def test_llama_70b_in_consecutive_blocks_is_64_segments_a_parcel() -> None:
    figures = plan(*LLAMA_70B, "--dtype", "bfp8", "--blocks", "consecutive")
    assert figures["wire_bytes"] == 178_257_920
    assert [parcel["segments"] for parcel in figures["parcels"]] == [64, 64]
    assert [parcel["blocks"] for parcel in figures["parcels"]] == [8, 8]
    assert figures["segments"] == 128
    assert figures["bytes_per_segment"] == 8 * 174_080


def test_scattered_blocks_in_pools_of_one_layer_are_staged() -> None:
    """One parcel: 81,920 reads of 2,176 bytes into the pools, or a stream for each of 8 banks of 4 chips."""
    words = ("--model", "llama-3.1-70b", "--tp", "4", "--chips", "4", "--tokens", "1024")
    words += ("--parcel-tokens", "1024", "--parcel-bytes", str(1 << 30))
    figures = plan(*words, "--pool", "per_layer", "--blocks", "scattered")
    placed = {"choice": "staged", "reads": 32, "pool_reads": 81_920, "staged_reads": 32, "copies": 81_920}
    assert (figures["placement"], figures["bytes_per_segment"]) == (placed, 2_176)
    figures = plan(*words, "--pool", "cross_layer", "--blocks", "scattered")
    assert figures["placement"] == {**placed, "choice": "pool", "reads": 1_024, "pool_reads": 1_024, "copies": 1_024}
    assert plan("--model", "llama-3.1-8b", "--layout", "linear")["placement"] is None
    done = hawk("plan", *words, "--pool", "per_layer")
    assert "staged: 32 reads; 81,920 into the pools, or 32 into stages" in " ".join(done.stdout.split())


def test_descending_blocks_do_not_merge() -> None:
    assert plan(*LLAMA_70B, "--blocks", "descending")["segments"] == 1_024


def test_per_layer_pools_cost_a_read_for_every_layer() -> None:
    """81,920 reads of 2,176 bytes (as in tests/plan/test_segments.py), and what they cost on the link."""
    words = ("--model", "llama-3.1-70b", "--tp", "4", "--chips", "4", "--pool", "per_layer")
    figures = plan(*words, "--link-gbps", "100", "--read-us", "10")
    assert (figures["segments"], figures["bytes_per_segment"]) == (81_920, 2_176)
    assert figures["bytes_s"] == pytest.approx(178_257_920 * 8 / 100e9)
    assert figures["reads_s"] == pytest.approx(0.8192)
    assert figures["predicted_s"] == pytest.approx(figures["bytes_s"] + figures["reads_s"])
    assert sum(rank["predicted_s"] for rank in figures["ranks"]) == pytest.approx(figures["predicted_s"])


@pytest.mark.parametrize(
    ("device", "banks", "alignment"), [("blackhole-p100", 7, 64), ("wormhole-n150", 12, 32), ("blackhole-p150", 8, 64)]
)
@pytest.mark.parametrize(("blocks", "ids"), [("consecutive", range(1, 12)), ("scattered", range(1, 23, 2))])
def test_smollm2_is_counted_as_the_oracle_counts_it(
    device: str, banks: int, alignment: int, blocks: str, ids: range
) -> None:
    """7, 8 and 12 banks; U is 180 pages, no multiple of 7 or 8; 340 tokens are 11 blocks of 32, parcels of 4."""
    words = ("--model", "smollm2-135m", "--tokens", "340", "--block-size", "32", "--parcel-tokens", "128")
    figures = plan(*words, "--device", device, "--blocks", blocks)
    pool = Pool(
        kind="cross_layer",
        layers=30,
        heads=3,
        block_size=32,
        head_dim=64,
        banks=[0] * banks,
        buffer_address={"k": 0x200000, "v": 0x8000000},
        codec="bfp8",
        alignment=alignment,
    )
    assert figures["segments"] == expected_segments(pool, list(ids), chips=1, blocks_per_parcel=4)
    assert figures["wire_bytes"] == 11 * 2 * 180 * 1_088
    assert [parcel["blocks"] for parcel in figures["parcels"]] == [4, 4, 3]
    assert figures["largest_segment"] >= figures["bytes_per_segment"] >= figures["smallest_segment"]


def test_replicated_heads_are_sent_by_one_rank_and_land_on_every_chip() -> None:
    """3 KV heads: 6 ranks hold each of them twice, 6 chips too."""
    figures = plan("--model", "smollm2-135m", "--tp", "6", "--chips", "6", "--tokens", "64")
    assert [rank["chips"] for rank in figures["ranks"]] == [[0, 1], [], [2, 3], [], [4, 5], []]
    assert [rank["wire_bytes"] for rank in figures["ranks"]] == [2 * 30 * 2 * 4 * 1_088, 0] * 3


def test_a_send_buffer_that_holds_few_blocks_cuts_smaller_parcels() -> None:
    figures = plan(*LLAMA_70B, "--send-buffer-bytes", str(3 * 16 * 174_080))
    assert {parcel["blocks"] for parcel in figures["parcels"]} == {3, 1}
    assert figures["segments"] == 1_024


def test_decode_sides_with_different_layouts_are_packed_for_on_demand() -> None:
    words = ("--model", "llama-3.1-8b", "--device", "blackhole-p150", "--device", "blackhole-p100")
    figures = plan(*words)
    assert figures["eager"] is False
    assert "blackhole-p100" in figures["why"]
    assert figures["banks"] == 8


def test_nd_shards_put_a_block_of_a_layer_into_one_bank() -> None:
    """16 blocks x 80 layers x K, V x 4 chips; a run is a row's 16 tiles."""
    words = ("--model", "llama-3.1-70b", "--tp", "4", "--chips", "4", "--pool", "per_layer")
    figures = plan(*words, "--layout", "ttnn-nd-sharded")
    assert (figures["segments"], figures["bytes_per_segment"]) == (16 * 80 * 2 * 4, 16 * 1_088)


@pytest.mark.parametrize(("layout", "dtype"), [("ascend-310p", "fp16"), ("tpu-bf16", "bf16"), ("linear", "bf16")])
def test_one_region_is_one_segment_for_a_unit(layout: str, dtype: str) -> None:
    """Llama-3.1-8B: 16 blocks of 32 layers x 8 heads x 64 tokens x 128 dims of two bytes, K and V."""
    figures = plan("--model", "llama-3.1-8b", "--layout", layout)
    assert (figures["dtype"], figures["banks"], figures["segments"]) == (dtype, 1, 32)
    assert figures["bytes_per_segment"] == 32 * 8 * 64 * 128 * 2
    assert figures["wire_bytes"] == figures["bf16_wire_bytes"]


def test_padding_is_on_the_wire(tmp_path: Path) -> None:
    """head_dim 80 takes three tiles of 32; the KV itself has 80 dims."""
    figures = plan("--model", config_file(tmp_path, head_dim=80), "--tokens", "64", "--dtype", "bf16")
    assert figures["wire_bytes"] == 2 * 3 * 2 * 64 * 96 * 2
    assert figures["bf16_wire_bytes"] == 2 * 3 * 2 * 64 * 80 * 2


def test_a_config_file_is_read(tmp_path: Path) -> None:
    """hidden_size / heads where head_dim is not given; 3 layers x 2 heads x 64 dims x 64 tokens x K, V in fp32."""
    words = ("--tokens", "64", "--dtype", "fp32")
    figures = plan("--model", config_file(tmp_path), *words)
    assert (figures["layers"], figures["kv_heads"], figures["head_dim"]) == (3, 2, 64)
    assert figures["wire_bytes"] == 2 * 3 * 2 * 64 * 64 * 4
    other = plan("--model", config_file(tmp_path, head_dim=32), *words)
    assert other["wire_bytes"] == figures["wire_bytes"] // 2
    nested = {"text_config": {"num_key_value_heads": 4, "head_dim": 32}}
    assert plan("--model", str(Path(config_file(tmp_path, **nested)).parent), *words)["kv_heads"] == 4


def test_the_text_has_the_figures() -> None:
    done = hawk("plan", *LLAMA_70B)
    assert done.returncode == 0
    for figure in ("178,257,920", "335,544,320", "53.1%", "1,024, 174,080 bytes each", "eager", "25.6 ms"):
        assert figure in done.stdout


def test_neither_torch_nor_vllm_is_imported() -> None:
    code = (
        "import sys\nfrom hawk_connector.cli.main import app\n"
        "app(['plan', '--model', 'smollm2-135m', '--json'], standalone_mode=False)\n"
        "found = {'torch', 'vllm', 'matplotlib'} & set(sys.modules)\nassert not found, found"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


# ---- refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (("--model", "llama-3-70b"), ["'llama-3-70b' is no model known by name", "Did you mean 'llama-3.1-70b'?"]),
        (("--model", "smollm2-135m", "--layout", "ttnn"), ["layout 'ttnn'", "ttnn-interleaved"]),
        (("--model", "smollm2-135m", "--layout", "linear", "--dtype", "bfp8"), ["kv_dtype: ", "bfloat16"]),
        (("--model", "smollm2-135m", "--device", "p150"), ["'p150'", "Did you mean 'blackhole-p150'?"]),
        (
            ("--model", "llama-3.1-8b", "--tp", "3", "--chips", "5"),
            [
                "cannot be paired",
                "tensor_parallel_size: prefill side has 3 (rank 0), decode side has 8 KV heads",
                "chips: prefill side has 8 KV heads, decode side has 5 chips with",
            ],
        ),
        (("--model", "llama-3.1-8b", "--block-size", "24"), ["block_size: ", "multiple of 16"]),
        (
            ("--model", "llama-3.1-70b", "--send-buffer-bytes", "1000"),
            ["send_buffer_bytes: prefill side has 1000", "to at least 11141120"],
        ),
    ],
)
def test_what_cannot_be_is_said_with_code_2(words: tuple[str, ...], texts: list[str]) -> None:
    done = hawk("plan", *words, "--json")
    assert done.returncode == 2
    assert done.stdout == ""
    for text in texts:
        assert text in done.stderr


@pytest.mark.parametrize(
    ("figures", "text"),
    [
        ({"num_hidden_layers": "many"}, "num_hidden_layers: expected a whole number from 1 to 65536, got 'many'"),
        ({"hidden_size": None}, "hidden_size: expected a whole number from 1 to 65536, got nothing"),
        ({"hidden_size": 100}, "hidden_size 100 is no multiple of 8 heads"),
        ({"kv_lora_rank": 512}, "multi-head latent attention is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layers of type sliding_attention"),
    ],
)
def test_configs_without_plain_kv_are_refused(tmp_path: Path, figures: dict[str, Any], text: str) -> None:
    done = hawk("plan", "--model", config_file(tmp_path, **figures))
    assert done.returncode == 2
    assert text in done.stderr


def test_a_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    done = hawk("plan", "--model", str(tmp_path))
    assert done.returncode == 2
    assert "as JSON" in done.stderr
