# SPDX-License-Identifier: Apache-2.0
"""Replaces flashinfer.prefill, which computes attention over ragged keys and values.

The form is the up-projected one (d_qk 192, d_v 128, and others).

lse is in base 2 unless said. A query without a visible key gets o = 0 and lse = -inf. libmla computes one KV head per
query head; where there are fewer, keys and values are repeated first. e4m3 inputs are dequantized to float32 first.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import libmla
from libmla.flashinfer._common import FLOAT8, attn_sink, check_choice, int32, lse_base, output, refuse_given
from libmla.flashinfer._plans import KeptPlan
from libmla.flashinfer.mla import trtllm_prefill_with_kv_cache_mla

__all__ = [
    "BatchPrefillWithRaggedKVCacheWrapper",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
    "trtllm_prefill_with_kv_cache_mla",
]

_BACKENDS = ("auto", "fa2", "fa3", "cudnn", "cutlass", "cute-dsl", "cute-dsl-prims", "cutile", "fmha_v2", "trtllm-gen")
_MASKS = "libmla masks causally, by a sliding window, or not at all"
_NVFP4 = "libmla has no NVFP4 format"
_ITEMS = "libmla has no multi-item scoring"
_ROTATED = "libmla does not rotate inside attention; rotate queries and keys before it"


def single_prefill_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale_q: torch.Tensor | None = None,
    scale_k: torch.Tensor | None = None,
    scale_v: torch.Tensor | None = None,
    o_dtype: torch.dtype | None = None,
    custom_mask: torch.Tensor | None = None,
    packed_custom_mask: torch.Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: tuple[torch.Tensor, torch.Tensor] | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Computes attention of one request: q [T, H, d_qk], k [S, H_kv, d_qk], v [S, H_kv, d_v] (NHD), or k, v with S and
    H_kv swapped (HND). Returns o [T, H, d_v], with `return_lse` also lse f32 [T, H] in base 2.

    `causal` aligns the last query with the last key. scale_q, scale_k, scale_v f32 [H or H_kv] dequantize e4m3 inputs;
    k_scale and v_scale multiply scores and output. `backend` and use_fp16_qk_reduction choose nothing here.
    Refused: masks, RoPE inside attention, NVFP4.
    """
    function = "single_prefill_with_kv_cache"
    check_choice("backend", backend, _BACKENDS)
    refuse_given(
        function,
        custom_mask=(custom_mask, _MASKS),
        packed_custom_mask=(packed_custom_mask, _MASKS),
        kv_cache_sf=(kv_cache_sf, _NVFP4),
    )
    k, v = _tokens_first(kv_layout, k, v)
    arguments: dict[str, Any] = {
        "qo_indptr": _indptr_of_one(q),
        "kv_indptr": _indptr_of_one(k),
        "causal": causal,
        "sm_scale": (1.0 / math.sqrt(q.shape[-1]) if sm_scale is None else sm_scale)
        * (1.0 if k_scale is None else k_scale),
        "window_left": window_left,
        "logits_soft_cap": logits_soft_cap or 0.0,
        "alibi_slopes": _alibi_slopes(function, pos_encoding_mode, q.shape[1], q.device),
    }
    out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=o_dtype or q.dtype, device=q.device)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device) if return_lse else None
    scales = (scale_q, scale_k, scale_v)
    _attend(q, k, v, scales, v_scale, out=out, lse=lse, lse_base="2", **arguments)
    return out if lse is None else (out, lse)


single_prefill_with_kv_cache_return_lse = functools.partial(single_prefill_with_kv_cache, return_lse=True)


class BatchPrefillWithRaggedKVCacheWrapper:
    """Computes attention of a batch of requests over ragged keys and values.

    `plan` describes a batch; `run` then computes it for every layer.

    float_workspace_buffer only says the device: libmla keeps a workspace of its own in the wrapper. With
    use_cuda_graph, `plan` copies the batch into the caller's buffers and plans again in the same workspace, so that a
    captured `run` serves every later batch of the same size.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        kv_indptr_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: Sequence[Any] | None = None,
        jit_kwargs: Mapping[str, Any] | None = None,
        variant_owns_mask: bool = False,
    ) -> None:
        check_choice("kv_layout", kv_layout, ("NHD", "HND"))
        check_choice("backend", backend, _BACKENDS)
        function = "BatchPrefillWithRaggedKVCacheWrapper"
        refuse_given(function, jit_args=(jit_args, "libmla's kernels are built ahead"))
        refuse_given(function, variant_owns_mask=(variant_owns_mask, _MASKS))
        if use_cuda_graph and (qo_indptr_buf is None or kv_indptr_buf is None):
            raise ValueError("qo_indptr_buf, kv_indptr_buf: expected tensors with use_cuda_graph, got none")
        self.device = float_workspace_buffer.device
        self._kv_layout = kv_layout
        self._use_cuda_graph = use_cuda_graph
        self._buffers = (qo_indptr_buf, kv_indptr_buf) if use_cuda_graph else None
        self._arguments: dict[str, Any] | None = None
        self._kept = KeptPlan(libmla.Plan.prefill, in_place=use_cuda_graph)

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._use_cuda_graph

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor | None = None
    ) -> None:
        """Does nothing, and is there for the peer's sake: the wrapper has a workspace of its own."""

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: torch.Tensor | None = None,
        o_indptr: torch.Tensor | None = None,
        uniform_q_len: int | None = None,
    ) -> None:
        """Describes the next batch: qo_indptr, kv_indptr int32 [B + 1] are the first query and key of each request.

        The dtypes of the later run are q_data_type, kv_data_type (default: that), o_data_type (default: q_data_type).
        head_dim_vo defaults to head_dim_qk, sm_scale to 1 / sqrt(head_dim_qk). fixed_split_size and disable_split_kv
        make the bits of a request independent of the rest of the batch. Refused: masks, multi-item scoring, RoPE inside
        attention, v_indptr and o_indptr of their own. Hints about lengths are not needed.
        """
        function = "BatchPrefillWithRaggedKVCacheWrapper.plan"
        refuse_given(
            function,
            custom_mask=(custom_mask, _MASKS),
            packed_custom_mask=(packed_custom_mask, _MASKS),
            prefix_len_ptr=(prefix_len_ptr, _ITEMS),
            token_pos_in_items_ptr=(token_pos_in_items_ptr, _ITEMS),
            max_item_len_ptr=(max_item_len_ptr, _ITEMS),
            v_indptr=(v_indptr, "libmla's values lie where their keys do"),
            o_indptr=(o_indptr, "libmla's outputs lie where their queries do"),
        )
        if num_qo_heads % num_kv_heads != 0:
            raise ValueError(f"num_qo_heads: expected a multiple of num_kv_heads {num_kv_heads}, got {num_qo_heads}")
        self._q_dtype = _dtype(q_data_type)
        self._kv_dtype = self._q_dtype if kv_data_type is None else _dtype(kv_data_type)
        self._o_dtype = self._q_dtype if o_data_type is None else _dtype(o_data_type)
        self._head_dims = (num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo or head_dim_qk)
        self._set_batch(qo_indptr, kv_indptr, non_blocking)
        self._arguments = {
            "causal": causal,
            "sm_scale": 1.0 / math.sqrt(head_dim_qk) if sm_scale is None else sm_scale,
            "window_left": window_left,
            "logits_soft_cap": logits_soft_cap or 0.0,
            "alibi_slopes": _alibi_slopes(function, pos_encoding_mode, num_qo_heads, self.device),
            "batch_invariant": disable_split_kv or (fixed_split_size or -1) > 0,
        }
        self._kept.next_batch(causal=causal, window_left=window_left)

    begin_forward = plan

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        o_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Computes the planned batch's o [T, H, d_v] from q [T, H, d_qk], k [S, H_kv, d_qk] and v [S, H_kv, d_v].

        With `return_lse` also lse f32: base 2 ("log2") or natural ("ln"), [T, H] ("NH") or [H, T] ("HN"). q_scale and
        k_scale multiply the scores, v_scale multiplies and o_scale divides the output. With e4m3 inputs, *args may be
        scale_q, scale_k, scale_v of single_prefill_with_kv_cache. An attribute `_sinks` f32 [H], which engines set on
        the peer's wrapper, is honoured.
        """
        if self._arguments is None:
            raise RuntimeError("BatchPrefillWithRaggedKVCacheWrapper.run: called before plan")
        refuse_given("BatchPrefillWithRaggedKVCacheWrapper.run", kv_cache_sf=(kv_cache_sf, _NVFP4))
        check_choice("lse_base", lse_base, ("log2", "ln"))
        check_choice("lse_layout", lse_layout, ("NH", "HN"))
        k, v = _tokens_first(self._kv_layout, k, v)
        self._check_inputs(q, k, v, args)
        num_tokens, num_heads = q.shape[:2]
        out = output("out", out, (num_tokens, num_heads, v.shape[-1]), self._o_dtype, q)
        shape = (num_heads, num_tokens) if lse_layout == "HN" else (num_tokens, num_heads)
        if return_lse or lse is not None:
            lse = output("lse", lse, shape, torch.float32, q)
        arguments = dict(self._arguments, qo_indptr=self._qo_indptr, kv_indptr=self._kv_indptr)
        arguments["sm_scale"] *= (1.0 if q_scale is None else q_scale) * (1.0 if k_scale is None else k_scale)
        _attend(
            q,
            k,
            v,
            args or (None, None, None),
            (1.0 if v_scale is None else v_scale) / (1.0 if o_scale is None else o_scale),
            out=out,
            lse=lse.t() if lse is not None and lse_layout == "HN" else lse,
            lse_base=_base(lse_base),
            attn_sink=attn_sink(getattr(self, "_sinks", None)),
            kept=self._kept,
            **arguments,
        )
        return (out, lse) if return_lse and lse is not None else out

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Calls `run` with these options instead of the planned ones (deprecated in the peer)."""
        function = "BatchPrefillWithRaggedKVCacheWrapper.forward"
        if self._arguments is None:
            raise RuntimeError(f"{function}: called before plan")
        options = {
            "causal": causal,
            "sm_scale": 1.0 / math.sqrt(q.shape[-1]) if sm_scale is None else sm_scale,
            "window_left": window_left,
            "logits_soft_cap": logits_soft_cap or 0.0,
            "alibi_slopes": _alibi_slopes(function, pos_encoding_mode, q.shape[1], q.device),
        }
        changed = (causal, window_left) != (self._arguments["causal"], self._arguments["window_left"])
        self._arguments.update(options)
        if changed:
            self._kept.next_batch(causal=causal, window_left=window_left)
        return self.run(q, k, v, return_lse=return_lse)

    forward_return_lse = functools.partialmethod(forward, return_lse=True)

    def end_forward(self) -> None:
        """Does nothing, and is there for the peer's sake."""

    def _set_batch(self, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, non_blocking: bool) -> None:
        if qo_indptr.shape != kv_indptr.shape:
            raise ValueError(
                f"kv_indptr: expected {qo_indptr.numel()} entries, as qo_indptr has, got {kv_indptr.numel()}"
            )
        pair = []
        for name, values, buffer in zip(
            ("qo_indptr", "kv_indptr"), (qo_indptr, kv_indptr), self._buffers or (None, None)
        ):
            int32(name, values)
            if buffer is None:
                pair.append(values.to(self.device, non_blocking=non_blocking))
                continue
            if values.shape != buffer.shape:
                raise ValueError(
                    f"{name}: expected {buffer.numel()} entries, as the buffer of the CUDA graph has, "
                    f"got {values.numel()}"
                )
            pair.append(buffer.copy_(values, non_blocking=non_blocking))
        self._qo_indptr, self._kv_indptr = pair

    def _check_inputs(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scales: Sequence[Any]) -> None:
        for name, tensor, dtype in (("q", q, self._q_dtype), ("k", k, self._kv_dtype)):
            if tensor.dtype != dtype:
                raise ValueError(f"{name}: expected dtype {dtype}, as planned, got {tensor.dtype}")
        num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo = self._head_dims
        planned = {"q": (q, num_qo_heads, head_dim_qk), "k": (k, num_kv_heads, head_dim_qk)}
        for name, (tensor, heads, width) in (planned | {"v": (v, num_kv_heads, head_dim_vo)}).items():
            if tuple(tensor.shape[1:]) != (heads, width):
                raise ValueError(
                    f"{name}: expected {heads} heads of {width} channels, as planned, got {tuple(tensor.shape)}"
                )
        if len(scales) not in (0, 3):
            raise TypeError(f"run: expected no further arguments or scale_q, scale_k, scale_v, got {len(scales)}")


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scales: Sequence[torch.Tensor | float | None],
    v_scale: float | torch.Tensor | None,
    *,
    out: torch.Tensor,
    kept: KeptPlan | None = None,
    **arguments: Any,
) -> None:
    """Calls libmla.prefill, and does what that does not do itself: e4m3 inputs, fewer KV heads, a scaled output."""
    if q.dtype in FLOAT8:
        q, k, v = (_dequantized(x, scale) for x, scale in zip((q, k, v), scales))
    if k.shape[1] != q.shape[1]:
        groups = q.shape[1] // max(k.shape[1], 1)
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    k, v = k.to(q.dtype), v.to(q.dtype)
    unscaled = v_scale is None or (not isinstance(v_scale, torch.Tensor) and v_scale == 1.0)
    in_place = unscaled and out.dtype in (q.dtype, torch.float32)
    target = out if in_place else torch.empty(out.shape, dtype=torch.float32, device=out.device)
    arguments["out"] = target
    plan = None if kept is None else kept.of(q, k, v, **arguments)
    libmla.prefill(q, k, v, plan=plan, **arguments)
    if in_place:
        return
    if v_scale is not None:
        target.mul_(v_scale)
    limit = torch.finfo(out.dtype).max
    out.copy_(target.clamp_(-limit, limit) if out.dtype in FLOAT8 else target)


def _dequantized(x: torch.Tensor, scale: torch.Tensor | float | None) -> torch.Tensor:
    x = x.to(torch.float32)
    if scale is None:
        return x
    return x * (scale[:, None] if isinstance(scale, torch.Tensor) and scale.ndim == 1 else scale)


def _tokens_first(kv_layout: str, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    check_choice("kv_layout", kv_layout, ("NHD", "HND"))
    return (k, v) if kv_layout == "NHD" else (k.transpose(0, 1), v.transpose(0, 1))


def _indptr_of_one(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(2, dtype=torch.int32, device=x.device) * x.shape[0]


def _dtype(name: str | torch.dtype) -> torch.dtype:
    return getattr(torch, name) if isinstance(name, str) else name


def _base(name: str) -> str:
    return lse_base(name == "log2")


def _alibi_slopes(function: str, pos_encoding_mode: str, num_heads: int, device: torch.device) -> torch.Tensor | None:
    """Returns f32 [H]: 2^(-8 i / n) for the first n heads, n the largest power of two up to H; others lie between."""
    check_choice("pos_encoding_mode", pos_encoding_mode, ("NONE", "ROPE_LLAMA", "ALIBI"))
    if pos_encoding_mode == "ROPE_LLAMA":
        refuse_given(function, pos_encoding_mode=(pos_encoding_mode, _ROTATED))
    if pos_encoding_mode == "NONE":
        return None
    power = 1 << (num_heads.bit_length() - 1)
    between = torch.arange(1, 1 + 2 * (num_heads - power), 2, dtype=torch.float32)
    exponents = torch.cat([torch.arange(1, 1 + power, dtype=torch.float32) * 8.0, between * 4.0])
    return torch.exp2(-exponents / power).to(device)
