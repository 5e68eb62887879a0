# SPDX-License-Identifier: Apache-2.0
"""From a graph with quantize and dequantize operators to an ONNX model, by torch's own exporter."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import onnx_ir as ir
import torch
from onnx_ir.passes.common import DeduplicateInitializersPass, RemoveUnusedNodesPass
from onnxscript.optimizer import fold_constants
from qompose.backend import CallSignature
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from qompose_onnx import (
    averages,
    bounds,
    branches,
    masks,
    matrices,
    nested_names,
    sizes,
    zero_points,
)
from qompose_onnx.errors import ONNXTargetError
from qompose_onnx.places import bare, calls_of, place_of
from qompose_onnx.refusals import why_not_exported
from qompose_onnx.shifts import SHIFTS, by_numbers
from qompose_onnx.translations import TRANSLATIONS

quantized = torch.ops.quantized_decomposed

OPSET: Final = 20
"""With 21, ONNX Runtime 1.32 refuses some int8 around reshapes in float, of which it names the type twice."""
OF_BLOCKS: Final = 21
"""The first with weights of four bits, with scales for blocks, and with integers of 16 bits."""
FOLDED: Final = 8192
"""Numbers of constants that torch's exporter folds for each reader anew; larger ones it shares."""
SIXTEEN: Final = (torch.uint16, torch.int16)
OWN: Final = ("quantized_decomposed", "qompose")
"""The namespaces of operators that torch's exporter knows by `TRANSLATIONS` alone."""
BIT_SHIFTS: Final = (
    *("__lshift__", "__ilshift__", "bitwise_left_shift", "bitwise_left_shift_"),
    *("__rshift__", "__irshift__", "bitwise_right_shift", "bitwise_right_shift_"),
)


def export(module: GraphModule, signature: CallSignature) -> tuple[ir.Model, ExportedProgram]:
    """Return the ONNX model of a graph, and the program that it was made of.

    Nodes of the model name the nodes of the program that they come from.

    Raises:
        ONNXTargetError: ONNX lacks an operator of the graph, or it cannot be exported.
    """
    with _quiet():
        program = torch.export.export(
            module, signature.args, dict(signature.kwargs), dynamic_shapes=signature.dynamic_shapes
        )
        by_numbers(calls_of(program))
        bounds.of_one_type(calls_of(program))
        _check_operators(program)
        constants = _without_constants(program)
        try:
            made = torch.onnx.export(
                program,
                dynamo=True,
                verbose=False,
                opset_version=_opset(program),
                custom_translation_table={**TRANSLATIONS, **SHIFTS},
            )
        except Exception as error:  # passes of onnxscript have errors of their own
            raise ONNXTargetError(why_not_exported(error, program)) from error
        # It is returned, since it goes to no file.
        assert made is not None and made.exported_program is not None
        _check_writes(made.exported_program)
        for place, value in constants.items():
            made.exported_program.graph_signature.output_specs[place].arg.value = value
        fold_constants(made.model, output_size_limit=sys.maxsize, should_fold=_is_of_layout)
        DeduplicateInitializersPass(FOLDED)(made.model)  # of weights with several readers
        sizes.settle(made.model)
        masks.settle(made.model)
        averages.settle(made.model)
        matrices.settle(made.model)
        RemoveUnusedNodesPass()(made.model)  # what computed sizes and masks that are gone
        branches.settle(made.model)
        zero_points.settle(made.model)
        nested_names.settle(made.model, made.exported_program)
        _name_outputs(made.model, made.exported_program)
    return made.model, made.exported_program


def _is_of_layout(node: ir.Node) -> bool | None:
    """Tell what constants go through whatever their size: zero points have 64 bits in torch, for example.

    A cast of many numbers to a wider type is left in the file, which it would make larger.
    """
    if node.op_type != "Cast":
        return node.op_type == "Transpose" or None
    given = node.inputs[0]
    assert given is not None and given.const_value is not None  # folding asks of constants alone
    wanted = ir.DataType(node.attributes["to"].as_int())
    return wanted.bitwidth <= given.const_value.dtype.bitwidth or None


def _name_outputs(model: ir.Model, program: ExportedProgram) -> None:
    """Name results that stand in a dict by their keys, `logits` or `past.0`; others keep a node's name."""
    spec: Any = program.call_spec.out_spec
    leaves = pytree.tree_leaves_with_path(pytree.tree_unflatten([*range(spec.num_leaves)], spec))
    kinds = [each.arg for each in program.graph_signature.output_specs]
    paths = [path for path, place in leaves if not isinstance(kinds[place], ConstantArgument)]
    taken = {value.name for value in _values(model)}
    for value, path in zip(model.graph.outputs, paths, strict=True):
        name = ".".join(str(getattr(step, "key", getattr(step, "idx", step))) for step in path)
        if path and isinstance(path[0], pytree.MappingKey) and name not in taken:
            value.name = name
            taken.add(name)


def _values(model: ir.Model) -> Iterator[ir.Value]:
    yield from (*model.graph.inputs, *model.graph.initializers.values())
    for node in model.graph.all_nodes():
        yield from node.outputs


def _without_constants(program: ExportedProgram) -> dict[int, Any]:
    """Let None stand for numbers and texts that a model returns, in place, and return them by their places.

    torch's exporter takes None alone.
    """
    output = program.graph.output_node()
    results: Any = output.args[0]
    found = {n: v for n, v in enumerate(results) if v is not None and not isinstance(v, Node)}
    output.args = (tuple(None if place in found else v for place, v in enumerate(results)),)
    for place in found:
        program.graph_signature.output_specs[place].arg = ConstantArgument(name="", value=None)
    return found


def _opset(program: ExportedProgram) -> int:
    """Return the version of ONNX's operators that a program needs."""
    grouped = quantized.dequantize_per_channel_group.default
    needed = any(
        node.target is grouped or not {*node.args}.isdisjoint(SIXTEEN)
        for node in calls_of(program)
        if getattr(node.target, "namespace", "") == "quantized_decomposed"
    )
    return OF_BLOCKS if needed else OPSET


def _check_operators(program: ExportedProgram) -> None:
    """Raise for quantization that QDQ cannot say, such as a scale per token, and for shifts by tensors."""
    for node in calls_of(program):
        target: Any = node.target
        if getattr(target, "namespace", "") in OWN and target not in TRANSLATIONS:
            raise ONNXTargetError(
                f"{place_of(node)} cannot be expressed in ONNX, which supports scales per tensor, "
                "per channel or per block of a weight, and at run time only per tensor of "
                "asymmetric uint8. Choose such a configuration, or None to keep it in float"
            )
        if node.target is quantized.choose_qparams.tensor and (node.args[1:3] != (0, 255)):
            raise ONNXTargetError(
                f"{place_of(node)}: DynamicQuantizeLinear computes uint8 in [0, 255], not "
                f"{list(node.args[1:3])}. Choose a dynamic configuration with full-range uint8"
            )
        if bare(str(target)) in BIT_SHIFTS and target not in SHIFTS:
            raise ONNXTargetError(
                f"{place_of(node)}: ONNX runtimes disagree on bit shifts by a tensor. Shift by a "
                "Python int (not in place), or multiply or divide by a power of two"
            )


def _check_writes(program: ExportedProgram) -> None:
    """Raise for buffers and inputs that are written to, which the file would leave as they are."""
    signature = program.graph_signature
    written = (*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values())
    if written:
        raise ONNXTargetError(
            f"the model writes to {', '.join(dict.fromkeys(written))}, but an ONNX model cannot "
            "modify its state or inputs. Make the model take these tensors as inputs and return "
            "their new values"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporter from writing about packages that are not installed, and from warning of itself."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
