# SPDX-License-Identifier: Apache-2.0
"""Speed of the `onnx` backend's files and those of onnxruntime.quantization and NNCF, in both runtimes.

Each engine is a file and the runtime that reads it. Files are made once and kept. SQNR is against the float
model, on the timed input, which no engine was calibrated on.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from comparing import Comparison
from observers import sqnr
from side_by_side import Call, Row
from x86_engines import onnx_file, openvino_model
from x86_workloads import ROOT, WORKLOADS, Workload

OURS, THEIRS = "ours, ONNX Runtime", "onnxruntime.quantization"
OURS_OPENVINO, NNCF = "ours, OpenVINO", "NNCF, OpenVINO"
COMPARED = (THEIRS, NNCF)


def _ours(work: Workload, path: Path, target: str = "onnx", *, attention: bool = False) -> None:
    import qompose
    from qompose_onnx import ONNXQuantizer, get_onnx_quantization_config

    config = get_onnx_quantization_config(attention=attention)
    result = qompose.quantize(
        work.module, work.inputs, backends=ONNXQuantizer().set_global(config),
        calibration=work.calibration, target=target, progress=False,
    )  # fmt: skip
    result.model.save(path)


def _nncf(work: Workload, path: Path) -> None:
    import openvino

    transformer = work.inputs[0].dtype == torch.int64
    openvino.save_model(openvino_model(work, transformer), path, compress_to_fp16=False)


def _in_onnxruntime(path: Path, inputs: Sequence[torch.Tensor], threads: int) -> Call:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    feed = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
    return lambda: session.run(None, feed)[0]


def _in_openvino(path: Path, inputs: Sequence[torch.Tensor], threads: int) -> Call:
    import openvino

    hints = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}  # fmt: skip  # noqa: E501
    core = openvino.Core()
    request = core.compile_model(core.read_model(path), "CPU", hints).create_infer_request()
    feeds = [x.numpy() for x in inputs]
    return lambda: request.infer(feeds)[0]


Make = Callable[[Workload, Path], None]
Run = Callable[[Path, Sequence[torch.Tensor], int], Call]
ENGINES: dict[str, tuple[str, Make, Run]] = {
    OURS: ("ours.onnx", _ours, _in_onnxruntime),
    THEIRS: ("onnxruntime.onnx", onnx_file, _in_onnxruntime),
    OURS_OPENVINO: (
        "ours_openvino.onnx",
        partial(_ours, target="openvino", attention=True),
        _in_openvino,
    ),
    NNCF: ("nncf.xml", _nncf, _in_openvino),
}
"""By name, the file of an engine, what makes it, and what runs it."""


def prepared(engine: str, model: str, folder: Path) -> tuple[Path, list[torch.Tensor], np.ndarray]:
    """The file of an engine, made where there is none yet, with the inputs and what float gives for them."""
    name, make, _ = ENGINES[engine]
    place = folder / model
    place.mkdir(parents=True, exist_ok=True)
    path, data = place / name, place / "inputs.pt"
    if not path.exists() or not data.exists():
        work = WORKLOADS[model]()
        with torch.no_grad():
            make(work, path)
            draft = place / f"inputs.{os.getpid()}"  # two engines may be set up at a time
            torch.save([[*work.inputs], work.module(*work.inputs)], draft)
            draft.replace(data)
    inputs, expected = torch.load(data)
    return path, inputs, expected


def work(engine: str, model: str, options: argparse.Namespace) -> tuple[Call, dict[str, Any]]:
    """Make what an engine runs."""
    torch.set_num_threads(options.threads)
    path, inputs, expected = prepared(engine, model, options.files)
    call = ENGINES[engine][2](path, inputs, options.threads)
    return call, {"sqnr": sqnr([expected], [torch.from_numpy(np.array(call()))])}


def cells(row: Row, rows: Sequence[Row]) -> list[str]:
    """The times, those as a part of the other file's in the same runtime, and decibels."""
    other = {OURS: THEIRS, OURS_OPENVINO: NNCF}.get(row.engine)
    part = row.ratio(row.siblings(rows).get(other)) if other else None
    shown = "" if part is None else f"{part:.3f}"
    return [*row.times(), shown, f"{row.found['sqnr']:.2f}"]


COMPARISON = Comparison(
    models=[*WORKLOADS],
    engines=[*ENGINES],
    columns=("ms", "p10", "p90", "of theirs", "SQNR, dB"),
    compared=COMPARED,
    packages=("torch", "onnx", "onnxruntime", "openvino", "nncf", "qompose"),
    threads=2,
    work=work,
    cells=cells,
)


def main() -> None:
    """Make the files alone, or measure too."""
    parser = COMPARISON.parser(__doc__)
    parser.add_argument("--files", type=Path, default=ROOT / "build" / "onnx_inference", metavar="FOLDER",
        help="folder for files, which are made once (default: build/onnx_inference)")  # fmt: skip
    parser.add_argument("--prepare", action="store_true", help="only make the files")
    options = parser.parse_args()
    if not options.prepare:
        COMPARISON.run(options)
        return
    for model in options.models:
        for engine in options.engines:
            path, *_ = prepared(engine, model, options.files)
            print(f"{path}: {path.stat().st_size:,} bytes", flush=True)


if __name__ == "__main__":
    main()
