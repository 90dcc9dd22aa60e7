# SPDX-License-Identifier: Apache-2.0
"""Computes the functions of ``flash_mla.fused_norm_rope_attn_rope_cast`` by libmla: sparse attention of DeepSeek V4 and
V4.1 with what stands before and behind it.

They are two operations here, `append_rope` without keys and `decode_sparse` that finishes its outputs, or three,
`append_rope`, `prefill_sparse` and `finish_output`, and run on every device of libmla, where the peer's kernel is for
data-center Blackwell. Weights keep their order: the peer's kernel has channels in another one, so that its callers
permute the weights around it by `permute_q_b_proj` and `permute_wv_proj`. Those of libmla leave them as they are.
"""

from __future__ import annotations

import torch

import libmla
from libmla.flash_mla.flash_mla_interface import _expect_dims, flash_mla_sparse_fwd
from libmla.types import CacheFormat

__all__ = ["decode", "permute_q_b_proj", "permute_wv_proj", "prefill"]

_FORMATS: dict[int, CacheFormat] = {584: "fp8_dsv4", 528: "fp8_dsv41", 288: "fp4_dsv41"}
_CHANNELS_PER_SCALE = 32
_PACKED = 4 * _CHANNELS_PER_SCALE  # channels whose exponents share an int32


def prefill(
    enable_q_norm: bool,
    rms_norm_eps: float,
    token_positions: torch.Tensor,
    is_rope_neox_style: bool,
    rope_dim: int,
    cos_sin_cache: torch.Tensor,
    n_wv_group: int,
    num_per_channels: int,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normalizes and turns queries, attends to rows of kv, turns the output back, and quantizes it.

    enable_q_norm, rms_norm_eps: whether [h_q] rows of q are divided by their root mean square.
    token_positions: [s_q] int32; cos_sin_cache: [*, rope_dim] f32; is_rope_neox_style: pairs are channels
        (i, i + rope_dim / 2), else (2i, 2i + 1), of the last rope_dim.
    n_wv_group: groups of heads that are projected together; num_per_channels: 32; the three flags: True.
    q: [s_q, h_q, d_qk]; kv, indices, sm_scale, d_v, attn_sink, topk_length: as in flash_mla_sparse_fwd.

    Returns (out [s_q, n_wv_group, h_q / n_wv_group * d_v] e4m3; exponents of its scales, one for each 32 channels, four
    in an int32, [s_q, n_wv_group, h_q / n_wv_group * d_v / 128], tokens side by side, padded to four; max_logits
    [s_q, h_q] f32; lse [s_q, h_q] f32, +inf where a query has no valid index).
    """
    _expect_layout(num_per_channels, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    positions = token_positions.to(torch.int64)
    turned = _turned(q, enable_q_norm, rms_norm_eps, positions, is_rope_neox_style, rope_dim, cos_sin_cache)
    out, max_logits, lse = flash_mla_sparse_fwd(turned, kv, indices, sm_scale, d_v, attn_sink, topk_length)
    codes, exponents = _outputs(out, out.shape[2], n_wv_group)
    libmla.finish_output(
        out,
        cos_sin=cos_sin_cache,
        positions=positions,
        interleaved=not is_rope_neox_style,
        out=codes,
        scale=exponents,
    )
    return codes.flatten(2), _as_projected(exponents), max_logits, lse


def decode(
    enable_q_norm: bool,
    rms_norm_eps: float,
    token_positions: torch.Tensor,
    is_rope_neox_style: bool,
    rope_dim: int,
    cos_sin_cache: torch.Tensor,
    n_wv_group: int,
    num_per_channels: int,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    indices_in_kvcache: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Does the same over one or two paged caches under one softmax.

    k_cache, extra_k_cache: [num_blocks, page_block_size, 1, bytes of a token], whose 584, 528 or 288 bytes say that they
        are fp8_dsv4, fp8_dsv41 or fp4_dsv41.
    indices_in_kvcache, extra_indices_in_kvcache: [s_q, topk] int32: block * page_block_size + offset; negative ones,
        and those beyond the cache, are skipped.
    topk_length, extra_topk_length: [s_q] int32: entries of indices from it on are skipped.
    The other arguments are those of prefill.

    Returns (out, exponents of its scales, lse) as prefill does.
    """
    _expect_layout(num_per_channels, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    positions = token_positions.to(torch.int64)
    turned = _turned(q, enable_q_norm, rms_norm_eps, positions, is_rope_neox_style, rope_dim, cos_sin_cache)
    codes, exponents = _outputs(turned, d_v, n_wv_group)
    _, _, lse = libmla.decode_sparse(
        turned,
        _cache("k_cache", k_cache),
        indices_in_kvcache,
        topk_length=topk_length,
        topk_length_per="token",
        extra_cache=None if extra_k_cache is None else _cache("extra_k_cache", extra_k_cache),
        extra_indices=extra_indices_in_kvcache,
        extra_topk_length=extra_topk_length,
        extra_topk_length_per="token",
        sm_scale=sm_scale,
        attn_sink=attn_sink,
        d_v=d_v,
        cos_sin=cos_sin_cache,
        positions=positions,
        interleaved=not is_rope_neox_style,
        out=codes,
        scale=exponents,
        lse_inf_without_keys=True,
        return_lse=True,
    )
    return codes.flatten(2), _as_projected(exponents), lse


def permute_q_b_proj(
    weight_and_sf: tuple[torch.Tensor, torch.Tensor], h_q: int, d_q: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the weight of q_b_proj and its scales as they are: libmla takes queries in the model's order."""
    return weight_and_sf


def permute_wv_proj(
    weight_and_sf: tuple[torch.Tensor, torch.Tensor], wv_group_size: int, d_o: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the weight of wv_proj, [n_wv_groups, d_proj_out, wv_group_size * d_o], as it is, and its scales for each
    32 channels, [n_wv_groups, d_proj_out, wv_group_size * d_o / 128] int32, d_proj_out side by side: those of an output
    of `prefill` and `decode`. Scales for more channels are repeated.
    """
    weight, scales = weight_and_sf
    wanted = wv_group_size * d_o // _PACKED
    repeats, rest = divmod(wanted, scales.shape[2])
    if rest or repeats == 0:
        raise ValueError(f"weight_and_sf: expected scales that divide {wanted} times four, got {scales.shape[2]}")
    if repeats == 1:
        return weight, scales
    exponents = scales.contiguous().view(torch.uint8).repeat_interleave(repeats, -1)
    return weight, exponents.view(torch.int32).transpose(1, 2).contiguous().transpose(1, 2)


def _expect_layout(channels: int, col_major: bool, rounded: bool, packed: bool) -> None:
    """Raises ValueError unless the scales are those that the peer has, too."""
    for name, given, expected in (
        ("num_per_channels", channels, _CHANNELS_PER_SCALE),
        ("use_tma_aligned_col_major_sf", col_major, True),
        ("round_sf", rounded, True),
        ("use_packed_ue8m0", packed, True),
    ):
        if given != expected:
            raise ValueError(f"{name}: expected {expected}, got {given}")


def _turned(
    q: torch.Tensor,
    norm: bool,
    epsilon: float,
    positions: torch.Tensor,
    neox: bool,
    rope_dim: int,
    cos_sin: torch.Tensor,
) -> torch.Tensor:
    """Returns the queries, normalized and turned, in a tensor of their own."""
    _expect_dims("q", q, "s_q, h_q, d_qk")
    if rope_dim != cos_sin.shape[-1]:
        raise ValueError(f"rope_dim: expected {cos_sin.shape[-1]}, as cos_sin_cache has, got {rope_dim}")
    parts = q.split([q.shape[2] - rope_dim, rope_dim], -1)
    # Queries alone: no key has a slot.
    no_cache = torch.empty(1, 1, q.shape[2], dtype=torch.bfloat16, device=q.device)
    no_slots = torch.full((q.shape[0],), -1, dtype=torch.int64, device=q.device)
    return libmla.append_rope(
        parts[0][:, 0],
        parts[1][:, 0],
        no_slots,
        no_cache if q.dtype != torch.float16 else no_cache.half(),
        cos_sin=cos_sin,
        positions=positions,
        q=parts,
        interleaved=not neox,
        q_norm=norm,
        norm_eps=epsilon,
    )


def _outputs(rows: torch.Tensor, d_v: int, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns new outputs for the tokens and heads of `rows`, [s_q, n_wv_group, heads of a group, d_v] e4m3, and their
    exponents, [.., d_v / 128] int32, of which tokens lie side by side, padded to four."""
    tokens, heads = rows.shape[:2]
    if groups < 1 or heads % groups != 0:
        raise ValueError(f"n_wv_group: expected a divisor of {heads} heads, got {groups}")
    codes = torch.empty(tokens, groups, heads // groups, d_v, dtype=torch.float8_e4m3fn, device=rows.device)
    padded = torch.empty(
        groups, heads // groups, d_v // _PACKED, -(-tokens // 4) * 4, dtype=torch.int32, device=rows.device
    )
    return codes, padded[..., :tokens].permute(3, 0, 1, 2)


def _as_projected(exponents: torch.Tensor) -> torch.Tensor:
    """Returns them as [s_q, n_wv_group, all of a group]."""
    return exponents.permute(1, 2, 3, 0).flatten(1, 2).permute(2, 0, 1)


def _cache(name: str, cache: torch.Tensor) -> libmla.KvCache:
    _expect_dims(name, cache, "num_blocks, page_block_size, num_heads_k, bytes_per_token")
    if cache.shape[2] != 1 or cache.shape[3] not in _FORMATS:
        raise ValueError(f"{name}: expected one head of {', '.join(map(str, _FORMATS))} bytes, got {list(cache.shape)}")
    pages = cache[:, :, 0].view(torch.uint8)
    return libmla.KvCache(_FORMATS[cache.shape[3]], kv=pages.flatten(1), page_size=cache.shape[1])
