# SPDX-License-Identifier: Apache-2.0
"""Tests that the modules of the package import one another in one direction only.

Imports inside of functions count: they run, later, and hide a circle as long as nobody asks for it. Imports under
TYPE_CHECKING do not: they never run, and an annotation may name whoever uses the module (an operation its Plan).
"""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path

import pytest

import libmla

ROOT = Path(libmla.__file__).parents[1]


def modules_of(package: Path) -> dict[str, Path]:
    names = {file: file.relative_to(package.parent).with_suffix("").parts for file in package.rglob("*.py")}
    return {".".join(parts).removesuffix(".__init__"): file for file, parts in names.items()}


def imported(name: str, file: Path, modules: dict[str, Path]) -> set[str]:
    """Returns the modules of the package that a module imports."""
    package = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                visit(other)
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found.update(f"{base}.{alias.name}" if f"{base}.{alias.name}" in modules else base for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(file.read_text(encoding="utf-8")))
    return (found & set(modules)) - {name}


def circle(modules: dict[str, Path]) -> list[str]:
    """Returns one circle of imports; empty: there is none."""
    graph = {name: imported(name, file, modules) for name, file in modules.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_no_imports_go_in_a_circle() -> None:
    modules = modules_of(ROOT / "libmla")
    assert {"libmla", "libmla.ops", "libmla.torch_ops", "libmla.flashinfer.mla"} <= set(modules)
    assert {"libmla._attention", "libmla.torch_ops"} <= imported("libmla.ops", modules["libmla.ops"], modules)
    assert circle(modules) == []


@pytest.mark.parametrize(
    "line, found",
    [
        ("from . import b", True),
        ("from .b import f", True),
        ("import p.b", True),
        ("from p import b", True),
        ("def g():\n    from .b import f", True),
        ("if TYPE_CHECKING:\n    from .b import f", False),
        ("import os", False),
    ],
)
def test_a_planted_circle_is_found(line: str, found: bool, tmp_path: Path) -> None:
    package = tmp_path / "p"
    package.mkdir()
    for name, text in {"__init__": "", "a": line, "b": "from .a import g"}.items():
        (package / f"{name}.py").write_text(text, encoding="utf-8")
    assert (set(circle(modules_of(package))) == {"p.a", "p.b"}) == found
