# SPDX-License-Identifier: Apache-2.0
"""Which part of a cached row minds 8 bits: the latent channels, or the rotary ones?

    python examples/tiny-mla/sensitivity.py --model examples/tiny-mla

Rounds one part to e4m3 in the float32 model, whose attention is left as transformers has it, and measures bits per byte
of held-out text. Any model that keeps its latents apart from its rotary keys will do.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from libmla._text.corpus import documents, standard_library
from libmla._text.measure import sample, score

PARTS = {"latent channels": (True, False), "rotary channels": (False, True), "both": (True, True)}


def rounded(values: torch.Tensor) -> torch.Tensor:
    """Rounds values to e4m3, with a scale of 1, and returns them in their own type."""
    return values.clamp(-448, 448).to(torch.float8_e4m3fn).to(values.dtype)


@contextmanager
def rounding(model: Any, latent: bool, rotary: bool) -> Iterator[None]:
    """Within it, these parts of every row are rounded before they are attended."""
    layers = [module for module in model.modules() if hasattr(module, "expand_kv")]
    for layer in layers:
        original = layer.expand_kv

        def expand(ckv: torch.Tensor, kpe: torch.Tensor, original: Any = original) -> Any:
            return original(rounded(ckv) if latent else ckv, rounded(kpe) if rotary else kpe)

        layer.expand_kv = expand
    try:
        yield
    finally:
        for layer in layers:
            del layer.expand_kv


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--text", type=Path, default=standard_library(), help="file or folder of held-out text")
    parser.add_argument("--bytes", type=int, default=16384, help="of that text")
    given = parser.parse_args()
    torch.set_grad_enabled(False)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    text = sample((one for _, one in documents(given.text, "held-out")), tokenizer, 2048, given.bytes)
    exact = score(model, text).bits_per_byte(text)
    print(f"exact            {exact:.4f} bits/byte")
    for name, parts in PARTS.items():
        with rounding(model, *parts):
            bits = score(model, text).bits_per_byte(text)
        print(f"{name:15}  {bits:.4f} bits/byte  {100 * (bits / exact - 1):+.2f} %")


if __name__ == "__main__":
    main()
