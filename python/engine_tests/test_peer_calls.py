# SPDX-License-Identifier: Apache-2.0
"""The calls of FlashInfer and FlashMLA in an engine's sources, against the signatures of libmla's drop-ins.

A function that a drop-in has must take what the engine passes: install_as would bring the engine's call there.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# vLLM hands FlashMLA's functions out by a module of its own.
PLACES = {"flashinfer": "libmla.flashinfer", "vllm.v1.attention.ops.flashmla": "libmla.flash_mla"}


def engine() -> Path:
    """The folder of the engine that is installed here."""
    installed = {distribution.metadata["Name"]: distribution for distribution in importlib.metadata.distributions()}
    name = next(name for name in ("vllm", "sglang") if name in installed)
    return Path(str(installed[name].locate_file(name)))


def drop_in(module: str) -> Any:
    """libmla's module in the place of a peer's, or None."""
    for place, own in PLACES.items():
        if module == place or module.startswith(f"{place}."):
            try:
                return importlib.import_module(own + module.removeprefix(place))
            except ModuleNotFoundError:
                return None
    return None


def functions(tree: ast.Module) -> dict[str, Callable[..., Any]]:
    """What a source calls the drop-ins' functions and classes that it imports from the peers."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            own = drop_in(node.module)
            for alias in node.names:
                if callable(getattr(own, alias.name, None)):
                    found[alias.asname or alias.name] = getattr(own, alias.name)
    return found


def calls(tree: ast.Module) -> Iterator[tuple[ast.Call, Callable[..., Any]]]:
    """Calls by an imported name, and calls as flashinfer.module.function."""
    named = functions(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id in named:
            yield node, named[node.func.id]
        elif isinstance(node.func, ast.Attribute):
            module, _, name = ast.unparse(node.func).rpartition(".")
            function = getattr(drop_in(module), name, None) if module.startswith("flashinfer") else None
            if callable(function):
                yield node, function


def why_not(call: ast.Call, function: Callable[..., Any]) -> str | None:
    """Why the function does not take the arguments of a call; None if it does, as far as the source says."""
    parameters = inspect.signature(function).parameters.values()
    names = {parameter.name for parameter in parameters}
    unknown = [word.arg for word in call.keywords if word.arg is not None and word.arg not in names]
    if unknown and not any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters):
        return f"unknown {', '.join(unknown)}"
    by_position = [parameter for parameter in parameters if parameter.kind == parameter.POSITIONAL_OR_KEYWORD]
    open_ended = any(isinstance(argument, ast.Starred) for argument in call.args) or any(
        parameter.kind == parameter.VAR_POSITIONAL for parameter in parameters
    )
    if not open_ended and len(call.args) > len(by_position):
        return f"{len(call.args)} arguments by position"
    return None


def test_the_drop_ins_take_what_the_engine_passes() -> None:
    seen, refused = set(), []
    for path in sorted(engine().rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "flashinfer" not in text and "flash_mla" not in text:
            continue
        for call, function in calls(ast.parse(text)):
            seen.add(getattr(function, "__name__", str(function)))
            reason = why_not(call, function)
            if reason is not None:
                refused.append(f"{path}:{call.lineno}: {ast.unparse(call.func)}: {reason}")
    assert not refused, "\n".join(refused)
    # Those that both engines call in one way or another: the search finds them.
    assert {"trtllm_batch_decode_with_kv_cache_mla", "BatchMLAPagedAttentionWrapper"} <= seen, seen


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("from flashinfer import merge_state as m\nm(1, 2, 3, 4)", None),
        ("from flashinfer.cascade import merge_state\nmerge_state(1, 2, 3, 4, 5)", "5 arguments by position"),
        ("import flashinfer\nflashinfer.cascade.merge_state(*x, s=1)", "unknown s"),
        ("from vllm.v1.attention.ops.flashmla import flash_mla_with_kvcache as f\nf(q=1, new=2)", "unknown new"),
    ],
)
def test_the_search_itself(source: str, reason: str | None) -> None:
    ((call, function),) = calls(ast.parse(source))
    assert why_not(call, function) == reason
