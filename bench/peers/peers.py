# SPDX-License-Identifier: Apache-2.0
"""The peers: how each is called for a problem. A peer takes part if its module can be imported."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from typing import Any

import torch
from problems import (
    D_QK,
    D_ROPE,
    D_V,
    PAGE_SIZE,
    SM_SCALE,
    Decode,
    DecodeSparse,
    IndexerLogits,
    Prefill,
    PrefillSparse,
    Side,
)


class Unsupported(Exception):
    """Says why a peer does not compute a problem."""


class Peer:
    name: str  #: in tables and charts
    module: str  #: what is imported
    distribution: str  #: what pip calls it
    install: str  #: where it comes from

    def __init__(self) -> None:
        self.library = importlib.import_module(self.module)

    def version(self) -> str:
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return str(getattr(self.library, "__version__", "version unknown"))

    def side(self, problem: Any) -> Side:
        """Returns the calls for a problem. Raises Unsupported if the peer does not compute it."""
        method = getattr(self, _METHODS[type(problem)], None)
        if method is None:
            raise Unsupported(f"{self.name} has no such operation")
        return method(problem)


_METHODS = {
    Decode: "decode",
    DecodeSparse: "decode_sparse",
    PrefillSparse: "prefill_sparse",
    Prefill: "prefill",
    IndexerLogits: "indexer_logits",
}


class FlashMla(Peer):
    name, module, distribution = "FlashMLA", "flash_mla", "flash-mla"
    install = "github.com/deepseek-ai/FlashMLA"

    def decode(self, problem: Decode) -> Side:
        if problem.format != "bf16":
            raise Unsupported("FlashMLA's dense decode takes 16-bit caches")
        q = problem.q.view(problem.batch, problem.q_len, problem.heads, D_QK)
        metadata, _ = self.library.get_mla_metadata()

        def call(rows: torch.Tensor) -> Any:
            return self.library.flash_mla_with_kvcache(
                q, rows.unsqueeze(2), problem.block_table, problem.kv_lens, D_V, metadata, None,
                softmax_scale=SM_SCALE, causal=problem.causal,
            )  # fmt: skip

        shape = (*problem.q.shape[:2], D_V)
        return Side([lambda one=one: call(one) for one in problem.rows], lambda found: found[0].view(shape))

    def decode_sparse(self, problem: DecodeSparse) -> Side:
        metadata, _ = self.library.get_mla_metadata()
        named: dict[str, Any] = {"softmax_scale": problem.sm_scale, "is_fp8_kvcache": True}
        named["indices"] = problem.indices.unsqueeze(1)
        if problem.extra_pool is not None:
            named |= {
                "attn_sink": problem.sink,
                "extra_k_cache": self._pages(problem.extra_pool),
                "extra_indices_in_kvcache": problem.extra_indices.unsqueeze(1),
            }

        def call(pages: torch.Tensor) -> Any:
            q = problem.q.unsqueeze(1)
            return self.library.flash_mla_with_kvcache(q, pages, None, None, D_V, metadata, None, **named)

        pools = [self._pages(pool) for pool in problem.pools]
        return Side([lambda one=one: call(one) for one in pools], lambda found: found[0][:, 0])

    @staticmethod
    def _pages(pool: torch.Tensor) -> torch.Tensor:
        return pool.view(len(pool), PAGE_SIZE, 1, -1).view(torch.float8_e4m3fn)

    def prefill_sparse(self, problem: PrefillSparse) -> Side:
        indices = problem.indices.unsqueeze(1)
        call = lambda: self.library.flash_mla_sparse_fwd(problem.q, problem.kv, indices, problem.sm_scale)
        return Side([call], lambda found: found[0])


class FlashInfer(Peer):
    """FlashInfer's paged MLA with one of its backends: fa3 is for SM90, fa2 for every GPU."""

    module, distribution, install = "flashinfer", "flashinfer-python", "pip install flashinfer-python"
    backend: str

    def decode(self, problem: Decode) -> Side:
        mla = importlib.import_module("flashinfer.mla")
        q, device = problem.q, problem.q.device
        workspace = torch.empty(128 << 20, dtype=torch.uint8, device=device)
        wrapper = mla.BatchMLAPagedAttentionWrapper(workspace, backend=self.backend)
        pages = problem.block_table.shape[1]
        every = torch.arange(problem.batch + 1, dtype=torch.int32, device=device)
        wrapper.plan(
            every * problem.q_len, every * pages, problem.block_table.flatten(), problem.kv_lens, problem.heads, D_V,
            D_ROPE, PAGE_SIZE, problem.causal, SM_SCALE, q.dtype, problem.rows[0].dtype,
        )  # fmt: skip
        out = torch.empty(*q.shape[:2], D_V, device=device, dtype=q.dtype)
        scales = {"ckv_scale": 1.0, "kpe_scale": 1.0} if problem.format == "fp8" else {}

        def call(rows: torch.Tensor) -> None:
            wrapper.run(q[..., :D_V], q[..., D_V:], rows[..., :D_V], rows[..., D_V:], out=out, **scales)

        return Side([lambda one=one: call(one) for one in problem.rows], lambda _: out)


class FlashInferFa3(FlashInfer):
    name, backend = "FlashInfer fa3", "fa3"


class FlashInferFa2(FlashInfer):
    name, backend = "FlashInfer fa2", "fa2"

    def decode(self, problem: Decode) -> Side:
        if problem.format != "bf16":
            raise Unsupported("FlashInfer's fa2 takes 16-bit caches")
        return super().decode(problem)


class VllmTriton(Peer):
    name, distribution, install = "vLLM's Triton kernel", "vllm", "pip install vllm"
    module = "vllm.v1.attention.ops.triton_decode_attention"

    def decode(self, problem: Decode) -> Side:
        if problem.format != "bf16" or problem.q_len != 1:
            raise Unsupported("compared with bf16 rows and one query a request only")
        q, device = problem.q, problem.q.device
        # As vLLM chooses it: a split for every 512 keys, at most two for each multiprocessor.
        most = 2 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
        splits = min(1 << (max(1, problem.kv_len // 512) - 1).bit_length(), most)
        out = torch.zeros(*q.shape[:2], D_V, device=device, dtype=q.dtype)
        lse = torch.zeros(q.shape[:2], device=device, dtype=q.dtype)
        partial = torch.empty(*q.shape[:2], splits, D_V + 1, device=device)
        one = torch.ones((), device=device)

        # Arguments that newer versions of vLLM have.
        known = inspect.signature(self.library.decode_attention_fwd).parameters
        newer = {key: value for key, value in {"k_scale": one, "v_scale": one, "is_mla": True}.items() if key in known}

        def call(rows: torch.Tensor) -> None:
            keys = rows.unsqueeze(2)
            self.library.decode_attention_fwd(
                q, keys, keys[..., :D_V], out, lse, problem.block_table, problem.kv_lens, partial, splits, SM_SCALE,
                PAGE_SIZE, **newer,
            )  # fmt: skip

        return Side([lambda rows=rows: call(rows) for rows in problem.rows], lambda _: out)


class FlashAttention3(Peer):
    name, module, distribution = "FlashAttention-3", "flash_attn_interface", "flash-attn-3"
    install = "github.com/Dao-AILab/flash-attention, folder hopper"

    def prefill(self, problem: Prefill) -> Side:
        indptr, length = problem.indptr, problem.length

        def call() -> Any:
            return self.library.flash_attn_varlen_func(
                problem.q, problem.k, problem.v, indptr, indptr, length, length, softmax_scale=SM_SCALE, causal=True
            )

        return Side([call], lambda found: found[0] if isinstance(found, tuple) else found)


class CuDnn(Peer):
    """cuDNN as torch calls it: scaled_dot_product_attention."""

    name, module, distribution, install = "cuDNN", "torch.backends.cudnn", "torch", "pip install torch"

    def __init__(self) -> None:
        super().__init__()
        if not self.library.is_available():
            raise ImportError("torch has no cuDNN")

    def version(self) -> str:
        return f"{self.library.version()}, torch {torch.__version__}"

    def prefill(self, problem: Prefill) -> Side:
        attention = importlib.import_module("torch.nn.attention")
        shape = (problem.batch, problem.length, problem.heads, -1)
        q, k, v = (one.view(shape).transpose(1, 2) for one in (problem.q, problem.k, problem.v))

        def call() -> torch.Tensor:
            with attention.sdpa_kernel(attention.SDPBackend.CUDNN_ATTENTION):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SM_SCALE)

        return Side([call], lambda out: out.transpose(1, 2).reshape(problem.v.shape))


class DeepGemm(Peer):
    name, module, distribution, install = "DeepGEMM", "deep_gemm", "deep-gemm", "github.com/deepseek-ai/DeepGEMM"

    def indexer_logits(self, problem: IndexerLogits) -> Side:
        q = problem.q.view(problem.batch, problem.q_len, problem.heads, 128)
        behind = torch.arange(problem.q_len - 1, -1, -1, dtype=torch.int32, device=q.device)
        lengths = (problem.kv_lens.unsqueeze(1) - behind).contiguous()  # the last query sees all keys
        metadata = self.library.get_paged_mqa_logits_metadata(lengths, PAGE_SIZE, self.library.get_num_sms())

        def call(pages: torch.Tensor) -> torch.Tensor:
            return self.library.fp8_paged_mqa_logits(
                q, pages.view(len(pages), PAGE_SIZE, 1, -1), problem.weights, lengths, problem.block_table, metadata,
                problem.kv_len, clean_logits=False,
            )  # fmt: skip

        return Side([lambda one=one: call(one) for one in problem.caches], problem.seen)


PEERS: list[type[Peer]] = [FlashMla, FlashInferFa3, FlashInferFa2, VllmTriton, FlashAttention3, CuDnn, DeepGemm]


def installed() -> tuple[list[Peer], dict[str, str]]:
    """Returns the peers that can be imported, and why the others cannot."""
    found, missing = [], {}
    for kind in PEERS:
        try:
            found.append(kind())
        except Exception as error:  # noqa: BLE001 - a package whose import fails in any way is not installed
            missing[kind.name] = f"{type(error).__name__}: {error} ({kind.install})"
    return found, missing
