# SPDX-License-Identifier: Apache-2.0
"""The errors of the targets for ONNX."""

from __future__ import annotations

from qompose.errors import TargetError


class ONNXTargetError(TargetError, RuntimeError):
    """The graph cannot become an ONNX file, or a runtime rejects the file."""


class ONNXInputError(ONNXTargetError, TypeError):
    """A program was called with inputs that it does not take; the message names the input."""


class ONNXRefusalError(ONNXTargetError):
    """A runtime refuses a file.

    Attributes:
        runtime: its name.
        said: all that it says.
        reason: of that, what is not about its own sources.
    """

    def __init__(self, message: str, runtime: str, said: str, reason: str) -> None:
        super().__init__(message)
        self.runtime, self.said, self.reason = runtime, said, reason
