# SPDX-License-Identifier: Apache-2.0
"""qompose backend for oneDNN int8 kernels on x86 processors."""

from __future__ import annotations

import qompose

from qompose_x86_inductor.backend import X86InductorBackend, X86InductorQuantizer
from qompose_x86_inductor.configs import (
    get_default_x86_inductor_quantization_config,
    get_x86_inductor_linear_dynamic_fp16_config,
    get_x86_inductor_linear_float8_config,
)

__all__ = [
    "X86InductorBackend",
    "X86InductorQuantizer",
    "get_default_x86_inductor_quantization_config",
    "get_x86_inductor_linear_dynamic_fp16_config",
    "get_x86_inductor_linear_float8_config",
    "qompose_backend",
]


@qompose.backend.hookimpl
def qompose_backend() -> qompose.backend.Backend:
    """Return the backend that the entry point `x86_inductor` names."""
    return X86InductorBackend()
