# SPDX-License-Identifier: Apache-2.0
"""The engines of `xnnpack_runtime.py`: how each makes a program of a model, and what is in the program.

What a program consists of is read in the same way for every engine: from what XNNPACK is handed and from
the instructions of the file, not from what an engine says of itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from runtime_subjects import Subject
from torch import Tensor

Run = Callable[[tuple[Tensor, ...]], Tensor]


@dataclass
class Program:
    """What an engine made: how to run it, and what it consists of. Counts are by name of operator."""

    run: Run
    bytes: int
    delegates: int | None = None
    delegated_int8: Counter[str] = field(default_factory=Counter)
    delegated_float: Counter[str] = field(default_factory=Counter)
    portable: Counter[str] = field(default_factory=Counter)


def _float(subject: Subject) -> bytes:
    return _delegate(torch.export.export(subject.module, subject.held_out[0]))


def _stock(subject: Subject) -> bytes:
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    config = get_symmetric_quantization_config(is_per_channel=True)
    exported = torch.export.export(subject.module, subject.held_out[0]).module()
    prepared = prepare_pt2e(exported, XNNPACKQuantizer().set_global(config))
    for inputs in subject.calibration:
        prepared(*inputs)
    return _delegate(torch.export.export(convert_pt2e(prepared), subject.held_out[0]))


def _delegate(exported: torch.export.ExportedProgram) -> bytes:
    import executorch.kernels.quantized  # noqa: F401  # what is quantized and not delegated runs too
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    edge = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()])
    return bytes(edge.to_executorch().buffer)


def _qompose(subject: Subject) -> bytes:
    import qompose
    from qompose_xnnpack import XNNPACKQuantizer, get_symmetric_quantization_config

    quantized = qompose.quantize(
        subject.module,
        subject.held_out[0],
        backends=XNNPACKQuantizer().set_global(get_symmetric_quantization_config(True)),
        calibration=subject.calibration,
        target="executorch",
        progress=False,
    )
    return bytes(quantized.model.buffer)


EAGER, FLOAT, STOCK, OURS = "eager", "float", "stock", "qompose"
ON_RUNTIME: dict[str, Callable[[Subject], bytes]] = {
    FLOAT: _float,
    STOCK: _stock,
    OURS: _qompose,
}
ENGINES = (EAGER, *ON_RUNTIME)


def make(engine: str, subject: Subject, threads: int) -> Program:
    """The program of an engine, loaded."""
    if engine == EAGER:
        module = subject.module
        state = {t.data_ptr(): t.nbytes for t in module.state_dict().values()}
        return Program(lambda inputs: module(*inputs), sum(state.values()))
    with _recorded() as graphs:
        buffer = ON_RUNTIME[engine](subject)
    program = Program(_load(buffer, threads), len(buffer))
    delegates, program.portable = _instructions(buffer)
    program.delegates = len(delegates)
    for delegate in delegates:
        for name, is_float in _nodes(graphs[delegate]):
            (program.delegated_float if is_float else program.delegated_int8)[name] += 1
    return program


def take_threads(threads: int) -> None:
    """Give ExecuTorch's runtime so many threads: it has a pool of its own, for all processors at first."""
    from executorch.extension.pybindings import portable_lib

    portable_lib._unsafe_reset_threadpool(threads)
    if portable_lib._threadpool_get_thread_count() != threads:
        raise RuntimeError(f"the runtime's thread pool did not take {threads} threads")


def _load(buffer: bytes, threads: int) -> Run:
    import executorch.kernels.quantized  # noqa: F401
    from executorch.runtime import Runtime

    take_threads(threads)
    program = Runtime.get().load_program(buffer)
    program.load_method("forward")
    # Asked for anew, which is a look into a dictionary: a method points into its program without owning it.
    return lambda inputs: program.load_method("forward").execute(list(inputs))[0]


@contextmanager
def _recorded() -> Iterator[dict[bytes, Any]]:
    """The graphs that are serialized for XNNPACK meanwhile, kernel by kernel, by what they are written as."""
    from executorch.backends.xnnpack import xnnpack_preprocess

    graphs: dict[bytes, Any] = {}
    serialize = xnnpack_preprocess.serialize_xnnpack_binary

    def record(graph: Any, *rest: Any) -> Any:
        written = serialize(graph, *rest)
        graphs[bytes(written)] = graph
        return written

    xnnpack_preprocess.serialize_xnnpack_binary = record
    try:
        yield graphs
    finally:
        xnnpack_preprocess.serialize_xnnpack_binary = serialize


def _nodes(graph: Any) -> Iterator[tuple[str, bool]]:
    """Name each kernel of XNNPACK's, and tell whether it gives floats; conversions to and from int8 apart."""
    from executorch.backends.xnnpack.serialization.xnnpack_graph_schema import XNNDatatype

    values = (value.xvalue_union for value in graph.xvalues)
    tensors = [getattr(value, "tensor_value", value) for value in values]
    types = {tensor.id_out: tensor.datatype for tensor in tensors}
    for node in (node.xnode_union for node in graph.xnodes):
        name = type(node).__name__.removeprefix("XNN")
        if name != "Convert":
            yield name, types[node.output_id] == XNNDatatype.xnn_datatype_fp32


def _instructions(buffer: bytes) -> tuple[list[bytes], Counter[str]]:
    """What each call of a delegate in a program is handed, and how often it calls each kernel outside."""
    from executorch.exir._serialize._program import deserialize_pte_binary
    from executorch.exir.schema import DelegateCall, KernelCall

    program = deserialize_pte_binary(buffer).program
    plan = program.execution_plan[0]
    calls = [step.instr_args for chain in plan.chains for step in chain.instructions]
    handed = (plan.delegates[c.delegate_index] for c in calls if isinstance(c, DelegateCall))
    delegates = [bytes(program.backend_delegate_data[d.processed.index].data) for d in handed]
    kernels = (plan.operators[call.op_index].name for call in calls if isinstance(call, KernelCall))
    return delegates, Counter(kernels)


def decibels(program: Program, subject: Subject) -> float:
    """Signal to quantization noise over all held-out inputs, against the float model."""
    signal = noise = 0.0
    for inputs in subject.held_out:
        expected = _first(subject.module(*inputs)).double()
        signal += float(expected.square().sum())
        noise += float((program.run(inputs).double() - expected).square().sum())
    return 10 * float(torch.tensor(signal / noise).log10()) if noise else float("inf")


def _first(outputs: Any) -> Tensor:
    return outputs if isinstance(outputs, Tensor) else outputs[0]
