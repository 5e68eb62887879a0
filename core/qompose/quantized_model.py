# SPDX-License-Identifier: Apache-2.0
"""`quantize(...)`, which runs all stages in one call and returns the model in each of its forms."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from os import PathLike
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.utils import _pytree as pytree
from torch.utils.benchmark import Timer

from qompose.calibration.calibrator import Ranks, calibrate
from qompose.calibration.statistics_data import Statistics
from qompose.console import on_terminal, progress_bar
from qompose.conversion.convert import convert_pt2e
from qompose.conversion.qparams_solver import check_needs_no_data
from qompose.errors import (
    CalibrationError,
    ExportError,
    InputError,
    QomposeError,
    QomposeWarning,
    TargetError,
    UncalibratedError,
    UnlearnedError,
    UserError,
)
from qompose.files import place_for
from qompose.lowering.compilation import CompiledModel, compile_lowered
from qompose.lowering.lower_regions import check_target, lower
from qompose.plan.plan import Record
from qompose.plan.user_program import unlifted
from qompose.preparation.prepare import prepare_pt2e
from qompose.program.aliasing import inputs_written
from qompose.program.batches import arguments_of
from qompose.program.disk import Spool, files_of, spooling, tensors_of, whole_tensors, with_weights
from qompose.program.graph import copy_graph_module, one_thread_at_a_time, pytree_info
from qompose.program.meta import META_KEY
from qompose.quantizer.base import Quantizer
from qompose.quantizer.composition import QuantizerLike, as_composition
from qompose.reporting.build_report import report
from qompose.reporting.report_data import Report
from qompose.spec.qparams import AllowUncalibrated
from qompose.storage.artifact import save, task_of
from qompose.storage.pt2_archive import export_pt2


@dataclass(frozen=True, repr=False)
class QuantizedModel:
    """The result of `quantize`: the float program, the Q/DQ model, and the model with integer kernels.

    It is called as `model` is.
    """

    exported: ExportedProgram
    converted: GraphModule
    model: Any
    quantizer: Quantizer
    compiled: dict[str, CompiledModel] = field(default_factory=dict, compare=False)
    """What `compile` made, by mode."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run `model`.

        Raises:
            TargetError: the model was lowered for a target whose programs cannot be called.
        """
        if not callable(self.model):
            raise TargetError(
                f"a {type(self.model).__name__} cannot be called here; run it in its own runtime, or "
                'quantize with target="torch"'
            )
        return self.model(*args, **kwargs)

    def __copy__(self) -> QuantizedModel:
        return replace(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedModel:
        return QuantizedModel(**copy.deepcopy(vars(self), memo))

    def __reduce__(self) -> Any:
        """Refuse to be pickled: torch pickles programs by tracing them anew, which fails.

        Raises:
            UserError: always.
        """
        raise UserError(
            "a QuantizedModel cannot be pickled. Write a file with qompose.save(result.model, path), and "
            "read it with qompose.load(path)"
        )

    def __repr__(self) -> str:
        found = self.report
        size = f"{found.bytes_before:,} -> {found.bytes_after:,} bytes"
        return f"<QuantizedModel {found.headline()}; {size}>"

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
        native_code: bool | None = None,
    ) -> CompiledModel:
        """Compile the lowered model, in this process or to a package: `compile_lowered` of `model`.

        Raises:
            UserError: and its kinds, as `compile_lowered` raises them.
        """
        self.compiled[mode] = compile_lowered(
            self.model, mode, path=path, options=options, native_code=native_code
        )
        return self.compiled[mode]

    def export(self, path: str | PathLike[str]) -> None:
        """Write the converted model for `torch.export.load`: `export_pt2` of `converted`.

        Raises:
            UserError: and its kinds, as `export_pt2` raises them.
        """
        export_pt2(self.converted, path)

    def benchmark(
        self,
        *inputs: Any,
        keywords: Mapping[str, Any] | None = None,
        seconds: float = 0.2,
        **named: Any,
    ) -> Timings:
        """Time the float program, the lowered model and the result of `compile` by `torch.utils.benchmark`.

        A QomposeWarning names those that are slower than the float program.

        Args:
            inputs, named: the arguments of one call, or one dict of keyword arguments, like a batch of
                `calibrate`. Default: the example inputs of the export.
            keywords: keyword arguments as a mapping, in case an input is named "seconds", for example.
            seconds: the least time for which each is run; the median is reported.

        Raises:
            UserError: the program was exported without inputs and none are given.
            TargetError: the model was lowered for a target whose programs cannot be called.
            InputError: the inputs do not fit the program.
        """
        if not callable(self.model):
            raise TargetError(
                f"The {type(self.model).__name__} cannot be benchmarked against the float "
                'program; time it in its own runtime, or quantize with target="torch".'
            )
        info = pytree_info(self.converted.graph)
        names = [] if info is None else [*info.orig_args]
        inputs, keywords = self._inputs_of_a_call(names, inputs, {**(keywords or {}), **named})
        if inputs_written(self.converted.graph):
            inputs, keywords = pytree.tree_map_only(Tensor, Tensor.clone, (inputs, keywords))
        models = {
            "float": self._float_program(),
            "lowered": self.model,
            **{f"compiled, {mode}": model for mode, model in self.compiled.items()},
        }
        calls = {name: partial(model, *inputs, **keywords) for name, model in models.items()}
        timings = _timed(calls, seconds)
        slower = [
            f"{row.name} (takes {row.ratio:.2f}x as long)" for row in timings.rows if row.ratio > 1
        ]
        if slower:
            warnings.warn(f"slower than float: {', '.join(slower)}", QomposeWarning, stacklevel=2)
        return timings

    def _float_program(self) -> GraphModule:
        """Return what takes calls in the forms that the model does; torch's own takes that of the export."""
        return copy_graph_module(unlifted(self.exported))

    def _inputs_of_a_call(
        self, names: list[str], inputs: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        exported = self.exported.example_inputs
        if not inputs and not keywords:
            if exported is None:
                raise UserError(
                    "benchmark requires inputs: the exported program has no example inputs"
                )
            return exported[0], exported[1]
        examples = [] if exported is None else [*exported[0], *exported[1].values()]
        first = inputs[0] if len(inputs) == 1 and not keywords else None
        if isinstance(first, Mapping) and not _is_argument(first, names, examples):
            inputs, keywords = (), dict(first)
        if names:
            _check_names(names, inputs, keywords)
        return inputs, keywords


def _is_argument(given: Mapping[Any, Any], names: list[str], examples: list[Any]) -> bool:
    """Tell whether a dict is the first argument of a call, and not all arguments by name."""
    first = examples[0] if examples else None
    by_name = given.keys() <= {*names}
    return isinstance(first, Mapping) and (given.keys() == first.keys() or not by_name)


def _check_names(names: list[str], inputs: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
    """Refuse a call with arguments too many or too few.

    Raises:
        InputError: it has such.
    """
    placed, rest = names[: len(inputs)], names[len(inputs) :]
    faults = {
        "unknown": [name for name in keywords if name not in names],
        "passed twice": [name for name in placed if name in keywords],
        "too many": [f"number {place + 1}" for place in range(len(names), len(inputs))],
        "missing": [name for name in rest if name not in keywords],
    }
    for fault, found in faults.items():
        if found:
            remedy = "Pass each of these once, by position or by name"
            raise InputError(", ".join(map(str, found)), fault, ", ".join(names), remedy)


def quantize(
    model: nn.Module | ExportedProgram,
    example_inputs: Any = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    backends: QuantizerLike,
    calibration: Iterable[Any] | Statistics | None = None,
    target: str = "torch",
    dynamic_shapes: Any = None,
    transform: Callable[[Any], Any] | None = None,
    progress: bool | None = None,
    strict: bool = False,
    fold_batch_norms: bool = False,
    allow_uncalibrated: AllowUncalibrated = False,
) -> QuantizedModel:
    """Export, prepare, calibrate, convert and lower a model in one call.

    Args:
        model: a module, which is exported in eval mode, or an ExportedProgram.
        example_inputs: the arguments of one call: a tuple of positional arguments, a single tensor, or a
            dict of keyword arguments. Other calls must have the same shapes, except for the dimensions in
            `dynamic_shapes`.
        kwargs: keyword arguments of that call, in addition to `example_inputs` or instead of them.
        backends: quantizers, or installed backends by `"name"` or `"name:configuration"`, in order of
            priority; or a single one.
        calibration: batches for `calibrate`, or `Statistics` of an earlier calibration. Not needed if
            nothing is quantized statically.
        target: the runtime to lower for, as in `lower`.
        dynamic_shapes: dimensions that may vary, in the form that torch.export takes.
        transform: as for `calibrate`.
        progress: as for `calibrate` and `lower`.
        strict: raise an error if nothing is quantized, or if a claimed operator has no kernel.
        fold_batch_norms: as for `prepare_pt2e`.
        allow_uncalibrated: as for `convert_pt2e`; "unit_scale" shows kernels and times before there is data.

    Raises:
        UserError: `example_inputs` are missing or do not fit the model; and whatever the stages raise.
        ExportError: torch cannot export the model.
    """
    if backends is None:
        raise UserError(
            "quantize requires backends=: a backend name, a quantizer, or a list of these"
        )
    quantizer = as_composition(backends)
    exported = (
        model
        if isinstance(model, ExportedProgram)
        else _export(model, example_inputs, kwargs, dynamic_shapes)
    )
    prepared = prepare_pt2e(exported, quantizer, strict=strict, fold_batch_norms=fold_batch_norms)
    check_target(prepared, target, strict=strict)
    if calibration is not None:
        calibrate(prepared, calibration, transform=transform, progress=progress)
    converted = convert_pt2e(prepared, allow_uncalibrated=allow_uncalibrated)
    lowered = lower(converted, target, strict=strict, progress=progress)
    return QuantizedModel(exported, converted, lowered, quantizer)


@one_thread_at_a_time
def _export(
    model: nn.Module, example_inputs: Any, kwargs: Mapping[str, Any] | None, dynamic_shapes: Any
) -> ExportedProgram:
    if isinstance(model, GraphModule) or not isinstance(model, nn.Module):
        raise UserError(
            "quantize expects a torch.nn.Module (not a GraphModule) or an ExportedProgram, got "
            f"{type(model).__name__}; for a GraphModule use prepare_pt2e, calibrate, convert_pt2e "
            "and lower"
        )
    args, keywords = _example_call(model, example_inputs, kwargs)
    training = {module: module.training for module in model.modules()}
    try:
        with torch.no_grad(), warnings.catch_warnings():
            # torch's recurrent modules list their own parameters anew, of which it warns and which is fine.
            warnings.filterwarnings("ignore", "The tensor attribute.*_flat_weights", UserWarning)
            return torch.export.export(model.eval(), args, keywords, dynamic_shapes=dynamic_shapes)
    except QomposeError:
        raise
    except Exception as error:  # torch has many kinds, and the model's own code may raise any
        raise ExportError(model, error) from error
    finally:
        for module, mode in training.items():
            module.training = mode


def _example_call(
    model: nn.Module, example_inputs: Any, kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of one call of a model, checked against what it takes."""
    if example_inputs is None and not kwargs:
        raise UserError(
            "quantize requires example_inputs to export the model: a tuple, a tensor, or a "
            "dict of keyword arguments"
        )
    try:
        args, keywords = arguments_of(() if example_inputs is None else example_inputs)
    except CalibrationError:
        raise UserError(
            "example_inputs must be a tuple of positional arguments, a tensor, or a dict of keyword "
            f"arguments, got {example_inputs!r}"
        ) from None
    if twice := sorted(keywords.keys() & (kwargs or {}).keys()):
        raise UserError(f"arguments passed in both example_inputs and kwargs: {', '.join(twice)}")
    keywords |= kwargs or {}
    try:
        signature(model.forward).bind(*args, **keywords)
    except ValueError:  # compiled code has no signature: torch.export says what does not fit
        return args, keywords
    except TypeError as error:
        hint = ""
        if isinstance(example_inputs, Mapping):
            hint = "; to pass a dict as the first argument, wrap it in a tuple"
        raise UserError(
            f"The example inputs do not fit {type(model).__name__}: {error}{hint}"
        ) from None
    return args, keywords


def quantize_checkpoint(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    checkpoint: str | PathLike[str] | Mapping[str, Tensor],
    path: str | PathLike[str],
    backends: QuantizerLike,
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    scratch: str | PathLike[str] | None = None,
    progress: bool | None = None,
    strict: bool = False,
    timeout: float = 1800.0,
) -> Report:
    """Quantize weights that lie on disk, one after the other, into a file for `load`.

    The file is the one that `save` writes of `convert_pt2e`'s result, byte for byte. Only what needs no
    calibration data can be quantized: weights alone, or weights with activations at run time.

    What was made of each weight is kept in `scratch`, about 2 bytes per weight, until the file is written;
    the folder is deleted then. A call that was interrupted is gone on with by the same call. If
    `torch.distributed` is initialized, processes share the work; they need one file system, and all have
    to call this.

    Args:
        model: a module on the meta device, whose parameters take no memory. It is left unchanged.
        example_inputs, kwargs, dynamic_shapes, backends, strict: as for `quantize`.
        checkpoint: a safetensors file, the index of several, a folder with either, or a state dict, whose
            entries may be DTensors.
        path: the file to write.
        scratch: a folder; by default that of the file, with ".partial" behind its name.
        progress: whether to show a progress bar; None shows it on a terminal.
        timeout: seconds after which a process that does not answer is an error.

    Raises:
        CheckpointError: the checkpoint is damaged, or its tensors are not those of the model.
        UncalibratedError, UnlearnedError: what is to be quantized needs calibration data.
        ExportError: torch cannot export the model.
        UserError: `path` cannot be a file, or is one of the checkpoint's; `scratch` is a file, has `path`
            in it, or was left by another task; or another process failed; and whatever the stages raise.
        OSError: a file cannot be read or written.
    """
    target = Path(path)
    place = place_for(target)
    folder = _scratch(
        place, target.with_name(f"{target.name}.partial") if scratch is None else scratch
    )
    ranks = Ranks.here(timeout)
    source = _Source.of(checkpoint, folder, ranks, place)
    loaded = with_weights(model, source.tensors)
    exported = _export(loaded, example_inputs, kwargs, dynamic_shapes)
    prepared = prepare_pt2e(exported, as_composition(backends), strict=strict)
    record = _needing_no_data(prepared)
    gc.collect()  # what torch.export leaves in circles grows with the model, and would stay for a while
    with progress_bar(ranks.rank == 0 and on_terminal(progress)) as bar:
        spool = Spool(folder, ranks, bar)
        spool.claim(task_of(record, source.identity))
        with spooling(spool):
            converted = convert_pt2e(prepared, inplace=True)
            result = report(converted)
            spool.together(partial(save, converted, target) if ranks.rank == 0 else lambda: None)
    if ranks.rank == 0:
        rmtree(folder)
    return result


def _scratch(place: Path, scratch: str | PathLike[str]) -> Path:
    """Return the folder that is deleted in the end, where a link leads to it.

    Raises:
        UserError: it is a file, or has the result in it.
    """
    folder = Path(scratch).resolve()
    if folder.exists() and not folder.is_dir():
        raise UserError(f"scratch must be a folder, but {scratch} is a file")
    if folder in place.parents:
        raise UserError(
            f"{place} cannot be written: it is in the folder scratch={str(scratch)!r}, which is deleted "
            "when the file is written"
        )
    return folder


def _needing_no_data(prepared: GraphModule) -> Record:
    record: Record = prepared.meta[META_KEY]
    try:
        check_needs_no_data(prepared, record.plan)
    except (UncalibratedError, UnlearnedError) as error:
        error.args = (f"{error}\n{_WITHOUT_DATA}",)
        raise
    return record


_WITHOUT_DATA = (
    "quantize_checkpoint runs no data through the model. Choose configurations that are weight-only or "
    "dynamic, or quantize the model in memory, with calibration=."
)


@dataclass(frozen=True)
class _Source:
    """The tensors of a checkpoint, and what tells it from another one beside their values."""

    tensors: Mapping[str, Tensor]
    identity: Any

    @classmethod
    def of(cls, checkpoint: object, folder: Path, ranks: Ranks, place: Path) -> _Source:
        if isinstance(checkpoint, Mapping):
            return cls(whole_tensors(checkpoint, folder, ranks), None)
        if not isinstance(checkpoint, (str, PathLike)):
            raise UserError(f"checkpoint expects a path or a state dict, got {checkpoint!r}")
        files = files_of(Path(checkpoint))
        if any(file.resolve() == place for file in files):
            raise UserError(f"{place} cannot be written: it is a file of the checkpoint")
        facts = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        return cls(tensors_of(files), facts)


@dataclass(frozen=True)
class Timing:
    """The median time of one call of a model, in seconds, and that over the float model's."""

    name: str
    seconds: float
    ratio: float


@dataclass(frozen=True)
class Timings:
    """One row per model, the float one first; its fields are `name`, `seconds` and `ratio`, to the first."""

    rows: tuple[Timing, ...]

    def to_dict(self) -> list[dict[str, Any]]:
        """Return the rows as JSON data."""
        return [dict(row.__dict__) for row in self.rows]

    def __str__(self) -> str:
        width = max(len(row.name) for row in self.rows)
        return "\n".join(
            f"{row.name:{width}} {row.seconds * 1e3:10.3f} ms  {row.ratio:6.2f} of float"
            for row in self.rows
        )


def _timed(models: Mapping[str, Callable[[], Any]], seconds: float) -> Timings:
    threads = torch.get_num_threads()
    timers = {
        name: Timer("call()", globals={"call": call}, num_threads=threads)
        for name, call in models.items()
    }
    with torch.no_grad():
        medians = {n: t.blocked_autorange(min_run_time=seconds).median for n, t in timers.items()}
    first = next(iter(medians.values()))
    return Timings(tuple(Timing(name, median, median / first) for name, median in medians.items()))
