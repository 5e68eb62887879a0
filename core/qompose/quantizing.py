# SPDX-License-Identifier: Apache-2.0
"""The one call that runs all stages, from a module to integer kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule

from qompose.calibration import calibrate
from qompose.composing import compose
from qompose.errors import UserError
from qompose.ledger import Report
from qompose.pipeline import convert_pt2e, lower, prepare_pt2e
from qompose.quantizer import Quantizer
from qompose.reporting import report


@dataclass(frozen=True)
class QuantizedModel:
    """What `quantize` made: the float program, the Q/DQ model, and the one that runs integer kernels."""

    exported: ExportedProgram
    converted: GraphModule
    model: Any
    quantizer: Quantizer

    @property
    def report(self) -> Report:
        """Return what happened to every float operator."""
        return report(self.model)


def quantize(
    model: nn.Module | ExportedProgram,
    example_inputs: tuple[Any, ...] | None = None,
    *,
    backends: str | Quantizer | Sequence[str | Quantizer],
    calibration: Iterable[Any] | None = None,
    target: str = "torch",
    dynamic_shapes: Any = None,
    transform: Callable[[Any], Any] | None = None,
    progress: bool | None = None,
    strict: bool = False,
) -> QuantizedModel:
    """Export, prepare, calibrate, convert and lower a model, in one call.

    Args:
        model: a module, which is exported in eval mode with `example_inputs` and `dynamic_shapes`; or an
            ExportedProgram.
        backends: names of installed backends or quantizers, in order of priority; or just one.
        calibration: batches for `calibrate`; not needed where nothing is quantized statically.

    Raises:
        UserError: `example_inputs` are missing; and whatever the stages raise.
    """
    if backends is None:
        raise UserError(
            "quantize needs backends: names of installed ones, quantizers, or a list of both"
        )
    single = isinstance(backends, (str, Quantizer))
    quantizer = compose(*([backends] if single else backends))  # type: ignore[misc]
    exported = (
        model
        if isinstance(model, ExportedProgram)
        else _export(model, example_inputs, dynamic_shapes)
    )
    prepared = prepare_pt2e(exported, quantizer, strict=strict)
    if calibration is not None:
        calibrate(prepared, calibration, transform=transform, progress=progress)
    converted = convert_pt2e(prepared)
    return QuantizedModel(exported, converted, lower(converted, target, strict=strict), quantizer)


def _export(model: nn.Module, example_inputs: Any, dynamic_shapes: Any) -> ExportedProgram:
    if isinstance(model, GraphModule) or not isinstance(model, nn.Module):
        raise UserError(
            "quantize takes a torch.nn.Module or an ExportedProgram; for a GraphModule call "
            "prepare_pt2e, calibrate, convert_pt2e and lower"
        )
    if not isinstance(example_inputs, tuple):
        raise UserError(
            "quantize needs example_inputs, a tuple of positional arguments, to export the model"
        )
    training = {module: module.training for module in model.modules()}
    try:
        with torch.no_grad():
            return torch.export.export(model.eval(), example_inputs, dynamic_shapes=dynamic_shapes)
    finally:
        for module, mode in training.items():
            module.training = mode
