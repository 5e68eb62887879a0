# SPDX-License-Identifier: Apache-2.0
"""Every error and warning of qompose: what, where, who, and the remedy."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from numbers import Real
from pathlib import Path
from types import UnionType
from typing import Any, TypeAlias

__all__ = [
    "AnnotationConflictError",
    "ArtefactError",
    "BackendNotFoundError",
    "BatchError",
    "CalibrationError",
    "CheckpointError",
    "CompilationError",
    "ConfigError",
    "ContestedRegionError",
    "ExcludedBackendError",
    "ExportError",
    "InputError",
    "InternalError",
    "MemberError",
    "MissingBackendError",
    "NotExportedError",
    "NotLoweredError",
    "NothingQuantizedError",
    "PluginError",
    "ProjectError",
    "QomposeError",
    "QomposeWarning",
    "RequirementError",
    "RequirementWarning",
    "SelectorError",
    "SharingError",
    "StageError",
    "StateError",
    "StatisticsError",
    "TargetError",
    "TuningError",
    "UncalibratedError",
    "UnlearnedError",
    "UserError",
]


class QomposeError(Exception):
    """Base class of all errors that qompose raises on purpose. They can be copied and pickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self.args, self.__dict__)


def _restored(
    kind: type[QomposeError], args: tuple[Any, ...], attributes: dict[str, Any]
) -> QomposeError:
    """Return an error without calling its `__init__`, which takes other arguments than the message."""
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(attributes)
    return error


class UserError(QomposeError):
    """The request cannot be carried out as given; the message says what to change."""


class InternalError(QomposeError):
    """qompose broke one of its own rules; please report it with the message."""


class BackendNotFoundError(UserError, LookupError):
    """No installed distribution offers a backend of the requested name."""

    def __init__(self, name: str, installed: Sequence[str]) -> None:
        self.name, self.installed = name, tuple(installed)
        close = near_names(name, installed)
        remedy = (
            ""
            if close
            else " Install the package that provides it: a backend is an entry point in the group "
            "'qompose'."
        )
        super().__init__(
            f"No backend named {name!r} is installed{close}. "
            f"Installed: {', '.join(installed) or 'none'}.{remedy}"
        )


class ExcludedBackendError(BackendNotFoundError):
    """A backend is installed, but the environment variable QOMPOSE_PLUGINS excludes it."""

    def __init__(self, name: str, source: str, variable: str, allowed: Iterable[str]) -> None:
        self.name, self.installed = name, (name,)
        listed = ",".join(sorted(allowed))
        UserError.__init__(
            self,
            f"Backend {name!r} is installed ({source}), but {variable}={listed!r} excludes "
            f"it. Add {name!r} to {variable} or unset {variable}.",
        )


class PluginError(UserError):
    """A plugin is installed but cannot be used."""

    def __init__(self, name: str, source: str, reason: str, kind: str = "backend") -> None:
        self.name, self.source, self.reason, self.kind = name, source, reason, kind
        super().__init__(f"{kind.capitalize()} {name!r} ({source}) cannot be used: {reason}")


class AnnotationConflictError(UserError, RuntimeError):
    """A member of a composition changed what an earlier member had annotated.

    Attributes:
        earlier, later: labels of the two members.
        node: the operator.
        change: what the later member did with the earlier one's annotation.
    """

    def __init__(self, earlier: str, later: str, node: str, change: str) -> None:
        self.earlier, self.later, self.node, self.change = earlier, later, node, change
        super().__init__(
            f"Quantizer {later!r} {change} the annotation of node {node!r} made by quantizer "
            f"{earlier!r}. Restrict one of them (set_module_name(..., None) or "
            'qompose.restrict), change their order, or compose with on_conflict="first" to '
            "keep the earlier annotation."
        )


class ContestedRegionError(AnnotationConflictError):
    """Several members want the same operators, in a composition with on_conflict="error".

    Attributes:
        contests: (earlier member, its rule, later member, its rule, operators) of each region.
    """

    def __init__(self, contests: Sequence[tuple[str, str, str, str, tuple[str, ...]]]) -> None:
        self.contests = tuple(contests)
        self.earlier, _, self.later, _, nodes = self.contests[0]
        self.node, self.change = nodes[0], "claims"
        lines = [
            f"{', '.join(nodes)}: {earlier} (rule {rule}) and {later} (rule {other})"
            for earlier, rule, later, other, nodes in self.contests
        ]
        shown = [*lines[:8], *([f"and {len(lines) - 8} more"] if lines[8:] else [])]
        UserError.__init__(
            self,
            'Members of a composition with on_conflict="error" claim the same operators:\n'
            + "".join(f"  - {line}\n" for line in shown)
            + "For each line, restrict one of the members (set_module_name(..., None) or qompose.restrict), "
            "or omit on_conflict to give the operators to the earlier member.",
        )


class SharingError(UserError):
    """Quantization parameters that must be shared cannot be."""


class SelectorError(UserError, ValueError):
    """A selector names something that is not in the model."""


class ConfigError(UserError, ValueError):
    """A configuration or an option is invalid, or a backend does not support it."""


class NotExportedError(UserError, TypeError):
    """A model was passed where an exported program is needed."""

    def __init__(self, model: object, function: str) -> None:
        super().__init__(
            f"{function} expects a torch.export.ExportedProgram, or the GraphModule that its "
            f"module() returns, got {type(model).__module__}.{type(model).__qualname__}. "
            "Export the model first with torch.export.export(model.eval(), example_inputs), "
            "or call qompose.quantize(model, example_inputs, ...)."
        )


class ExportError(UserError):
    """`torch.export` cannot export a model; its error is the `__cause__`. `line` is the model's, or ""."""

    def __init__(self, model: object, error: BaseException) -> None:
        self.line = _line_of(error, anywhere=False)
        where = f", at {self.line}" if self.line else ""
        said, found, fixes = str(error).partition(_FIXES)
        lines = [line.strip() for line in said.splitlines() if line.strip()][:2]
        if found:
            lines += [
                found,
                "; ".join(map(str.strip, fixes.partition("\n\n")[0].strip().splitlines())),
            ]
        text = " ".join(lines) or "no reason given"
        advice = next((a for word, a in _EXPORT_ADVICE.items() if word in text), _ANY_ADVICE)
        what = f"{type(model).__name__}{where}: {type(error).__name__}: {text}"
        super().__init__(f"torch.export cannot export {what}\n{advice}")


_FIXES = "Suggested fixes:"
_EXPORT_ADVICE = {
    _FIXES: "Change dynamic_shapes as it suggests, or the model",
    "nference tensor": "Make the model and the example inputs outside torch.inference_mode",
    "Unsupported input type": "Register that type, or take tensors, tuples, lists and dicts",
}
_ANY_ADVICE = (
    "Code that branches on the values of a tensor needs torch.where or torch.cond. Change what the "
    "message names until torch.export.export(model.eval(), example_inputs) succeeds"
)


class StageError(UserError):
    """A function was called with a model of the wrong stage."""


class UncalibratedError(UserError):
    """Observers that never saw a tensor have no quantization parameters."""

    def __init__(self, tensors: Sequence[str]) -> None:
        self.tensors = tuple(tensors)
        listed = "\n".join(f"  - {tensor}" for tensor in tensors)
        super().__init__(
            "no data reached these observed tensors:\n"
            f"{listed}\n"
            "Before convert_pt2e, run qompose.calibrate(prepared, batches) or call "
            "prepared(*inputs) in a loop. Pass allow_uncalibrated=True to leave these "
            'regions in float, or allow_uncalibrated="unit_scale" to look at graphs and kernels '
            "with a scale of 1."
        )


class UnlearnedError(UserError):
    """Algorithms that learn from calibration data had none; `products` counts layers by algorithm."""

    def __init__(self, products: Mapping[str, int]) -> None:
        self.products = dict(products)
        listed = ", ".join(f"{word} for {number} layers" for word, number in products.items())
        super().__init__(
            f"calibration data is required by {listed}: call qompose.calibrate(prepared, "
            "batches) before convert_pt2e. Calling the model on each batch or applying "
            "merged statistics is not enough. Pass allow_uncalibrated=True to round to "
            "nearest instead."
        )


class CalibrationError(UserError):
    """A calibration batch cannot be used."""


class StatisticsError(UserError, ValueError):
    """Calibration statistics cannot be merged, read or applied."""


class CheckpointError(UserError):
    """A checkpoint cannot be read, or its tensors cannot be taken as they are.

    Attributes:
        names: modules, tensors or parameters that the message is about, all of them; none where it is about
            the checkpoint as a whole.
    """

    def __init__(self, message: str, names: Iterable[str] = ()) -> None:
        self.names = tuple(names)
        super().__init__(message)


class StateError(UserError, RuntimeError):
    """A state dict belongs to a model with other constants in its code, such as scales of activations.

    Copies of a quantized model refuse such state dicts too, but not what torch makes anew of it, such as the
    module of another `torch.export.export`.

    Attributes:
        path: the model's path in the module whose `load_state_dict` was called; "" if it is that module.
        stages: the stage of the model that the state dict is from, and of the one that it was loaded into.
    """

    def __init__(self, message: str, path: str, stages: tuple[str, str]) -> None:
        self.path, self.stages = path, stages
        super().__init__(message)


class BatchError(CalibrationError):
    """One of several batches cannot be used. `reason` says why; `what` names the kind of batch."""

    def __init__(self, number: int, reason: str, what: str = "calibration batch") -> None:
        self.number, self.reason, self.what = number, reason, what
        super().__init__(f"{what} {number} {reason}")


class InputError(UserError, ValueError):
    """A program was called with an input that it was not exported for; `name` is its placeholder."""

    def __init__(self, name: str, given: str, wanted: str, remedy: str = "") -> None:
        self.name = name
        remedy = remedy or (
            "Export it with dynamic_shapes for variable sizes, or with another constant"
        )
        super().__init__(
            f"input {name} is {given}, but the program was exported for {wanted}. {remedy}"
        )


class TargetError(UserError):
    """No kernels, or no runtime, for the requested target."""


class CompilationError(TargetError):
    """A lowered model cannot be compiled; it still runs uncompiled."""


class ArtefactError(UserError):
    """A model cannot be saved, or a file cannot be loaded; the message says what is wrong with it."""


class RequirementError(ArtefactError):
    """A loaded model needs something that this machine lacks."""


class MissingBackendError(BackendNotFoundError):
    """A backend whose kernels a loaded model needs is not installed."""

    def __init__(self, owner: Mapping[str, Any], installed: list[str]) -> None:
        name, release = owner["backend"], owner["version"]
        self.name, self.installed = name, tuple(installed)
        if owner["distribution"]:
            source = f" (from {owner['distribution']} {release})"
            remedy = (
                f'run pip install "{owner["distribution"]}=={release}" or install a later release'
            )
        else:
            source = ", which belonged to no installed package when the model was saved"
            remedy = "register it as an entry point in the group 'qompose'"
        UserError.__init__(
            self,
            f"This model was quantized by the backend {name!r}{source}, which is not "
            f"installed; {remedy}. Installed: {', '.join(installed) or 'none'}. The loaded "
            "model runs without it, but cannot be lowered.",
        )


class MemberError(UserError):
    """Code of a quantizer or backend raised an error, which is the `__cause__`."""


@contextmanager
def blaming(who: str, *passing: type[Exception]) -> Iterator[None]:
    """Turn errors that are not qompose's own, nor `passing`, into one that says whose code raised them.

    Raises:
        MemberError: there was such an error.
    """
    own: tuple[type[Exception], ...] = (QomposeError, *passing)
    try:
        yield
    except own:
        raise
    except Exception as error:
        kind, text = type(error).__name__, str(error)
        told = f"{kind}: {text}" if text.strip() else f"{kind} at {_line_of(error)}"
        raise MemberError(f"{who} raised {told}") from error


def _is_hosts(file: str) -> bool:
    """Tell whether code is qompose's or torch's own, or what torch made of a graph."""
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    folders = [f"{Path(module).parent}{os.sep}" for module in (__file__, torch) if module]
    return file.startswith(("<eval_with_key>", *folders))


def _line_of(error: BaseException, *, anywhere: bool = True) -> str:
    """Return file and line of the last call that belongs to a member, and not to qompose or torch.

    Args:
        anywhere: where there is no such call, return the last of all, not "".
    """
    calls = [(f.f_code.co_filename, line) for f, line in traceback.walk_tb(error.__traceback__)]
    own = [call for call in calls if not _is_hosts(call[0])]
    file, line = (own or (calls if anywhere else []) or [("", 0)])[-1]
    return f"{'/'.join(Path(file).parts[-2:])}:{line}" if file or anywhere else ""


@contextmanager
def locating(where: str) -> Iterator[None]:
    """Let qompose's own errors end with the part of a program that they are about, if it is not all of it."""
    try:
        yield
    except QomposeError as error:
        if where:
            error.args = (f"{error} (in {where})",)
        raise


class ProjectError(UserError, ValueError):
    """A project for a new backend cannot be created with that name or in that place."""


class NothingQuantizedError(UserError):
    """strict=True, and the quantizer claimed no operator."""


class NotLoweredError(UserError):
    """strict=True, and claimed operators found no kernel."""


class TuningError(UserError):
    """No setting meets the target of `tune`; the message has the best one that was found.

    Attributes:
        tuning: that one, with all attempts.
    """

    def __init__(self, message: str, tuning: Any = None) -> None:
        self.tuning = tuning
        super().__init__(message)


class QomposeWarning(UserWarning):
    """Something that was requested did not happen; the message names the operators."""


class RequirementWarning(QomposeWarning):
    """A model runs here, but without the kernels that it was made for; the message says why."""


def warn_user(message: str, category: type[QomposeWarning] = QomposeWarning) -> None:
    """Warn at the line of the user's code that called qompose, or torch's code that called it."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _is_hosts(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def near_names(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean 'a' or 'b'?)", or nothing where no known name is close."""
    close = get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f" (did you mean {' or '.join(map(repr, close))}?)" if close else ""


Kind: TypeAlias = "type | UnionType"
_WANTED: Mapping[Kind, str] = {
    bool: "True or False", int: "an integer", Real: "a number", str: "a string",
    str | None: "a string or None",
}  # fmt: skip


def is_kind(value: object, kind: Kind) -> bool:
    """Tell whether a value is of a type. True and False are no numbers."""
    return kind is bool if isinstance(value, bool) else isinstance(value, kind)


def kind_fault(name: str, value: object, kind: Kind) -> str | None:
    """Return what is wrong with an option that is not of its kind, one of `_WANTED`; None if it is."""
    return None if is_kind(value, kind) else f"{name} must be {_WANTED[kind]}, got {value!r}"


def kind_faults(given: object, kinds: Mapping[str, Kind]) -> Iterator[str]:
    """Yield what is wrong with the fields of an object that are not of their kinds."""
    faults = (kind_fault(name, getattr(given, name), kind) for name, kind in kinds.items())
    yield from filter(None, faults)


def brief(given: object) -> str:
    """Return what an error says of a value: its text, or the name of its type where that is long."""
    text = repr(given)
    is_brief = len(text) <= _BRIEF and not isinstance(given, Iterator)
    return text if is_brief else type(given).__name__


_BRIEF = 80


def first_of(names: Sequence[str], most: int) -> str:
    """Return the first of some names, and how many more there are."""
    more = f" and {len(rest)} more" if (rest := names[most:]) else ""
    return f"{', '.join(names[:most])}{more}"
