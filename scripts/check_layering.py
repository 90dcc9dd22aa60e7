#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that dependencies point down only and that what may stand in one place stands nowhere else.

    check_layering.py [ROOT]       prints every violation; exit status 1 if there is one
    check_layering.py --self-test  plants one violation of every rule in a tree of its own and expects each to be caught

The rules are those of docs/design.md, "Where a line goes".
"""

import pathlib
import re
import sys
import tempfile

SOURCE_SUFFIXES = {".h", ".hpp", ".cpp", ".c", ".cc", ".cu", ".cuh"}
SPDX_SUFFIXES = SOURCE_SUFFIXES | {".py", ".sh", ".cmake", ".yml"}
SPDX_NAMES = {"CMakeLists.txt", "Makefile", "run", ".clang-format", ".clang-tidy"}
SKIPPED_FOLDERS = {".git", "build", "out", "__pycache__"}

# What the host side of a kernel and its callers agree on.
KERNEL_BORDER = "cuda/border/"
# What kernels may include beside the rooms above ptx.
KERNELS = ("mla/", "core/args.h", KERNEL_BORDER, "cuda/ptx/", "cuda/tile/", "cuda/common/")
# What the host says of kernels in verdicts.
VERDICTS = ("core/implementation.h", "core/format.h")
# Which folders of the project a folder's files may include, as prefixes of the include path; the longest entry that
# contains the file decides. Folders that are not listed (the tests) may include everything.
MAY_INCLUDE = {
    "include": ("mla/",),
    "src/core": ("mla/", "core/"),
    "src/plan": ("mla/", "core/", "plan/"),
    "src/reference": ("mla/", "core/", "reference/"),
    "src/cpu": ("mla/", "core/", "plan/", "cpu/"),
    "src/dispatch": ("mla/", "core/", "plan/", "dispatch/", "reference/reference.h", "cpu/cpu_backend.h", "cpu/levels.h",
                     KERNEL_BORDER, "cuda/runtime/"),
    "src/emulator": ("mla/", "core/", "emulator/"),
    "src/cuda/border": ("mla/", "core/", KERNEL_BORDER, "cuda/ptx/machine.h"),
    "src/cuda/ptx": ("mla/", "cuda/ptx/", "emulator/device.h"),
    "src/cuda/tile": ("mla/", "core/args.h", "cuda/ptx/", "cuda/tile/"),
    "src/cuda/common": KERNELS,
    "src/cuda/attention": (*KERNELS, *VERDICTS, "cuda/attention/"),
    "src/cuda/backends": (*KERNELS, *VERDICTS, "cuda/attention/"),  # and a backend's own folder
    "src/cuda/runtime": ("mla/", "core/", KERNEL_BORDER, "cuda/runtime/", "cuda/ptx/archs.h",
                         "cuda/built_archs.h", "cuda/built_backends.h", "emulator/emulator.h"),
    "tools/kit": ("mla/", "kit/"),
    "tools/mla": ("mla/", "kit/"),
    "examples": ("mla/",),
    "python/src": ("mla/",),
}
BACKEND = re.compile(r"src/(cuda/backends/\w+/)")
PROJECT_PREFIXES = ("mla/", "core/", "plan/", "dispatch/", "reference/", "cpu/", "cuda/", "emulator/", "kit/")

INTRINSICS = re.compile(r"^(\w*intrin\.h|arm_neon\.h|arm_sve\.h|arm_acle\.h|x86gprintrin\.h|hwy/.*)$")
# The kernels, the ceilings they are measured against, and the detection, which executes xgetbv.
INTRINSICS_PLACES = ("src/cpu/", "tools/mla/bench/", "src/dispatch/machine.cpp")
CUDA = re.compile(r"^(cuda\w*\.h|cuda/(std|pipeline|barrier).*|cooperative_groups.*|nvrtc.*|cublas.*|cute/.*|cutlass/.*)")
CUDA_PLACES = ("src/cuda/ptx/", "src/cuda/runtime/")
# What only nvcc knows. Kernels are compiled for the emulator too, and reach the machine through the wrappers of ptx.
CUDA_ONLY = re.compile(r"\b(threadIdx|blockIdx|blockDim|gridDim|warpSize|atomic[A-Z]\w*|__(?!builtin_|restrict)\w+)\b")
# These are constexpr, so that nvcc 13.0 takes them in kernels, but libstdc++ goes on to functions of the host, and
# nothing warns: std::countr_zero is 32 whatever its argument, and what follows a std::copy_n is removed.
WRONG_ON_GPUS = re.compile(r"\bstd::(countr_(zero|one)|copy(_n|_backward)?|move_backward|fill(_n)?|swap_ranges)\b")
KERNEL_PLACES = ("src/cuda/tile/", "src/cuda/common/", "src/cuda/attention/", "src/cuda/backends/")
TORCH = re.compile(r"^(torch|ATen|c10)/")
# Engines of the Python package, and the folders that may know them. What is said to kernels stays free of them.
ENGINES = {"vllm": ("integrations/vllm/",), "sglang": ("integrations/sglang/",),
           "transformers": ("integrations/transformers/", "_text/")}
ENGINE_FREE = ("integrations/vllm/attention.py", "integrations/vllm/caches.py", "integrations/vllm/workspaces.py",
               "integrations/sglang/attention.py", "integrations/sglang/pages.py")
PYTHON_IMPORT = re.compile(r"^\s*(?:import|from)\s+(\w+)")
ASM = re.compile(r"\b(asm|__asm__|__asm)\b\s*(volatile|__volatile__|goto|inline)?\s*\(")
# The instructions of GPUs, those of AMX, which GCC 12's intrinsics declare wrongly, and the switch between stacks.
ASM_PLACES = ("src/cuda/ptx/", "src/cpu/tile_unit-inl.h", "src/emulator/stack_switch.h", "tools/mla/bench/ceilings_kernels.cpp")
LAYOUT_NUMBER = re.compile(r"(?<![\w.])(656|584|576)(?![\w.])")
LAYOUT_FREE_FOLDERS = ("src/cpu/", "src/cuda/", "src/reference/", "src/plan/", "src/dispatch/")
# A format is its codecs: who asks for its name, or guesses one property of it from another, misses the next format.
FORMAT_FACTS = {
    re.compile(r"([=!]=|\bcase)\s*(mla::)?CacheFormat::k"): "a format is asked for by name",
    re.compile(r"\bnum_scales\s*(>|==|!=)\s*0\b"): "whether rows are quantized is guessed from their scales",
    re.compile(r"\?\s*1\s*:\s*4\b"): "bytes of a scale are guessed: size_of(ScaleType) knows",
}
FORMAT_FREE_FOLDERS = ("src/", "tools/", "python/src/")
FORMAT_PLACES = ("src/core/cache_checks.cpp",)  # and include/mla/kv_layout.h
INCLUDED_ONCE = re.compile(r"^#(pragma once|ifndef MLA_\w+_H_?)$", re.MULTILINE)  # C headers keep to standard C
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')


def without_comments_and_strings(text):
    """Blanks comments and literals, keeping the line structure."""
    pattern = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'(?!\d)', re.DOTALL)
    digits = re.compile(r"(?<=\d)'(?=\d)")
    return pattern.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), digits.sub("", text))


def allowed_includes(path):
    folders = [folder for folder in MAY_INCLUDE if path.startswith(folder + "/")]
    if not folders:
        return None
    backend = BACKEND.match(path)
    return MAY_INCLUDE[max(folders, key=len)] + ((backend.group(1),) if backend else ())


def check_include(path, header, quoted):
    if CUDA.match(header) and not path.startswith(CUDA_PLACES):
        yield f"CUDA header <{header}> outside {' and '.join(CUDA_PLACES)}"
    if TORCH.match(header):
        yield f"torch header <{header}>"
    if INTRINSICS.match(header) and not path.startswith(INTRINSICS_PLACES):
        yield f"instruction-set header <{header}> outside {' and '.join(INTRINSICS_PLACES)}"
    allowed = allowed_includes(path)
    if allowed is None:
        return
    if quoted and header.startswith(".."):
        yield f'include path "{header}" is not relative to include/, src/ or tools/'
    if header.startswith(PROJECT_PREFIXES) and not header.startswith(allowed):
        yield f'may not include "{header}" (only {", ".join(allowed)})'


def check_source(path, text):
    code = without_comments_and_strings(text)
    for number, line in enumerate(text.splitlines(), 1):
        match = INCLUDE.match(line)
        if match:
            for message in check_include(path, match.group(2), match.group(1) == '"'):
                yield number, message
    for number, line in enumerate(code.splitlines(), 1):
        if ASM.search(line) and not path.startswith(ASM_PLACES):
            yield number, "inline assembly outside src/cuda/ptx, AMX's tiles and the emulator's stack switch"
        if path.startswith(KERNEL_PLACES):
            builtin = CUDA_ONLY.search(line)
            if builtin:
                yield number, f"{builtin.group()} in a kernel: nvcc alone knows it, src/cuda/ptx wraps it"
            wrong = WRONG_ON_GPUS.search(line)
            if wrong:
                yield number, f"{wrong.group()}: nvcc 13.0 compiles it wrong; std::bit_width, std::popcount and loops are right"
        if path.startswith(LAYOUT_FREE_FOLDERS):
            constant = LAYOUT_NUMBER.search(line)
            if constant:
                yield number, f"the cache layout's number {constant.group()} belongs in include/mla/kv_layout.h"
        if path.startswith(FORMAT_FREE_FOLDERS) and not path.startswith(FORMAT_PLACES):
            for pattern, message in FORMAT_FACTS.items():
                if pattern.search(line):
                    yield number, message + ": include/mla/kv_layout.h"
    # A "-inl.h" is the body of several translation units, included once in each.
    if path.endswith((".h", ".hpp", ".cuh")) and not path.endswith("-inl.h") and not INCLUDED_ONCE.search(code):
        yield 1, "header without #pragma once"


def check_python(path, text):
    package = "python/libmla/"
    if not path.startswith(package):
        return
    for number, line in enumerate(text.splitlines(), 1):
        match = PYTHON_IMPORT.match(line)
        name = match.group(1) if match else None
        if name not in ENGINES:
            continue
        if not path.startswith(tuple(package + place for place in ENGINES[name])):
            yield number, f"{name} outside {' and '.join(ENGINES[name])}"
        elif path[len(package):] in ENGINE_FREE:
            yield number, f"{name} where only tensors and calls of libmla belong"


def check_tree(root):
    violations = []
    for file in sorted(root.rglob("*")):
        relative = file.relative_to(root)
        hidden = relative.parts[0].startswith("build-")
        if not file.is_file() or hidden or SKIPPED_FOLDERS.intersection(relative.parts):
            continue
        if file.suffix not in SPDX_SUFFIXES and file.name not in SPDX_NAMES:
            continue
        path = relative.as_posix()
        text = file.read_text(encoding="utf-8")
        head = text.splitlines()[:2]
        if not any("SPDX-License-Identifier: Apache-2.0" in line for line in head):
            violations.append(f"{path}:1: no SPDX-License-Identifier line at the top")
        if file.suffix in SOURCE_SUFFIXES:
            violations += [f"{path}:{number}: {message}" for number, message in check_source(path, text)]
        if file.suffix == ".py":
            violations += [f"{path}:{number}: {message}" for number, message in check_python(path, text)]
    return violations


SPDX = "// SPDX-License-Identifier: Apache-2.0\n"
PYTHON_SPDX = SPDX.replace("//", "#")
PLANTED = {
    "include/mla/a.h": (SPDX + "#pragma once\n#include \"core/args.h\"\n", 'may not include "core/args.h"'),
    "include/mla/b.h": (SPDX + "#pragma once\n#include <cuda_runtime.h>\n", "CUDA header <cuda_runtime.h>"),
    "include/mla/c.h": (SPDX + "int x;\n", "header without #pragma once"),
    "src/core/a.cpp": (SPDX + "#include \"cpu/cpu_backend.h\"\n", 'may not include "cpu/cpu_backend.h"'),
    "src/core/b.cpp": (SPDX + "#include <immintrin.h>\n", "instruction-set header <immintrin.h>"),
    "src/core/c.cpp": (SPDX + "#include \"../cpu/x.h\"\n", "is not relative to"),
    "src/plan/a.cpp": (SPDX + "#include \"dispatch/table.h\"\n", 'may not include "dispatch/table.h"'),
    "src/reference/a.cpp": (SPDX + "#include \"plan/plan.h\"\n", 'may not include "plan/plan.h"'),
    "src/cpu/a.cpp": (SPDX + "#include \"cuda/x.h\"\n", 'may not include "cuda/x.h"'),
    "src/cpu/d.cpp": (SPDX + "#include \"dispatch/select.h\"\n", 'may not include "dispatch/select.h"'),
    "src/cpu/b.cpp": (SPDX + "int bytes = 656 * 2;\n", "number 656"),
    "src/cpu/e.cpp": (SPDX + "bool f(CacheFormat a) { return a != CacheFormat::kFP8; }\n", "asked for by name"),
    "src/dispatch/d.cpp": (SPDX + "int f() { switch (a) { case CacheFormat::kFP8: return 1; } }\n", "asked for by name"),
    "src/cuda/tile/d.cuh": (SPDX + "#pragma once\nbool f(const Cache& c) { return c.num_scales > 0; }\n", "is guessed from"),
    "tools/kit/d.cpp": (SPDX + "int f(bool ue8m0) { return ue8m0 ? 1 : 4; }\n", "bytes of a scale"),
    "src/cpu/c.cpp": (SPDX + "void f() { asm volatile(\"nop\"); }\n", "inline assembly"),
    "src/cuda/tile/a.cuh": (SPDX + "#pragma once\n#include <torch/torch.h>\n", "torch header"),
    "src/cuda/tile/b.cuh": (SPDX + "#pragma once\n#include \"cuda/common/a.cuh\"\n", 'may not include "cuda/common/a.cuh"'),
    "src/cuda/tile/c.cuh": (SPDX + "#pragma once\n#include <cuda_fp16.h>\n", "CUDA header <cuda_fp16.h>"),
    "src/cuda/common/a.cu": (SPDX + "int x = threadIdx.x;\n", "threadIdx in a kernel"),
    "src/cuda/common/b.cu": (SPDX + "void f() { __syncthreads(); }\n", "__syncthreads in a kernel"),
    "src/cuda/common/c.cu": (SPDX + "#include \"cuda/attention/a.cuh\"\n", 'may not include "cuda/attention/a.cuh"'),
    "src/cuda/attention/a.cuh": (SPDX + "#pragma once\n#include \"cuda/backends/sm90/a.cuh\"\n",
                                 'may not include "cuda/backends/sm90/a.cuh"'),
    "src/cuda/attention/b.cuh": (SPDX + "#pragma once\ninline void f() { __syncthreads(); }\n", "__syncthreads in a kernel"),
    "src/cuda/border/a.h": (SPDX + "#pragma once\n#include \"cuda/tile/a.cuh\"\n", 'may not include "cuda/tile/a.cuh"'),
    "src/cuda/backends/portable/a.cu": (SPDX + "#include \"emulator/device.h\"\n", 'may not include "emulator/device.h"'),
    "src/cuda/common/d.cu": (SPDX + "int f(unsigned x) { return std::countr_zero(x); }\n", "nvcc 13.0 compiles it wrong"),
    "src/cuda/common/e.cu": (SPDX + "void f(float* a, float* b) { std::copy_n(a, 4, b); }\n", "nvcc 13.0 compiles it wrong"),
    "src/cuda/backends/portable/b.cu": (SPDX + "void f() { atomicAdd(p, 1); }\n", "atomicAdd in a kernel"),
    "src/cuda/backends/portable/c.cuh": (SPDX + "#pragma once\n#include \"cuda/runtime/code.h\"\n",
                                         'may not include "cuda/runtime/code.h"'),
    "src/cuda/backends/portable/d.cu": (SPDX + "#include \"cuda/backends/sm90/a.cuh\"\n",
                                       'may not include "cuda/backends/sm90/a.cuh"'),
    "src/cuda/backends/sm90/a.cu": (SPDX + "#include \"cuda/backends/portable/prefill.cuh\"\n",
                                    'may not include "cuda/backends/portable/prefill.cuh"'),
    "src/cuda/backends/sm90/b.cu": (SPDX + "void f() { __syncwarp(); }\n", "__syncwarp in a kernel"),
    "src/cuda/ptx/a.h": (SPDX + "#pragma once\n#include \"cuda/tile/a.cuh\"\n", 'may not include "cuda/tile/a.cuh"'),
    "src/cuda/runtime/a.cpp": (SPDX + "#include \"cuda/common/plan.h\"\n", 'may not include "cuda/common/plan.h"'),
    "src/emulator/a.cpp": (SPDX + "#include \"cuda/border/queue.h\"\n", 'may not include "cuda/border/queue.h"'),
    "src/dispatch/a.cpp": (SPDX + "#include \"cuda/ptx/ptx.h\"\n", 'may not include "cuda/ptx/ptx.h"'),
    "tools/mla/a.cpp": (SPDX + "#include \"core/validate.h\"\n", 'may not include "core/validate.h"'),
    "tools/mla/b.cpp": (SPDX + "#include <hwy/highway.h>\n", "instruction-set header <hwy/highway.h>"),
    "tests/a.cpp": ("int x;\n", "no SPDX-License-Identifier"),
    "python/libmla/a.py": (PYTHON_SPDX + "def f():\n    import vllm\n", "vllm outside integrations/vllm/"),
    "python/libmla/integrations/vllm/b.py": (PYTHON_SPDX + "import transformers\n", "transformers outside"),
    "python/libmla/integrations/sglang/pages.py": (PYTHON_SPDX + "from sglang.srt import a\n", "sglang where only"),
}
INNOCENT = {
    "src/cpu/fine.cpp": SPDX + "#include <immintrin.h>\n#include \"core/args.h\"\n// 656 bytes, asm(\"x\")\n"
                               "const char* s = \"656 asm()\"; int n = 1'656; int w = 5760;\n",
    "src/core/cache_checks.cpp": SPDX + "bool f(CacheFormat a) { return a == CacheFormat::kFP8; }\n",
    "src/reference/fine.cpp": SPDX + "CacheFormat f = CacheFormat::kBF16; bool g = f.num_scales > 1;\n",
    "tools/mla/bench/ceilings.cpp": SPDX + "#include <immintrin.h>\n#include \"kit/kit.h\"\n",
    "src/cuda/runtime/fine.cpp": SPDX + "#include <cuda_runtime_api.h>\n#include \"emulator/emulator.h\"\n",
    "src/cuda/common/fine.cu": SPDX + "#include \"cuda/border/launch.h\"\n// threadIdx\nint f(int* __restrict__ p) { "
                               "return __builtin_clz(*p); }\n",
    "src/cuda/backends/new/fine.cu": SPDX + "#include \"cuda/attention/absorbed_args.h\"\n"
                                            "#include \"cuda/backends/new/operations.h\"\n",
    "python/libmla/integrations/vllm/fine.py": PYTHON_SPDX + "import vllm\nimport vllm_flash_attn\n",
    "src/cuda/ptx/fine.cuh": SPDX + "#pragma once\n#include <cuda_fp16.h>\nvoid f() { asm volatile(\"nop\"); }\n",
}


def self_test():
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for path, text in [*((p, t) for p, (t, _) in PLANTED.items()), *INNOCENT.items()]:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text, encoding="utf-8")
        found = check_tree(root)
    failures = [f"not caught: {path}: {message}" for path, (_, message) in PLANTED.items()
                if not any(line.startswith(path + ":") and message in line for line in found)]
    failures += [f"wrongly reported: {line}" for line in found if line.split(":")[0] not in PLANTED]
    failures += [f"reported twice: {path}" for path in PLANTED
                 if sum(line.startswith(path + ":") for line in found) > 1]
    return failures


def main(arguments):
    if arguments == ["--self-test"]:
        violations = self_test()
    else:
        root = pathlib.Path(arguments[0]) if arguments else pathlib.Path(__file__).parent.parent
        violations = check_tree(root.resolve())
    for line in violations:
        print(line)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
