"""A random Llama of some megabytes, for tests that need vLLM but no meaning.

Same parameters, same weights: they come from a seed, so the directory can be cached by its parameters.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

CORPUS = (
    "The hawk sees the field from above and falls on what it wants in one long dive. "
    "A cache holds keys and values; one side writes them, the other side reads them. "
    "def move(blocks, banks): return [banks[i % len(banks)] for i in blocks]\n"
    "Seven banks, eight banks or twelve banks: the page tells which, and nothing else does. "
)
SPECIAL_TOKENS = ("<s>", "</s>", "<pad>")


@dataclass(frozen=True, slots=True)
class TinyLlama:
    """Parameters of the model; ``heads`` query heads must be a multiple of ``kv_heads``."""

    kv_heads: int = 4
    head_dim: int = 64
    layers: int = 4
    heads: int = 8
    hidden: int = 256
    vocab: int = 384
    positions: int = 4096
    seed: int = 0

    @property
    def name(self) -> str:
        return (
            f"tiny-llama-L{self.layers}-q{self.heads}-kv{self.kv_heads}-d{self.head_dim}"
            f"-h{self.hidden}-v{self.vocab}-p{self.positions}-s{self.seed}"
        )

    def directory(self, cache: Path) -> Path:
        """The model's directory under ``cache``; written if it is not there, in one rename."""
        target = cache / self.name
        if target.is_dir():
            return target
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".tiny-", dir=cache) as scratch:
            staged = Path(scratch) / "model"
            self._save(staged)
            try:
                staged.rename(target)
            except OSError:  # another worker was faster
                if not target.is_dir():
                    raise
        return target

    def _save(self, directory: Path) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        tokenizer = _byte_level_tokenizer(self.vocab)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = LlamaForCausalLM(
                LlamaConfig(
                    vocab_size=self.vocab,
                    hidden_size=self.hidden,
                    intermediate_size=2 * self.hidden,
                    num_hidden_layers=self.layers,
                    num_attention_heads=self.heads,
                    num_key_value_heads=self.kv_heads,
                    head_dim=self.head_dim,
                    max_position_embeddings=self.positions,
                    bos_token_id=0,
                    eos_token_id=1,
                    pad_token_id=2,
                    tie_word_embeddings=False,
                    # The usual 0.02 gives almost flat logits in so small a model, and ties decide the text.
                    initializer_range=0.1,
                )
            )
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)


def _byte_level_tokenizer(vocab: int):  # type: ignore[no-untyped-def]
    """A byte-level BPE tokenizer of exactly ``vocab`` entries, trained on CORPUS; every text has tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    if tokenizer.get_vocab_size() != vocab:
        # The model could then answer with ids that no text has.
        raise ValueError(f"CORPUS yields {tokenizer.get_vocab_size()} tokens, vocab={vocab} asked for")
    bos, eos, pad = SPECIAL_TOKENS
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=pad)
    wrapped.chat_template = (
        "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    return wrapped
