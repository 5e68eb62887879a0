# SPDX-License-Identifier: Apache-2.0
"""The runtimes that run a file in this process: ONNX Runtime and OpenVINO."""

from __future__ import annotations

import functools
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from qompose_onnx.errors import ONNXRefusalError, ONNXTargetError
from qompose_onnx.names import ONNXRUNTIME, OPENVINO

EXACT_PRODUCTS: Final = ("session.qdq_matmulnbits_accuracy_level", "1")
"""Weights alone are quantized: ONNX Runtime's default would quantize what they multiply, too."""


class Session(ABC):
    """A file in a runtime, on processors.

    Attributes:
        runtime: its name, for messages.
        package: that has it.
        inputs: the names of what the file reads.

    Args:
        path: of the file.
        options: of a runtime.

    Raises:
        ONNXTargetError: the runtime is broken, or refuses the file (`ONNXRefusalError`).
    """

    runtime: ClassVar[str]
    package: ClassVar[str]
    inputs: frozenset[str]

    def __init__(self, path: Path, **options: Any) -> None:
        package = _imported(self.package)
        try:
            self._load(package, str(path), **options)
        except Exception as error:  # errors of runtimes have no class in common
            message = (
                f"{self.runtime} {package.__version__} cannot load {path.name}: {_said(error)}. "
                "Upgrade the runtime if an operator or opset is unsupported, or lower the model "
                "for the target 'torch'"
            )
            raise ONNXRefusalError(message, self.runtime, str(error), _said(error)) from error

    @abstractmethod
    def _load(self, package: Any, path: str) -> None:
        """Load a file, or raise whatever the runtime raises."""

    def run(self, feeds: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs by their names.

        Raises:
            ONNXTargetError: the runtime refuses the inputs, such as those of another size.
        """
        known = {name: x for name, x in feeds.items() if name in self.inputs}
        try:
            return self._outputs({name: x.cpu().contiguous().numpy() for name, x in known.items()})
        except Exception as error:
            shapes = {name: tuple(x.shape) for name, x in feeds.items()}
            raise ONNXTargetError(
                f"{self.runtime} cannot run the program with input shapes {shapes}: {_said(error)}"
            ) from error

    @abstractmethod
    def _outputs(self, arrays: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the outputs by their names, or raise whatever the runtime raises."""


def missing(package: str) -> str | None:
    """Return why a runtime cannot be used here, and the remedy; None where it can."""
    if find_spec(package) is not None:
        return None
    return f'the package {package} is not installed; run pip install "qompose-onnx[{package}]"'


def _imported(package: str) -> Any:
    try:
        return import_module(package)
    except Exception as error:  # such as an OSError of a library that is missing
        raise ONNXTargetError(
            f"the package {package} is installed but broken: {_said(error)}. Reinstall it; "
            "files can still be written without it"
        ) from error


class OnnxRuntimeSession(Session):
    """A file in ONNX Runtime; `optimized` is where to write the graph that it executes, None: nowhere."""

    runtime, package = "ONNX Runtime", ONNXRUNTIME

    def _load(self, package: Any, path: str, optimized: Path | None = None) -> None:
        options = package.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 4
        options.add_session_config_entry(*EXACT_PRODUCTS)
        if optimized is not None:
            options.optimized_model_filepath = str(optimized)
        providers = ["CPUExecutionProvider"]
        self._session = package.InferenceSession(path, options, providers=providers)
        self.inputs = frozenset(value.name for value in self._session.get_inputs())

    def _outputs(self, arrays: Mapping[str, Any]) -> dict[str, Tensor]:
        names = [value.name for value in self._session.get_outputs()]
        results = self._session.run(names, dict(arrays))
        return {name: torch.from_numpy(y) for name, y in zip(names, results, strict=True)}


class OpenVinoSession(Session):
    """A file in OpenVINO."""

    runtime, package = "OpenVINO", OPENVINO

    def _load(self, package: Any, path: str) -> None:
        core = package.Core()
        options = {
            "INFERENCE_PRECISION_HINT": "f32",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",  # what weights alone multiply stays in float
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        }
        self.compiled: Any = core.compile_model(core.read_model(path), "CPU", options)
        self._request = self.compiled.create_infer_request()
        self.inputs = frozenset(name for x in self.compiled.inputs for name in x.get_names())

    def _outputs(self, arrays: Mapping[str, Any]) -> dict[str, Tensor]:
        results = self._request.infer(dict(arrays))
        return {
            name: torch.from_numpy(results[value].copy())
            for value in self.compiled.outputs
            for name in value.get_names()
        }


SESSIONS: Final[Mapping[str, type[Session]]] = MappingProxyType(
    {session.package: session for session in (OnnxRuntimeSession, OpenVinoSession)}
)
"""By the name of a package."""


def sums_are_exact_here() -> bool:
    """Return `sums_are_exact` of the first runtime that is installed, since it is the processor that counts.

    It is true without any.
    """
    installed = [name for name in SESSIONS if missing(name) is None]
    return all(map(sums_are_exact, installed[:1]))


@functools.cache
def sums_are_exact(runtime: str) -> bool:
    """Return whether a runtime adds products of 255 and 127 exactly on this processor, by one linear.

    Of a runtime that is broken nothing is said here: lowering for it says what is wrong.
    """
    import onnx
    import onnx.parser

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "linear.onnx"
        onnx.save(onnx.parser.parse_model(_linear()), path)
        try:
            found = SESSIONS[runtime](path).run({"x": torch.ones(1, _DEPTH)})["y"]
        except ONNXTargetError:
            return True
    return bool((found - _DEPTH).abs().max() < 0.5)


_DEPTH, _WIDTH = 64, 16


def _linear() -> str:
    """Return a model of one linear, whose weights are as large as integers of eight bits can be, as text."""
    weights = ", ".join(["127"] * _DEPTH * _WIDTH)
    return f"""<ir_version: 8, opset_import: ["" : 13]>
linear (float[1, {_DEPTH}] x) => (float[1, {_WIDTH}] y) <
    float x_scale = {{{1 / 255}}}, uint8 x_zero = {{0}}, float w_scale = {{{1 / 127}}}, int8 w_zero = {{0}},
    int8[{_DEPTH}, {_WIDTH}] w = {{{weights}}}
> {{
    x_q = QuantizeLinear(x, x_scale, x_zero)
    x_dq = DequantizeLinear(x_q, x_scale, x_zero)
    w_dq = DequantizeLinear(w, w_scale, w_zero)
    y = MatMul(x_dq, w_dq)
}}"""


def _said(error: Exception) -> str:
    """Return what a runtime says, without the places in its own sources."""
    lines = (line.strip() for line in str(error).splitlines())
    said = " ".join(line for line in lines if line and not line.startswith("Exception from src"))
    return (said or repr(error))[:400]
