# SPDX-License-Identifier: Apache-2.0
"""Puts libmla's functions in the place of FlashMLA's, which vLLM's own DeepSeek V4 layers call.

vLLM chooses among its own classes for these layers, so a plug-in has no place there. The layers take FlashMLA's
functions from one module of vLLM, and libmla.flash_mla has them with the same arguments and results.
"""

from __future__ import annotations

import sys

from vllm.v1.attention.ops import flashmla as place

from libmla import flash_mla
from libmla.flash_mla import flash_mla_interface

_FUNCTIONS = {
    "FlashMLASchedMeta": flash_mla_interface.FlashMLASchedMeta,
    "flash_mla_sparse_fwd": flash_mla.flash_mla_sparse_fwd,
    "flash_mla_with_kvcache": flash_mla.flash_mla_with_kvcache,
    "get_mla_metadata": flash_mla.get_mla_metadata,
}


def take() -> None:
    """Puts them there, and in the modules of vLLM that have taken FlashMLA's already."""
    theirs = {name: getattr(place, name) for name in _FUNCTIONS}
    for module in [module for name, module in sys.modules.items() if name.startswith("vllm.") and module is not None]:
        for name, function in _FUNCTIONS.items():
            if vars(module).get(name) is theirs[name]:
                setattr(module, name, function)
