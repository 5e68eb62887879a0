# SPDX-License-Identifier: Apache-2.0
"""qompose backend for oneDNN int8 kernels on x86 processors."""

from __future__ import annotations

import qompose

from qompose_x86_inductor.backend import (
    X86InductorBackend,
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config,
)
from qompose_x86_inductor.compiling import compile_lowered, package_lowered

__all__ = [
    "X86InductorBackend",
    "X86InductorQuantizer",
    "compile_lowered",
    "get_default_x86_inductor_quantization_config",
    "package_lowered",
    "qompose_backend",
]


@qompose.hookimpl
def qompose_backend() -> qompose.Backend:
    """Return the backend that the entry point `x86_inductor` names."""
    return X86InductorBackend()
