# SPDX-License-Identifier: Apache-2.0
"""A program for the ExecuTorch runtime, which runs in process or is written to a file."""

from __future__ import annotations

import base64
import json
import threading
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from qompose.backend import draft_of

from qompose_xnnpack.executorch_target.delegation import Delegation
from qompose_xnnpack.executorch_target.errors import ExecutorchTargetError, loading_error
from qompose_xnnpack.executorch_target.executorch_imports import import_runtime, quiet
from qompose_xnnpack.executorch_target.method_interface import Interface

FORWARD = "forward"
INTERFACE = "qompose_interface"
"""The method of every file that takes nothing and returns what `packed` made."""

Parts = Mapping[str, tuple[Interface, Delegation]]
"""By method, how it is called and what became of its operators."""


class _Loaded:
    """A program in the runtime of this process, for one thread at a time as its methods share memory.

    ``together``: methods that are loaded together. Those that share state are: loading one sets its state to
    the initial values.
    """

    def __init__(self, buffer: bytes, together: tuple[str, ...] = ()) -> None:
        self.together = together
        self.lock = threading.Lock()
        self._buffer = buffer
        self._program: Any = None
        self._methods: dict[str, Any] = {}

    def __del__(self) -> None:
        # The methods point into the program and the program into the buffer, without owning them.
        self._methods = {}
        self._program = None

    def method(self, name: str) -> tuple[Any, bool]:
        """Return a method and whether it was loaded just now. The caller must hold the lock."""
        if name in self._methods:
            return self._methods[name], False
        with quiet():  # it changes settings of the process, so not in every call
            if self._program is None:
                self._program = import_runtime().load_program(self._buffer)
                self._methods = {each: self._program.load_method(each) for each in self.together}
            if name not in self._methods:
                self._methods[name] = self._program.load_method(name)
        return self._methods[name], True

    def forget(self, name: str) -> None:
        """Forget a method, so that it is loaded again."""
        self._methods.pop(name, None)


class ExecutorchMethod:
    """A method of a program. ``meta`` has the record that ``qompose.report`` reads."""

    def __init__(
        self, name: str, interface: Interface, delegation: Delegation, loaded: _Loaded, nbytes: int
    ) -> None:
        self.name, self.interface, self.delegation = name, interface, delegation
        self.nbytes = nbytes
        self.meta: dict[str, Any] = {}
        self._loaded = loaded

    def __deepcopy__(self, memo: dict[int, Any]) -> ExecutorchMethod:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(f"method {self.name!r} cannot be pickled on its own; pickle the program")

    def load(self) -> None:
        """Load the method into the runtime of this process; done by the first ``run`` otherwise.

        Raises ``ExecutorchTargetError`` if the runtime rejects it: an operator without a kernel, or a
        tensor that XNNPACK cannot define.
        """
        with self._loaded.lock:
            self._ready()

    def _ready(self) -> Any:
        try:
            method, new = self._loaded.method(self.name)
            if new and self.interface.largest_first:
                method.execute(self.interface.largest())
        except RuntimeError as error:
            self._loaded.forget(self.name)
            raise loading_error(error, self.delegation.in_float) from error
        return method

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the method on the runtime; it takes and returns what the exported module does.

        Inputs in another memory format are copied to a contiguous one first. Threads wait for each other.

        Raises:
            ExecutorchInputError: an input is missing, or has a type or size that the method does not take.
            ExecutorchTargetError: the runtime rejects the method or the inputs.
        """
        flat = self.interface.flat(args, kwargs, self.name)
        with self._loaded.lock:
            method = self._ready()
            try:
                outputs = method.execute(flat)
            except RuntimeError as error:
                shapes = [tuple(x.shape) if isinstance(x, torch.Tensor) else x for x in flat]
                raise ExecutorchTargetError(
                    f"{error} (inputs of {self.name!r}: {shapes})"
                ) from error
        return self.interface.call.result(outputs)

    __call__ = run

    def __repr__(self) -> str:
        takes = ", ".join(
            f"{argument.name}: {argument}" for argument in self.interface.call.arguments
        )
        return f"ExecutorchMethod({self.name!r}, inputs: {takes or 'none'})"


class ExecutorchProgram:
    """A program for the ExecuTorch runtime.

    ``buffer``: the ``.pte`` file as bytes; ``methods``: its methods by name. A program of one method,
    ``forward``, is run by itself, and has the method's ``delegation`` and record.

    A deep copy is the program itself where nothing in it changes. One whose methods write to buffers
    begins anew, as a pickle, which holds the file, does.
    """

    def __init__(self, buffer: bytes, parts: Parts) -> None:
        self.buffer = buffer
        keeps = any(interface.writes for interface, _ in parts.values())
        loaded = _Loaded(buffer, tuple(parts) if keeps else ())
        self.methods: Mapping[str, ExecutorchMethod] = MappingProxyType(
            {
                name: ExecutorchMethod(name, interface, delegation, loaded, len(buffer))
                for name, (interface, delegation) in parts.items()
            }
        )

    @classmethod
    def read(cls, path: str | Path) -> ExecutorchProgram:
        """Return the program of a ``.pte`` file that ``save`` wrote.

        The file knows how its methods are called and what became of their operators, so that the program
        is as before, except for the record that ``qompose.report`` reads. If arguments or results have
        classes that are not registered with torch's pytree in this process, they are flat lists.

        Raises:
            ExecutorchTargetError: the file is not such a program.
            OSError: it cannot be read.
        """
        buffer = Path(path).read_bytes()
        with quiet():
            runtime = import_runtime()
            try:
                method = runtime.load_program(buffer).load_method(INTERFACE)
                (text,) = method.execute([])
                parts = unpacked(text)
            except (RuntimeError, KeyError, TypeError, ValueError, zlib.error) as error:
                raise ExecutorchTargetError(
                    f"{path} is damaged or was not saved by qompose: {error}"
                ) from error
        return cls(buffer, parts)

    def __deepcopy__(self, memo: dict[int, Any]) -> ExecutorchProgram:
        if not any(method.interface.writes for method in self.methods.values()):
            return self
        function, arguments = self.__reduce__()
        copied: ExecutorchProgram = function(*arguments)
        return copied

    def __reduce__(self) -> Any:
        # Trees are pickled by way of a class that torch 2.13 has deprecated: they go as text.
        parts = {name: (m.interface, m.delegation) for name, m in self.methods.items()}
        return _restored, (self.buffer, packed(parts), {n: m.meta for n, m in self.methods.items()})

    @property
    def nbytes(self) -> int:
        """Size of the ``.pte`` file in bytes."""
        return len(self.buffer)

    @property
    def meta(self) -> dict[str, Any]:
        """What ``qompose.report`` reads of a program of one method; empty if there are several."""
        return self.methods[FORWARD].meta if set(self.methods) == {FORWARD} else {}

    @meta.setter
    def meta(self, value: dict[str, Any]) -> None:
        self._only().meta = value

    @property
    def delegation(self) -> Delegation:
        """What became of the operators of the one method."""
        return self._only().delegation

    def _only(self) -> ExecutorchMethod:
        if set(self.methods) != {FORWARD}:
            raise ExecutorchTargetError(
                f"this program has named methods ({', '.join(self.methods)}); use one of "
                f"them, for example program.methods[{next(iter(self.methods))!r}]"
            )
        return self.methods[FORWARD]

    def save(self, path: str | Path) -> Path:
        """Write the program as a ``.pte`` file and return its path: the whole file, or nothing.

        Raises:
            OSError: it cannot be written there.
            UserError: there is something else than a file, such as a folder.
        """
        path = Path(path)
        with draft_of(path) as draft:
            draft.write_bytes(self.buffer)
        return path

    def load(self) -> None:
        """Load all methods into the runtime of this process; the first ``run`` of each does otherwise.

        Raises:
            ExecutorchTargetError: the runtime rejects one.
        """
        for method in self.methods.values():
            method.load()

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the one method on the runtime; it takes and returns what the exported module does.

        Tensors have the shapes of the export; where a dimension may vary, up to its bound.

        Raises:
            ExecutorchTargetError: the runtime rejects the inputs, or there are several methods.
            TypeError: an input is missing, or has a type or size that the method does not take.
        """
        return self._only().run(*args, **kwargs)

    __call__ = run

    def __repr__(self) -> str:
        return f"ExecutorchProgram ({self.nbytes:,} bytes, methods: {', '.join(self.methods)})"

    def __str__(self) -> str:
        lines = [f"{self!r}", *(f"{name}: {m.delegation}" for name, m in self.methods.items())]
        return "\n".join(lines)


def packed(parts: Parts) -> str:
    """Return the interfaces and delegations of a program as text that a file can hold."""
    facts = {name: [i.to_dict(), d.to_dict()] for name, (i, d) in parts.items()}
    return base64.b64encode(zlib.compress(json.dumps(facts).encode(), 9)).decode()


def unpacked(text: str) -> Parts:
    """Return what `packed` turned into text."""
    facts = json.loads(zlib.decompress(base64.b64decode(text)))
    return {n: (Interface.from_dict(i), Delegation.from_dict(d)) for n, (i, d) in facts.items()}


def method_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return names of methods. Raises ``ExecutorchTargetError`` for the one that the file itself uses."""
    found = tuple(names)
    if INTERFACE in found:
        raise ExecutorchTargetError(f"a method cannot be named {INTERFACE!r}, which is reserved")
    return found


def _restored(buffer: bytes, text: str, meta: Mapping[str, Any]) -> ExecutorchProgram:
    program = ExecutorchProgram(buffer, unpacked(text))
    for name, method in program.methods.items():
        method.meta = meta[name]
    return program
