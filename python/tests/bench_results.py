# SPDX-License-Identifier: Apache-2.0
"""Holds bench results for tests: a file that the tool wrote, and made-up ones whose numbers are easy to check."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

MEASURED = Path(__file__).parent / "data" / "bench_cpu.json"  #: 1 thread, two backends, 16 and 128 heads, 1k and 4k

_CASE = {
    "op": "decode", "backend": "cpu_avx512_bf16", "device": "cpu", "cache": "bf16", "batch": 1, "q_len": 1,
    "kv_len": 4096, "heads": 16, "page_size": 64, "topk": 0, "threads": 2, "label": "", "lengths": "uniform",
    "q_dtype": "bf16", "d_qk": 576, "d_v": 512, "causal": True, "batch_invariant": False, "states": 0,
    "scales": "pow2", "extra_topk": 0, "extra_page_size": 0, "to_cache": None, "to_page_size": 0, "sink": False,
    "window": -1, "soft_cap": 0.0, "alibi": False, "compute": "default", "tree": "none", "dcp": 1, "runs": 100,
    "noisy": False, "plan_us": None, "copies": 1, "ratio": None, "target": None, "met": None, "error": None, "error_text": "",
    "median_us": 100.0, "p10_us": 98.0, "p90_us": 104.0, "gflops": 400.0, "gbps": 10.0, "ceiling_share": 0.8,
    "ceiling_kind": "bf16", "ceiling": 500.0,
}  # fmt: skip
_CPU = {"bf16_gflops": 500.0, "f32_gflops": 250.0, "f32_avx2_gflops": 250.0, "dram_gbps": 40.0, "l3_gbps": 160.0}
_GPU = {
    "device": "cuda:0", "read_gbps": 4000.0, "copy_gbps": 3800.0, "mma_bf16_gflops": 600e3, "wgmma_bf16_gflops": 900e3,
    "mma_e4m3_gflops": 1200e3, "mma_e4m3_converted": False,
}  # fmt: skip

BUSY_LOAD = {"others_share": 0.2, "steal_share": 0.03, "busy": True}


def result(**changes: Any) -> dict[str, Any]:
    """Returns one result; a `median_us` alone moves p10 and p90 along."""
    one = _CASE | changes
    if "median_us" in changes:
        one = one | {"p10_us": 0.98 * one["median_us"], "p90_us": 1.04 * one["median_us"]} | changes
    return one


def gpu_result(**changes: Any) -> dict[str, Any]:
    one = {"device": "cuda:0", "backend": "cuda_portable", "gflops": 100e3, "gbps": 3400.0, "ceiling_share": 0.85}
    return result(**(one | {"ceiling_kind": "gpu_read", "ceiling": 4000.0, "plan_us": 3.2, "copies": 4} | changes))


def document(*results: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Returns what `libmla bench --json` writes for these results."""
    has_gpu = any(one["device"].startswith("cuda") for one in results)
    machine = {"cpu": "Test CPU", "threads": 2, "isa": ["avx512_bf16"], "gpus": ["Test GPU"] if has_gpu else []}
    machine |= {"bf16_instruction": "AVX-512 vdpbf16ps", "f32_instruction": "AVX-512 vfmadd"}
    settings = {"min_time_s": 0.3, "cold": False, "seed": 1}
    ceilings = _CPU | {"threads": 2, "gpus": [_GPU] if has_gpu else []}
    whole = {"version": "0.2.0", "machine": machine, "settings": settings, "interrupted": False, "ceilings": ceilings}
    return whole | {"results": list(results)} | changes


def write(path: Path, *results: dict[str, Any], **changes: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document(*results, **changes)), encoding="utf-8")
    return path


def unwritable(folder: Path) -> Path:
    """Returns a path that nobody can write below or to, not even root: it goes through a file."""
    blocker = folder / "blocker"
    blocker.write_text("a file, not a folder", encoding="utf-8")
    return blocker / "here"


def bad_files(folder: Path) -> dict[str, tuple[str, str]]:
    """Writes files that hold no usable results and returns them: name -> (path, part of the message)."""

    def text(name: str, content: str) -> str:
        (folder / name).write_text(content, encoding="utf-8")
        return os.fspath(folder / name)

    def doc(name: str, whole: Any) -> str:
        return text(name, json.dumps(whole))

    (folder / "binary.json").write_bytes(b"\xff\xfe\x00")
    slow = result() | {"median_us": "slow"}
    keyless = {key: value for key, value in result().items() if key != "op"}
    return {
        "missing": (os.fspath(folder / "missing.json"), "No such file or directory"),
        "folder": (os.fspath(folder), "Is a directory"),
        "text": (text("text.json", "op,backend\n"), "is not JSON"),
        "binary": (os.fspath(folder / "binary.json"), "is not JSON"),
        "list": (doc("list.json", [1, 2]), "these are no bench results"),
        "info": (doc("info.json", {"version": "0.2.0", "cpu": "x"}), "these are no bench results"),
        "cases": (doc("cases.json", {"version": "0.2.0", "cases": []}), "it lists cases; nothing was measured"),
        "empty": (doc("empty.json", document()), "the list of results is empty"),
        "no list": (doc("nolist.json", document() | {"results": 3}), "results: expected a list, got int"),
        "string": (
            doc("string.json", document(result(), slow)),
            "results[1]: median_us: expected a number of at least 0",
        ),
        "no op": (doc("noop.json", document() | {"results": [keyless]}), "results[0]: op: expected a string, got null"),
        "number": (doc("number.json", document() | {"results": [7]}), "results[0]: expected an object, got int"),
        "no time": (doc("notime.json", document(result(p10_us=0.0))), "results[0]: p10_us: expected a time above 0"),
        "share": (doc("share.json", document(result(ceiling_share="x"))), "ceiling_share: expected a number or null"),
        "machine": (doc("machine.json", document(result(), machine=3)), "machine: expected an object, got int"),
    }


BAD_FILES = (
    "missing", "folder", "text", "binary", "list", "info", "cases", "empty", "no list", "string", "no op", "number",
    "no time", "share", "machine",
)  # fmt: skip
