# SPDX-License-Identifier: Apache-2.0
"""torchao's engine and quantizers beside ours: one import of both packages, for all tests of parity."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import qompose
import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from tests.ecosystem.makers import remember_xnnpack_patterns

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # both packages warn about themselves while they are imported
    import torchao.quantization.pt2e.quantizer as torchao_quantizer
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )
    from torchao.quantization.pt2e import (
        observer as torchao_observer,
        quantize_pt2e as torchao_engine,
    )
    from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
        X86InductorQuantizer,
        get_default_x86_inductor_quantization_config,
    )

MIN_MAX = torchao_observer.MinMaxObserver.with_args(eps=2**-12)

THEIR_WARNINGS = (
    "ignore::FutureWarning",  # of what both packages call
    "ignore:The input of maxpool2d is not quantized:UserWarning",  # X86, after others took the producer
)


def _in_any_order(config: Any) -> Any:
    """A configuration with observers whose result does not depend on how data is split."""
    spec = replace(config.input_activation, observer_or_fake_quant_ctr=MIN_MAX)
    output = None if config.output_activation is None else spec
    return replace(config, input_activation=spec, output_activation=output)


def torchao_x86() -> Any:
    """torchao's quantizer, with min-max ranges."""
    return X86InductorQuantizer().set_global(
        _in_any_order(get_default_x86_inductor_quantization_config())
    )


def executorch_xnnpack() -> Any:
    """ExecuTorch's quantizer, with min-max ranges."""
    remember_xnnpack_patterns()
    return XNNPACKQuantizer().set_global(
        _in_any_order(get_symmetric_quantization_config(is_per_channel=True))
    )


QUANTIZERS: dict[str, Callable[[], Any]] = {"x86": torchao_x86, "xnnpack": executorch_xnnpack}


class ByOperator(torchao_quantizer.Quantizer):  # type: ignore[misc]
    """Annotates with torchao's classes what a table says: operator -> (specs of inputs, spec of output)."""

    def __init__(self, table: dict[Any, Callable[[Node], Any]], implicit: bool = True) -> None:
        self.table, self.implicit = table, implicit

    def annotate(self, model: GraphModule) -> GraphModule:
        for node in model.graph.nodes:
            if node.op == "call_function" and node.target in self.table:
                inputs, output = self.table[node.target](node)
                inputs = {source: spec for source, spec in inputs.items() if spec is not None}
                node.meta["quantization_annotation"] = torchao_quantizer.QuantizationAnnotation(
                    inputs, output, self.implicit, True
                )
        return model

    def validate(self, model: GraphModule) -> None:
        """Accept everything."""


@dataclass(frozen=True)
class Converted:
    """A converted model and what it computes, as a list of tensors."""

    model: GraphModule
    outputs: list[Tensor]

    def calls(self, name: str) -> list[Node]:
        """The nodes that call operators whose names begin with `name`."""
        return [node for node in self.model.graph.nodes if f".{name}" in str(node.target)]

    @property
    def quantizes(self) -> int:
        return len(self.calls("quantize_per_"))

    @property
    def dequantizes(self) -> int:
        return len(self.calls("dequantize_per_"))


def assert_same(ours: Converted, theirs: Converted) -> None:
    """They compute the same, to the bit."""
    for one, other in zip(ours.outputs, theirs.outputs, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def tensors_of(outputs: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]


def by_torchao(program: ExportedProgram, quantizer: Any, *batches: Any) -> Converted:
    """Quantized by torchao's engine; the outputs are for the last batch."""
    prepared = torchao_engine.prepare_pt2e(program.module(), quantizer)
    return _finished(prepared, torchao_engine.convert_pt2e, batches)


def by_qompose(program: ExportedProgram, quantizer: Any, *batches: Any) -> Converted:
    """Quantized by qompose's engine; the outputs are for the last batch.

    A branch that no batch comes to stays in float.
    """
    prepared = qompose.prepare_pt2e(program, quantizer)
    convert = partial(qompose.convert_pt2e, allow_uncalibrated=True)
    return _finished(prepared, convert, batches)


def _finished(prepared: Any, convert: Callable[[Any], Any], batches: Any) -> Converted:
    with torch.no_grad():
        for batch in batches:
            prepared(*batch)
        model = convert(prepared)
        return Converted(model, tensors_of(model(*batches[-1])))
