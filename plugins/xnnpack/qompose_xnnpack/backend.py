# SPDX-License-Identifier: Apache-2.0
"""The XNNPACK backend, with its quantizer."""

from __future__ import annotations

from qompose import RuleQuantizer
from qompose.backend import Backend, Target

from qompose_xnnpack.configs import CONFIGS
from qompose_xnnpack.executorch_target.target import availability, finish, finish_methods
from qompose_xnnpack.rules.left_in_float import LEFT_IN_FLOAT
from qompose_xnnpack.rules.rule_table import RULES


class XNNPACKBackend(Backend):
    """XNNPACK's int8 operators, on the ExecuTorch runtime or in process."""

    name = "xnnpack"
    api_version = 1
    rules = RULES
    rewrites = (
        "scalar_to_tensor",
        "split_cells",
        "split_experts",
        "unroll_recurrent",
        "fold_weight",
        "product_to_linear",
    )
    left_in_float = LEFT_IN_FLOAT
    targets = (Target("executorch", finish, availability, finish_methods),)

    def __init__(self) -> None:
        self.configs = CONFIGS
        self.quantizer_class = XNNPACKQuantizer


class XNNPACKQuantizer(RuleQuantizer):
    """Quantizes what XNNPACK computes in int8. Without `set_global` or another selector, nothing."""

    def __init__(self) -> None:
        super().__init__(XNNPACKBackend())
