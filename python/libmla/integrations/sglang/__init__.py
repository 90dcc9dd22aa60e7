# SPDX-License-Identifier: Apache-2.0
"""Makes libmla an attention backend of SGLang, which calls :func:`register` in each of its processes.

``--attention-backend libmla`` selects it, for every model with MLA:

=====================================  ==========================================================================
DeepSeek V2, V3, R1, Kimi K2, Kimi     dense attention: prefill, decode, target verify and draft extend, over pages
K2.5, GLM with MLA, LongCat            of any size
DeepSeek V3.2, GLM-5 (DSA)             sparse attention over the keys that SGLang's indexer picks
DeepSeek V4                            the window pool and the C4 or C128 pool under one softmax, 256-token pages
                                       as they lie
=====================================  ==========================================================================

``--prefill-attention-backend`` and ``--decode-attention-backend`` select it for one of the two. Everything that depends
on a version's interfaces is in one module for it, ``v0_5_23`` and the like.
"""

from __future__ import annotations

import importlib
import logging
import re
from typing import Any

NAME = "libmla"
"""What ``--attention-backend`` calls it."""

_ADAPTERS = {(0, 5, 22): "v0_5_22", (0, 5, 23): "v0_5_23"}

_logger = logging.getLogger("sglang.libmla")
_registered = False


def supported_versions() -> str:
    """Returns, in words, the versions of SGLang that there is an adapter for."""
    return " and ".join(".".join(map(str, version)) for version in sorted(_ADAPTERS))


def register() -> None:
    """Registers the backend with SGLang. Does nothing when called again.

    For a version of SGLang without an adapter, it registers a name whose use raises an error that says which versions
    have one.
    """
    global _registered
    if _registered:
        return
    _registered = True

    import sglang
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", sglang.__version__)
    adapter = _ADAPTERS.get((int(numbers[1]), int(numbers[2]), int(numbers[3]))) if numbers else None
    choices.add_attention_backend_choices([NAME])
    if adapter is None:
        message = (
            f"libmla: expected SGLang {supported_versions()}, got {sglang.__version__}: install one of these versions, "
            "or a libmla that knows yours; or choose another --attention-backend"
        )
        _logger.warning("%s. SGLang goes on without libmla", message)

        def refuse(runner: Any) -> Any:
            raise RuntimeError(message)

        register_attention_backend(NAME)(refuse)
        return
    importlib.import_module(f"{__name__}.{adapter}").install()
