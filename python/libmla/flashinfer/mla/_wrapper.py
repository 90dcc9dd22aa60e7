# SPDX-License-Identifier: Apache-2.0
"""Replaces flashinfer.mla.BatchMLAPagedAttentionWrapper, which plans a batch once and runs it for every layer."""

import functools
import math
from typing import Any

import torch

import libmla
from libmla._call import calling
from libmla.flashinfer._common import (
    E4M3,
    FLOAT8,
    Rows,
    Scale,
    attend_scaled,
    attn_sink,
    check_choice,
    first_of,
    int32,
    lse_base,
    output,
    refuse_given,
    row_cache,
)
from libmla.flashinfer._plans import KeptPlan
from libmla.flashinfer.mla._types import MLAPlanMetadata, deepseek_mla_dimensions

_BACKENDS = (
    "auto",
    "fa2",
    "fa3",
    "cutlass",
    "cutile",
    "trtllm-gen",
    "xqa",
    "cute-dsl",
    "cute-dsl-monolithic",
    "cute-dsl-modular",
)
_PROFILER = "libmla's kernels write no profile"
_NAME = "BatchMLAPagedAttentionWrapper"


class BatchMLAPagedAttentionWrapper:
    """Computes decode and incremental prefill in the absorbed form over a paged latent cache, for a batch of requests.

    float_workspace_buffer only says the device: libmla keeps a workspace of its own in the wrapper. `backend` is one of
    the peer's names and chooses nothing; libmla selects its kernel itself. With use_cuda_graph, `plan` copies the batch
    into the caller's buffers (qo_indptr, kv_indptr, kv_indices, kv_len_arr) and plans again in the same workspace, so
    that a captured `run` serves every later batch of the same number of requests and query tokens.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        check_choice("backend", backend, _BACKENDS)
        self.device = float_workspace_buffer.device
        self._use_cuda_graph = use_cuda_graph
        self._buffers = {
            "qo_indptr": qo_indptr,
            "kv_indptr": kv_indptr,
            "kv_indices": kv_indices,
            "kv_len": kv_len_arr,
        }
        self._batch: dict[str, torch.Tensor] | None = None
        self._head_dim_ckv: int | None = None
        self._sm_scale = 1.0 / math.sqrt(
            deepseek_mla_dimensions.qk_nope_head_dim + deepseek_mla_dimensions.qk_rope_head_dim
        )
        self._causal = True
        self._q_dtype: torch.dtype | None = None
        self._kv_dtype: torch.dtype | None = None
        self._out_dtype: torch.dtype | None = None
        self._lse_mode = "none"
        self._kept = KeptPlan(libmla.Plan.decode, in_place=use_cuda_graph)

    def plan(
        self,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        num_heads: int | None = None,
        head_dim_ckv: int | None = None,
        head_dim_kpe: int | None = None,
        page_size: int | None = None,
        causal: bool | None = None,
        sm_scale: float | None = None,
        q_data_type: torch.dtype | None = None,
        kv_data_type: torch.dtype | None = None,
        use_profiler: bool = False,
        *,
        metadata: MLAPlanMetadata | None = None,
        cum_seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        max_q_len: int | None = None,
        query_layout: str | None = None,
        kv_cache_layout: str | None = None,
        lse_mode: str = "none",
        output_dtype: torch.dtype | None = None,
        output_scale: str = "none",
        scale_mode: str = "default",
        skip_softmax: bool = False,
        enable_pdl: bool | None = None,
        use_sinks: bool = False,
    ) -> None:
        """Describes the next batch and what its runs look like.

        The batch is int32, on the CPU or the wrapper's device. It is given as `metadata`, or by its fields as arguments
        (CSR: qo_indptr, kv_indptr, kv_indices, kv_len_arr; dense: cum_seq_lens_q, block_tables, seq_lens). num_heads,
        head_dim_ckv, head_dim_kpe (0 without a rotary part), page_size, causal, sm_scale, q_data_type and kv_data_type
        are required. Queries of bf16, f16, f32 or e4m3 go with any cache of bf16, f16 or e4m3.

        lse_mode "basee" makes natural-log lse the default of `run`, and output_dtype is that of the outputs that it
        allocates (default: the query's; bf16 for e4m3). What runs may give need not be declared: layouts, scales, lse,
        sinks and skip_softmax are taken as they come. Refused: use_profiler.
        """
        refuse_given(f"{_NAME}.plan", use_profiler=(use_profiler, _PROFILER))
        check_choice("lse_mode", lse_mode, ("none", "base2", "basee"))
        check_choice("query_layout", query_layout, (None, "packed", "split"))
        check_choice("kv_cache_layout", kv_cache_layout, (None, "packed", "split"))
        check_choice("output_scale", output_scale, ("none", "per-tensor"))
        check_choice("scale_mode", scale_mode, ("default", "kv-per-tensor", "bmm-scalar", "bmm-tensor"))
        flat = MLAPlanMetadata(
            qo_indptr, kv_indptr, kv_indices, kv_len_arr, cum_seq_lens_q, block_tables, seq_lens, max_q_len
        )
        if metadata is None:
            metadata = flat
        elif flat != MLAPlanMetadata():
            raise ValueError("metadata: expected either it or its fields as arguments, got both")
        required = {
            "num_heads": num_heads,
            "head_dim_ckv": head_dim_ckv,
            "head_dim_kpe": head_dim_kpe,
            "page_size": page_size,
            "causal": causal,
            "sm_scale": sm_scale,
            "q_data_type": q_data_type,
            "kv_data_type": kv_data_type,
        }
        missing = [name for name, value in required.items() if value is None]
        if missing:
            raise TypeError(f"{_NAME}.plan: expected {', '.join(missing)}, got none")
        batch = self._on_device(_batch_of(metadata))
        self._head_dim_ckv = head_dim_ckv
        self._causal = bool(causal)
        self._sm_scale = float(sm_scale or 0.0)
        self._q_dtype = q_data_type
        self._kv_dtype = kv_data_type
        self._lse_mode = lse_mode
        self._out_dtype = output_dtype
        self._batch = batch
        self._kept.next_batch(causal=causal, **batch)

    @calling(
        {
            "q": "query",
            "q[0]": "q_nope",
            "q[1]": "q_pe",
            "cache.kv": "kv_cache",
            "cache.ckv": "ckv_cache",
            "cache.kpe": "kpe_cache",
            "cache.ckv_scale": "ckv_scale",
            "cache.kpe_scale": "kpe_scale",
            "block_table": "page_table",
            "attn_sink": "sinks",
        }
    )
    def run(
        self,
        q_nope: torch.Tensor | None = None,
        q_pe: torch.Tensor | None = None,
        ckv_cache: torch.Tensor | None = None,
        kpe_cache: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: torch.Tensor | None = None,
        kv_len: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        query: Rows | None = None,
        kv_cache: Rows | None = None,
        ckv_scale: Scale | None = None,
        ckv_scale_arr: torch.Tensor | None = None,
        kpe_scale: Scale | None = None,
        sinks: torch.Tensor | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        bmm1_scale: Scale | None = None,
        bmm2_scale: Scale | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Returns out [T, H, head_dim_ckv], with `return_lse` also lse f32 [T, H]: base 2, or natural if
        return_lse_base_on_e. A given `lse` is written even if not returned.

        Queries are given as q_nope [T, H, head_dim_ckv] and q_pe [T, H, head_dim_kpe], or as `query`: one tensor, or
        the pair. The cache is given as ckv_cache and kpe_cache [pages, page_size, width], or as `kv_cache`: one tensor,
        or the pair.

        - e4m3 caches: ckv_scale, or ckv_scale_arr f32 [pages, page_size, 4] for the quarters of a token's ckv, with
          kpe_scale: what stored elements are multiplied by. Or bmm1_scale, which replaces the planned sm_scale, and
          bmm2_scale, which multiplies the output.
        - o_scale: `out` is e4m3 (or e5m2), and the output is divided by it.
        - sinks f32 [H], natural-log logits; lse excludes them. skip_softmax_threshold_scale_factor has no effect:
          every key is computed.
        - kv_len int32 [B] and page_table int32 [B, pages] replace the planned ones; with both, one query per request
          needs no plan.

        A query without a visible key gets 0 and lse -inf. Refused: profiler_buffer.
        """
        refuse_given(f"{_NAME}.run", profiler_buffer=(profiler_buffer, _PROFILER))
        q = _rows("query", query, (("q_nope", q_nope), ("q_pe", q_pe)), "q_data_type", self._q_dtype)
        kv = _rows(
            "kv_cache", kv_cache, (("ckv_cache", ckv_cache), ("kpe_cache", kpe_cache)), "kv_data_type", self._kv_dtype
        )
        if self._batch is None and (kv_len is None or page_table is None):
            raise RuntimeError(f"{_NAME}.run: called before plan, and without kv_len and page_table")
        first = first_of(q)
        out = self._output(out, o_scale, (*first.shape[:-1], _value_width(q, kv, self._head_dim_ckv)), first)
        if return_lse or lse is not None:
            lse = output("lse", lse, first.shape[:-1], torch.float32, first)
        base2 = not (return_lse_base_on_e or self._lse_mode == "basee")
        has_bmm = bmm1_scale is not None or bmm2_scale is not None
        attend_scaled(
            functools.partial(self._decode, replanned=kv_len is not None or page_table is not None),
            q,
            out=out,
            bmm1_scale=self._sm_scale if bmm1_scale is None else bmm1_scale,
            bmm2_scale=1.0 if bmm2_scale is None else bmm2_scale,
            o_scale=o_scale,
            cache=row_cache(kv, *_kv_scales(q, kv, ckv_scale, ckv_scale_arr, kpe_scale, has_bmm)),
            lse=lse,
            lse_base=lse_base(base2),
            attn_sink=attn_sink(sinks),
            causal=self._causal,
            **self._pages(kv_len, page_table),
        )
        return (out, lse) if return_lse and lse is not None else out

    def _decode(self, q: Rows, *, cache: libmla.KvCache, replanned: bool, **arguments: Any) -> None:
        """Calls libmla.decode, with the kept plan unless the run brings lengths or pages of its own."""
        plan = None if replanned else self._kept.of(q, cache, **arguments)
        libmla.decode(q, cache, plan=plan, **arguments)

    def _pages(self, kv_len: torch.Tensor | None, page_table: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Returns the planned page table, or the one that a run brings."""
        pages = dict(self._batch or {})
        if page_table is not None:
            pages.pop("kv_indptr", None)
            pages.pop("kv_indices", None)
            pages["block_table"] = int32("page_table", page_table)
        if kv_len is not None:
            pages["kv_len"] = int32("kv_len", kv_len)
        return pages

    def _on_device(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        placed = {}
        for name, values in batch.items():
            buffer = self._buffers.get(name) if self._use_cuda_graph else None
            if buffer is None:
                placed[name] = values.to(self.device, non_blocking=True)
                continue
            if name != "kv_indices" and buffer.shape != values.shape:
                raise ValueError(
                    f"{name}: expected shape {tuple(buffer.shape)}, as the buffer of the CUDA graph has, "
                    f"got {tuple(values.shape)}"
                )
            if values.numel() > buffer.numel():
                raise ValueError(
                    f"{name}: expected at most {buffer.numel()} entries, which the buffer of the CUDA graph holds, "
                    f"got {values.numel()}"
                )
            buffer[: values.numel()].copy_(values, non_blocking=True)
            placed[name] = buffer
        return placed

    def _output(
        self, out: torch.Tensor | None, o_scale: Scale | None, shape: tuple[int, ...], q: torch.Tensor
    ) -> torch.Tensor:
        if o_scale is not None:
            if out is None:
                raise ValueError("out tensor must be provided with o_scale: an FP8 one")
            if out.dtype not in FLOAT8:
                raise ValueError(f"out must be an FP8 tensor with o_scale, got {out.dtype}")
            if not isinstance(o_scale, torch.Tensor) and not (math.isfinite(o_scale) and o_scale > 0.0):
                raise ValueError(f"o_scale must be a finite positive value, got {o_scale}")
        default = self._out_dtype or (torch.bfloat16 if q.dtype == E4M3 else q.dtype)
        return output("out", out, shape, default if out is None else out.dtype, q)


def _batch_of(metadata: MLAPlanMetadata) -> dict[str, torch.Tensor]:
    """Returns the arguments of libmla.decode that say which queries and pages are whose."""
    csr = {"qo_indptr": "qo_indptr", "kv_indptr": "kv_indptr", "kv_indices": "kv_indices", "kv_len": "kv_len_arr"}
    dense = {"qo_indptr": "cum_seq_lens_q", "block_table": "block_tables", "kv_len": "seq_lens"}
    for form in (csr, dense):
        fields = {name: (field, getattr(metadata, field)) for name, field in form.items()}
        given = {name: int32(field, x) for name, (field, x) in fields.items() if x is not None}
        if len(given) == len(form):
            offsets = given["kv_len"].numel() + 1  # as in the peer, more may follow
            return {name: x[:offsets] if name.endswith("indptr") else x for name, x in given.items()}
    raise TypeError(
        f"{_NAME}.plan: expected qo_indptr, kv_indptr, kv_indices and kv_len_arr, or cum_seq_lens_q, block_tables and "
        "seq_lens, got neither in full"
    )


def _rows(
    name: str,
    whole: Rows | None,
    parts: tuple[tuple[str, torch.Tensor | None], tuple[str, torch.Tensor | None]],
    planned: str,
    dtype: torch.dtype | None,
) -> Rows:
    """Returns one tensor, or a pair whose second part is None if it has no channels.

    Raises ValueError if its dtype is not the planned one.
    """
    (left_name, left), (right_name, right) = parts
    if whole is None:
        if left is None:
            raise TypeError(f"{_NAME}.run: expected {name}, or {left_name} and {right_name}, got none")
        whole = (left, right)
    elif left is not None or right is not None:
        raise TypeError(f"{_NAME}.run: expected either {name} or {left_name} and {right_name}, got both")
    named: tuple[tuple[str, torch.Tensor | None], ...]
    if isinstance(whole, torch.Tensor):
        named = ((name, whole),)
    elif isinstance(whole, tuple) and len(whole) == 2:
        left, right = whole
        if right is not None and right.shape[-1] == 0:
            whole = (left, None)
        named = ((left_name, left), (right_name, right))
    else:
        raise TypeError(f"{name}: expected a tensor or a pair of tensors, got {type(whole).__name__}")
    for label, tensor in named:
        if dtype is not None and tensor is not None and tensor.dtype != dtype:
            raise ValueError(f"{label}.dtype: expected the planned {planned} {dtype}, got {tensor.dtype}")
    if isinstance(whole, tuple) and whole[1] is None and name == "query":
        return whole[0]
    return whole


def _value_width(q: Rows, kv: Rows, planned: int | None) -> int:
    """Returns how many channels the value has: the latent ones."""
    if planned is not None:
        return planned
    for rows in (q, kv):
        if isinstance(rows, tuple):
            return rows[0].shape[-1]
    return first_of(kv).shape[-1] - deepseek_mla_dimensions.qk_rope_head_dim


def _kv_scales(
    q: Rows,
    kv: Rows,
    ckv_scale: Scale | None,
    ckv_scale_arr: torch.Tensor | None,
    kpe_scale: Scale | None,
    has_bmm: bool,
) -> tuple[Scale, Scale | None]:
    """Returns (scale of ckv, scale of kpe or None if it is that of ckv)."""
    rows = first_of(kv)
    given = any(scale is not None for scale in (ckv_scale, ckv_scale_arr, kpe_scale))
    if rows.dtype != E4M3:
        if given:
            raise ValueError(f"ckv_scale, ckv_scale_arr, kpe_scale: expected none with a cache of {rows.dtype}")
        return 1.0, None
    if given and has_bmm:
        raise ValueError("bmm1_scale, bmm2_scale: expected none beside scales of the cache")
    if not given and (has_bmm or first_of(q).dtype == E4M3):
        return 1.0, None
    ckv = ckv_scale if ckv_scale_arr is None else ckv_scale_arr
    if ckv is None or (ckv_scale is not None and ckv_scale_arr is not None):
        raise ValueError("Exactly one of ckv_scale or ckv_scale_arr is needed with a cache of float8_e4m3fn")
    if ckv_scale_arr is not None and ckv_scale_arr.shape != (*rows.shape[:2], 4):
        raise ValueError(
            f"Invalid shape of ckv_scale_arr: expected {(*rows.shape[:2], 4)}, one scale for each quarter of a token's "
            f"ckv, got {tuple(ckv_scale_arr.shape)}"
        )
    if isinstance(kv, tuple) and kv[1] is None:
        return ckv, None
    if kpe_scale is None:
        raise ValueError("kpe_scale: expected a number with a cache of float8_e4m3fn, got none")
    return ckv, kpe_scale
