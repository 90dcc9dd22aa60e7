# SPDX-License-Identifier: Apache-2.0
"""Tests which exception says what, and what contexts do."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

import batches
import libmla
from batches import ints


@pytest.fixture
def good():
    """Returns arguments of decode that are right."""
    batch = batches.paged([5, 20], 16)
    return {
        "q": torch.randn(2, 4, 576).bfloat16(),
        "cache": batches.random_cache(batch),
        **batch.pages(),
        "sm_scale": 0.1,
    }


@pytest.mark.parametrize(
    ("field", "value", "error", "message"),
    [
        ("q", torch.zeros(2, 576).bfloat16(), ValueError, r"q: expected .*\[2, 576\]"),
        ("q", torch.zeros(2, 4, 576).double(), TypeError, r"q: expected elements of .*, got float64"),
        ("q", torch.zeros(2, 4, 576, dtype=torch.complex64), TypeError, r"q: expected elements of .*, got complex64"),
        ("q", torch.zeros(1, 1, 1, 2, 4, 576), ValueError, "q: expected at most 5 dimensions, got 6"),
        ("q", torch.zeros(2, 4, 1152).bfloat16()[..., ::2], ValueError, "q: expected .*stride"),
        ("q", None, ValueError, "q: "),
        ("q", "tensor", TypeError, 'q: expected a tensor, got "tensor"'),
        ("q", (torch.zeros(2, 4, 512).bfloat16(),), TypeError, "pair of tensors"),
        ("cache", None, ValueError, "cache"),
        ("cache", torch.zeros(4, 16, 500).bfloat16(), ValueError, "cache: expected shape"),
        ("cache", torch.zeros(4, 16, 576, dtype=torch.uint8), TypeError, "cache: expected a KvCache, which names its"),
        ("cache", libmla.KvCache("int4", torch.zeros(1)), ValueError, "cache.format: expected bf16, .* got int4"),
        ("cache", libmla.KvCache("fp8", torch.zeros(4, 16, 576)), ValueError, "cache.kv: expected e4m3, got f32"),
        ("kv_len", [5, 20], TypeError, "kv_len: expected a tensor of int32, got a list or tuple"),
        ("kv_len", torch.tensor([5, 20]), ValueError, "kv_len: expected int32, got int64"),
        ("kv_len", ints([5, -1]), ValueError, "kv_len"),
        ("block_table", None, ValueError, "block_table"),
        ("block_table", ints([7]).reshape(1, 1), ValueError, "block_table: expected"),
        ("sm_scale", 0.0, ValueError, "sm_scale: expected"),
        ("sm_scale", float("nan"), ValueError, "sm_scale: expected"),
        ("sm_scale", "1", TypeError, 'sm_scale: expected a number, got "1"'),
        ("causal", "yes", TypeError, 'causal: expected a bool, got "yes"'),
        ("lse_base", "10", ValueError, 'lse_base: expected "e" or "2", got "10"'),
        ("compute", "fp4", ValueError, 'compute: expected "default", "fp8" or "exact", got "fp4"'),
        ("compute", "fp8", ValueError, "compute: expected default, since bf16 caches are not quantized, got fp8"),
        ("window_left", 2**40, ValueError, "window_left: expected an int of 32 bits, got 1099511627776"),
        ("window_left", -2, ValueError, "window_left: expected"),
        ("context_parallel", (1, 2), TypeError, r"context_parallel: expected \(rank, world, interleave\)"),
        ("context_parallel", (2, 2, 1), ValueError, "context_parallel.rank: expected"),
        ("out_dtype", "bf17", TypeError, "out_dtype: expected an element type"),
        ("out_dtype", "i32", ValueError, "out: expected .*, got int32"),
        ("out", torch.zeros(2, 3, 512).bfloat16(), ValueError, "out: expected"),
        ("d_v", 1000, ValueError, "out: expected"),
        ("d_v", -3, ValueError, "d_v: expected at least 1, got -3"),
        ("d_v", 0, ValueError, "d_v: expected at least 1, got 0"),
        ("window_left", None, TypeError, "window_left: expected an int, got None"),
        ("context", 3, TypeError, "context: expected a Context, got int"),
        ("q", torch.zeros(2, 4, 576, device="meta"), TypeError, "strided tensors on .* on device meta"),
        ("q", torch.zeros(2, 4, 576).to_sparse(), TypeError, "got one of layout torch.sparse_coo"),
    ],
)
def test_one_wrong_argument(good, field, value, error, message):
    with pytest.raises(error, match=message) as raised:
        libmla.decode(**{**good, field: value})
    assert type(raised.value) is error


def test_outputs_stay_as_they_are(good):
    out = torch.full((2, 4, 512), 7.0).bfloat16()
    with pytest.raises(ValueError, match="kv_len"):
        libmla.decode(**{**good, "kv_len": ints([5, 1000])}, out=out)
    assert (out == 7).all()


def test_outputs_over_other_tensors(good):
    q, cache = good["q"], good["cache"]
    before = q.clone(), cache.view(torch.int16).clone()  # of a cache that holds NaN
    for over, name in ((q, "q"), (cache, "cache")):
        out = over.view(-1)[512 : 512 + 2 * 4 * 512].view(2, 4, 512)
        with pytest.raises(
            ValueError, match=f"^decode: out: expected memory apart from that of {name}, got ranges with"
        ):
            libmla.decode(**good, out=out)
    with pytest.raises(ValueError, match="workspace: expected memory apart from that of out"):
        plan = libmla.Plan.decode(**good)
        libmla.decode(
            **good, plan=plan, out=torch.from_dlpack(plan.workspace)[: 2 * 4 * 512 * 2].view(q.dtype).view(2, 4, 512)
        )
    assert torch.equal(q, before[0]) and torch.equal(cache.view(torch.int16), before[1])


def test_slices_of_one_tensor_are_apart(good):
    wanted = libmla.decode(**good, return_lse=True)
    together = torch.zeros(2, 4, 576 + 512).bfloat16()
    together[..., :576] = good["q"]
    good["q"], out = together[..., :576], together[..., 576:]
    libmla.decode(**good, out=out)
    assert torch.equal(out, wanted[0])


def test_gather_counts_rows_only_where_it_can():
    batch = batches.paged([5], 16)
    named = {**batch.pages(), "out_indptr": ints([0, 5])}
    cache = batches.random_cache(batch)
    assert libmla.gather(cache, **named).shape == (5, 576)
    named["out_indptr"].untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="gather: out_indptr: "):
        libmla.gather(cache, **named)
    for wrong in (torch.tensor([0, 5]), ints([]), ints([[0, 5]]), None):
        with pytest.raises(ValueError, match="gather: out_indptr: expected"):
            libmla.gather(cache, **{**named, "out_indptr": wrong})


def test_gradients(good):
    good["q"].requires_grad_()
    assert libmla.decode(**good).shape == (2, 4, 512)
    with torch.enable_grad(), pytest.raises(TypeError, match="requires_grad.*inference only"):
        libmla.decode(**good)
    with torch.enable_grad(), pytest.raises(TypeError, match="requires_grad"):
        libmla.decode(**{**good, "q": torch.nn.Parameter(good["q"])})
    with torch.enable_grad():
        assert libmla.decode(**{**good, "q": good["q"].detach()}).shape == (2, 4, 512)


def test_unsupported(good):
    assert issubclass(libmla.UnsupportedError, RuntimeError)
    with pytest.raises(libmla.UnsupportedError, match='backend: "cuda_portable" cannot run this'):
        libmla.decode(**good, context=libmla.Context(backend="cuda_portable"))
    with pytest.raises((ValueError, libmla.UnsupportedError), match="sm77"):
        libmla.Context(device="emulated:sm77")
    for wrong in (
        {"device": "tpu"},
        {"num_threads": -1},
        {"num_threads": 2, "affinity": [0]},
        {"num_threads": 1, "affinity": [1 << 40]},
    ):
        with pytest.raises(ValueError, match="expected"):
            libmla.Context(**wrong)
    with pytest.raises(TypeError, match="affinity"):
        libmla.Context(2, affinity="01")  # type: ignore[arg-type]


def test_explanations():
    found = libmla.explain("decode", model="deepseek-v3", cache="fp8_ds_mla", device="sm90")
    assert [row.backend for row in found.rows] == libmla.backends("decode")
    for arguments, field in (
        (("attention",), "op"),
        (("decode", "gpt-2"), "model|gpt-2"),
    ):
        with pytest.raises(ValueError, match=field):
            libmla.explain(arguments[0], model=arguments[1] if len(arguments) > 1 else None)
    for device in ("cuda:", "cuda:x", "sm", "emulated:", "tpu", "cudax"):
        with pytest.raises(ValueError, match="device: expected cpu, cuda:<index>"):
            libmla.explain("decode", device=device)


def child(code: str, **environment: str) -> str:
    """Returns what a fresh process prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# Without torch: numpy's arrays suffice, and the process starts faster.
SMALL = """
import os, sys
sys.modules["torch"] = None
import numpy as np, libmla
q, kv = np.ones((1, 2, 576), np.float16), np.ones((2, 16, 576), np.float16)
lengths = dict(kv_len=np.array([3], np.int32), block_table=np.zeros((1, 1), np.int32), sm_scale=0.1)
def run(**more):
    o = libmla.decode(q, kv, **lengths, **more)
    assert type(o) is np.ndarray and o.shape == (1, 2, 512) and abs(o - 1).max() < 1e-3, o
"""


def test_environment():
    show = SMALL + "p = libmla.Plan.decode(q, kv, **lengths); run(); print(p.backend)"
    assert child(show, MLA_BACKEND="reference") == "reference"
    archs = libmla.info().emulated_archs
    if archs:
        small: dict[str, Any] = {"cache": "f16", "q_dtype": "f16", "num_heads": 2}
        expected = libmla.explain("decode", device=f"emulated:sm{archs[0]}", **small).selected
        assert child(show, MLA_EMULATE=f"sm{archs[0]}") == expected
    wrong = SMALL + "try: run()\nexcept ValueError as error: print(error)"
    assert "MLA_EMULATE" in child(wrong, MLA_EMULATE="h100")


def test_fork():
    code = (
        SMALL
        + """
mine = libmla.Context(2)
run(); run(context=mine)
if os.fork() == 0:
    run()
    try:
        run(context=mine)
    except RuntimeError as error:
        assert "fork" in str(error)
    else:
        os._exit(3)
    del mine
    run(context=libmla.Context(2))
    os._exit(0)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
run(); run(context=mine)
print("fine")
"""
    )
    assert child(code) == "fine"


EVERYTHING = """
import libmla
for name in dir(libmla):
    getattr(libmla, name)
from libmla import *
assert callable(decode) and Plan and callable(libmla.info) and libmla.__version__[0].isdigit()
try:
    libmla.attention
except AttributeError as error:
    assert "attention" in str(error)
else:
    raise AssertionError
print(*sys.modules)
"""


def test_what_an_import_brings():
    heavy = {"torch", "numpy", "tvm_ffi", "rich", "matplotlib", "jax", "ml_dtypes"}
    loaded = child("import sys, libmla, libmla.cli; print(*sys.modules)").split()
    assert "libmla.cli" in loaded and not heavy & set(loaded)
    loaded = child('import sys; sys.modules["torch"] = sys.modules["numpy"] = None; ' + EVERYTHING).split()
    assert {"libmla.ops", "tvm_ffi"} <= set(loaded) and not heavy - {"torch", "numpy", "tvm_ffi"} & set(loaded)
