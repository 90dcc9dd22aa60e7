# SPDX-License-Identifier: Apache-2.0
"""Patches a model, and takes the patch away."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from types import MethodType
from typing import Any, TypeVar

import transformers
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

import libmla
from libmla.types import Compute

from . import compressed
from .attention import IMPLEMENTATION, keep_indices, keep_latents
from .cache import LatentCache
from .layer import SelectKeys, Settings
from .pages import check_compute, check_format

_REPLACED_METHODS = {"expand_kv": keep_latents, "build_attention_mask_from_topk": keep_indices}

Model = TypeVar("Model", bound=PreTrainedModel)


def patch(
    model: Model,
    *,
    cache_format: str = "bf16",
    pool_format: str | None = None,
    page_size: int = 64,
    context: libmla.Context | None = None,
    absorb: str = "decode",
    select_keys: SelectKeys | None = None,
    compute: Compute = "default",
) -> Model:
    """Lets a model's attention run on libmla, over a paged latent cache.

    Patching changes the model in place, for inference only; :func:`unpatch` undoes it. The model's calls and
    ``generate`` make a :class:`LatentCache` where none is given. Patching a patched model changes how it is patched.

    A model of DeepSeek V4's kind keeps its own cache, from which each forward writes what it attends to into pages, and
    reads it there by ``libmla.decode_sparse``, whatever ``absorb`` says.

    Args:
        model: a model of transformers with multi-head latent attention, or with that of DeepSeek V4.
        cache_format: how the caches that it makes store rows: a name of :class:`libmla.KvCache`.
        pool_format: the same for the compressed rows of DeepSeek V4; None: as ``cache_format``.
        page_size: tokens of a page of these caches.
        context: where libmla computes; None: its own choice.
        absorb: "decode": prompts are attended by ``libmla.prefill``, expanded and as the model computed them, and
            tokens behind a prefix by ``libmla.decode``, from the cache (or, if there are very many, both by
            ``prefill``, with the prefix expanded). "always": all by ``libmla.decode``, so that what a cache's format
            loses shows in every token.
        select_keys: sparse attention for models without an indexer: called for every layer, gives int32 [T, topk], the
            keys that each query sees, by their places in the request, -1 for none; or None: all.
        compute: of what reads the cache, as in :func:`libmla.decode`: "fp8" is for caches of fp8 formats. Prompts that
            ``libmla.prefill`` attends are computed as by "default".

    Returns:
        ``model``.

    Raises:
        ValueError: the model has no such attention, or an argument does not fit it.
    """
    windowed = compressed.compressed_modules(model)
    modules = windowed or _attention_modules(model)
    if absorb not in ("decode", "always"):
        raise ValueError(f"absorb: expected 'decode' or 'always', got {absorb!r}")
    if page_size < 1:
        raise ValueError(f"page_size: expected 1 or more, got {page_size}")
    if pool_format is not None and not windowed:
        raise ValueError(
            f"pool_format: expected None, as {type(model).__name__} has no compressed pool, got {pool_format}"
        )
    formats = (cache_format, pool_format or cache_format)
    windows = compressed.CompressedSettings(*formats, page_size, context, compute)
    for module in modules:
        if windowed:
            windows.check(module)
        else:
            check_format(cache_format, module.kv_lora_rank, module.qk_rope_head_dim)
            check_compute(compute, cache_format)
        if select_keys is not None and (windowed or hasattr(module, "indexer")):
            raise ValueError(
                f"select_keys: expected None, as {type(module).__name__} has an indexer, got {select_keys}"
            )
    unpatch(model)
    if windowed:
        hooks = compressed.attach(modules, windows)
    else:
        hooks = _attach(model, modules, Settings(absorb, context, select_keys, compute))
    configs = {id(module.config): module.config for module in modules}.values()
    model.libmla = _Patched(
        cache_format=cache_format,
        page_size=page_size,
        modules=modules,
        implementations=[(config, config._attn_implementation) for config in configs],
        hooks=hooks,
    )
    for config in configs:
        config._attn_implementation = compressed.IMPLEMENTATION if windowed else IMPLEMENTATION
    return model


def _attach(model: PreTrainedModel, modules: list[nn.Module], settings: Settings) -> list[RemovableHandle]:
    """Gives modules with latent attention their settings, and the model caches of ours. Returns the hooks."""
    for module in modules:
        module.libmla = settings
        for name, replacement in _REPLACED_METHODS.items():
            if hasattr(module, name):
                setattr(module, name, replacement)
    model._prepare_cache_for_generation = MethodType(_prepare_cache_for_generation, model)
    return [model.register_forward_pre_hook(_give_cache, with_kwargs=True)]


def unpatch(model: Model) -> Model:
    """Takes the patch of :func:`patch` away, if there is one. Changes ``model`` in place, and returns it."""
    patched = model.__dict__.pop("libmla", None)
    if patched is None:
        return model
    for hook in patched.hooks:
        hook.remove()
    for config, implementation in patched.implementations:
        config._attn_implementation = implementation
    for module in patched.modules:
        for name in ("libmla", *_REPLACED_METHODS):
            module.__dict__.pop(name, None)
    model.__dict__.pop("_prepare_cache_for_generation", None)
    return model


@dataclass(frozen=True)
class _Patched:
    """Holds what :func:`patch` did to a model."""

    cache_format: str
    page_size: int
    modules: list[nn.Module]
    implementations: list[tuple[PreTrainedConfig, str]]
    """The attention implementation that each config named."""
    hooks: list[RemovableHandle]

    def new_cache(self, model: PreTrainedModel) -> LatentCache:
        return LatentCache(model.config, cache_format=self.cache_format, page_size=self.page_size)


def _attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    """Returns the modules with latent attention; raises ValueError if there are none, or one cannot be patched."""
    latent = [module for module in model.modules() if hasattr(module, "kv_b_proj")]
    if not latent:
        others = sorted({type(module).__name__ for module in model.modules() if "Attention" in type(module).__name__})
        raise ValueError(
            f"patch: model: expected one with multi-head latent attention (kv_lora_rank in its config, kv_b_proj in "
            f"its layers: DeepSeek V2 to V4, Kimi, GLM, LongCat, MiniCPM3 and others), got {type(model).__name__} "
            f"with {', '.join(others) or 'no attention'}: leave it unpatched, or convert its weights to latent attention"
        )
    for module in latent:
        name = type(module).__name__
        if not hasattr(module, "expand_kv"):
            raise ValueError(
                f"patch: model: expected attention that caches latents and expands them by expand_kv, as that of "
                f"transformers 5.17 and newer, got {name} and transformers {transformers.__version__}: load the model "
                f"without trust_remote_code, with a newer transformers"
            )
        if getattr(module.kv_b_proj, "bias", None) is not None:
            raise ValueError(f"patch: model: expected kv_b_proj without a bias, got one in {name}")
    return latent


def _give_cache(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gives a forward a cache of ours, before it starts, where the model would make one of its own."""
    positional = inspect.signature(model.forward).bind_partial(*args).arguments if args else {}
    arguments = {**positional, **kwargs}
    given, use_cache = arguments.get("past_key_values"), arguments.get("use_cache")
    if given is not None and not isinstance(given, LatentCache):
        raise ValueError(
            f"past_key_values: expected a libmla.integrations.transformers.LatentCache for a patched model, got "
            f"{type(given).__name__}: pass LatentCache(model.config), or none, or unpatch(model)"
        )
    if use_cache is None:
        use_cache = getattr(model.config.get_text_config(decoder=True), "use_cache", True)
    if given is None and use_cache:
        kwargs["past_key_values"] = model.libmla.new_cache(model)
    return args, kwargs


def _prepare_cache_for_generation(
    model: PreTrainedModel, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any, **named: Any
) -> None:
    """Prepares the cache for ``generate`` as the model's own method does, then puts a cache of ours in its place."""
    given = model_kwargs.get("past_key_values")
    if generation_config.cache_implementation not in (None, "dynamic"):
        raise ValueError(
            f"cache_implementation: expected none for a patched model, which has a LatentCache, got "
            f"{generation_config.cache_implementation!r}"
        )
    type(model)._prepare_cache_for_generation(model, generation_config, model_kwargs, *args, **named)
    if given is None and model_kwargs.get("past_key_values") is not None:
        model_kwargs["past_key_values"] = model.libmla.new_cache(model)
