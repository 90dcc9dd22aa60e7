# SPDX-License-Identifier: Apache-2.0
"""Holds what the commands that run a model have in common: options, the model that they name, and where results go."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

    from ..context import Context

FAILED = 1
UNUSABLE_INPUT = 2

_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}


class UsageError(Exception):
    """What was asked for cannot be done; the message says what to change."""


class Place(NamedTuple):
    """Says where a model computes."""

    name: str  #: "cpu", "cuda:1", "emulated:sm90": as libmla names it
    device: torch.device  #: where its tensors are
    threads: int  #: 0: as many as the process may use

    def context(self, backend: str = "") -> Context:
        """Makes a context of libmla that computes there. Raises UsageError."""
        from .. import Context, UnsupportedError

        try:
            return Context(self.threads, backend=backend, device=self.name)
        except (UnsupportedError, ValueError) as error:
            raise UsageError(str(error)) from error


def add_model_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--model",
        required=True,
        metavar="FOLDER|OWNER/NAME",
        help="checkpoint as Hugging Face stores it, or its name on the hub, from where it is downloaded once",
    )
    add("--device", default="cpu", metavar="cpu|cuda[:N]", help="where to compute (default: cpu); or emulated:sm90")
    add("--dtype", choices=list(_DTYPES), help="of weights and activations (default: the checkpoint's)")
    add(
        "--num-threads",
        "--threads",
        dest="threads",
        type=_count,
        default=0,
        help="CPU threads (default: all that the process may use)",
    )
    add("--json", metavar="=FILE", help="write the results as JSON, --json=FILE to a file, --json to standard output")


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parses the arguments; `--json` takes its file only after `=`, as in every command, so that what follows it stays
    apart."""
    options = parser.parse_args(["--json=-" if one == "--json" else one for one in arguments])
    if options.json not in (None, "-") and not Path(options.json).parent.is_dir():
        parser.exit(UNUSABLE_INPUT, f"{parser.prog}: --json: cannot write to '{options.json}': no such folder\n")
    return options


def _count(text: str) -> int:
    value = int(text) if text.isascii() and text.isdigit() else -1
    if not 0 <= value < 1 << 31:
        raise argparse.ArgumentTypeError(f"expected a whole number, 0 or more, got '{text}'")
    return value


def positive(text: str) -> int:
    if not (value := _count(text)):
        raise argparse.ArgumentTypeError("expected 1 or more, got 0")
    return value


def require_transformers() -> None:
    """Raises UsageError where what runs models is not installed."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise UsageError(f"this needs torch and transformers ({error}): pip install 'libmla[transformers]'") from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_grad_enabled(False)


def place(options: argparse.Namespace) -> Place:
    """Returns where to compute, checked. Raises UsageError."""
    import torch

    name = options.device
    if options.threads:
        torch.set_num_threads(options.threads)
    if name == "cpu" or name.startswith("emulated:"):
        return Place(name, torch.device("cpu"), options.threads)
    kind, _, index = name.partition(":")
    if kind != "cuda" or not (index.isdigit() or name == "cuda"):
        raise UsageError(f"--device: expected cpu, cuda, cuda:N or emulated:ARCH, got '{name}'")
    if not torch.cuda.is_available():
        raise UsageError(
            f"--device: torch {torch.__version__} finds no GPU that it can use, got '{name}': use --device cpu, or "
            f"install a torch that is built with CUDA and an NVIDIA driver (`libmla info` says what is there)"
        )
    number = int(index or 0)
    if number >= torch.cuda.device_count():
        raise UsageError(f"--device: expected cuda:0 to cuda:{torch.cuda.device_count() - 1}, got '{name}'")
    return Place(f"cuda:{number}", torch.device("cuda", number), options.threads)


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Models that the wheel brings have the names that they have in the sources, as examples/tiny-mla.
_SHIPPED = Path(__file__).parents[1] / "share" / "libmla"
_HUB_FILES = ("*.json", "*.jinja", "*.model", "*.txt")


def folder_of(model: str, *, weights: bool = False) -> Path:
    """Returns the folder that `--model` names, which may be one of those that came with the package. Of a name on the
    Hugging Face hub that is one in the hub's cache, into which files are downloaded that are not there: the weights,
    which may take hours, only where they are asked for. Raises UsageError."""
    for folder in (Path(model), _SHIPPED / model):
        if folder.is_dir():
            return folder
    if not _HUB_NAME.fullmatch(model):
        raise UsageError(
            f"--model: expected a folder, or OWNER/NAME on the Hugging Face hub, got '{model}': there is none"
        )
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        files = [*_HUB_FILES, *(["*.safetensors"] if weights else [])]
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=files))
    except RepositoryNotFoundError as error:
        raise UsageError(
            f"--model: there is no folder '{model}', and on the Hugging Face hub no model of that name that you may "
            f"read (`hf auth login` for one that asks who you are)"
        ) from error
    except LocalEntryNotFoundError as error:
        raise UsageError(
            f"--model: there is no folder '{model}', and the Hugging Face hub cannot be reached from here: where it "
            f"can, run `hf download {model} --local-dir {model.partition('/')[2]}`, bring that folder here and name it"
        ) from error
    except OSError as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"--model: cannot download '{model}' from the Hugging Face hub: {reason}") from error


def tokenizer_of(folder: Path) -> Any:
    """Returns the folder's tokenizer. Raises UsageError."""
    from transformers import AutoTokenizer

    with _explained(folder, "a tokenizer"):
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def has_pool(config: Any) -> bool:
    """Returns whether a model of this config attends to a window and a compressed pool, as DeepSeek V4 does."""
    return bool(getattr(config.get_text_config(decoder=True), "compress_rates", None))


def config_of(folder: Path, need_latent: bool = True) -> Any:
    """Returns the folder's config; with `need_latent`, the model must have latent attention, or that of DeepSeek V4.
    Raises UsageError."""
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise UsageError(
            f"--model: expected a folder with config.json, model.safetensors and a tokenizer, got '{folder}'"
        )
    with _explained(folder, "a config"):
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    text = config.get_text_config(decoder=True)
    layers = getattr(text, "per_layer_config", None) or [text]
    if need_latent and not has_pool(config) and not any(getattr(layer, "kv_lora_rank", None) for layer in layers):
        raise UsageError(
            f"--model: expected one with multi-head latent attention (kv_lora_rank or compress_rates in its config: "
            f"DeepSeek V2 to V4, Kimi K2, GLM and their like), got {config.model_type} in '{folder}'"
        )
    return config


def load(folder: Path, where: Place, dtype: str | None) -> Any:
    """Returns the folder's model, for inference. Raises UsageError."""
    import torch
    from transformers import AutoModelForCausalLM

    kind = getattr(torch, _DTYPES[dtype]) if dtype else "auto"
    with _explained(folder, "a causal language model"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=kind, local_files_only=True)
    return model.to(where.device).eval()


@contextlib.contextmanager
def _explained(folder: Path, what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"--model: cannot read {what} from '{folder}': {reason}") from error


def write_json(document: Any, target: str) -> None:
    """Writes a document to a file, or to standard output for `-`. Raises UsageError."""
    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    if target == "-":
        sys.stdout.write(text)
        return
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--json: cannot write to '{target}': {error.strerror}") from error
