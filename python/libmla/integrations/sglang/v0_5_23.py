# SPDX-License-Identifier: Apache-2.0
"""Joins libmla to SGLang 0.5.23 by SGLang's registries, and by its hooks where those know no names but SGLang's.

What needs no model code is done when plug-ins are loaded, in every process. The rest is done in a worker when it makes
its first backend: by then that code is imported, and other processes need not import it.
"""

from __future__ import annotations

import functools
from typing import Any

from sglang.srt.arg_groups import choices
from sglang.srt.configs.model_config import is_deepseek_dsa
from sglang.srt.layers.attention import attention_registry
from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

from . import NAME, checks

_DRAFTS = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"
_V4 = "sglang.srt.layers.attention.deepseek_v4_trtllm_backend"


def install() -> None:
    """Makes ``--attention-backend libmla`` known."""
    choices.add_draft_attention_backend_choices([NAME])
    choices.add_chunked_prefix_cache_attention_backend(NAME)
    attention_registry.register_attention_backend(NAME)(_create)

    # A V4 model's backend is dsv4, whatever was asked for: the choice is made where that one is created.
    theirs = attention_registry.ATTENTION_BACKENDS["dsv4"]

    @functools.wraps(theirs)
    def create_v4(runner: Any) -> Any:
        _join_model_code()
        return theirs(runner)

    attention_registry.register_attention_backend("dsv4")(create_v4)


def _create(runner: Any) -> Any:
    """Makes the backend of a target or draft model."""
    config = runner.model_config.hf_config
    checks.refuse([checks.mla(runner.use_mla_backend, config.architectures[0])])
    _join_model_code()
    _take_parts(runner.model_config.hf_text_config)
    if is_deepseek_dsa(config):
        from .dsa import DsaBackend

        return DsaBackend(runner)
    from .dense import MlaBackend

    return MlaBackend(runner)


@functools.cache
def _join_model_code() -> None:
    """Tells models to hand over absorbed or up-projected queries, and drafts where their backends are. Does so once."""
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

    def choose_form(attention: Any, forward_batch: Any) -> Any:
        if getattr(attention, "use_dsa", False):
            return handlers.handle_attention_dsa(attention, forward_batch)
        return handlers._handle_attention_backend(attention, forward_batch, NAME)

    handlers.AttentionBackendRegistry.register(NAME, choose_form)
    handlers.MHA_ONE_SHOT_SUPPORTED_BACKENDS.append(NAME)

    for target, hook, kind in (
        (_DRAFTS, _know_drafts, HookType.BEFORE),
        (f"{_V4}.create_deepseek_v4_attn_backend", _create_v4, HookType.AROUND),
        (f"{_V4}.create_deepseek_v4_multistep_backend", _create_v4_drafts, HookType.AROUND),
    ):
        HookRegistry.register(target, hook, kind, source=HookSource(NAME, NAME))
    HookRegistry.apply_hooks()


def _take_parts(config: Any) -> None:
    """Has models hand over the latent and the rotary part of queries as they are, not copied into one tensor.

    Models that scale queries by position (Mistral Large 3) are left out: SGLang scales the copy.
    """
    from sglang.srt.models.deepseek_common.utils import FORWARD_ABSORB_CORE_ATTENTION_BACKENDS as take_parts

    if getattr(config, "llama_4_scaling", None) is None and NAME not in take_parts:
        take_parts.append(NAME)


def _know_drafts(
    factory: Any, backend_name: str, backend_map: dict[str, Any], error_template: str, stamps_children: bool = False
) -> None:
    """Adds libmla to the backends that a draft can have: one for all tokens of a step, or one for each of its steps."""
    runner = factory.draft_model_runner

    def make() -> tuple[str, Any]:
        if not stamps_children:
            return NAME, _create(runner)
        drafts: Any
        if is_deepseek_dsa(runner.model_config.hf_config):
            from .dsa import DsaMultiStepDraftBackend as drafts
        else:
            from .dense import MlaMultiStepDraftBackend as drafts
        return NAME, drafts(runner, factory.topk, factory.speculative_num_steps)

    backend_map[NAME] = make


def _create_v4(theirs: Any, runner: Any, **named: Any) -> Any:
    from .v4 import V4Backend

    return V4Backend(runner, **named) if _asked_for(runner) else theirs(runner, **named)


def _create_v4_drafts(theirs: Any, runner: Any, topk: int, speculative_num_steps: int) -> Any:
    from .v4 import V4MultiStepDraftBackend

    make = V4MultiStepDraftBackend if _asked_for(runner) else theirs
    return make(runner, topk=topk, speculative_num_steps=speculative_num_steps)


def _asked_for(runner: Any) -> bool:
    """Returns whether ``--attention-backend`` said libmla before SGLang resolved it for the model."""
    return runner.server_args.attention_backend == NAME
