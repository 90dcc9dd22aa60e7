# SPDX-License-Identifier: Apache-2.0
"""Compiles an attention layer of DeepSeek-V2-Lite with torch.compile, in one graph: libmla's functions are operators
that torch knows, and what they write to the cache is seen by what follows.

python examples/compiled_layer.py [BACKEND]     a backend of torch.compile: inductor, or aot_eager, which is quick to start
"""

import sys

import torch
from torch import nn

import libmla

HIDDEN, HEADS, NOPE, ROPE, RANK, PAGE_SIZE = 2048, 16, 128, 64, 512, 64
torch.manual_seed(0)


class Attention(nn.Module):
    """Decodes one new token of each request. Rotary embedding is left out: append_rope has it (dsv4_layer.py)."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * (NOPE + ROPE), bias=False)
        self.kv_proj = nn.Linear(HIDDEN, RANK + ROPE, bias=False)
        self.w_uk = nn.Parameter(torch.randn(HEADS, NOPE, RANK) * NOPE**-0.5)
        self.w_uv = nn.Parameter(torch.randn(HEADS, RANK, NOPE) * RANK**-0.5)
        self.o_proj = nn.Linear(HEADS * NOPE, HIDDEN, bias=False)

    def forward(self, x, slots, cache, kv_len, block_table):
        libmla.append(self.kv_proj(x), slots, cache)
        q_nope, q_pe = self.q_proj(x).unflatten(-1, (HEADS, -1)).split([NOPE, ROPE], -1)
        q_nope = torch.einsum("thn,hnr->thr", q_nope, self.w_uk)  # absorbed: queries for latents
        scale = (NOPE + ROPE) ** -0.5
        o = libmla.decode((q_nope, q_pe), cache, kv_len=kv_len, block_table=block_table, sm_scale=scale)
        return self.o_proj(torch.einsum("thr,hrn->thn", o, self.w_uv).flatten(1))


layer = Attention().bfloat16()
backend = sys.argv[1] if len(sys.argv) > 1 else "inductor"  # on a CPU it runs a C++ compiler, for half a minute
compiled = torch.compile(layer, fullgraph=True, backend=backend)

cache = torch.randn(8, PAGE_SIZE, RANK + ROPE).bfloat16()
block_table = torch.tensor([[3, 0, 5], [1, 6, 2]], dtype=torch.int32)
kv_len = torch.tensor([130, 64], dtype=torch.int32)
with torch.inference_mode():
    for _ in range(3):  # three tokens of each request
        kv_len += 1
        last = kv_len - 1
        slots = block_table.gather(1, (last // PAGE_SIZE).long()[:, None])[:, 0].long() * PAGE_SIZE + last % PAGE_SIZE
        x = torch.randn(2, HIDDEN).bfloat16()
        y = compiled(x, slots, cache, kv_len, block_table)

    # The last token again, in float64, with keys and values of every head: nothing is absorbed, nothing compiled.
    layer.double()
    worst = 0.0
    for request, length in enumerate(kv_len.tolist()):
        rows = cache[block_table[request].long()].flatten(0, 1)[:length].double()
        rows[-1] = layer.kv_proj(x[request].double())  # not what the compiled layer appended
        q = layer.q_proj(x[request].double()).view(HEADS, NOPE + ROPE)
        keys = torch.einsum("sr,hnr->hsn", rows[:, :RANK], layer.w_uk)
        keys = torch.cat([keys, rows[:, RANK:].expand(HEADS, -1, -1)], -1)
        values = torch.einsum("sr,hrn->hsn", rows[:, :RANK], layer.w_uv)
        weights = (torch.einsum("hd,hsd->hs", q, keys) * (NOPE + ROPE) ** -0.5).softmax(-1)
        expected = layer.o_proj(torch.einsum("hs,hsn->hn", weights, values).flatten())
        worst = max(worst, float((y[request] - expected).abs().max() / expected.abs().max()))
assert worst < 0.02, worst
print("compiled_layer: projections, append and decode are one graph of torch.compile")
print(f"compiled_layer: equal to the layer in float64 without absorption, largest difference {100 * worst:.2f} %")
