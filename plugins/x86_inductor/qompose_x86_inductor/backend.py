# SPDX-License-Identifier: Apache-2.0
"""The x86 backend and its quantizer."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from qompose import QuantizationConfig, RuleQuantizer
from qompose.backend import Backend, LateOperators, RuleUse
from torch import nn
from torch.fx import GraphModule

from qompose_x86_inductor import configs, machine_requirements
from qompose_x86_inductor.inductor import gemm_template, native_cache, native_calls
from qompose_x86_inductor.inductor.decomposition import with_prepack_in_graph
from qompose_x86_inductor.inductor.late_operators import LATE_OPERATORS
from qompose_x86_inductor.native import processor
from qompose_x86_inductor.rules import RULES
from qompose_x86_inductor.rules.float_operators import LEFT_IN_FLOAT

if TYPE_CHECKING:
    from typing_extensions import Self


class X86InductorBackend(Backend):
    """int8 convolution and linear on oneDNN, with fused activations and weights packed once."""

    name = "x86_inductor"
    api_version = 1
    rules = RULES
    # Not unroll_recurrent: see rules.float_operators.
    rewrites = ("split_cells", "split_experts", "fold_weight", "product_to_linear")
    left_in_float = LEFT_IN_FLOAT

    def __init__(self, *, native_code: bool = True) -> None:
        self._native_code = native_code
        self.configs = configs.named()
        self.quantizer_class = X86InductorQuantizer

    def for_compiler(self, graph: GraphModule) -> GraphModule:
        with processor.used_if(self._native_code):
            return with_prepack_in_graph(graph)

    def join_regions(self, graph: GraphModule, target: str) -> None:
        if target == "torch":
            with processor.used_if(self._native_code):
                native_cache.read_integers(graph)

    def late_operators(self) -> LateOperators:
        return LATE_OPERATORS

    def compiler_options(self, graph: GraphModule) -> Mapping[str, Any]:
        with processor.used_if(self._native_code):
            return {**gemm_template.options(graph), **native_calls.options(graph)}

    def without_native_code(self) -> X86InductorBackend | None:
        return X86InductorBackend(native_code=False) if self._native_code else None

    def requirements(self, uses: Sequence[RuleUse]) -> Mapping[str, str]:
        return machine_requirements.requirements(uses)

    def objection(self, requirements: Mapping[str, str]) -> str | None:
        return machine_requirements.objection(requirements)

    def availability(self) -> str | None:
        """Return why oneDNN's int8 operators cannot be used in this process."""
        if platform.machine().lower() not in ("x86_64", "amd64"):
            return f"it requires an x86 processor, but this one is {platform.machine()}"
        if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            return "this build of torch has no oneDNN; install torch from PyPI"
        return None


class X86InductorQuantizer(RuleQuantizer):
    """Quantizes what oneDNN computes in int8. Without `set_global` or another selector, nothing."""

    def __init__(self) -> None:
        super().__init__(X86InductorBackend())

    # torchao's quantizer of this name has these methods, and scripts call them.

    def set_module_name_qconfig(
        self, module_name: str, quantization_config: QuantizationConfig | None
    ) -> Self:
        """Do what `set_module_name` does."""
        return self.set_module_name(module_name, quantization_config)

    def set_module_type_qconfig(
        self, module_type: type[nn.Module], quantization_config: QuantizationConfig | None
    ) -> Self:
        """Do what `set_module_type` does: unlike torchao, it leaves out functionals of that kind."""
        return self.set_module_type(module_type, quantization_config)

    def set_function_type_qconfig(
        self, function_type: Callable[..., Any], quantization_config: QuantizationConfig | None
    ) -> Self:
        """Do what `set_operator_type` does."""
        return self.set_operator_type(function_type, quantization_config)
