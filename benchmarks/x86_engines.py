# SPDX-License-Identifier: Apache-2.0
"""The engines of `x86_inference.py`: float, ours, and every int8 engine that a PyTorch user has on x86."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from side_by_side import Call
from x86_workloads import Workload

EAGER, FLOAT, STOCK = "eager", "compiled float", "torchao"
OURS, PACKAGE, TUNED = "qompose", "qompose package", "qompose tuned package"
ATTENTION = "qompose attention"


def _eager(work: Workload) -> Call:
    return lambda: work.module(*work.inputs)


def _compiled_float(work: Workload) -> Call:
    with torch._inductor.config.patch(freezing=True):
        compiled = torch.compile(work.module)
        compiled(*work.inputs)
    return lambda: compiled(*work.inputs)


def _torchao_converted(work: Workload) -> Any:
    import torchao.quantization.pt2e.quantizer.x86_inductor_quantizer as x86
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    # With a default export its quantizer raises on ResNets.
    exported = torch.export.export(work.module, work.inputs, strict=True).module()
    config = x86.get_default_x86_inductor_quantization_config()
    prepared = prepare_pt2e(exported, x86.X86InductorQuantizer().set_global(config))
    for inputs in work.calibration:
        prepared(*inputs)
    return convert_pt2e(prepared)


def _torchao(work: Workload) -> Call:
    from torchao.quantization.pt2e.inductor_passes import x86

    x86._register_quantization_weight_pack_pass()
    torch._inductor.config.freezing = True
    compiled = torch.compile(_torchao_converted(work))
    compiled(*work.inputs)
    return lambda: compiled(*work.inputs)


def _torchao_package(work: Workload) -> Call:
    from torchao.quantization.pt2e.lowering import lower_pt2e_quantized_to_x86

    torch._inductor.config.freezing = True
    lowered = lower_pt2e_quantized_to_x86(_torchao_converted(work), work.inputs)
    return lambda: lowered(*work.inputs)


def _qompose(work: Workload, mode: str, *, attention: bool = False, **options: Any) -> Call:
    import qompose
    from qompose_x86_inductor import (
        X86InductorQuantizer,
        get_default_x86_inductor_quantization_config,
    )

    config = get_default_x86_inductor_quantization_config(attention=attention)
    quantized = qompose.quantize(
        work.module,
        work.inputs,
        backends=X86InductorQuantizer().set_global(config),
        calibration=work.calibration,
        progress=False,
    )
    compiled = quantized.compile(mode, **options)
    return lambda: compiled(*work.inputs)


def onnx_session(work: Workload, optimized: bool = True) -> tuple[Any, list[str]]:
    """A session with the model that onnxruntime's static quantizer gives, and the names of its inputs.

    Args:
        optimized: run integer kernels, whose sums saturate without VNNI; else floats between Q and DQ.
    """
    import onnxruntime

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "q.onnx"
        onnx_file(work, file)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        if not optimized:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        providers = ["CPUExecutionProvider"]
        session = onnxruntime.InferenceSession(str(file), options, providers=providers)
    return session, [i.name for i in session.get_inputs()]


def onnx_file(work: Workload, path: Path) -> None:
    """Write the model that onnxruntime's static quantizer gives."""
    import onnxruntime
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    with tempfile.TemporaryDirectory() as folder:
        float_file, ready = (str(Path(folder) / name) for name in ("f.onnx", "p.onnx"))
        torch.onnx.export(
            work.module, work.inputs, float_file, dynamo=True, external_data=False, verbose=False
        )
        quant_pre_process(float_file, ready, skip_symbolic_shape=True)
        names = [i.name for i in onnxruntime.InferenceSession(float_file).get_inputs()]
        feeds = [named(names, inputs) for inputs in work.calibration]
        quantize_static(
            ready,
            str(path),
            _Reader(feeds),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )


def _onnxruntime(work: Workload) -> Call:
    session, names = onnx_session(work)
    feed = named(names, work.inputs)
    return lambda: session.run(None, feed)


class _Reader:
    """Calibration data as onnxruntime asks for it, one batch after the other."""

    def __init__(self, feeds: list[dict[str, Any]]) -> None:
        self._feeds = iter(feeds)

    def get_next(self) -> dict[str, Any] | None:
        return next(self._feeds, None)


def named(names: list[str], inputs: tuple[torch.Tensor, ...]) -> dict[str, Any]:
    """Inputs as onnxruntime takes them."""
    return {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)}


def openvino_request(work: Workload, transformer: bool) -> Any:
    """A request to the model that NNCF gives for OpenVINO."""
    import openvino

    threads = torch.get_num_threads()
    hints = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}  # fmt: skip  # noqa: E501
    quantized = openvino_model(work, transformer)
    return openvino.Core().compile_model(quantized, "CPU", hints).create_infer_request()


def openvino_model(work: Workload, transformer: bool) -> Any:
    """The model that NNCF gives for OpenVINO."""
    import nncf
    import openvino

    shapes = [list(tensor.shape) for tensor in work.inputs]
    model = openvino.convert_model(work.module, example_input=work.inputs, input=shapes)
    batches = [tuple(tensor.numpy() for tensor in inputs) for inputs in work.calibration]
    data = nncf.Dataset([b[0] if len(b) == 1 else b for b in batches])
    return nncf.quantize(
        model,
        data,
        subset_size=len(batches),
        **({"model_type": nncf.ModelType.TRANSFORMER} if transformer else {}),
    )


def _openvino(work: Workload) -> Call:
    request = openvino_request(work, transformer=work.inputs[0].dtype == torch.int64)
    feeds = [tensor.numpy() for tensor in work.inputs]
    return lambda: request.infer(feeds)


def _executorch(work: Workload) -> Call:
    import executorch.kernels.quantized  # noqa: F401
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.backends.xnnpack.quantizer import xnnpack_quantizer as xnnpack
    from executorch.exir import to_edge_transform_and_lower
    from executorch.extension.pybindings import portable_lib
    from executorch.runtime import Runtime
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    config = xnnpack.get_symmetric_quantization_config(is_per_channel=True)
    exported = torch.export.export(work.module, work.inputs).module()
    prepared = prepare_pt2e(exported, xnnpack.XNNPACKQuantizer().set_global(config))
    for inputs in work.calibration:
        prepared(*inputs)
    again = torch.export.export(convert_pt2e(prepared), work.inputs)
    edge = to_edge_transform_and_lower(again, partitioner=[XnnpackPartitioner()])
    portable_lib._unsafe_reset_threadpool(torch.get_num_threads())
    program = Runtime.get().load_program(bytes(edge.to_executorch().buffer))
    method, inputs = program.load_method("forward"), list(work.inputs)
    return lambda: (program, method.execute(inputs))


ENGINES: dict[str, Callable[[Workload], Call]] = {
    EAGER: _eager,
    FLOAT: _compiled_float,
    STOCK: _torchao,
    "torchao package": _torchao_package,
    "onnxruntime": _onnxruntime,
    "openvino": _openvino,
    "executorch xnnpack": _executorch,
    OURS: lambda work: _qompose(work, "default"),
    ATTENTION: lambda work: _qompose(work, "default", attention=True),
    PACKAGE: lambda work: _qompose(work, "package"),
    TUNED: lambda work: _qompose(work, "package", options={"max_autotune": True}),
}
