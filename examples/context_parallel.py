# SPDX-License-Identifier: Apache-2.0
"""Deals out the tokens of every request over processes, which decode together: decode context parallelism.

torchrun --nproc-per-node 2 examples/context_parallel.py

It runs over gloo, on CPUs. On GPUs a process calls torch.cuda.set_device, initializes "nccl", and makes its tensors
there; all else stays.
"""

import torch
import torch.distributed as dist

from libmla.distributed import ContextParallel, local_kv_len, shard_heads

HEADS, PAGE_SIZE, INTERLEAVE = 32, 16, 16  # runs of 16 tokens go to one rank after another
SM_SCALE = 192**-0.5

dist.init_process_group("gloo")
group = ContextParallel(interleave=INTERLEAVE)
rank, world = group.rank, group.world_size

# Every rank knows the whole batch: three requests, the last of which is too short for all ranks to hold a part of it.
torch.manual_seed(0)
lengths = [1000, 257, 5]
kv_len = torch.tensor(lengths, dtype=torch.int32)
qo_indptr = torch.tensor([0, 1000, 1257, 1262], dtype=torch.int32)
rows = torch.randn(sum(lengths), 576).bfloat16()
q = torch.randn(len(lengths), HEADS, 576).bfloat16()

# This rank's cache has pages for its own tokens only, about 1 / world of each request.
pages_of = [-(-local_kv_len(length, rank, world, INTERLEAVE) // PAGE_SIZE) for length in lengths]
cache = torch.zeros(sum(pages_of), PAGE_SIZE, 576, dtype=torch.bfloat16)
block_table = torch.zeros(len(lengths), max(pages_of), dtype=torch.int32)
for request, pages in enumerate(torch.arange(sum(pages_of), dtype=torch.int32).split(pages_of)):
    block_table[request, : len(pages)] = pages
batch = {"kv_len": kv_len, "block_table": block_table}  # lengths are those of all ranks together

group.append(rows, cache, qo_indptr=qo_indptr, **batch)  # writes the rows that this rank owns
own_q = shard_heads(q, rank, world)  # the heads that tensor parallelism gives this rank
o = group.decode(own_q, cache, sm_scale=SM_SCALE, **batch)  # this rank's heads, over the keys of all ranks

# One process with all tokens, in float64.
worst = 0.0
for request, keys in enumerate(rows.double().split(lengths)):
    weights = (own_q[request].double() @ keys.T * SM_SCALE).softmax(-1)
    worst = max(worst, float((o[request] - weights @ keys[:, :512]).abs().max()))
assert worst < 0.03, worst
worst_of_all = torch.tensor(worst)
dist.all_reduce(worst_of_all, dist.ReduceOp.MAX)
if rank == 0:
    held = f"rank 0 holds {cache.shape[0]} pages of {PAGE_SIZE} tokens, of {sum(lengths)} tokens"
    print(f"context_parallel: {world} ranks, {HEADS // world} heads each; {held}")
    print(f"context_parallel: equal to attention in float64 over all tokens, largest difference {worst_of_all:.4f}")
dist.destroy_process_group()
