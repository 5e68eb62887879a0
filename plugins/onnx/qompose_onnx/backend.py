# SPDX-License-Identifier: Apache-2.0
"""The ONNX backend, with its quantizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from qompose import RuleQuantizer
from qompose.backend import Backend, RuleUse

from qompose_onnx import configs, machine
from qompose_onnx.rules import LEFT_IN_FLOAT, RULES
from qompose_onnx.targets import TARGETS


class ONNXBackend(Backend):
    """Files of ONNX operators between QuantizeLinear and DequantizeLinear."""

    name = "onnx"
    api_version = 1
    rules = RULES
    rewrites = ("fold_batch_norm", "scalar_to_tensor", "fold_weight", "product_to_linear")
    left_in_float = LEFT_IN_FLOAT
    targets = TARGETS

    def __init__(self) -> None:
        self.configs = configs.named_configs()  # here: the default depends on the processor
        self.quantizer_class = ONNXQuantizer

    def requirements(self, uses: Sequence[RuleUse]) -> Mapping[str, str]:
        return machine.requirements(uses)

    def objection(self, requirements: Mapping[str, str]) -> str | None:
        return machine.objection(requirements)


class ONNXQuantizer(RuleQuantizer):
    """Quantizes what the runtimes that read QDQ compute in int8. Without a selector, nothing."""

    def __init__(self) -> None:
        super().__init__(ONNXBackend())
