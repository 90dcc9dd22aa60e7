# SPDX-License-Identifier: Apache-2.0
"""Makes arguments of FlashMLA's functions, and calls of libmla.flash_mla of which a test changes some."""

import math

import torch

from libmla import flash_mla

GARBAGE_PAGE = 2147480000


def randn(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def dense_problem(lens, s_q, h_q, h_k, page_size, d_qk, dtype=torch.bfloat16):
    """Returns q, k_cache, block_table, cache_seqlens.

    NaN stands wherever no key is, and nonsense in the table's unused entries.
    """
    pages_each = max(1, math.ceil(max(lens) / page_size))
    num_pages = pages_each * len(lens)
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    table = order.view(len(lens), pages_each).clone()
    cache = randn(num_pages, page_size, h_k, d_qk, seed=2, dtype=dtype)
    for row, length in zip(table, lens, strict=True):
        used = math.ceil(length / page_size)
        if length % page_size:
            cache[row[used - 1].item(), length % page_size :] = math.nan
        cache[row[used:].long()] = math.nan
        row[used:] = GARBAGE_PAGE
    q = randn(len(lens), s_q, h_q, d_qk, seed=3, dtype=dtype)
    return q, cache, table, torch.tensor(lens, dtype=torch.int32)


def packed_cache(layout, num_pages, page_size, seed=5):
    """Returns (a cache of bytes with gaps between its pages, the bf16 rows it means [num_pages * page_size, d_qk])."""
    generator = torch.Generator().manual_seed(seed)
    channels, groups, d_qk = {"fp8_ds_mla": (512, 4, 576), "fp8_dsv4": (448, 7, 512)}[layout]
    shape = (num_pages, page_size)
    values = torch.randn(*shape, channels, generator=generator).to(torch.float8_e4m3fn)
    rope = torch.randn(*shape, 64, generator=generator).to(torch.bfloat16)
    if layout == "fp8_ds_mla":
        scales = torch.rand(*shape, groups, generator=generator) + 0.1
        row_bytes = torch.cat([values.view(torch.uint8), scales.view(torch.uint8), rope.view(torch.uint8)], -1)
        storage = torch.full((num_pages, page_size + 1, 656), 0xFF, dtype=torch.uint8)[:, :page_size]
        storage.copy_(row_bytes)
        cache = storage[:, :, None]
    else:
        exponents = torch.randint(124, 129, (*shape, groups), generator=generator)
        scales = torch.exp2(exponents.float() - 127)
        footer = torch.cat([exponents.to(torch.uint8), torch.full((*shape, 1), 0xFF, dtype=torch.uint8)], -1)
        data = torch.cat([values.view(torch.uint8), rope.view(torch.uint8)], -1)
        page = math.ceil(page_size * 584 / 576) * 576
        storage = torch.full((num_pages, page), 0xFF, dtype=torch.uint8)[:, : page_size * 584]
        storage.copy_(torch.cat([data.flatten(1), footer.flatten(1)], -1))
        cache = storage.view(num_pages, page_size, 1, 584)
    wide = values.float().unflatten(-1, (groups, -1)) * scales[..., None]
    return cache, torch.cat([wide.flatten(-2).to(torch.bfloat16), rope], -1).view(-1, d_qk)


def random_indices(b, s_q, topk, slots, seed):
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(0, slots, (b, s_q, topk), generator=generator, dtype=torch.int32)
    return indices.masked_fill(torch.rand(b, s_q, topk, generator=generator) < 0.2, -1)


def indptr(lens):
    return torch.tensor([0, *lens]).cumsum(0).to(torch.int32)


def dense_call(**changes):
    q, cache, table, seqlens = dense_problem([50, 9], 1, 6, 1, 16, 576)
    call = {"q": q, "k_cache": cache, "block_table": table, "cache_seqlens": seqlens, "head_dim_v": 512}
    return flash_mla.flash_mla_with_kvcache(**(call | {"tile_scheduler_metadata": None} | changes))


def sparse_call(**changes):
    cache, _ = packed_cache("fp8_ds_mla", 2, 64)
    call = {"q": randn(2, 1, 4, 576), "k_cache": cache, "block_table": None, "cache_seqlens": None, "head_dim_v": 512}
    call |= {"tile_scheduler_metadata": None, "is_fp8_kvcache": True, "indices": random_indices(2, 1, 32, 128, 1)}
    return flash_mla.flash_mla_with_kvcache(**(call | changes))


def prefill_call(**changes):
    call = {"q": randn(5, 4, 192), "k": randn(5, 2, 192), "v": randn(5, 2, 128)}
    call |= {"cu_seqlens_qo": indptr([5]), "cu_seqlens_kv": indptr([5]), "max_seqlen_qo": 5, "max_seqlen_kv": 5}
    return flash_mla.flash_attn_varlen_func(**(call | changes))


def sparse_fwd_call(**changes):
    call = {"q": randn(5, 4, 576), "kv": randn(9, 1, 576), "indices": torch.zeros(5, 1, 8, dtype=torch.int32)}
    return flash_mla.flash_mla_sparse_fwd(**(call | {"sm_scale": 0.1} | changes))
