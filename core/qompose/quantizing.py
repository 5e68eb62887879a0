# SPDX-License-Identifier: Apache-2.0
"""The one call that runs all stages, from a module to integer kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from os import PathLike
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule

from qompose.benchmarking import Timings, bench
from qompose.calibration import calibrate
from qompose.collecting import Statistics
from qompose.compiling import CompiledModel, compile_lowered
from qompose.composing import compose
from qompose.errors import TargetError, UserError
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
    compiled: dict[str, CompiledModel] = field(default_factory=dict, repr=False, compare=False)
    """What `compile` made, by mode."""

    @property
    def report(self) -> Report:
        """Return what happened to every float operator."""
        return report(self.model)

    def compile(
        self,
        mode: str = "default",
        *,
        path: str | PathLike[str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> CompiledModel:
        """Compile the lowered model, in this process or to a package: `compile_lowered` of `model`.

        Raises:
            UserError: and its kinds, as `compile_lowered` raises them.
        """
        self.compiled[mode] = compile_lowered(self.model, mode, path=path, options=options)
        return self.compiled[mode]

    def benchmark(
        self,
        *inputs: Any,
        keywords: Mapping[str, Any] | None = None,
        rounds: int = 10,
        warmup: int = 2,
    ) -> Timings:
        """Time the float program, the lowered one and what `compile` made, in turns; see `bench`.

        What is slower than the float program is in a QomposeWarning.

        Args:
            inputs, keywords: those of one call; without any, the ones that the float program was exported
                with.

        Raises:
            UserError: no rounds, or the program was exported without inputs and none are given.
            TargetError: the model was lowered to what cannot be called.
        """
        if not callable(self.model):
            raise TargetError(
                f"A {type(self.model).__name__} cannot be called beside the float program: time it in its "
                'runtime, or quantize with target="torch".'
            )
        if not inputs and not keywords:
            inputs, keywords = self._example()
        models = {
            "float": self.exported.module(),
            "lowered": self.model,
            **{f"compiled, {mode}": model for mode, model in self.compiled.items()},
        }
        return bench(
            {name: partial(model, **(keywords or {})) for name, model in models.items()},
            *inputs,
            rounds=rounds,
            warmup=warmup,
            stacklevel=2,
        )

    def _example(self) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        example = self.exported.example_inputs
        if example is None:
            raise UserError("benchmark needs inputs: the program was exported without any")
        args, kwargs = example
        return args, kwargs


def quantize(
    model: nn.Module | ExportedProgram,
    example_inputs: tuple[Any, ...] | None = None,
    *,
    backends: str | Quantizer | Sequence[str | Quantizer],
    calibration: Iterable[Any] | Statistics | None = None,
    target: str = "torch",
    dynamic_shapes: Any = None,
    transform: Callable[[Any], Any] | None = None,
    progress: bool | None = None,
    strict: bool = False,
) -> QuantizedModel:
    """Export, prepare, calibrate, convert and lower a model, in one call.

    Args:
        model: a module, which is exported in eval mode; or an ExportedProgram.
        example_inputs: the arguments of one call. The shapes of their tensors are those of all calls, but
            for the dimensions of `dynamic_shapes`.
        backends: names of installed backends or quantizers, in order of priority; or just one.
        calibration: batches for `calibrate`, or `Statistics` of an earlier calibration; not needed where
            nothing is quantized statically.
        target: what to lower for, as for `lower`.
        dynamic_shapes: which dimensions may vary, in the form that torch.export takes.
        transform, progress: as for `calibrate`.
        strict: make errors of "nothing was quantized" and "claimed, but without a kernel".

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
