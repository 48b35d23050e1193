"""`python -m hawk_connector.cli.gguf_to_hf FILE.gguf DIRECTORY`: a GGUF as a Hugging Face model directory.

The weights are de-quantised to float32 (a quantised value is exact in it); tokenizer and chat template come
along. A program of its own: torch and transformers stay out of the `hawk` command's process.
"""

from __future__ import annotations

import sys
from pathlib import Path


def convert(gguf: Path, destination: Path) -> None:
    """Writes config, weights (safetensors, float32), tokenizer and chat template into ``destination``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    model.save_pretrained(destination)
    tokenizer.save_pretrained(destination)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m hawk_connector.cli.gguf_to_hf FILE.gguf DIRECTORY")
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
