# SPDX-License-Identifier: Apache-2.0
"""What the tests of OpenVINO's defects read, and a program of OpenVINO beside the converted model."""

from __future__ import annotations

from typing import Any, Final

import qompose
import torch
from qompose.backend import load_backend
from qompose_onnx import ONNXProgram, get_onnx_quantization_config as config
from torch import Tensor, nn

X = (torch.linspace(-1, 1, 64).reshape(2, 2, 4, 4), torch.linspace(-2, 0.5, 64).reshape(2, 2, 4, 4))


SIGNED: Final = config("int8", bits=7)


def lowered(model: nn.Module, target: str, settings: Any = SIGNED) -> tuple[ONNXProgram, Tensor]:
    """Return the program of a model of two inputs, and what the converted model gives for `X`."""
    quantizer = qompose.RuleQuantizer(load_backend("onnx")).set_global(settings)
    result = qompose.quantize(
        model.eval(), X, backends=quantizer, calibration=[X], target=target, progress=False
    )
    with torch.no_grad():
        return result.model, result.converted(*X)
