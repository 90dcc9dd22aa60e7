# SPDX-License-Identifier: Apache-2.0
"""Computes DeepSeek Sparse Attention (V3.2, GLM-5): the indexer scores all keys, top-k chooses 2,048 of them, and
decode_sparse attends to those alone.

Latents lie in 656 bytes a token (fp8_ds_mla), the indexer's keys in 132, both in the same pages.
"""

import torch

import libmla

HEADS, INDEX_HEADS, TOP_K, PAGE_SIZE = 16, 64, 2048, 64  # 16 of the 128 heads, as on one of eight GPUs
SM_SCALE = 192**-0.5
torch.manual_seed(0)

kv_len = torch.tensor([4000, 700], dtype=torch.int32)  # of two requests; the second has fewer keys than are chosen
pages_of = [-(-length // PAGE_SIZE) for length in kv_len.tolist()]
block_table = torch.zeros(2, max(pages_of), dtype=torch.int32)
shuffled = torch.randperm(sum(pages_of), dtype=torch.int32)  # pages lie anywhere
block_table[0, : pages_of[0]], block_table[1, : pages_of[1]] = shuffled.split(pages_of)
table = {"kv_len": kv_len, "block_table": block_table}

# A layer's two caches. Every token appends its latent row, and its key of the indexer (turned and normalized already).
row_bytes = libmla.row_bytes("fp8_ds_mla", 576)
cache = libmla.KvCache("fp8_ds_mla", kv=torch.zeros(len(shuffled), PAGE_SIZE, row_bytes, dtype=torch.uint8))
index_cache = torch.zeros(len(shuffled), libmla.indexer_page_bytes(PAGE_SIZE), dtype=torch.uint8)
slots_of, index_keys_of = [], []
for request, length in enumerate(kv_len.tolist()):
    tokens = torch.arange(length)
    slots = block_table[request, tokens // PAGE_SIZE].long() * PAGE_SIZE + tokens % PAGE_SIZE
    index_keys = torch.randn(length, 128).bfloat16()
    libmla.append(torch.randn(length, 576).bfloat16(), slots, cache)
    libmla.append_indexer(index_keys, slots, index_cache, page_size=PAGE_SIZE)
    slots_of.append(slots)
    index_keys_of.append(index_keys)

# One new token of each request: its queries for the indexer, with a weight for each head, and its absorbed queries.
index_q = torch.randn(2, INDEX_HEADS, 128).bfloat16()
index_weights = torch.rand(2, INDEX_HEADS)
q = torch.randn(2, HEADS, 576).bfloat16()

# indexer_top_k is indexer_logits, top_k and physical_slots in one. Its slots are what decode_sparse takes; -1 stands
# behind the last key of a request that has fewer than 2,048.
indices = libmla.indexer_top_k(index_q, index_weights, index_cache, TOP_K, page_size=PAGE_SIZE, **table)
o = libmla.decode_sparse(q, cache, indices, sm_scale=SM_SCALE)


def true_scores(request: int) -> torch.Tensor:
    """Returns the indexer's scores of a request's keys, which are e4m3 with a power of two as their scale."""
    keys = index_keys_of[request].double()
    scale = (keys.abs().amax(-1, keepdim=True) / 448).log2().ceil().exp2()
    keys = (keys / scale).to(torch.float8_e4m3fn).double() * scale
    return index_weights[request].double() @ (index_q[request].double() @ keys.T).relu()


# The same by torch, in float64: no key that was left out scores better than one that was chosen, and attention over the
# chosen rows, as the cache gives them back, is what decode_sparse says.
out_indptr = torch.tensor([0, *kv_len.cumsum(0)], dtype=torch.int32)
all_rows = libmla.gather(cache, out_indptr=out_indptr, out_dtype="f32", **table).double()
worst = 0.0
for request, rows in enumerate(all_rows.split(kv_len.tolist())):
    chosen = torch.isin(slots_of[request], indices[request])
    scores = true_scores(request)
    assert chosen.sum() == min(TOP_K, len(rows))
    assert chosen.all() or scores[chosen].min() > scores[~chosen].max() - 1e-3 * scores.max()
    weights = (q[request].double() @ rows[chosen].T * SM_SCALE).softmax(-1)
    worst = max(worst, float((o[request] - weights @ rows[chosen, :512]).abs().max()))
assert worst < 0.02, worst
print(f"dsa: attended to {TOP_K} of {kv_len[0]} tokens, and to all {kv_len[1]}; the indexer's choice is the best")
print(f"dsa: equal to attention in float64 over the chosen rows, largest difference {worst:.4f}")
