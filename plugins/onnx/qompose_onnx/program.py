# SPDX-License-Identifier: Apache-2.0
"""A program of the targets for ONNX: a model that is written to a file, and runs in process."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from qompose.backend import CallInterface, draft_of
from qompose.errors import ConfigError

from qompose_onnx.errors import ONNXInputError, ONNXTargetError
from qompose_onnx.machine import objection
from qompose_onnx.names import OPENVINO
from qompose_onnx.runtimes import SESSIONS, Session, missing

if TYPE_CHECKING:
    import onnx_ir as ir

    from qompose_onnx.fused_graph import Executed

LARGEST: Final = 2**31 - 2**20
"""Bytes of constants that fit into one file, whose limit protobuf sets."""
INTERFACE: Final = "qompose.interface"
"""The file's metadata of how the program is called."""


class ONNXProgram:
    """A model in ONNX, called with tensors as the exported module is.

    Args:
        model: what is written. Its metadata has the interface.
        runtime: what a call runs it in, "onnxruntime" or "openvino"; "": whichever is installed.

    Attributes:
        meta: the record that `qompose.report` reads.

    Raises:
        ConfigError: there is no such runtime.
    """

    def __init__(self, model: ir.Model, runtime: str = "") -> None:
        self.model, self.runtime = model, _known(runtime)
        self.interface = CallInterface.from_dict(json.loads(model.metadata_props[INTERFACE]))
        self.meta: dict[str, Any] = {}
        self._session: Session | None = None
        self._executed: Executed | None = None
        self._is_called = False

    @classmethod
    def read(cls, path: str | PathLike[str], runtime: str = "") -> ONNXProgram:
        """Return the program of a file that `save` wrote, without the record that `qompose.report` reads.

        Raises:
            ConfigError: there is no such runtime.
            ONNXTargetError: the file is not such a program, or is damaged.
            OSError: it cannot be read.
        """
        _known(runtime)
        import onnx
        import onnx_ir as ir

        try:
            model = ir.load(path)
            onnx.checker.check_model(str(path))
            if INTERFACE not in model.metadata_props:
                raise ValueError(f"its metadata does not say how it is called ({INTERFACE})")
            program = cls(model, runtime)
            program._check_data()
            return program
        except OSError:
            raise
        except Exception as error:
            said = str(error).rstrip(".") or repr(error)
            raise ONNXTargetError(
                f"{path} is damaged or was not saved by qompose-onnx: {said}. "
                "Save it again, together with its external data file if it has one"
            ) from error

    def _check_data(self) -> None:
        """Raise for constants in another file that is cut short, which is read when they are needed."""
        import onnx_ir as ir

        for tensor in self._tensors():
            if isinstance(tensor, ir.ExternalTensor):
                size = Path(tensor.path).stat().st_size
                if size < (tensor.offset or 0) + (tensor.length or 0):
                    raise ValueError(f"{tensor.path} is cut short at {size:,} bytes")

    def __deepcopy__(self, memo: dict[int, Any]) -> ONNXProgram:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "an ONNXProgram cannot be pickled; use program.save(path) and ONNXProgram.read(path)"
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the constants."""
        held = {id(tensor): tensor for tensor in self._tensors()}
        return sum(tensor.nbytes for tensor in held.values())

    def _tensors(self) -> Iterator[ir.TensorProtocol]:
        for graph in (self.model.graph, *self.model.graph.subgraphs()):
            for value in graph.initializers.values():
                if value.const_value is not None:
                    yield value.const_value

    def save(self, path: str | PathLike[str]) -> Path:
        """Write the file and return its path: the whole file, or nothing.

        Constants of 2 GB and more are in a second file beside it, with ".data" behind its name.

        Raises:
            OSError: it cannot be written there.
            UserError: there is something else than a file, such as a folder.
        """
        path = Path(path)
        with draft_of(path) as draft:
            self._write(draft)
        return path

    def _write(self, path: Path) -> None:
        """Write the model, and its constants beside it where they do not fit into one file."""
        import onnx_ir as ir

        data = None if self.nbytes < LARGEST else f"{path.name}.data"
        ir.save(self.model, path, external_data=data)

    @contextmanager
    def written(self) -> Iterator[Path]:
        """Yield the path of a file that is gone afterwards."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            self._write(path)
            yield path

    def load(self) -> Session:
        """Load the program into its runtime; the first call does otherwise.

        Raises:
            ONNXTargetError: no runtime is installed, or it refuses the program.
        """
        if self._session is None:
            with self.written() as path:
                self._session = _loaded(path, self.runtime, self.model)
        return self._session

    def use(self, session: Session, executed: Executed) -> None:
        """Let calls run in a session that has this program and executes these operators."""
        self._session, self._executed = session, executed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program; it takes and returns what the exported module does, on processors.

        Raises:
            ONNXInputError: an input is missing, or has another type or rank.
            ONNXTargetError: no runtime is installed, or it refuses the program or the inputs.

        Warns:
            RequirementWarning: the first time, where sums may saturate on this processor.
        """
        known, flat = self.interface, self.interface.flat(args, kwargs, error=ONNXInputError)
        given = [
            torch.as_tensor(x)
            for argument, x in zip(known.arguments, flat, strict=True)
            if not argument.is_fixed
        ]
        session = self.load()
        self._warn(session)
        results = session.run(dict(zip(_names(self.model.graph.inputs), given, strict=True)))
        outputs = [results[name] for name in _names(self.model.graph.outputs)]
        left = [result for result in known.results if not result.is_fixed]
        return known.result(
            [x.item() if r.is_number else x for r, x in zip(left, outputs, strict=True)]
        )

    def _warn(self, session: Session) -> None:
        """Warn of wrong numbers, once: the file may be for another device or machine."""
        if not self._is_called:
            from qompose_onnx.saturation import warn_where_sums_saturate

            if not self._was_told_of():
                warn_where_sums_saturate(self.model, session, lambda: self._read_from(session))
            self._is_called = True

    def _was_told_of(self) -> bool:
        """Tell whether `qompose.lower` has warned of this processor, as it does for a runtime."""
        record = self.meta.get("qompose")
        asked = record.requirements.values() if record is not None and self.runtime else ()
        return any(map(objection, asked))

    def _read_from(self, session: Session) -> Executed:
        """Return what a runtime executes; of a program that was not lowered here, it is read now."""
        if self._executed is None:
            from qompose_onnx.fused_graph import READERS, origins_of

            with self.written() as path:
                _, self._executed = READERS[session.package](path, origins_of(self.model))
        return self._executed

    def __repr__(self) -> str:
        takes = ", ".join(a.name for a in self.interface.arguments if not a.is_fixed)
        return (
            f"ONNXProgram ({self.nbytes:,} bytes, opset {self.model.opset_imports['']}, inputs: "
            f"{takes})"
        )


def _known(runtime: str) -> str:
    """Return a runtime's name; raise ConfigError where there is none of that name."""
    if runtime and runtime not in SESSIONS:
        names = " or ".join(map(repr, SESSIONS))
        raise ConfigError(
            f"runtime must be {names}, or '' for whichever is installed, got {runtime!r}"
        )
    return runtime


def _names(values: Iterable[ir.Value]) -> list[str]:
    return [value.name or "" for value in values]


def _loaded(path: Path, runtime: str, model: ir.Model) -> Session:
    known = [runtime] if runtime else [*SESSIONS]
    for name in known:
        if missing(name) is None:
            if name == OPENVINO:
                return _in_openvino(path, model)
            return SESSIONS[name](path)
    raise ONNXTargetError(
        f"calling the program requires a runtime: {missing(known[0])}. It can be saved without one"
    )


def _in_openvino(path: Path, model: ir.Model) -> Session:
    """Load a file, which may have been written for others, without what OpenVINO computes wrongly."""
    from qompose_onnx.fused_graph import in_openvino, origins_of
    from qompose_onnx.openvino_defects import settle_file

    settle_file(path)
    session, _ = in_openvino(path, origins_of(model))
    return session
