# SPDX-License-Identifier: Apache-2.0
"""qompose backend for quantized embedding tables."""

from __future__ import annotations

import qompose

from qompose_embedding.backend import EmbeddingBackend, EmbeddingQuantizer
from qompose_embedding.configs import (
    get_default_embedding_quantization_config,
    get_embedding_quantization_config,
)

__all__ = [
    "EmbeddingBackend",
    "EmbeddingQuantizer",
    "get_default_embedding_quantization_config",
    "get_embedding_quantization_config",
    "qompose_backend",
]


@qompose.backend.hookimpl
def qompose_backend() -> qompose.backend.Backend:
    """Return the backend that the entry point `embedding` names."""
    return EmbeddingBackend()
