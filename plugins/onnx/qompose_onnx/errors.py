# SPDX-License-Identifier: Apache-2.0
"""The errors of the targets for ONNX."""

from __future__ import annotations

from qompose.errors import TargetError


class ONNXTargetError(TargetError, RuntimeError):
    """The graph cannot become an ONNX file, or a runtime rejects the file."""


class ONNXInputError(ONNXTargetError, TypeError):
    """A program was called with inputs that it does not take; the message names the input."""
