#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that the tests stand where the code that they test would make one look for them.

    check_tests.py [ROOT]       prints every violation; exit status 1 if there is one
    check_tests.py --self-test  plants one violation of every rule in a tree of its own and expects each to be caught

1. tests/X mirrors src/X, X of the root (tools/...) or the header include/mla/X.h; other folders are listed here with the
   reason.
2. A source with GoogleTest's tests is named <what>_test.cpp, and is among the sources of a program of its folder.
"""

import pathlib
import re
import sys
import tempfile

OTHER_FOLDERS = {
    "cuda/backends/nothing": "a backend that does next to nothing, which shows what a folder makes of one",
    "fuzz": "one program per fuzzer, with a sanitizer; what they feed crosses folders",
    "fuzz/corpus": "seeds of the fuzzers",
    "mpi": "runs examples/mpi with several processes",
    "ops": "whole operations through the public functions, on every backend",
    "package": "builds examples/find_package and examples/c with an installed libmla",
    "repository": "the tree itself, and builds of their own",
}
TEST = re.compile(r"^(TYPED_)?TEST(_P|_F)?\(", re.MULTILINE)


def is_mirrored(root, folder):
    return (root / "src" / folder).is_dir() or (root / folder).is_dir() or (root / f"include/mla/{folder}.h").is_file()


def check_folder(root, path):
    folder = path.relative_to(root / "tests").as_posix()
    if folder in OTHER_FOLDERS or folder.startswith("fuzz/corpus/"):
        return
    if not is_mirrored(root, folder):
        yield f"tests/{folder}: there is no src/{folder}, no {folder} and no include/mla/{folder}.h"


def check_source(root, path):
    name = path.relative_to(root).as_posix()
    if not TEST.search(path.read_text(encoding="utf-8")):
        return
    if not path.name.endswith("_test.cpp"):
        yield f"{name}: has tests, so its name ends in _test.cpp"
    lists = path.parent / "CMakeLists.txt"
    if not lists.is_file() or not re.search(rf"\b{re.escape(path.name)}\b", lists.read_text(encoding="utf-8")):
        yield f"{name}: its tests are in no program of its folder"


def check_tree(root):
    found = []
    for path in sorted((root / "tests").rglob("*")):
        if path.is_dir() and path.name != "__pycache__":
            found += check_folder(root, path)
        elif path.suffix in {".cpp", ".h", ".cu", ".cuh"}:
            found += check_source(root, path)
    unused = [folder for folder in OTHER_FOLDERS if not (root / "tests" / folder).is_dir()]
    return found + [f"tests/{folder}: {pathlib.Path(__file__).name} lists it, and there is none" for folder in unused]


PLANTED = {
    "tests/cuda_plan/fine_test.cpp": ("", "tests/cuda_plan: there is no src/cuda_plan"),
    "tests/core/test_status.cpp": ("TEST(A, B) {}\n", "tests/core/test_status.cpp: has tests, so its name"),
    "tests/core/params.h": ("TEST_P(A, B) {}\n", "tests/core/params.h: has tests, so its name"),
    "tests/core/forgotten_test.cpp": ("TEST(A, B) {}\n", "tests/core/forgotten_test.cpp: its tests are in no program"),
    "tests/tools/kit/lost_test.cpp": ("TEST(A, B) {}\n", "tests/tools/kit/lost_test.cpp: its tests are in no program"),
}
INNOCENT = {
    "src/core/status.cpp": "",
    "src/cuda/backends/sm90/backend.cpp": "",
    "tools/kit/kit.h": "",
    "include/mla/c_api.h": "",
    "tests/core/CMakeLists.txt": "mla_add_test(core_test SOURCES test_status.cpp params.h fine_test.cpp)\n",
    "tests/core/fine_test.cpp": "TEST(A, B) {}\n",
    "tests/core/fixture.h": "// TEST(A, B)\n",
    "tests/c_api/c_api_test.c": "",
    **{f"tests/{folder}/file": "" for folder in OTHER_FOLDERS if folder != "mpi"},
}
LISTED_ONLY = "tests/mpi: check_tests.py lists it, and there is none"


def self_test():
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for name, text in {**{name: text for name, (text, _) in PLANTED.items()}, **INNOCENT}.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text, encoding="utf-8")
        found = check_tree(root)
    expected = [message for _, message in PLANTED.values()] + [LISTED_ONLY]
    failures = [f"not caught: {message}" for message in expected if not any(line.startswith(message) for line in found)]
    return failures + [
        f"wrongly reported: {line}" for line in found if not any(line.startswith(message) for message in expected)
    ]


def main(arguments):
    if arguments == ["--self-test"]:
        found = self_test()
    else:
        found = check_tree(pathlib.Path(arguments[0] if arguments else pathlib.Path(__file__).parents[1]).resolve())
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
