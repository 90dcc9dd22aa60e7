# SPDX-License-Identifier: Apache-2.0
"""Runs an engine's decode loop: one plan serves all layers of a step, and on a GPU the whole step is one CUDA graph.

The "model" is random numbers; everything else is what an engine does between two tokens: it allots pages, says where
the new tokens go, plans once, then appends and attends in every layer.
"""

import torch

import libmla

LAYERS, HEADS, PAGE_SIZE, PAGES, STEPS = 3, 16, 64, 12, 6
SM_SCALE = 192**-0.5  # 1 / sqrt(qk_nope_head_dim + qk_rope_head_dim), that of the heads before absorption
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

# What a step reads and writes stays where it is, so that a graph may be replayed: new values are copied into it.
lengths = [127, 30, 0]  # of three requests; the scheduler's own copy, on the host
requests = len(lengths)
caches = [torch.zeros(PAGES, PAGE_SIZE, 576, dtype=torch.bfloat16, device=device) for _ in range(LAYERS)]
block_table = torch.zeros(requests, PAGES // requests, dtype=torch.int32, device=device)
kv_len = torch.tensor(lengths, dtype=torch.int32, device=device)
slots = torch.full((requests,), -1, device=device)  # -1: the step writes nothing
rows = torch.zeros(LAYERS, requests, 576, dtype=torch.bfloat16, device=device)  # [latent | rotary key] of new tokens
q = torch.zeros(LAYERS, requests, HEADS, 576, dtype=torch.bfloat16, device=device)  # absorbed queries
out = torch.zeros(LAYERS, requests, HEADS, 512, dtype=torch.bfloat16, device=device)
batch = {"kv_len": kv_len, "block_table": block_table, "sm_scale": SM_SCALE}


def slots_of(request: int, first: int, end: int) -> torch.Tensor:
    """Returns the slots of a request's tokens, page * page_size + offset."""
    tokens = torch.arange(first, end, device=device)
    return block_table[request, tokens // PAGE_SIZE].long() * PAGE_SIZE + tokens % PAGE_SIZE


# The prompts: a real engine computes them with libmla.prefill, and appends their rows as here.
free_pages = list(range(PAGES))
prompts = [torch.randn(LAYERS, length, 576, device=device).bfloat16() for length in lengths]
for request, length in enumerate(lengths):
    for page in range(-(-length // PAGE_SIZE)):
        block_table[request, page] = free_pages.pop()
    for layer in range(LAYERS):
        libmla.append(prompts[request][layer], slots_of(request, 0, length), caches[layer])

plan = libmla.Plan.decode(q[0], caches[0], **batch)  # owns the workspace, for as long as the loop runs


def step() -> None:
    plan.update(q[0], caches[0], **batch)  # lengths grew; all layers share what is decided here
    for layer in range(LAYERS):
        libmla.append(rows[layer], slots, caches[layer])
        libmla.decode(q[layer], caches[layer], plan=plan, out=out[layer], **batch)


if device == "cuda":
    step()  # kernels are loaded on first use, which a graph cannot capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    run_step = graph.replay  # plans for the new lengths, on the GPU
else:
    run_step = step

history = [list(prompt.unbind(1)) for prompt in prompts]  # of each request, [LAYERS, 576] for each token; for the check
for _ in range(STEPS):
    rows.normal_()
    q.normal_()
    for request in range(requests):
        if lengths[request] % PAGE_SIZE == 0:  # its last page is full
            block_table[request, lengths[request] // PAGE_SIZE] = free_pages.pop()
        slots[request] = slots_of(request, lengths[request], lengths[request] + 1)[0]
        lengths[request] += 1
        history[request].append(rows[:, request].clone())
    kv_len.copy_(torch.tensor(lengths, dtype=torch.int32))
    run_step()

# The last step again, in float64, without pages and plans.
worst = 0.0
for request in range(requests):
    keys = torch.stack(history[request], 1).double()  # [LAYERS, tokens, 576]
    weights = (q[:, request].double() @ keys.mT * SM_SCALE).softmax(-1)
    worst = max(worst, float((out[:, request] - weights @ keys[..., :512]).abs().max()))
assert worst < 0.03, worst
print(f"decode_loop: {STEPS} steps of {requests} requests in {LAYERS} layers on {device} ({plan.backend})")
print(f"decode_loop: equal to attention in float64, largest difference {worst:.4f}")
