# SPDX-License-Identifier: Apache-2.0
"""Makes a tokenizer of bytes as a Hugging Face folder: token b is byte b, and three special tokens follow."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD = 256, 257, 258
SPECIAL = {BOS: "<|bos|>", EOS: "<|eos|>", PAD: "<|pad|>"}
VOCABULARY = 264  # rounded up to a multiple of 8, which matrix products like


def _characters() -> list[str]:
    """Returns the character that stands for each byte: itself if printable, else one from U+0100 on (GPT-2's table)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (chr(code) for code in range(0x100, 0x200))
    return [chr(byte) if byte in printable else next(others) for byte in range(256)]


def byte_tokenizer(context: int) -> PreTrainedTokenizerFast:
    """Returns the tokenizer, which puts BOS before every text. `context` is the model's longest text in tokens."""
    vocabulary = {character: byte for byte, character in enumerate(_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL.values()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL[BOS]} $A", special_tokens=[(SPECIAL[BOS], BOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL[BOS],
        eos_token=SPECIAL[EOS],
        pad_token=SPECIAL[PAD],
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


def write(folder: Path, context: int) -> None:
    byte_tokenizer(context).save_pretrained(folder)
