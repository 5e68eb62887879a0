# SPDX-License-Identifier: Apache-2.0
"""The fourth stage: quantized regions become kernels; compilation and packages."""

from qompose.lowering.compilation import CompiledModel

__all__ = [
    "CompiledModel",
]
