# SPDX-License-Identifier: Apache-2.0
"""The peers of `zoo.py`: torchao's engine with its quantizer for x86, and with ExecuTorch's for XNNPACK."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

Batches = list[tuple[Any, ...]]
Stage = Callable[[str], AbstractContextManager[None]]
Runs = Callable[..., Any]

XNNPACK, X86 = "torchao + ExecuTorch XNNPACK", "torchao x86"
FLOAT = "ExecuTorch XNNPACK, float"


def _converted(
    module: nn.Module, batches: Batches, quantizer: Any, stage: Stage, strict: bool
) -> Any:
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    with stage("export"):
        exported = torch.export.export(module, batches[0], strict=strict).module()
    with stage("prepare"):
        prepared = prepare_pt2e(exported, quantizer)
    with stage("calibrate"), torch.no_grad():
        for batch in batches:
            prepared(*batch)
    with stage("convert"):
        return convert_pt2e(prepared)


def xnnpack_converted(module: nn.Module, batches: Batches, stage: Stage) -> Any:
    """The Q/DQ model of ExecuTorch's stock quantizer, per channel."""
    from executorch.backends.xnnpack.quantizer import xnnpack_quantizer as stock

    config = stock.get_symmetric_quantization_config(is_per_channel=True)
    quantizer = stock.XNNPACKQuantizer().set_global(config)
    return _converted(module, batches, quantizer, stage, strict=False)


def xnnpack(module: nn.Module, batches: Batches, stage: Stage) -> Runs:
    """The stock flow of ExecuTorch's documentation; the program takes and gives flat tensors."""
    converted = xnnpack_converted(module, batches, stage)
    with stage("lower"):
        return _on_executorch(torch.export.export(converted, batches[0]))


def floating(module: nn.Module, batches: Batches, stage: Stage) -> Runs:
    """The float model on the same runtime: what it cannot run, no quantizer brings there."""
    with stage("export"):
        exported = torch.export.export(module, batches[0])
    with stage("lower"), torch.no_grad():
        return _on_executorch(exported)


def _on_executorch(exported: Any) -> Runs:
    import executorch.kernels.quantized  # noqa: F401  # what is quantized and not delegated runs too
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower
    from executorch.runtime import Runtime

    edge = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()])
    buffer = bytes(edge.to_executorch().buffer)
    program = Runtime.get().load_program(buffer)
    method = program.load_method("forward")
    # A method points into its program, and that into the buffer, without owning them.
    return lambda *inputs: (buffer, program, method.execute(pytree.tree_leaves(inputs)))[-1]


def x86_converted(module: nn.Module, batches: Batches, stage: Stage) -> Any:
    """The Q/DQ model of torchao's stock quantizer; with a default export it raises on ResNets."""
    import torchao.quantization.pt2e.quantizer.x86_inductor_quantizer as stock

    config = stock.get_default_x86_inductor_quantization_config()
    quantizer = stock.X86InductorQuantizer().set_global(config)
    return _converted(module, batches, quantizer, stage, strict=True)


def x86(module: nn.Module, batches: Batches, stage: Stage) -> Runs:
    """The stock flow of PyTorch's tutorial: strict export, Inductor with frozen weights."""
    from torchao.quantization.pt2e.inductor_passes import x86 as passes

    converted = x86_converted(module, batches, stage)
    with stage("lower"), torch.no_grad():
        passes._register_quantization_weight_pack_pass()
        torch._inductor.config.freezing = True
        compiled = torch.compile(converted)
        compiled(*batches[0])
    return compiled


PEERS: dict[str, Callable[[nn.Module, Batches, Stage], Runs]] = {
    XNNPACK: xnnpack,
    X86: x86,
    FLOAT: floating,
}
