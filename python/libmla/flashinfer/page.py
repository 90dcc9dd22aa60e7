# SPDX-License-Identifier: Apache-2.0
"""Replaces flashinfer.page, which appends latent rows to a paged cache and has the small index tools around it."""

import torch

import libmla
from libmla._call import calling
from libmla.flashinfer._common import check_buffer, row_cache

__all__ = ["append_paged_mla_kv_cache", "get_batch_indices_positions", "get_seq_lens"]


def get_batch_indices_positions(
    append_indptr: torch.Tensor,
    seq_lens: torch.Tensor,
    nnz: int,
    batch_indices: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the request and the position of each of `nnz` appended tokens, both int32 [nnz].

    Request b appends tokens append_indptr[b] ... append_indptr[b + 1] - 1 ([B + 1]); they are its last ones, seq_lens
    [B] counting them too. Entries beyond append_indptr[B] get request -1 and position 0.
    """
    device = append_indptr.device
    for name, buffer in (("batch_indices", batch_indices), ("positions", positions)):
        if buffer is not None:
            check_buffer(name, buffer, (nnz,), torch.int32, append_indptr)
    token = torch.arange(nnz, device=device, dtype=append_indptr.dtype)
    ends = append_indptr[1:].contiguous()
    request = torch.searchsorted(ends, token, right=True)
    exists = request < ends.numel()
    if ends.numel() == 0:
        position = token
    else:
        known = request.clamp(max=ends.numel() - 1)
        position = seq_lens.to(device)[known] - ends[known] + token
    request, position = torch.where(exists, request, -1), torch.where(exists, position, 0)
    return (
        request.to(torch.int32) if batch_indices is None else batch_indices.copy_(request),
        position.to(torch.int32) if positions is None else positions.copy_(position),
    )


def get_seq_lens(kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    """Returns [B]: how many tokens each request has, in full pages and then kv_last_page_len [B] in the last one.

    kv_indptr [B + 1] counts pages.
    """
    full_pages = (kv_indptr[1:] - kv_indptr[:-1] - 1).clamp(min=0)
    return full_pages * page_size + kv_last_page_len


@calling(
    {
        "rows": "append_ckv",
        "rows[0]": "append_ckv",
        "rows[1]": "append_kpe",
        "slot_mapping": "positions",
        "cache.kv": "ckv_cache",
        "cache.ckv": "ckv_cache",
        "cache.kpe": "kpe_cache",
    }
)
def append_paged_mla_kv_cache(
    append_ckv: torch.Tensor,
    append_kpe: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    ckv_cache: torch.Tensor | None,
    kpe_cache: torch.Tensor | None,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
) -> None:
    """Writes rows (append_ckv [T, kv_lora_rank], append_kpe [T, qk_rope_head_dim]) to their places in the cache.

    Token t becomes token positions[t] of request batch_indices[t], whose pages are kv_indices[kv_indptr[b] ...]; a
    negative request skips it. Caches are [pages, page_size, width] of bfloat16, float16 or float8_e4m3fn (rounded to it
    without a scale), with strides of their own and any widths. kv_last_page_len [B] is not needed.
    """
    if ckv_cache is None:
        raise ValueError("ckv_cache: expected a tensor, got none")
    page_size = ckv_cache.shape[1]
    last_page = kv_indices.numel() - 1
    if last_page < 0:
        return
    request = batch_indices.to(torch.int64)
    position = positions.to(torch.int64)
    entry = kv_indptr.to(torch.int64)[request.clamp(min=0)] + position // page_size
    page = kv_indices[entry.clamp(min=0, max=last_page)].to(torch.int64)
    slots = torch.where(request < 0, -1, page * page_size + position % page_size)
    without_kpe = kpe_cache is None or kpe_cache.shape[-1] == 0
    cache = row_cache((ckv_cache, None if without_kpe else kpe_cache))
    rows = append_ckv if append_ckv.element_size() > 1 else append_ckv.to(torch.bfloat16)
    kpe = None if without_kpe else append_kpe.to(rows.dtype)
    libmla.append(rows if kpe is None else (rows, kpe), slots, cache)
