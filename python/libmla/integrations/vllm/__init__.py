# SPDX-License-Identifier: Apache-2.0
"""Makes libmla an attention backend of vLLM, which calls :func:`register` in each of its processes.

``--attention-backend CUSTOM`` selects it for models with MLA, dense or sparse, and ``mla_prefill_backend=CUSTOM`` of
``--attention-config`` its prefill. The environment's ``LIBMLA_VLLM`` says what is registered:

======================  ==========================================================================================
``custom``, or unset    these two names
``auto``                these, and libmla takes the place of TRITON_MLA and, on SM80-89 and SM12x, of what vLLM
                        tries for sparse models; on a CPU, of CPU_MLA and AMX_MLA and of prefill. So vLLM chooses it
                        by itself where it would take these
``flashmla``            the two names, and libmla's functions take the place of FlashMLA's wherever vLLM calls these: in
                        its own layers for DeepSeek V4, among which no plug-in can be chosen, and in its backends
                        FLASHMLA and FLASHMLA_SPARSE
``off``                 nothing
======================  ==========================================================================================
"""

from __future__ import annotations

import logging
import os
import re

_ADAPTERS = {(0, 32): "v0_32", (0, 33): "v0_33"}
_OPTIONS = ("custom", "auto", "flashmla", "off")

_logger = logging.getLogger("vllm.libmla")
_warned: set[str] = set()


def supported_versions() -> str:
    """Returns, in words, the versions of vLLM that there is an adapter for."""
    return " and ".join(f"{major}.{minor}" for major, minor in sorted(_ADAPTERS))


def register() -> None:
    """Registers the backends with vLLM. A second call changes nothing, and no call raises.

    A version of vLLM without an adapter is left alone: then selecting CUSTOM is an error that names the versions.
    """
    option = os.environ.get("LIBMLA_VLLM", "") or "custom"
    if option not in _OPTIONS:
        _warn(f"LIBMLA_VLLM: expected one of {', '.join(_OPTIONS)}, got {option!r}: taken as custom")
        option = "custom"
    if option == "off":
        return
    try:
        _register(option)
    except Exception as error:  # noqa: BLE001  # an engine that nobody knows yet must start without libmla
        _warn(f"libmla's backends could not be registered with vLLM: {error!r}")


def _warn(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        _logger.warning(message)


def _register(option: str) -> None:
    import vllm

    numbers = re.match(r"(\d+)\.(\d+)", vllm.__version__)
    adapter = _ADAPTERS.get((int(numbers[1]), int(numbers[2]))) if numbers else None
    if adapter is None:
        _warn(
            f"libmla has no backend for vLLM {vllm.__version__}, only for {supported_versions()}: vLLM goes on without "
            "libmla. Install one of these versions, or a libmla that knows yours"
        )
    module = f"{__name__}.{adapter or 'unsupported'}"

    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum, register_mla_prefill_backend
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for register_one, name, class_name in (
        (register_backend, AttentionBackendEnum.CUSTOM, "CustomBackend"),
        (register_mla_prefill_backend, MLAPrefillBackendEnum.CUSTOM, "PrefillBackend"),
    ):
        if name.is_overridden() and not name.get_path().startswith(f"{__name__}."):
            _warn(f"{name} is {name.get_path()}, another plug-in's, and stays so: set VLLM_PLUGINS to choose plug-ins")
        else:
            register_one(name, f"{module}.{class_name}")
    if option == "auto" and adapter is not None:
        _take_places(module)
    if option == "flashmla" and adapter is not None:
        from . import flashmla

        flashmla.take()
        _logger.info("vLLM's calls of FlashMLA's functions go to libmla")


def _take_places(module: str) -> None:
    """Puts libmla where vLLM looks by itself, if libmla can run there."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum, register_mla_prefill_backend
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from . import checks

    if not (current_platform.is_cuda() or current_platform.is_cpu()):
        return _warn(f"LIBMLA_VLLM=auto: libmla has nothing for vLLM's platform {current_platform.device_type}")
    capability = current_platform.get_device_capability() if current_platform.is_cuda() else None
    reason = checks.why_not("decode", checks.device_of(capability))
    if reason is not None:
        return _warn(f"LIBMLA_VLLM=auto: vLLM keeps its own backends: {reason}")

    if capability is None:
        places = {AttentionBackendEnum.CPU_MLA: "DenseBackend", AttentionBackendEnum.AMX_MLA: "DenseBackend"}
        # vLLM's own is a loop over requests. On GPUs its prefill is FlashAttention's, which stays.
        register_mla_prefill_backend(MLAPrefillBackendEnum.CPU, f"{module}.PrefillBackend")
    else:
        places = {AttentionBackendEnum.TRITON_MLA: "DenseBackend"}
        if capability.major == 8:  # where vLLM tries it, though its own needs SM90
            places[AttentionBackendEnum.FLASHMLA_SPARSE] = "SparseBackend"
        elif capability.major == 12:
            places[AttentionBackendEnum.FLASHINFER_MLA_SPARSE_SM120] = "SparseBackend"
    for name, class_name in places.items():
        register_backend(name, f"{module}.{class_name}")
