# SPDX-License-Identifier: Apache-2.0
"""Computes an attention layer of DeepSeek V4 between its projections: queries and keys are normalized and turned, 128
tokens at a time are compressed into one row of a second pool, queries attend to the window and to that pool under one
softmax, and the output is turned back and quantized for the output projection.

Layers with a ratio of 4 choose rows of the pool by an indexer (dsa.py), whose keys compress() makes too.
"""

import torch

import libmla

HEADS, WINDOW, RATIO, PAGE_SIZE = 8, 128, 128, 64  # 8 of the 64 heads, as on one of eight GPUs
CHUNKS = [765, 1, 1, 1, 1]  # a prompt, then four tokens; the sixth group of 128 ends with the third of them
TOKENS = sum(CHUNKS)
torch.manual_seed(0)

# The weights of the layer, and random numbers in place of what its projections give for each token.
norm_weight, pool_norm_weight = torch.rand(2, 512) + 0.5
position_bias, attn_sink = torch.randn(RATIO, 512), torch.randn(HEADS)
angles = torch.arange(1024)[:, None] * 10000.0 ** -torch.arange(0, 1, 1 / 32)
cos_sin = torch.cat([angles.cos(), angles.sin()], -1)  # [positions, 64] of the last 64 channels
q = torch.randn(TOKENS, HEADS, 512).bfloat16()
kv = torch.randn(TOKENS, 512).bfloat16()
pool_kv, pool_score = torch.randn(2, TOKENS, 512).bfloat16()

# The caches of one request: pages of the window, pages of the pool, and what compress() keeps of an unfinished group.
page_bytes = libmla.page_bytes("fp8_dsv4", 512, PAGE_SIZE)
window = libmla.KvCache("fp8_dsv4", kv=torch.zeros(16, page_bytes, dtype=torch.uint8), page_size=PAGE_SIZE)
pool = libmla.KvCache("fp8_dsv4", kv=torch.zeros(2, page_bytes, dtype=torch.uint8), page_size=PAGE_SIZE)
window_table, pool_table = torch.randperm(16)[None].int(), torch.tensor([[1]], dtype=torch.int32)
state, state_table = torch.zeros(1, RATIO + 3, 1024), torch.zeros(1, 1, dtype=torch.int32)  # 4 drafts may be rejected


def layer(first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what the output projection multiplies for tokens `first` to `end` - 1: e4m3, and scales of 128 channels."""
    new, positions = slice(first, end), torch.arange(first, end)
    turn = {"cos_sin": cos_sin, "positions": positions}
    request = {"kv_len": torch.tensor([end], dtype=torch.int32)}

    slots = window_table[0, positions // PAGE_SIZE].long() * PAGE_SIZE + positions % PAGE_SIZE
    norms = {"q_norm": True, "norm_weight": norm_weight}
    (nope, pe), q_parts = kv[new].split([448, 64], -1), q[new].split([448, 64], -1)
    turned_q = libmla.append_rope(nope, pe, slots, window, q=q_parts, **norms, **turn)

    pool_slots = pool_table[0, 0].long() * PAGE_SIZE + positions // RATIO
    pool_slots[(positions + 1) % RATIO != 0] = -1  # no group ends with this token
    kept = {"state": state, "state_table": state_table}
    weights = {"position_bias": position_bias, "norm_weight": pool_norm_weight, "cos_sin": cos_sin}
    into = {"slot_mapping": pool_slots, "cache": pool}
    libmla.compress(pool_kv[new], pool_score[new], ratio=RATIO, **into, **kept, **weights, **request)

    # A query sees the 128 tokens that end with its own, and every group that is complete by then.
    seen = (positions[:, None] + torch.arange(1 - WINDOW, 1)).int()
    groups = torch.arange(TOKENS // RATIO, dtype=torch.int32).repeat(len(positions), 1)
    groups[(groups + 1) * RATIO > positions[:, None] + 1] = -1
    request["page_size"] = PAGE_SIZE
    indices = libmla.physical_slots(seen, block_table=window_table, **request)
    extra = libmla.physical_slots(groups, block_table=pool_table, ratio=RATIO, **request)
    pools = {"cache": window, "indices": indices, "extra_cache": pool, "extra_indices": extra}
    o = libmla.decode_sparse(turned_q, attn_sink=attn_sink, sm_scale=512**-0.5, **pools)
    return libmla.finish_output(o, return_scale=True, **turn)  # decode_sparse takes these too: one pass


def turned(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Turns the last 64 channels, pairs (2i, 2i + 1), by complex numbers."""
    pairs = torch.view_as_complex(x[..., 448:].unflatten(-1, (32, 2)).contiguous()) * by
    return torch.cat([x[..., :448], torch.view_as_real(pairs).flatten(-2)], -1)


def normed(x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def expected() -> torch.Tensor:
    """Computes all tokens at once in float64: no pages, no formats, no chunks."""
    at, starts = torch.arange(TOKENS), torch.arange(TOKENS // RATIO) * RATIO
    turns = torch.polar(torch.ones(1), angles).to(torch.complex128)
    queries = turned(normed(q.double()), turns[at, None])
    grouped_kv, scores = (x[: len(starts) * RATIO].double().view(-1, RATIO, 512) for x in (pool_kv, pool_score))
    pooled = normed(((scores + position_bias).softmax(1) * grouped_kv).sum(1)) * pool_norm_weight
    keys = torch.cat([turned(normed(kv.double()) * norm_weight, turns[at]), turned(pooled, turns[starts])])
    behind = at[:, None] - at
    visible = torch.cat([(behind >= 0) & (behind < WINDOW), at[:, None] >= starts + RATIO - 1], 1)
    scores = (torch.einsum("thd,sd->ths", queries, keys) * 512**-0.5).masked_fill(~visible[:, None], -torch.inf)
    sink = attn_sink.double()[:, None].expand(TOKENS, -1, 1)  # takes its part of the softmax, and has no value
    return turned(torch.cat([scores, sink], -1).softmax(-1)[..., :-1] @ keys, turns[at, None].conj())


parts, first = [], 0
for count in CHUNKS:
    codes, scale = layer(first, first + count)
    parts.append(codes.double() * scale.repeat_interleave(128, -1))
    first += count
error = (torch.cat(parts) - expected()).square().sum((1, 2)).sqrt() / expected().square().sum((1, 2)).sqrt()
assert error.max() < 0.07, error.max()  # relative, of a token: caches and output are e4m3. A wrong row makes it 0.1
print(f"dsv4_layer: {TOKENS} tokens in {len(CHUNKS)} calls, {WINDOW} rows of the window, {TOKENS // RATIO} of the pool")
print(f"dsv4_layer: equal to the layer in float64 but for e4m3, largest difference {100 * error.max():.1f} %")
