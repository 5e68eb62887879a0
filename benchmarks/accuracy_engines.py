# SPDX-License-Identifier: Apache-2.0
"""The engines of `accuracy.py`: a float network and batches in, a callable out. None is set up for a task."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import qompose
import torch
import zoo_peers
from accuracy_tasks.subject import Inputs, Subject
from qompose.quantizer.composition import quantizer_of
from qompose.reporting.report_data import FLOAT_KERNEL, KERNEL
from torch.fx import GraphModule
from x86_engines import named, onnx_session, openvino_request
from x86_workloads import Workload
from zoo_run import Stages

FLOAT = "float"
SIMULATED, LOWERED = "simulated", "lowered"
ISA = "vnni"
"""The processor that Q/DQ models for x86 are for, whatever this one is: others' weights have eight bits."""
X86, XNNPACK, EMBEDDING, ONNX = "x86_inductor", "xnnpack", "embedding", "onnx"
ONNXRUNTIME, OPENVINO = "onnxruntime", "openvino"
Batches = list[Inputs]


@dataclass
class Made:
    """What an engine made of a network, and facts of it for the table."""

    run: Callable[..., Any]
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Engine:
    """A way to make int8 of a network.

    Attributes:
        make: what it does with a task and batches; `lowered` asks for kernels instead of a Q/DQ model.
        tables: it only differs from others where there are embedding tables.
        judged: of "simulated" and "lowered" models, those that it has.
    """

    make: Callable[[Subject, Batches, Stages, bool], Made]
    tables: bool = False
    judged: tuple[str, ...] = (SIMULATED, LOWERED)


def _float(subject: Subject, batches: Batches, stage: Stages, lowered: bool) -> Made:
    return Made(subject.module)


def _ours(
    members: Sequence[str],
    words: dict[str, Any],
    like: Callable[..., Any] | None = None,
    target: str = "torch",
) -> Engine:
    """Backends in order of priority; the words go to the one that has them.

    `like` makes another's Q/DQ model: kinds of operators that this leaves in float stay so here.
    """

    def make(subject: Subject, batches: Batches, stage: Stages, lowered: bool) -> Made:
        with stage("export"), torch.no_grad():
            program = torch.export.export(subject.module, batches[0])
        told = words if lowered else {"isa": ISA, **words}
        quantizers = [_configured(name, told) for name in members]
        if like is not None:
            others = _quantized(like(subject.module, batches[:1], stage))
            _leave_out(
                quantizers, _quantized(_first_look(program, quantizers, batches[0])) - others
            )
        with stage("prepare"):
            prepared = qompose.prepare_pt2e(program, qompose.compose(*quantizers))
        with stage("calibrate"):
            qompose.calibrate(prepared, batches, progress=False)
        with stage("convert"):
            converted = qompose.convert_pt2e(prepared)
        with stage("lower"):
            kernels = qompose.lower(converted, target)
        return Made(kernels if lowered else converted, _facts(qompose.report(kernels)))

    return Engine(make, tables=EMBEDDING in members)


def _quantized(converted: GraphModule) -> set[Any]:
    """The kinds of operators that read integers, in a Q/DQ model."""
    return {
        node.target
        for node in converted.graph.nodes
        if node.op == "call_function"
        and getattr(node.target, "namespace", "") == "aten"
        and any("dequantize" in str(source.target) for source in node.all_input_nodes)
    }


def _first_look(program: Any, quantizers: list[qompose.Quantizer], batch: Inputs) -> GraphModule:
    prepared = qompose.prepare_pt2e(program, qompose.compose(*quantizers))
    prepared(*batch)
    return qompose.convert_pt2e(prepared)


def _leave_out(quantizers: Iterable[qompose.Quantizer], kinds: set[Any]) -> None:
    for quantizer in quantizers:
        for kind in kinds if isinstance(quantizer, qompose.RuleQuantizer) else ():
            quantizer.set_operator_type(kind, None)


def _configured(name: str, words: dict[str, Any]) -> qompose.Quantizer:
    """A backend in its static configuration, per channel, with words if there are any."""
    if name == X86:
        import qompose_x86_inductor as x86

        config = x86.get_default_x86_inductor_quantization_config(**words)
        return x86.X86InductorQuantizer().set_global(config)
    if name == XNNPACK:
        import qompose_xnnpack as xnnpack

        words = {key: value for key, value in words.items() if key != "isa"}
        config = xnnpack.get_symmetric_quantization_config(is_per_channel=True, **words)
        return xnnpack.XNNPACKQuantizer().set_global(config)
    if name == ONNX:
        import qompose_onnx as onnx

        words = {key: value for key, value in words.items() if key != "isa"}
        return onnx.ONNXQuantizer().set_global(onnx.get_onnx_quantization_config(**words))
    return quantizer_of(name)


def _facts(report: qompose.Report) -> dict[str, Any]:
    """The part of multiply-accumulates on integers, this processor having exact kernels or not."""
    macs = sum(row.macs for row in report.rows)
    share = report.coverage(KERNEL) + report.coverage(FLOAT_KERNEL) if macs else None
    return {"int8": share, "rewrites": [*report.rewrites]}


def _torchao(quantized: Callable[..., Any], kernels: Callable[..., Any]) -> Engine:
    def make(subject: Subject, batches: Batches, stage: Stages, lowered: bool) -> Made:
        return Made((kernels if lowered else quantized)(subject.module, batches, stage))

    return Engine(make)


def _nncf(subject: Subject, batches: Batches, stage: Stages, lowered: bool) -> Made:
    """A Q/DQ model of a torch.fx program; what it is lowered to is the engine `openvino`."""
    import nncf

    with stage("export"), torch.no_grad():
        program = torch.export.export(subject.module, batches[0]).module()
    data = nncf.Dataset(batches, lambda batch: batch if len(batch) > 1 else batch[0])
    words = {"model_type": nncf.ModelType.TRANSFORMER} if subject.transformer else {}
    with stage("calibrate"):
        return Made(nncf.quantize(program, data, subset_size=len(batches), **words))


def _openvino(subject: Subject, batches: Batches, stage: Stages, lowered: bool) -> Made:
    """The kernels of NNCF's models, there are no others."""
    work = Workload(subject.module, batches, batches[0])
    with stage("calibrate"):
        request = openvino_request(work, subject.transformer)
    return Made(lambda *inputs: _first(request.infer([x.numpy() for x in inputs]).values()))


def _nncf_weights(mode: str, group_size: int, **words: bool) -> Engine:
    """NNCF's compression of weights to four bits, run by OpenVINO in float32; tables stay in float."""

    def make(subject: Subject, batches: Batches, stage: Stages, lowered: bool) -> Made:
        import nncf
        import openvino

        shapes = [list(tensor.shape) for tensor in batches[0]]
        model = openvino.convert_model(subject.module, example_input=batches[0], input=shapes)
        arrays = [tuple(tensor.numpy() for tensor in inputs) for inputs in batches]
        data = nncf.Dataset([b[0] if len(b) == 1 else b for b in arrays])
        with stage("calibrate"):
            compressed = nncf.compress_weights(
                model,
                mode=nncf.CompressWeightsMode[mode],
                ratio=1.0,
                group_size=group_size,
                all_layers=True,
                ignored_scope=nncf.IgnoredScope(types=["Gather"]),
                **({"dataset": data, "subset_size": len(batches), **words} if words else {}),
            )
        hints = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
        request = openvino.Core().compile_model(compressed, "CPU", hints).create_infer_request()
        return Made(lambda *inputs: _first(request.infer([x.numpy() for x in inputs]).values()))

    return Engine(make, judged=(SIMULATED,))


def _llm_compressor(group_size: int, gptq: bool) -> Engine:
    """llm-compressor's weights of four bits, with zero points in groups; tables stay in float."""

    def make(subject: Subject, batches: Batches, stage: Stages, lowered: bool) -> Made:
        import llm_compressor_engine

        with stage("calibrate"):
            model = llm_compressor_engine.compressed(subject.module, batches, group_size, gptq=gptq)
        return Made(partial(llm_compressor_engine.run, model))

    return Engine(make, judged=(SIMULATED,))


def _onnxruntime(subject: Subject, batches: Batches, stage: Stages, lowered: bool) -> Made:
    with stage("calibrate"):
        session, names = onnx_session(Workload(subject.module, batches, batches[0]), lowered)
    return Made(lambda *inputs: _first(session.run(None, named(names, inputs))))


def _first(arrays: Iterable[Any]) -> torch.Tensor:
    return torch.from_numpy(next(iter(arrays)).copy())


_OURS = {
    "x86": (X86,),
    "embedding + x86": (EMBEDDING, X86),
    "xnnpack": (XNNPACK,),
    "embedding + xnnpack": (EMBEDDING, XNNPACK),
}

_SYMMETRIC, _ASYMMETRIC = "INT4_SYM", "INT4_ASYM"
_NNCF = {
    "int4 g32": (_SYMMETRIC, 32),
    "int4 g32 asymmetric": (_ASYMMETRIC, 32),
    "int4 g128": (_SYMMETRIC, 128),
    "int4 g128 asymmetric": (_ASYMMETRIC, 128),
    "int4": (_SYMMETRIC, -1),
}
_LLM_COMPRESSOR = {"int4 g32 asymmetric": 32, "int4 g128 asymmetric": 128, "int4": -1}
_WEIGHTS: dict[str, dict[str, Any]] = {
    "int4 g32": {"group_size": 32, "symmetric": True},
    "int4 g32 asymmetric": {"group_size": 32},
    "int4 g128": {"group_size": 128, "symmetric": True},
    "int4 g128 asymmetric": {"group_size": 128},
    "int4": {"weight_qmin": -8, "weight_qmax": 7},
}
"""Weights alone in four bits, in groups and per channel."""

ENGINES: dict[str, Engine] = {
    FLOAT: Engine(_float),
    **{name: _ours(members, {}) for name, members in _OURS.items()},
    "x86, as torchao": _ours((X86,), {}, zoo_peers.x86_converted),
    "xnnpack, as torchao": _ours((XNNPACK,), {}, zoo_peers.xnnpack_converted),
    "torchao x86": _torchao(zoo_peers.x86_converted, zoo_peers.x86),
    "torchao xnnpack": _torchao(zoo_peers.xnnpack_converted, zoo_peers.xnnpack),
    "nncf": Engine(_nncf, judged=(SIMULATED,)),
    "openvino": Engine(_openvino, judged=(LOWERED,)),
    "onnxruntime": Engine(_onnxruntime),
    **{f"onnx in {name}": _ours((ONNX,), {}, target=name) for name in (ONNXRUNTIME, OPENVINO)},
    **{
        f"weights {name}": _ours((X86,), {"weight_only": True, **w}) for name, w in _WEIGHTS.items()
    },
    **{
        f"nncf {name} {' '.join(words)}".strip(): _nncf_weights(*kind, **dict.fromkeys(words, True))
        for name, kind in _NNCF.items()
        for words in ((), ("scale_estimation",), ("awq", "scale_estimation"), ("gptq",))
    },
    **{
        f"llm-compressor {name}{' gptq' * gptq}": _llm_compressor(size, gptq)
        for name, size in _LLM_COMPRESSOR.items()
        for gptq in (False, True)
    },
}


def chosen(names: Sequence[str], words: Sequence[str], judged: str) -> dict[str, Engine]:
    """The named engines that have such models, each of ours followed by itself with each of the words."""
    found: dict[str, Engine] = {}
    for name in names:
        if judged not in ENGINES[name].judged:
            continue
        found[name] = ENGINES[name]
        if name in _OURS:
            found |= {f"{name} {word}": _ours(_OURS[name], _parsed(word)) for word in words}
        elif name.startswith("weights "):
            fixed = {"weight_only": True, **_WEIGHTS[name.removeprefix("weights ")]}
            found |= {f"{name} {word}": _ours((X86,), {**fixed, **_parsed(word)}) for word in words}
    return found


def _parsed(text: str) -> dict[str, Any]:
    """`range=minmax,algorithms=smooth_quant+bias_correction,balance=False` as arguments."""
    words: dict[str, Any] = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        known: dict[str, Any] = {"True": True, "False": False}
        words[key] = (
            (*filter(None, value.split("+")),) if key == "algorithms" else known.get(value, value)
        )
    return words
