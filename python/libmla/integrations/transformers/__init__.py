# SPDX-License-Identifier: Apache-2.0
"""Runs Hugging Face transformers models with multi-head latent attention on libmla's kernels and paged latent caches.

    patch(model, cache_format="fp8_ds_mla")
    model.generate(**inputs, max_new_tokens=100)

docs/transformers.md has the whole picture.
"""

from .cache import LatentCache
from .layer import LatentQuery
from .model import patch, unpatch

__all__ = ["LatentCache", "LatentQuery", "patch", "unpatch"]
