#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Holds the kernels to what ptxas reported of them while they were compiled.

    ptxas_reports.py FILE         FILE lists objects, each with its report OBJECT.ptxas beside it
    ptxas_reports.py --self-test

No kernel spills registers (but for KNOWN_SPILLS), uses more of them than a thread can have, keeps arrays in local
memory (a stack frame of more than a few words), or has its wgmma products serialized. Every object but the tables of
operations has kernels.
"""

import pathlib
import re
import sys
import tempfile

MOST_REGISTERS = 255
MOST_STACK_BYTES = 64
WITHOUT_KERNELS = {"operations.cu.o"}
# Spills that are known: the kernels, and the most bytes that each stores and loads.
KNOWN_SPILLS = (
    # The indexer's listed blocks of FP8 keys for the family of SM100 spill 8 bytes since logits may have 16 bits.
    # Reading the lane anew, or hiding the row's index from the compiler, changed nothing.
    (re.compile(r"portable13IndexerKernel\w+IndexerFormatE0ELb1E\w+ \(sm_1(00|03|10)f\)"), (8, 8)),
    # Of 64 rows and 512 channels, accumulators and queries take 200 registers. On SM90, which has better kernels for all
    # of these rows, nvcc 13.0 spills the lane's sums of all four rows, stored and loaded once in each step: little
    # beside 600 instructions of each warp. For other GPUs it spills nothing.
    (re.compile(r"portable14AbsorbedKernelINS2_14AbsorbedConfigILi64ELi512E\w+ \(sm_90a\)"), (64, 32)),
    # A block of top_k has 1,024 threads of 64 registers, 16 of which hold ranks: what nvcc 13.0 spills are numbers of the
    # row, stored and loaded once in a run.
    (re.compile(r"TopKKernel\w+ \(sm_(80|86|89|90a|12[01]f)\)"), (28, 40)),
    # Outputs, scores and queries of prefill take 208 registers; what nvcc 13.0 spills are addresses and lengths.
    (re.compile(r"portable13PrefillKernel\w+ \(sm_(80|86|89|12[01]f)\)"), (40, 64)),
    # Prefill of e4m3, whose outputs and scores take 160 registers and queries up to 32: addresses of copies.
    (re.compile(r"fp813PrefillKernel\w+ \(sm_12[01]f\)"), (24, 48)),
    # Of rows with several scales, of which P has as many versions; outputs take 128 of 232 registers.
    (re.compile(r"sm90_fp814AbsorbedKernelILb0E\w+ \(sm_90a\)"), (120, 136)),
    # Of prefill of e4m3 by wgmma, whose outputs, products and scores take 192 of 232 registers: what only values of NaN
    # need, and addresses and lengths of a unit, in 192 bytes of stack. Its loops spill nothing.
    (re.compile(r"sm90_fp813PrefillKernel\w+ \(sm_90a\)"), (188, 192, 192)),
    # Of quantized rows of cuda_sm90, whose warps share 128 registers a thread and have a loop for each kind of rows: a
    # flag of the score warps, loaded twice at the end of a unit, and a word of the loop for e2m1 in clusters.
    (re.compile(r"sm9014AbsorbedKernelINS2_14AbsorbedConfigILi512E\w+KeyKindE2\w+ \(sm_90a\)"), (8, 12)),
    # Of 64 rows, warps of cuda_bulk that share 128 registers a thread. For sm_100a, whose cubins run on 10.0 alone, nvcc
    # 13.0 spilled nothing; for the family it keeps fewer addresses in uniform registers
    # (docs/notebook/2026-11-23-families.md). With 256 channels it stores 4 bytes and loads 64, with 512 24 and 84.
    (re.compile(r"bulk14AbsorbedKernelINS2_14AbsorbedConfigILi64E\w+ \(sm_1(00|03|10)f\)"), (24, 84)),
)

KERNEL = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")
SERIALIZED = re.compile(r"wgmma\.mma_async instructions are serialized.* in (?:the )?function '(\w+)'")


def check_report(name, text):
    """Returns what is wrong with one object's report, and how many kernels it names."""
    wrong, kernel, kernels, seen = [], None, 0, {"stack": 0, "registers": 0}
    for line in text.splitlines():
        if match := SERIALIZED.search(line):
            wrong.append(f"{name}: {match.group(1)}: its wgmma products are serialized")
        elif match := KERNEL.search(line):
            kernel, kernels = f"{name}: {match.group(1)} ({match.group(2)})", kernels + 1
        elif match := STACK.search(line):
            seen["stack"] += 1
            stack, stores, loads = map(int, match.groups())
            known = next((most for pattern, most in KNOWN_SPILLS if kernel and pattern.search(kernel)), (0, 0))
            most_stack = known[2] if len(known) > 2 else MOST_STACK_BYTES
            if stores > known[0] or loads > known[1]:
                wrong.append(f"{kernel}: spills {stores} bytes, loads {loads} back")
            elif stack > most_stack:
                wrong.append(f"{kernel}: keeps {stack} bytes in local memory")
        elif match := REGISTERS.search(line):
            seen["registers"] += 1
            if int(match.group(1)) > MOST_REGISTERS:
                wrong.append(f"{kernel}: uses {match.group(1)} registers")
    for what, count in seen.items():
        if count < kernels:
            wrong.append(f"{name}: {kernels} kernels, but {count} lines on {what}")
    return wrong, kernels


def check_objects(objects):
    wrong, kernels = [], 0
    for path in objects:
        report = pathlib.Path(f"{path}.ptxas")
        name = "/".join(path.parts[-3:])
        if not report.is_file():
            wrong.append(f"{name}: no report beside it")
            continue
        found, count = check_report(name, report.read_text(encoding="utf-8"))
        wrong += found
        kernels += count
        if count == 0 and path.name not in WITHOUT_KERNELS:
            wrong.append(f"{name}: its report names no kernel")
    return wrong, kernels


GOOD = """ptxas info    : Compiling entry function '_Z4good' for 'sm_90a'
ptxas info    : Function properties for _Z4good
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 126 registers, used 1 barriers
"""


def self_test():
    failures = []

    def expect(text, expected, name="a.cu.o", report=True):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / name
            if report:
                path.with_name(f"{name}.ptxas").write_text(text, encoding="utf-8")
            wrong, _ = check_objects([path])
        if not any(expected in line for line in wrong) if expected else wrong:
            failures.append(f"expected '{expected}', got {wrong}")

    expect(GOOD, "")
    expect(GOOD.replace("0 bytes spill stores", "8 bytes spill stores"), "spills 8 bytes")
    expect(GOOD.replace("0 bytes spill loads", "4 bytes spill loads"), "loads 4 back")
    known = "_ZN8portable14AbsorbedKernelINS2_14AbsorbedConfigILi64ELi512ELNS0_7KeyKindE0ELi1EEEEEvv"
    spilling = GOOD.replace("_Z4good", known).replace("0 bytes spill", "32 bytes spill")
    expect(spilling, "")
    expect(spilling.replace("32 bytes spill loads", "36 bytes spill loads"), "loads 36 back")
    expect(spilling.replace("sm_90a", "sm_120f"), "spills 32 bytes")
    of_bulk = GOOD.replace("_Z4good", known.replace("8portable14", "4bulk14")).replace(
        "0 bytes spill", "24 bytes spill"
    )
    of_family = of_bulk.replace("sm_90a", "sm_103f").replace("24 bytes spill loads", "84 bytes spill loads")
    expect(of_family, "")
    expect(of_family.replace("24 bytes spill stores", "28 bytes spill stores"), "spills 28 bytes")
    expect(of_family.replace("84 bytes", "88 bytes"), "loads 88 back")
    expect(of_bulk, "spills 24 bytes")
    expect(GOOD.replace("0 bytes stack", "1024 bytes stack"), "keeps 1024 bytes")
    expect(GOOD.replace("Used 126", "Used 256"), "uses 256 registers")
    expect(GOOD.replace("Used 126 registers", "Used nothing"), "0 lines on registers")
    serialized = (
        "ptxas info    : (C7520) Potential Performance Loss: wgmma.mma_async instructions are serialized due to program "
        "dependence on compiler-inserted WG.AR in divergent path in the function '_Z4good'\n"
    )
    expect(serialized + GOOD, "_Z4good: its wgmma products are serialized")
    expect("", "names no kernel")
    expect("", "", name="operations.cu.o")
    expect("", "no report beside it", report=False)
    return failures


def main(arguments):
    if arguments == ["--self-test"]:
        wrong, kernels = self_test(), 0
    else:
        lines = pathlib.Path(arguments[0]).read_text(encoding="utf-8").split()
        wrong, kernels = check_objects([pathlib.Path(line) for line in lines])
        if kernels == 0:
            wrong.append("no kernel at all")
    for line in wrong:
        print(line)
    print(f"{kernels} kernels")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
