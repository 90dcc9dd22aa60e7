#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the subjects of commits: `area: what`, at most 72 characters, and an empty line before the body.

    check_commits.py RANGE        of git, as in main..HEAD; prints every violation; exit status 1 if there is one
    check_commits.py --self-test  good and bad messages, in a repository of its own

An area is a folder, a backend or a part that has a name (cuda_portable, sm90/wgmma.cuh); several have commas between
them. Merges and reverts keep the subjects that git gives them.
"""

import pathlib
import re
import subprocess
import sys
import tempfile

MOST_CHARACTERS = 72
AREA = r"[\w./+-]+"
SUBJECT = re.compile(rf"{AREA}(, {AREA})*: \S.*")
OF_GIT = re.compile(r'Merge |Revert "')


def check_message(message):
    """Yields what is wrong with a commit's message."""
    subject, *rest = message.rstrip("\n").split("\n")
    if OF_GIT.match(subject):
        return
    if not SUBJECT.fullmatch(subject):
        yield "expected `area: what`"
    if len(subject) > MOST_CHARACTERS:
        yield f"{len(subject)} characters, at most {MOST_CHARACTERS}"
    if rest and rest[0]:
        yield "expected an empty line behind the subject"


def git(folder, *arguments):
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def check_range(folder, commits):
    """Returns what is wrong with the commits of a range, and how many commits there are."""
    found, count = [], 0
    for entry in git(folder, "log", "--reverse", "-z", "--format=%h %B", commits).split("\0"):
        if not entry:
            continue
        name, _, message = entry.partition(" ")
        count += 1
        found += [f"{name} {message.partition(chr(10))[0]!r}: {wrong}" for wrong in check_message(message)]
    return found, count


GOOD = [
    "docs: what a gate is",
    "kit, tests: two areas at once",
    "sm90/wgmma.cuh: a file is an area too",
    "x: " + "y" * 69,
    "Merge branch 'of a long name' of a place that has a long name too into another branch",
    'Revert "no area here"',
    "cuda: a body\n\nSays why, in lines as long as they need to be, without a colon and whatever their number may be.",
]
BAD = {
    "no area here": "expected `area: what`",
    "two words: an area is one": "expected `area: what`",
    "area:no space": "expected `area: what`",
    ": nothing in front": "expected `area: what`",
    "x: " + "y" * 70: "73 characters, at most 72",
    "docs: a body\nat once": "expected an empty line",
}


def self_test():
    failures = []
    with tempfile.TemporaryDirectory() as folder:

        def commit(message):
            settings = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
            git(folder, *settings, "commit", "--quiet", "--allow-empty", "--cleanup=verbatim", "--message", message)

        git(folder, "init", "--quiet")
        commit("the first is not of the range")
        for message in [*GOOD, *BAD]:
            commit(message)
        found, count = check_range(folder, f"HEAD~{len(GOOD) + len(BAD)}..HEAD")
    if count != len(GOOD) + len(BAD):
        failures.append(f"looked at {count} commits")
    for message, wrong in BAD.items():
        start = repr(message.partition("\n")[0])
        if not any(start in line and wrong in line for line in found):
            failures.append(f"not caught: {start}: {wrong}")
    failures += [
        f"wrongly reported: {line}" for line in found if any(repr(good.partition("\n")[0]) in line for good in GOOD)
    ]
    return failures


def main(arguments):
    if arguments == ["--self-test"]:
        found = self_test()
    elif len(arguments) == 1:
        found, count = check_range(pathlib.Path(__file__).parents[1], arguments[0])
        print(f"{count} commits")
    else:
        sys.exit(__doc__)
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
