# SPDX-License-Identifier: Apache-2.0
"""Trains a small language model with Multi-head Latent Attention on Python sources, byte by byte.

    python examples/tiny-mla/train.py --out tiny                      # six minutes on a GPU
    python examples/tiny-mla/train.py --out tiny --shape deepseek-v4  # the attention of DeepSeek V4
    python examples/tiny-mla/train.py --out tiny --minutes 240        # on a CPU
    python examples/tiny-mla/train.py --out tiny --text ~/my-sources --pattern '*.c'

The result is a Hugging Face folder: config.json, model.safetensors (bf16), a tokenizer. An interrupted training goes on
where its checkpoint file stands when the same command is given again. `--minutes` counts the time spent training, over
all parts; the learning rate follows that clock, so a slower machine gets a shorter but complete schedule. `--steps`
instead of it makes a schedule that the machine's speed does not change.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from byte_tokenizer import BOS, EOS, PAD
from byte_tokenizer import write as write_tokenizer
from shapes import SHAPES, Sizes, new_model
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from libmla._text.corpus import Split, documents, standard_library

PROMPTS = ("def ", "import os\n\n", "class Test", '"""Support for ')


@dataclass(frozen=True)
class Settings:
    """Holds what a training must not change halfway."""

    shape: str
    seed: int
    context: int
    batch: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    latent: int
    learning_rate: float
    weight_decay: float
    dropout: float

    @property
    def sizes(self) -> Sizes:
        return Sizes(*(getattr(self, name) for name in Sizes.__dataclass_fields__))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for the model")
    add("--text", type=Path, default=standard_library(), help="folder of sources")
    add("--pattern", default="*.py", help="which of its files")
    add("--minutes", type=float, default=6.0, help="time to train")
    add("--steps", type=int, help="train for so many steps instead")
    add("--checkpoint", type=Path, help="file to resume from (default: checkpoint.pt beside the model)")
    add("--checkpoint-seconds", type=float, default=60.0, help="how often it is written")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda, cuda:1, cpu")
    add("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available(), help="use torch.compile")
    add("--threads", type=int, help="CPU threads")
    add("--report", type=int, default=20, help="how many times the held-out loss is measured on the way")
    add("--held-out-bytes", type=int, default=1 << 18, help="size of its sample")
    add("--shape", choices=list(SHAPES), default="deepseek-v3", help="whose attention")
    add("--seed", type=int, default=0)
    add("--context", type=int, default=2048, help="bytes in a window")
    add("--batch", type=int, default=64 if torch.cuda.is_available() else 2, help="windows in a step")
    add("--layers", type=int, default=4)
    add("--hidden", type=int, default=256)
    add("--intermediate", type=int, help="of the MLP, or of each expert (default: what makes 14 MB)")
    add("--heads", type=int, default=4)
    add("--latent", type=int, default=512, help="channels of a cached row")
    add("--learning-rate", type=float, default=3e-3)
    add("--weight-decay", type=float, default=0.1)
    add("--dropout", type=float, default=0.03, help="share of what layers add that is dropped while training")
    return parser.parse_args()


def stream(root: Path, pattern: str, split: Split, limit: int | None = None) -> tuple[Tensor, int]:
    """Returns all texts of a split as tokens, BOS and EOS around each, and the number of texts.

    `limit` is in bytes, rounded up to a text.
    """
    parts: list[bytes] = []
    size = 0
    for _, text in documents(root, split, pattern):
        parts.append(text.encode())
        size += len(parts[-1])
        if limit is not None and size >= limit:
            break
    edge = torch.tensor([BOS, EOS], dtype=torch.int16)
    pieces = [(edge[:1], torch.frombuffer(bytearray(part), dtype=torch.uint8).short(), edge[1:]) for part in parts]
    return torch.cat([piece for three in pieces for piece in three]), len(parts)


def windows(tokens: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Returns inputs and targets [len(starts), context]. Every window begins with BOS, as texts do at inference."""
    targets = tokens[starts[:, None] + torch.arange(context, device=tokens.device)].long()
    inputs = targets.roll(1, dims=1)
    inputs[:, 0] = BOS
    return inputs, targets


def optimizer_for(model: PreTrainedModel, settings: Settings) -> torch.optim.AdamW:
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    vectors = [weight for weight in model.parameters() if weight.dim() == 1]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    fused = next(model.parameters()).is_cuda
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95), fused=fused)


class Trainer:
    """Holds a model in training, and what a checkpoint keeps of it."""

    def __init__(self, settings: Settings, device: torch.device, use_compile: bool) -> None:
        torch.manual_seed(settings.seed)
        self.settings = settings
        self.device = device
        self.model = new_model(settings.shape, settings.sizes, settings.dropout).to(device)
        self.optimizer = optimizer_for(self.model, settings)
        self.loss = torch.compile(self._loss) if use_compile else self._loss
        self.step = 0
        self.seconds = 0.0
        self.best = (math.inf, 0)
        self.best_weights: dict[str, Tensor] = {}

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean bits per token."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            logits = self.model(input_ids=inputs, use_cache=False).logits
        return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten()) / math.log(2)

    def train(self, tokens: Tensor, progress: float) -> Tensor:
        """Does one step, and returns the loss, unsynchronized.

        Windows and dropout depend on the seed and the step's number only.
        """
        settings = self.settings
        warm_up, least = 0.02, 0.01
        decay = least + (1 - least) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learning_rate * min(1.0, (progress + 1e-4) / warm_up) * decay
        torch.manual_seed(settings.seed * 1_000_003 + self.step + 1)
        starts = torch.randint(len(tokens) - settings.context, (settings.batch,)).to(self.device)
        self.model.train()
        loss = self.loss(*windows(tokens, starts, settings.context))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss.detach()

    @torch.no_grad()
    def measure(self, tokens: Tensor) -> float:
        """Returns bits per byte over consecutive windows. (The ends of files count as bytes here: one in thousands.)"""
        settings = self.settings
        self.model.eval()
        starts = torch.arange(0, len(tokens) - settings.context + 1, settings.context, device=self.device)
        losses = [self._loss(*windows(tokens, some, settings.context)) * len(some) for some in starts.split(8)]
        return float(torch.stack(losses).sum() / len(starts))

    def keep_if_best(self, held_out: float) -> None:
        if held_out < self.best[0]:
            self.best = (held_out, self.step)
            self.best_weights = {
                name: weight.detach().cpu().clone() for name, weight in self.model.state_dict().items()
            }

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "settings": asdict(self.settings),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": (self.step, self.seconds, self.best),
            "best_weights": self.best_weights,
        }
        part = path.with_suffix(".part")
        torch.save(state, part)
        os.replace(part, path)

    def resume(self, path: Path) -> None:
        """Raises ValueError if the checkpoint is of other settings."""
        state = torch.load(path, map_location=self.device, weights_only=True)
        ours, theirs = asdict(self.settings), state["settings"]
        if changed := [
            f"{name}: expected {theirs.get(name)}, got {ours[name]}" for name in ours if ours[name] != theirs.get(name)
        ]:
            raise ValueError(f"'{path}' is of another training ({'; '.join(changed)}); remove it to start anew")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds, self.best = state["progress"]
        self.best_weights = {name: weight.cpu() for name, weight in state["best_weights"].items()}


def run(trainer: Trainer, train: Tensor, held_out: Tensor, given: argparse.Namespace, checkpoint: Path) -> None:
    """Trains to the end of the schedule, printing and saving on the way."""
    settings = trainer.settings
    limit = given.minutes * 60

    def progress() -> float:
        return trainer.step / given.steps if given.steps else trainer.seconds / limit

    def clock() -> Iterator[float]:
        """Yields the seconds since the last time."""
        last = time.monotonic()
        while True:
            now = time.monotonic()
            last, passed = now, now - last
            yield passed

    first = trainer.step
    ticks = clock()
    next(ticks)
    reported, saved, since_report = progress(), trainer.seconds, (first + 1, trainer.seconds)
    while progress() < 1:
        loss = trainer.train(train, progress())
        if trainer.device.type == "cuda" and (trainer.step % 10 == 0 or trainer.step == first + 1):
            torch.cuda.synchronize(trainer.device)
        passed = next(ticks)
        if trainer.step > first + 1:  # the first step compiles, which is no time of training
            trainer.seconds += passed
        done = progress()
        if done >= 1 or done >= reported + 1 / given.report:
            measured = trainer.measure(held_out)
            trainer.keep_if_best(measured)
            steps, seconds = trainer.step - since_report[0], max(trainer.seconds - since_report[1], 1e-9)
            speed = steps * settings.batch * settings.context / seconds
            left = trainer.seconds * (1 / done - 1) if done else math.inf
            print(
                f"step {trainer.step:6d}  {min(done, 1):4.0%}  bits/byte: train {float(loss):.3f} held-out {measured:.3f}  "
                f"{speed / 1e3:,.1f} kB/s  {left / 60:.1f} min left",
                flush=True,
            )
            next(ticks)
            reported, since_report = done, (trainer.step, trainer.seconds)
        if trainer.seconds - saved >= given.checkpoint_seconds:
            trainer.save(checkpoint)
            next(ticks)
            saved = trainer.seconds
    trainer.save(checkpoint)


def write_model(trainer: Trainer, held_out: Tensor, out: Path) -> None:
    """Writes the best weights as a Hugging Face folder, and measures them once more as they are written."""
    model = trainer.model
    model.load_state_dict(trainer.best_weights)
    rounded = {name: weight.to(torch.bfloat16).to(weight.dtype) for name, weight in model.state_dict().items()}
    model.load_state_dict(rounded)
    measured = trainer.measure(held_out)
    model.to(torch.bfloat16).set_attn_implementation(SHAPES[trainer.settings.shape].run_by)
    model.generation_config = GenerationConfig(
        bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD, do_sample=True, temperature=0.7, top_p=0.95
    )
    model.save_pretrained(out)
    write_tokenizer(out, trainer.settings.context)
    size = sum(weight.numel() for weight in model.parameters())
    best, step = trainer.best
    print(f"'{out}': {size / 1e6:.1f} M weights; held-out bits/byte {best:.4f} at step {step}, {measured:.4f} in bf16")


@torch.no_grad()
def print_samples(out: Path, device: torch.device, seed: int, length: int = 300) -> None:
    """Lets the model that was written go on with a few prompts."""
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto").to(device).eval()
    for prompt in PROMPTS:
        torch.manual_seed(seed)
        tokens = torch.tensor([[BOS, *prompt.encode()]], device=device)
        made = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=length, min_new_tokens=64)
        text = bytes(token for token in made[0].tolist() if token < 256).decode(errors="replace")
        print(f"{'-' * 20} {prompt!r}\n{text}", flush=True)


def main() -> None:
    given = arguments()
    if given.threads:
        torch.set_num_threads(given.threads)
    torch.set_float32_matmul_precision("high")
    given.intermediate = given.intermediate or SHAPES[given.shape].intermediate
    names = Settings.__dataclass_fields__
    settings = Settings(**{name: getattr(given, name) for name in names})
    checkpoint = given.checkpoint or given.out / "checkpoint.pt"
    train, files = stream(given.text, given.pattern, "train")
    held_out, held_out_files = stream(given.text, given.pattern, "held-out", given.held_out_bytes)
    trainer = Trainer(settings, torch.device(given.device), given.compile)
    print(
        f"train: {files} files, {len(train) / 1e6:.1f} MB; held-out sample: {held_out_files} files, {len(held_out)} bytes"
    )
    if checkpoint.exists():
        trainer.resume(checkpoint)
        print(f"resumed from '{checkpoint}': step {trainer.step}, {trainer.seconds / 60:.1f} minutes")
    run(trainer, train.to(trainer.device), held_out.to(trainer.device), given, checkpoint)
    write_model(trainer, held_out.to(trainer.device), given.out)
    print_samples(given.out, trainer.device, given.seed)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        raise SystemExit(f"train.py: {error}") from None
