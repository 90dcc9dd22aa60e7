# SPDX-License-Identifier: Apache-2.0
"""Tests files that nothing here runs: forms of issues, the Dockerfile, and what names the version."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FORMS = sorted(path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_forms_of_issues_are_as_github_takes_them(path: Path) -> None:
    form: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert form["name"] and form["description"] and form["body"]
    assert set(form) <= {"name", "description", "labels", "body"}
    ids = [part["id"] for part in form["body"]]
    assert len(ids) == len(set(ids)) and all(re.fullmatch(r"[A-Za-z0-9_-]+", one) for one in ids)
    for part in form["body"]:
        assert part["type"] in ("textarea", "input", "dropdown") and part["attributes"]["label"]
        assert set(part) <= {"type", "id", "attributes", "validations"}
        assert part.get("validations", {"required": True}) == {"required": True}
        assert ("options" in part["attributes"]) == (part["type"] == "dropdown")


def test_commands_that_forms_name_exist() -> None:
    from libmla import cli

    tool = (ROOT / "tools" / "mla").rglob("*.cpp")
    commands = set(re.findall(r'add_subcommand\(\s*"([a-z-]+)"', "".join(path.read_text("utf-8") for path in tool)))
    assert "info" in commands
    for path in [*FORMS, ROOT / ".github" / "SECURITY.md"]:
        named = set(re.findall(r"`libmla ([a-z-]+)", path.read_text(encoding="utf-8")))
        assert named and named <= commands | set(cli._OWN_COMMANDS)


def test_the_dockerfile_copies_what_is_there_and_installs_nvcc_as_ci_does() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    for copied in re.findall(r"^COPY (?!--from)(\S+) ", text, re.MULTILINE):
        assert (ROOT / copied).exists(), copied
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    (keyring,) = set(re.findall(r"https://\S+keyring\S+\.deb", text))
    assert keyring in workflow
    (cuda,) = re.findall(r"^ARG CUDA=(\S+)$", text, re.MULTILINE)
    packages = [package.replace("${CUDA}", cuda) for package in re.findall(r"cuda-\S+-\${CUDA}", text)]
    assert packages and all(package in workflow for package in packages)
    archs = re.search(
        r"set\(mla_usual_archs ([\d ]+)\)", (ROOT / "cmake" / "MlaCuda.cmake").read_text(encoding="utf-8")
    )
    assert archs and f'ARG MLA_CUDA_ARCHS="{archs[1].replace(" ", ";")}"' in text


def test_what_names_the_version_names_the_same() -> None:
    """That of CMakeLists.txt: the newest in the changelog, and what the examples ask for."""
    text = (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
    (version,) = re.findall(r"project\(libmla VERSION ([0-9.]+)", text)
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## ([0-9.]+) ", changelog, re.MULTILINE)[0] == version
    minor = version.rpartition(".")[0]
    for page in ("docs/cpp.md", *(f"examples/{name}/CMakeLists.txt" for name in ("c", "find_package", "mpi"))):
        asked = re.findall(r"find_package\(libmla ([0-9.]+)", (ROOT / page).read_text(encoding="utf-8"))
        assert asked == [minor], page
