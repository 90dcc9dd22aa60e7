#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that the documentation holds together.

    check_docs.py [ROOT]       prints every violation; exit status 1 if there is one
    check_docs.py --self-test  plants one violation of every rule in a tree of its own and expects each to be caught

1. A relative link leads to a file or folder that exists, and its #anchor to a heading there.
2. A path of a page (docs/....md) in any other file, a comment say, exists.
3. Every page under docs is linked from another page.
4. README.md and the pages of docs/kernels have at most 150 lines.
"""

import pathlib
import re
import sys
import tempfile

SKIPPED_FOLDERS = {".git", "build", "out", "__pycache__", "third_party"}
SOURCE_SUFFIXES = {".h", ".cpp", ".c", ".cu", ".cuh", ".py", ".sh", ".cmake", ".txt", ".yml", ".yaml", ".toml"}
MOST_LINES = 150

LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\"")
PAGE = re.compile(r"\bdocs/[\w/-]+\.md\b")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def anchors(text):
    """Returns the anchors that GitHub makes of a page's headings."""
    found = set()
    for heading in re.findall(r"^#+ +(.*)$", FENCE.sub("", text), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        copies = sum(1 for other in found if re.fullmatch(re.escape(anchor) + r"(-\d+)?", other))
        found.add(f"{anchor}-{copies}" if copies else anchor)
    return found


def links_of(text):
    for groups in LINK.findall(FENCE.sub(lambda block: "\n" * block.group().count("\n"), text)):
        yield next(group for group in groups if group)


def check_links(root, path, text, linked):
    for link in links_of(text):
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        to = (path.parent / target).resolve() if target else path
        if not to.exists() or not to.is_relative_to(root):
            yield f"{path.relative_to(root)}: dead link: {link}"
            continue
        if to != path:
            linked.add(to)
        if anchor and to.suffix == ".md" and anchor not in anchors(to.read_text(encoding="utf-8")):
            yield f"{path.relative_to(root)}: no such heading: {link}"


def files_of(root):
    for path in sorted(root.rglob("*")):
        if path.is_file() and not SKIPPED_FOLDERS & {*path.relative_to(root).parts[:-1]}:
            yield path


def check_tree(root):
    root = root.resolve()
    found, linked, pages = [], set(), []
    for path in files_of(root):
        name = path.relative_to(root).as_posix()
        if path.suffix == ".md":
            pages.append(path)
            text = path.read_text(encoding="utf-8")
            found += check_links(root, path, text, linked)
            if (name == "README.md" or name.startswith("docs/kernels/")) and text.count("\n") > MOST_LINES:
                found.append(f"{name}: {text.count(chr(10))} lines, at most {MOST_LINES}")
        elif path.suffix in SOURCE_SUFFIXES and path.name != pathlib.Path(__file__).name:
            text = path.read_text(encoding="utf-8")
            found += [f"{name}: no such page: {page}" for page in PAGE.findall(text) if not (root / page).exists()]
    # The site's own pages are listed in its contents.
    found += [
        f"{path.relative_to(root)}: no page links to it"
        for path in pages
        if path.relative_to(root).parts[0] == "docs" and path not in linked and path.parent != root / "docs/site"
    ]
    return found


PLANTED = {
    "docs/a.md": ("[one](missing.md)\n", "dead link: missing.md"),
    "docs/b.md": ("# Two words, `code`\n[one](#two-words)\n", "no such heading: #two-words"),
    "docs/c.md": ("[out](../../elsewhere.md)\n", "dead link: ../../elsewhere.md"),
    "docs/d.md": ('<picture><source srcset="img/x.svg"></picture>\n', "dead link: img/x.svg"),
    "docs/e.md": ("![drawing](img/y.svg)\n", "dead link: img/y.svg"),
    "docs/orphan.md": ("nobody knows me\n", "no page links to it"),
    "docs/kernels/long.md": ("line\n" * 151, "151 lines, at most 150"),
    "src/a.cpp": ("// docs/kernels/gone.md\n", "no such page: docs/kernels/gone.md"),
}
INNOCENT = {
    "README.md": "".join(f"[x]({name})\n" for name in ("docs/a.md", "docs/b.md", "docs/c.md", "docs/d.md", "docs/e.md"))
    + "[x](docs/fine.md) [y](docs/fine.md#two-words-code) [z](docs/kernels/long.md)\n",
    "docs/fine.md": "# Two words, `code`\n[up](../README.md) [web](https://example.org/none)\n```\n[no](link.md)\n```\n",
    "src/fine.cpp": "// docs/fine.md\n",
}


def self_test():
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for name, text in {**{name: text for name, (text, _) in PLANTED.items()}, **INNOCENT}.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text, encoding="utf-8")
        found = check_tree(root)
    expected = [f"{name}: {message}" for name, (_, message) in PLANTED.items()]
    return [f"not caught: {line}" for line in expected if line not in found] + [
        f"wrongly reported: {line}" for line in found if line not in expected
    ]


def main():
    if sys.argv[1:] == ["--self-test"]:
        found = self_test()
    else:
        found = check_tree(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).parents[1])
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
