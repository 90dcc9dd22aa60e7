# SPDX-License-Identifier: Apache-2.0
"""Offers FlashMLA's Python package over libmla: names, argument order, defaults, shapes and conventions are the peer's.

Change ``import flash_mla`` to ``from libmla import flash_mla``, or call ``libmla.install_as("flash_mla")`` first in a
program that cannot be edited. docs/compatibility.md says where the two differ.
"""

from libmla.flash_mla import fused_norm_rope_attn_rope_cast
from libmla.flash_mla.flash_mla_interface import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
    get_mla_metadata,
)

#: The version of the peer whose interface this is; libmla's own is ``libmla.__version__``.
__version__ = "1.0.0"

__all__ = [
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "fused_norm_rope_attn_rope_cast",
    "get_mla_metadata",
]
