# SPDX-License-Identifier: Apache-2.0
"""Process state that foreign code changed, put back.

A fence around code of a foreign quantizer: what it changes in the process is undone, and said.

State of the process that a foreign quantizer might change: remembered, compared, put back.

Each class here remembers one kind of state when it is made; `undo` puts back what differs and says it.
Not covered, because nobody can undo it or because it is what importing a package means: imported modules,
registered operators and pytree nodes, patched functions, loggers of other packages, torch's compiler
configurations, modes that were entered and not left (inference mode, profilers, those for functions and
dispatch), random numbers of accelerators, and what compiled code does without Python knowing.

What a foreign quantizer prints, kept apart; its warnings and log records go where they always go.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch._tensor_str import get_printoptions
from torch.utils import deterministic


class Environment:
    """`os.environ` and `sys.path`. Texts name variables, and not their values, which may be secrets."""

    def __init__(self) -> None:
        self.variables = dict(os.environ)
        self.search_path = (sys.path, list(sys.path))

    def undo(self) -> list[str]:
        said = []
        if os.environ != self.variables:
            changed = {*self.variables.items()} ^ {*os.environ.items()}
            for name in sorted({name for name, _ in changed}):
                verb = "set" if name in os.environ else "removed"
                said.append(f"{verb} the environment variable {name}, which was undone")
                os.environ.pop(name, None)
                if name in self.variables:
                    os.environ[name] = self.variables[name]
        path, entries = self.search_path
        if sys.path is not path or path != entries:
            sys.path = path
            path[:] = entries
            said.append("changed sys.path, which was undone")
        return said


class Logging:
    """The root logger, torch's loggers, and `logging.disable`; a package's own loggers are its own."""

    def __init__(self) -> None:
        known = logging.root.manager.loggerDict
        loggers = [
            logger
            for name, logger in list(known.items())
            if isinstance(logger, logging.Logger) and (name == "torch" or name.startswith("torch."))
        ]
        self.before = [(logger, _logger_state(logger)) for logger in (logging.root, *loggers)]
        self.disabled = logging.root.manager.disable

    def undo(self) -> list[str]:
        said = []
        for logger, before in self.before:
            now = _logger_state(logger)
            if now != before:
                logger.setLevel(before.level)
                logger.handlers[:] = before.handlers
                logger.propagate, logger.disabled = before.propagate, before.disabled
                facts = [f for f in _LoggerState._fields if getattr(now, f) != getattr(before, f)]
                said.append(
                    f"changed {', '.join(facts)} of the logger {logger.name}, which was undone"
                )
        if logging.root.manager.disable != self.disabled:
            said.append(f"called logging.disable({logging.root.manager.disable}), which was undone")
            logging.disable(self.disabled)
        return said


class Output:
    """`sys.stdout` and `sys.stderr`, replaced from when this is made to `undo`.

    Only what is written through these two objects is kept: not what compiled code or a child process
    writes, nor what goes to `sys.stdout.buffer` or `sys.__stdout__`.
    """

    def __init__(self) -> None:
        self.streams: dict[str, Any] = {"stdout": sys.stdout, "stderr": sys.stderr}
        self.captures = {
            name: _Capture(stream)
            for name, stream in self.streams.items()
            if stream is not None  # as in a program without a console
        }
        self.show_warning, self.last_resort = warnings.showwarning, logging.lastResort
        for name, capture in self.captures.items():
            setattr(sys, name, capture)
        warnings.showwarning = self._let_through
        self.logs = self._handler_of_last_resort()
        logging.lastResort = self.logs

    def _let_through(self, *arguments: Any, **options: Any) -> None:
        """Show a warning on the streams that were there before, in the way that was set before."""
        replaced = {name: getattr(sys, name) for name in self.streams}
        self._set_streams(self.streams)
        try:
            self.show_warning(*arguments, **options)
        finally:
            self._set_streams(replaced)

    def _set_streams(self, streams: dict[str, Any]) -> None:
        for name, stream in streams.items():
            setattr(sys, name, stream)

    def _handler_of_last_resort(self) -> Any:
        """Return what prints records that no handler takes: as before, and on the stream there was before."""
        if self.last_resort is None or self.streams["stderr"] is None:
            return self.last_resort
        handler = logging.StreamHandler(self.streams["stderr"])
        handler.setLevel(self.last_resort.level)
        return handler

    def undo(self) -> list[str]:
        """Put the streams back, and say what was printed; all of it is logged at level DEBUG."""
        said = []
        for name, stream in self.streams.items():
            if getattr(sys, name) is not self.captures.get(name, stream):
                said.append(f"replaced sys.{name}, which was undone")
        self._set_streams(self.streams)
        # A member that enters catch_warnings and never leaves it resets showwarning as well.
        warnings.showwarning = self.show_warning
        if logging.lastResort is self.logs:
            logging.lastResort = self.last_resort
        for name, capture in self.captures.items():
            capture.keeping = False
            text = capture.kept.getvalue()
            if text.strip():
                said.append(_described(name, text))
                _LOGGER.debug("what was printed to %s: %s", name, text)
        return said

    def replay(self) -> None:
        """Print after all what was kept: the member failed, and that may tell why."""
        for capture in self.captures.values():
            capture.stream.write(capture.kept.getvalue())
            capture.kept = io.StringIO()


class RandomNumbers:
    """The states of the global generators of torch (CPU), `random`, and numpy where it is in use."""

    def __init__(self) -> None:
        self.torch = torch.random.get_rng_state()
        self.python = random.getstate()
        numpy = self._numpy()
        self.numpy = None if numpy is None else numpy.get_state(legacy=False)

    def _numpy(self) -> Any:
        return sys.modules.get("numpy.random")

    def undo(self) -> list[str]:
        said = []
        if not torch.equal(self.torch, torch.random.get_rng_state()):
            torch.random.set_rng_state(self.torch)
            said.append("torch")
        if self.python != random.getstate():
            random.setstate(self.python)
            said.append("random")
        if self.numpy is not None and self._numpy_differs(self.numpy):
            self._numpy().set_state(self.numpy)
            said.append("numpy")
        return [f"{USED_RANDOM_NUMBERS} of {name}, which was undone" for name in said]

    def _numpy_differs(self, before: Any) -> bool:
        now = self._numpy().get_state(legacy=False)  # arrays in dictionaries, of any generator
        return pickle.dumps(before) != pickle.dumps(now)


class Settings:
    """torch's flags, the working directory and the recursion limit."""

    def __init__(self) -> None:
        self.before = [(setting, _read(setting)) for setting in _SETTINGS]

    def undo(self) -> list[str]:
        after = [_read(setting) for setting, _ in self.before]
        if all(value == now for (_, value), now in zip(self.before, after, strict=True)):
            return []
        return list(self._put_back(after))

    def _put_back(self, after: list[Any]) -> Iterator[str]:
        """Write what differs, that too which writing an older name has only just changed."""
        for (setting, before), now in zip(self.before, after, strict=True):
            if before is _UNREADABLE:
                continue
            text = "something unreadable" if now is _UNREADABLE else repr(now)
            if before != now:
                yield _undone(
                    f"set {setting.name} to {text}",
                    lambda write=setting.write, value=before: write(value),  # type: ignore[misc]
                )
            elif before != _read(setting):
                setting.write(before)


class WarningFilters:
    """The filters of `warnings`."""

    def __init__(self) -> None:
        self.filters: Any = warnings.filters
        self.entries = list(self.filters)

    def undo(self) -> list[str]:
        if warnings.filters is self.filters and self.filters == self.entries:
            return []
        warnings.filters = self.filters
        self.filters[:] = self.entries
        with warnings.catch_warnings():  # makes Python forget what it decided by the other filters
            pass
        return ["changed the filters of warnings, which was undone"]


_KINDS: tuple[type[Watched], ...] = (
    Settings,
    Environment,
    RandomNumbers,
    WarningFilters,
    Logging,
    Output,
)
# Two fences that overlapped would each put back what the other had found.
_ONE_AT_A_TIME = threading.RLock()


@contextmanager
def fenced() -> Iterator[list[str]]:
    """Run a block of foreign code; afterwards, put back what it changed in the process.

    What is covered: torch's flags, defaults and random numbers, those of `random` and numpy, the
    environment and `sys.path`, the working directory, filters of warnings, the root logger and torch's,
    and what is written to `sys.stdout` and `sys.stderr`, which is kept from appearing. Warnings and log
    records appear as they would otherwise. `interop.process` and `interop.output` say what is not covered.

    The block may raise: all is put back, and what it printed appears after all, as it may tell why.

    One thread at a time is behind a fence, others wait at theirs; fences of one thread may be nested. What
    other threads change in the process meanwhile is taken for the block's doing and put back too, but
    what they print appears.

    Yields:
        a list that is empty, and has a text for each change once the block is left: "set
        torch.backends.mkldnn.enabled to False, which was undone".
    """
    effects: list[str] = []
    with _ONE_AT_A_TIME, ExitStack() as stack:  # it calls every undo, whichever of them raises
        watched = [kind() for kind in _KINDS]
        for one in reversed(watched):
            stack.callback(lambda one=one: effects.extend(one.undo()))  # type: ignore[misc]
        try:
            yield effects
        except BaseException:
            for one in watched:
                if isinstance(one, Output):
                    one.replay()
            raise


class Watched(Protocol):
    """One kind of state, as it was when this was made."""

    def undo(self) -> list[str]:
        """Put back what differs now, and say what that was, a text each."""


class _Setting(NamedTuple):
    name: str
    read: Callable[[], Any]
    write: Callable[[Any], Any]


def _attribute(name: str, owner: object, attribute: str) -> _Setting:
    return _Setting(
        f"{name}.{attribute}",
        lambda: getattr(owner, attribute),
        lambda value: setattr(owner, attribute, value),
    )


def _default_device() -> torch.device | None:
    """Return what `torch.set_default_device` was given, None where it was not called.

    `torch.get_default_device` cannot tell that from the device of an enclosing `with torch.device(...)`.
    """
    holder = getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None)
    context = getattr(holder, "device_context", None)
    return None if context is None else context.device


def _autocast(kind: str) -> Iterator[_Setting]:
    """Return what `torch.autocast(kind)` sets as it is entered."""
    name = f"torch's autocast on {kind}"
    yield _Setting(
        name,
        lambda: torch.is_autocast_enabled(kind),
        lambda value: torch.set_autocast_enabled(kind, value),
    )
    yield _Setting(
        f"the dtype of {name}",
        lambda: torch.get_autocast_dtype(kind),
        lambda value: torch.set_autocast_dtype(kind, value),
    )


def _depth_of_autocast() -> int:
    depth: int = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth


def _set_depth_of_autocast(depth: int) -> None:
    """Enter or leave so often; who leaves the outermost one lets go of the casts that it kept."""
    while _depth_of_autocast() < depth:
        torch.autocast_increment_nesting()
    while _depth_of_autocast() > depth:
        torch.autocast_decrement_nesting()
    if depth == 0:
        torch.clear_autocast_cache()


def _anomalies() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def _flushes_denormals() -> bool:
    """Return what `torch.set_flush_denormal` was given; only arithmetic tells."""
    return bool(sys.float_info.min * _HALF == 0.0)


_HALF = 0.5  # a name, so that no compiler multiplies beforehand
_BACKENDS: Any = torch.backends
_print_with: Any = torch.set_printoptions  # torch has no types for it
# Older names come before newer ones for the same thing, which the older ones change along.
_SETTINGS = (
    _Setting("torch's default dtype", torch.get_default_dtype, torch.set_default_dtype),
    _Setting("torch's default device", _default_device, torch.set_default_device),
    _Setting("torch's grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
    _Setting("torch's number of threads", torch.get_num_threads, torch.set_num_threads),
    _Setting(
        "torch's deterministic debug mode",
        torch.get_deterministic_debug_mode,
        torch.set_deterministic_debug_mode,
    ),
    _attribute("torch.utils.deterministic", deterministic, "fill_uninitialized_memory"),
    _Setting(
        "torch's float32 matmul precision",
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    *_autocast("cpu"),
    *_autocast("cuda"),
    _Setting(
        "torch's cache of autocast",
        torch.is_autocast_cache_enabled,
        torch.set_autocast_cache_enabled,
    ),
    _Setting("torch's depth of autocast", _depth_of_autocast, _set_depth_of_autocast),
    _Setting(
        "torch's detection of anomalies (and of NaN)",
        _anomalies,
        lambda value: torch.autograd.set_detect_anomaly(*value),
    ),
    _Setting("torch's flushing of denormals", _flushes_denormals, torch.set_flush_denormal),
    _Setting("how torch prints", get_printoptions, lambda value: _print_with(**value)),
    _attribute("torch.backends.quantized", _BACKENDS.quantized, "engine"),
    _attribute("torch.backends.mkldnn", _BACKENDS.mkldnn, "enabled"),
    _attribute("torch.backends.mkldnn", _BACKENDS.mkldnn, "deterministic"),
    _attribute("torch.backends.cudnn", _BACKENDS.cudnn, "enabled"),
    _attribute("torch.backends.cudnn", _BACKENDS.cudnn, "benchmark"),
    _attribute("torch.backends.cudnn", _BACKENDS.cudnn, "deterministic"),
    _attribute("torch.backends.cudnn", _BACKENDS.cudnn, "allow_tf32"),
    _attribute("torch.backends", _BACKENDS, "fp32_precision"),
    _attribute("torch.backends.mkldnn.matmul", _BACKENDS.mkldnn.matmul, "fp32_precision"),
    _attribute("torch.backends.mkldnn.conv", _BACKENDS.mkldnn.conv, "fp32_precision"),
    _attribute("torch.backends.mkldnn.rnn", _BACKENDS.mkldnn.rnn, "fp32_precision"),
    _attribute("torch.backends.cuda.matmul", _BACKENDS.cuda.matmul, "fp32_precision"),
    _attribute("torch.backends.cudnn.conv", _BACKENDS.cudnn.conv, "fp32_precision"),
    _attribute("torch.backends.cudnn.rnn", _BACKENDS.cudnn.rnn, "fp32_precision"),
    _Setting("the working directory", os.getcwd, os.chdir),
    _Setting("the recursion limit", sys.getrecursionlimit, sys.setrecursionlimit),
)
_UNREADABLE = object()
"""Stands for a setting that cannot be read: of a mix of old and new precision settings, or a lost folder."""


def _read(setting: _Setting) -> Any:
    try:
        return setting.read()
    except (RuntimeError, OSError):
        return _UNREADABLE


def _undone(change: str, undo: Callable[[], object]) -> str:
    try:
        undo()
    except (RuntimeError, OSError) as error:
        return f"{change}, which could not be undone: {error}"
    return f"{change}, which was undone"


USED_RANDOM_NUMBERS = "used the global random numbers"
"""What asks for no attention: many quantizers export their patterns with random examples."""


class _LoggerState(NamedTuple):
    level: int
    handlers: list[logging.Handler]
    propagate: bool
    disabled: bool


def _logger_state(logger: logging.Logger) -> _LoggerState:
    return _LoggerState(logger.level, list(logger.handlers), logger.propagate, logger.disabled)


_LOGGER = logging.getLogger("qompose")
_LONGEST = 100


class _Capture:
    """Stands for a stream while a quantizer runs, and keeps what the thread that made it writes.

    Other threads write to the stream itself; so does everybody once `keeping` is over, because handlers
    of loggers may hold on to this.
    """

    def __init__(self, stream: Any) -> None:
        self.stream, self.kept = stream, io.StringIO()
        self.keeping, self.thread = True, threading.get_ident()

    def write(self, text: str) -> int:
        keeping = self.keeping and threading.get_ident() == self.thread
        written: int = (self.kept if keeping else self.stream).write(text)
        return written

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _described(name: str, text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    first = lines[0].strip()
    first = first if len(first) <= _LONGEST else f"{first[:_LONGEST]}..."
    return f"wrote {len(lines)} line{'s' * (len(lines) > 1)} to {name}: {first}"
