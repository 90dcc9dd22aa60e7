#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Counts what a warp of absorbed attention executes in a step of keys, from the SASS of compiled kernels.

    sass_steps.py OBJECT... [--on SM]    prints rows for tools/mla/step_table.h; --on: see below. How many blocks share
                                         an SM is taken from the table; of a new row check it
    sass_steps.py --check LIST           kernels of the objects in LIST, one a line, must be near the table's rows
    sass_steps.py --self-test

All modes but --self-test need cuobjdump (--cuobjdump PROGRAM), with nvdisasm beside it or on the PATH.

The rule. The step loop is the innermost loop that holds all multiplies of a step. A step is the shortest way around
it, in instructions, on which the warp does its share of the step's work, as it follows from the shapes alone:
  multiplies  HMMA and QMMA, each by itself: rows x keys x (576 + 512) channels
  copies      LDGSTS of 16 bytes: what a lane copies of the rows
  P           F2FP to e4m3, in cuda_fp8: two P each, for four scales of a key as fp8_ds_mla has them; all warps of 64
              rows have some, two of 16 rows
  decoding    STS of 16 bytes: where rows are quantized, what a lane stores of decoded rows, and its exchange
A loop inside counts as often as this share needs (at most 8 times), and once if it holds none of it, as a wait that
succeeds at once does. So everything that a usual step goes around is left out: masks, growing maxima, poison, rows
that are not aligned. Work that warps take in turns (the step's entries, 4 bytes a lane, and finding its rows, a VOTE
into a register) is added with the share of one warp. Predicated instructions count: they are issued. Where scales of
keys may be operands of multiplies (QMMA.SF), the shortest way has them so: 64 rows of cuda_fp8 take more for
f32 scales that are no powers of two.

--on 90 marks rows of objects that were built with -DMLA_CUDA_PROFILE, for an SM90: the code that an H100 was timed
with.
"""

import argparse
import collections
import os
import pathlib
import re
import subprocess
import sys
import typing

TABLE = pathlib.Path(__file__).resolve().parent.parent / "tools/mla/step_table.h"
TOLERANCE = 0.15
MOST_TRIPS = 8
LANES, WARPS, THREADS, KEYS = 32, 8, 256, 32  # of all kernels here; keys are those of a step
LATENT, ROPE, SCALES = 512, 64, 4  # of a row; scales are those of fp8_ds_mla
PRODUCTS, E4M3_PRODUCTS = 16 * 8 * 16, 16 * 8 * 32  # of one multiply
SM_REGISTERS = 65536
ENTRIES, VOTES = 1, 2  # work that warps take in turns

KINDS = {"0": "bf16", "2": "quantized", "3": "codes"}  # of KeyKind, as mangled names have it

# The kernel's architecture and rows, and the kind of its keys.
PORTABLE = re.compile(
    r"3mla\d+?sm(\d+?)12kernel_entry.*8portable14AbsorbedKernel.*ConfigILi(\d+)ELi512E.*KeyKindE([023])ELi1E"
)
FP8 = re.compile(r"3mla\d+?sm(\d+?)12kernel_entry.*3fp814AbsorbedKernel.*ConfigILi(\d+)E")

INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,6})\*/\s+(?:\{ )?(.*?) *;")
PREDICATE = re.compile(r"^@!?U?P\w+\s+")
ADDRESS = re.compile(r"0x([0-9a-f]+)")
FOUND_ROWS = re.compile(r"VOTE\.\w+ R\d")
END = {"EXIT", "RET"}
JUMP = {"BRA", "JMP"}


class Work(typing.NamedTuple):
    """Counts what a step does; `turns` is a set of bits."""

    multiplies: int  # of 16-bit operands
    e4m3_multiplies: int
    copies: int
    stores: int
    packs: int
    turns: int

    def plus(self, other, share):
        """Returns the sum, as far as the share asks for it."""
        counts = (min(a + b, enough) for a, b, enough in zip(self[:-1], other[:-1], share[:-1], strict=True))
        return Work(*counts, (self.turns | other.turns) & share.turns)


class Cost(typing.NamedTuple):
    instructions: int
    shared_bytes: int

    def __add__(self, other):
        return Cost(*(a + b for a, b in zip(self, other, strict=True)))


class Block(typing.NamedTuple):
    work: Work
    cost: Cost

    @property
    def multiplies(self):
        return self.work.multiplies + self.work.e4m3_multiplies


def width_of(op):
    """Returns the bytes that a lane moves to or from shared memory."""
    name = op.split(".")[0]
    if name == "LDSM":
        return 16 if op.endswith(".4") else 8 if op.endswith(".2") else 4
    if name not in ("LDS", "STS", "LDGSTS"):
        return 0
    return 16 if ".128" in op else 8 if ".64" in op else 2 if "16" in op else 1 if "8" in op else 4


def opcode(text):
    return PREDICATE.sub("", text).split()[0]


class Kernel:
    """Holds a kernel's blocks of instructions and where each may go next."""

    def __init__(self, instructions):
        addresses = {address for address, _ in instructions}
        leaders, sync_targets = {instructions[0][0]}, collections.defaultdict(list)
        for i, (address, text) in enumerate(instructions):
            name = opcode(text).split(".")[0]
            if name in END | JUMP | {"BRX", "BSYNC"} and i + 1 < len(instructions):
                leaders.add(instructions[i + 1][0])
            if name in JUMP | {"CALL", "BSSY"} and (found := ADDRESS.findall(text)):
                leaders |= {int(found[-1], 16)} & addresses
                if name == "BSSY":
                    sync_targets[re.search(r"\bB\d+", text).group()].append((address, int(found[-1], 16)))
        self.code = {}
        for address, text in instructions:
            if address in leaders:
                block = self.code.setdefault(address, [])
            block.append(text)
        starts = sorted(self.code)
        self.next = {}
        for start, behind in zip(starts, [*starts[1:], None]):
            text = self.code[start][-1]
            name, last = opcode(text).split(".")[0], start + 16 * (len(self.code[start]) - 1)
            conditional = PREDICATE.match(text) or (name in JUMP and re.search(r"U?P\d|\.DIV|\.CONV|\.ANY", text))
            to = []
            if name in JUMP:
                to = [int(ADDRESS.findall(text)[-1], 16)]
            elif name == "BSYNC":
                where = [target for at, target in sync_targets[re.search(r"\bB\d+", text).group()] if at < last]
                to = where[-1:] or [behind]
            if behind is not None and (conditional or name not in JUMP | END | {"BSYNC"}):
                to.append(behind)
            self.next[start] = [block for block in dict.fromkeys(to) if block in self.code]
        self.blocks = {start: self.measure(code) for start, code in self.code.items()}

    @staticmethod
    def measure(code):
        ops = [opcode(text) for text in code]

        def count(test):
            return sum(map(test, ops))

        turns = (ENTRIES if count(lambda op: op.startswith("LDGSTS") and ".128" not in op) else 0) | (
            VOTES if any(FOUND_ROWS.match(PREDICATE.sub("", text)) for text in code) else 0
        )
        work = Work(
            multiplies=count(lambda op: op.startswith("HMMA")),
            e4m3_multiplies=count(lambda op: op.startswith("QMMA")),
            copies=count(lambda op: op.startswith("LDGSTS") and ".128" in op),
            stores=count(lambda op: op.startswith("STS.128")),
            packs=count(lambda op: op.startswith("F2FP") and ".E4M3.F32" in op),
            turns=turns,
        )
        return Block(work, Cost(len(ops), LANES * sum(map(width_of, ops))))

    @staticmethod
    def parts(nodes, next_of):
        """Returns the strongly connected parts of some blocks, each behind all that it leads to (Tarjan)."""
        index, low, stack, on_stack, parts = {}, {}, [], set(), []

        def visit(block):
            index[block] = low[block] = len(index)
            stack.append(block)
            on_stack.add(block)
            for other in next_of(block):
                if other not in index:
                    visit(other)
                    low[block] = min(low[block], low[other])
                elif other in on_stack:
                    low[block] = min(low[block], index[other])
            if low[block] == index[block]:
                at = stack.index(block)
                parts.append(stack[at:])
                on_stack.difference_update(stack[at:])
                del stack[at:]

        for block in sorted(nodes):
            if block not in index:
                visit(block)
        return parts

    def header_of(self, loop):
        inside = set(loop)
        entered = [b for b in loop if any(b in to for at, to in self.next.items() if at not in inside)]
        return min(entered or loop)

    def step_loop(self, share):
        """Returns the innermost loop around which the share's work can be done, or None."""
        nodes, header, found = set(self.blocks), None, None
        while True:
            leads_to = {b: [n for n in self.next[b] if n in nodes and n != header] for b in nodes}
            parts = self.parts(nodes, leads_to.get)
            around = [part for part in parts if len(part) > 1 and self.shortest(part, share)]
            if not around:
                return found
            found = max(around, key=lambda part: sum(self.blocks[b].multiplies for b in part))
            nodes, header = set(found), self.header_of(found)

    def shortest(self, loop, share):
        """Returns the cost of the shortest way around a loop on which the share's work is done, or None."""
        return self.ways_around(loop, share).get(share)

    def ways_around(self, loop, share):
        """Returns the costs of the shortest ways around a loop by the work that they do."""
        loop, header = set(loop), self.header_of(loop)

        def next_inside(block):
            return [n for n in self.next[block] if n in loop and n != header]

        parts = self.parts(loop, next_inside)
        part_of = {block: i for i, part in enumerate(parts) for block in part}
        options = [self.options(part, next_inside, share) for part in parts]
        reached = [{} for _ in parts]
        reached[part_of[header]] = options[part_of[header]]
        around = {}
        for i in reversed(range(len(parts))):  # parts come behind what they lead to
            if any(header in self.next[block] for block in parts[i]):
                for work, cost in reached[i].items():
                    keep(around, work, cost)
            for other in {part_of[n] for block in parts[i] for n in next_inside(block)} - {i}:
                for work, cost in reached[i].items():
                    for more, extra in options[other].items():
                        keep(reached[other], work.plus(more, share), cost + extra)
        return around

    def options(self, part, next_inside, share):
        """Returns what it may cost to pass a block, or a loop with some number of trips, by the work that is done."""
        first = self.blocks[part[0]]
        once = {NOTHING.plus(first.work, share): first.cost}
        if len(part) > 1:
            once = self.ways_around(part, share)
        elif part[0] not in next_inside(part[0]):
            return once
        result = {}
        for work, cost in once.items():
            total, spent = NOTHING, Cost(0, 0)
            for _ in range(MOST_TRIPS if any(work[:-1]) else 1):
                total, spent = total.plus(work, share), spent + cost
                keep(result, total, spent)
        return result


NOTHING = Work(0, 0, 0, 0, 0, 0)


def keep(table, work, cost):
    if work not in table or cost < table[work]:
        table[work] = cost


def listing_of(program, option, path):
    # cuobjdump looks for nvdisasm on the PATH.
    folder = str(pathlib.Path(program).parent)
    environment = os.environ | {"PATH": os.pathsep.join((folder, os.environ.get("PATH", "")))}
    command = [program, option, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def functions_of(program, path):
    """Yields the name, the registers and the instructions of every kernel of an object."""
    usage = re.findall(r"Function (\w+):\s+REG:(\d+)", listing_of(program, "-res-usage", path))
    registers = {name: int(count) for name, count in usage}
    for part in listing_of(program, "-sass", path).split("Function : ")[1:]:
        name, _, code = part.partition("\n")
        found = [match for line in code.splitlines() if (match := INSTRUCTION.match(line))]
        name = name.strip()
        yield name, registers[name], [(int(match.group(1), 16), match.group(2)) for match in found]


def most_blocks(kernel, registers):
    """Returns how many blocks may share an SM by their registers.

    Whether they do so depends on their shared memory too, of which machine code says nothing.
    """
    return 2 if kernel != "fp8" and registers * THREADS <= SM_REGISTERS // 2 else 1


def multiplies_of(kernel, rows):
    """Returns a warp's multiplies of a step: of 16-bit operands, and of e4m3."""
    if kernel == "fp8":  # e4m3 latents, and rotary channels of 16 bits
        return rows * KEYS * ROPE // PRODUCTS // WARPS, rows * KEYS * 2 * LATENT // E4M3_PRODUCTS // WARPS
    return rows * KEYS * (2 * LATENT + ROPE) // PRODUCTS // WARPS, 0


def share_of(kernel, rows):
    """Returns a warp's share of a step."""
    multiplies = multiplies_of(kernel, rows)
    if kernel == "fp8":
        return Work(*multiplies, KEYS * (LATENT + 2 * ROPE) // (16 * THREADS), 0, SCALES * KEYS // 4 // 2, 0)
    chunks = KEYS * (LATENT + ROPE) * 2 // 16 // THREADS
    if kernel == "bf16":
        return Work(*multiplies, chunks, 0, 0, 0)
    if kernel == "codes":  # a chunk of rotary channels is that of some lanes only
        return Work(*multiplies, KEYS * LATENT // 16 // THREADS + 1, 0, 0, 0)
    # Raw latent rows, and a chunk of rotary channels. A warp's exchange is so many chunks of scores a lane.
    exchanged = {16: 1, 32: 3, 64: 6}[rows]
    return Work(*multiplies, KEYS * LATENT // 16 // THREADS + 1, chunks + exchanged, 0, 0)


def rows_of_objects(program, paths, run_on):
    """Returns the table's rows by kernel, rows of the block, architecture, and what it is compiled for."""
    table = {}
    for path in paths:
        for name, registers, code in functions_of(program, path):
            if match := PORTABLE.search(name):
                kernel, rows = KINDS[match.group(3)], int(match.group(2))
            elif match := FP8.search(name):
                kernel, rows = "fp8", int(match.group(2))
            else:
                continue
            table[kernel, rows, int(match.group(1)), run_on or int(match.group(1))] = (
                most_blocks(kernel, registers),
                *count(Kernel(code), kernel, rows),
            )
    return table


def count(kernel, name, rows):
    """Returns instructions, multiplies of 16 bits and of e4m3, and shared bytes of a warp and step."""
    share = share_of(name, rows)
    loop = kernel.step_loop(share)
    if loop is None:
        raise SystemExit(f"{name}, {rows} rows: no loop does the work of a step; the rule must follow the kernel")
    plain = kernel.shortest(loop, share)
    turns = [kernel.shortest(loop, share._replace(turns=turn)) or plain for turn in (ENTRIES, VOTES)]
    instructions = plain.instructions + sum(turn.instructions - plain.instructions for turn in turns) / WARPS
    return round(instructions), *multiplies_of(name, rows), plain.shared_bytes


def row_text(key, values):
    return f"    {{Kernel::k{key[0].capitalize()}, {', '.join(map(str, (*key[1:], *values)))}}},"


ROW = re.compile(r"\{Kernel::k(\w+)((?:, \d+){8})\}")


def table_rows(text):
    found = {}
    for match in ROW.finditer(text):
        numbers = tuple(map(int, match.group(2).split(", ")[1:]))
        found[(match.group(1).lower(), *numbers[:3])] = numbers[3:]
    return found


def compare(counted, written):
    """Returns what the table says wrongly of the kernels that were counted."""
    wrong, archs = [], {key[2] for key in written}
    for key, values in counted.items():
        if archs and key[2] not in archs:
            continue  # of a build by name, sm103 say, whose code is that of another architecture's source
        name = f"{key[0]}, {key[1]} rows, sm{key[2]}"
        if key not in written:
            wrong.append(f"{name}: the table has no row")
        elif written[key][0] > values[0]:
            wrong.append(f"{name}: at most {values[0]} blocks share an SM, in the table {written[key][0]}")
        elif written[key][2:4] != values[2:4]:
            wrong.append(f"{name}: multiplies are {values[2:4]}, in the table {written[key][2:4]}")
        else:
            for what, now, then in zip(("instructions", "shared bytes"), values[1::3], written[key][1::3], strict=True):
                if abs(now - then) > TOLERANCE * then:
                    wrong.append(f"{name}: {now} {what} of a warp and step, in the table {then}")
    return wrong


def self_test():
    def code(text):
        return [(16 * i, line.strip()) for i, line in enumerate(text.strip().splitlines())]

    # A wait, a copy behind a branch that is seldom taken, a loop of multiplies, and a loop that is masked work.
    kernel = Kernel(
        code("""MOV R1, R2
        @P0 BRA 0x10
        @P1 BRA 0x50
        LDGSTS.E.BYPASS.128 [R1], desc[UR4][R2.64]
        NOP
        @P2 BRA 0x80
        IADD3 R1, R1, R2, R3
        @P3 BRA 0x60
        HMMA.16816.F32.BF16 R4, R8, R12, R4
        LDSM.16.M88.4 R8, [R1]
        @P4 BRA 0x80
        @P5 BRA 0x10
        EXIT""")
    )
    share = Work(4, 0, 1, 0, 0, 0)
    loop = kernel.step_loop(share)
    found = loop and kernel.shortest(loop, share)
    # 1 wait, 1 branch, 2 of the copy, 1 branch, 4 times 3, 1 branch.
    wanted = Cost(1 + 1 + 2 + 1 + 4 * 3 + 1, 4 * 512 + 512)
    failures = [] if found == wanted else [f"expected {wanted}, got {found}"]
    if kernel.step_loop(Work(0, 4, 1, 0, 0, 0)):
        failures.append("multiplies of 16-bit operands count as those of e4m3")
    if (most_blocks("bf16", 128), most_blocks("bf16", 129), most_blocks("fp8", 116)) != (2, 1, 1):
        failures.append("blocks of an SM do not follow from registers")
    key, values = ("bf16", 64, 120, 90), (1, 600, 136, 0, 30720)
    if table_rows(row_text(key, values)) != {key: values}:
        failures.append("a row does not come back as it was written")
    for changed, expected in (
        ((1, 680, 136, 0, 30720), []),
        ((2, 600, 136, 0, 30720), []),
        ((0, 600, 136, 0, 30720), ["bf16, 64 rows, sm120: at most 0 blocks share an SM, in the table 1"]),
        ((1, 700, 136, 0, 30720), ["bf16, 64 rows, sm120: 700 instructions of a warp and step, in the table 600"]),
        ((1, 600, 128, 8, 30720), ["bf16, 64 rows, sm120: multiplies are (128, 8), in the table (136, 0)"]),
    ):
        if (wrong := compare({key: changed}, {key: values})) != expected:
            failures.append(f"expected {expected}, got {wrong}")
    if compare({("bf16", 64, 121, 121): values}, {key: values}):
        failures.append("an architecture without rows is judged")
    if compare({key: values}, {}) != ["bf16, 64 rows, sm120: the table has no row"]:
        failures.append("a missing row is not told")
    return failures


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("objects", nargs="*", type=pathlib.Path)
    parser.add_argument("--on", type=int, default=0, metavar="SM")
    parser.add_argument("--check", type=pathlib.Path, metavar="LIST")
    parser.add_argument("--self-test", action="store_true")
    parser.add_argument("--cuobjdump", default="cuobjdump")
    arguments = parser.parse_args()
    if arguments.self_test:
        sys.exit("\n".join(self_test()) or 0)
    objects = arguments.objects
    if arguments.check:
        objects = [pathlib.Path(line) for line in arguments.check.read_text(encoding="utf-8").split()]
    counted = rows_of_objects(arguments.cuobjdump, objects, arguments.on)
    written = table_rows(TABLE.read_text(encoding="utf-8"))
    if not arguments.check:
        for key, values in sorted(counted.items()):
            blocks = min(values[0], written.get(key, values)[0])
            print(row_text(key, (blocks, *values[1:])))
        return
    wrong = compare(counted, written)
    if not counted:
        wrong.append("no kernel at all")
    sys.exit("\n".join([*wrong, "count again: scripts/sass_steps.py OBJECT..."]) if wrong else 0)


if __name__ == "__main__":
    main()
