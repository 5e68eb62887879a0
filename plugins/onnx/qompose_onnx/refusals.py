# SPDX-License-Identifier: Apache-2.0
"""What torch's exporter or a runtime refuses: an operator of the program, rather than what it calls it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from qompose_onnx.errors import ONNXRefusalError, ONNXTargetError
from qompose_onnx.places import bare, calls_of, named, place_of

REMEDY: Final = "Rewrite that part of the model with operators that ONNX supports"


def why_not_exported(error: Exception, program: ExportedProgram) -> str:
    """Return the message for what torch's exporter says: which operator is lacking, and where it is."""
    said = [str(cause) for cause in _causes(error)]
    for text in said:
        for name in re.findall(r"No ONNX function found for <OpOverload\(op='([^']+)'", text):
            # The exporter names what it decomposed a call to: prims.lgamma of aten.lgamma.
            places = [place_of(n) for n in calls_of(program) if bare(named(n)) == bare(name)]
            where = ", ".join(places[:4]) or name
            return f"ONNX has no operator for {where}. {REMEDY}"
    place = _failed_at(said, program)
    if place and any("No ONNX function found" in text for text in said):
        return f"ONNX has no operator for {place}. {REMEDY}"
    first = next(
        (line for text in reversed(said) for line in text.splitlines() if line.strip()), ""
    )
    where = f" at {place}" if place else ""
    return f"torch.onnx.export cannot export this graph{where}: {first.rstrip('. :')}. {REMEDY}"


def _failed_at(said: list[str], program: ExportedProgram) -> str:
    """Return where torch's exporter failed: a node that it was translating, or a line of the model's source.

    While it decomposes a graph it names nodes anew, but tells the line of the model that made one.
    """
    nodes = {node.name: node for node in calls_of(program)}
    for text in said:
        for name in re.findall(r"translating node %(\w+)", text):
            if name in nodes:
                return place_of(nodes[name])
        for file, line, code in re.findall(r'File "([^"]+)", line (\d+), in \w+\n +(.+)', text)[
            -1:
        ]:
            return f"{file}:{line} ({code.strip()})"
    return ""


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def placed(
    error: ONNXRefusalError, origins: Mapping[str, str], program: ExportedProgram
) -> ONNXTargetError:
    """Return the error that names the operator, and why where that is known; else the error itself.

    Args:
        origins: by the name of a node or value in the file, that of the program's node.
        program: that the file was made of.
    """
    words = re.findall(r"[\w.]+", error.said)
    name = next((origins[word] for word in words if word in origins), None)
    node = next((each for each in calls_of(program) if each.name == name), None)
    if node is None:
        return error
    if _is_in_bfloat16(node):
        why, remedy = "it computes in bfloat16", "Compute that part of the model in float32"
    else:
        found = re.search(r"Conversion is failed for: (.+)", error.said)
        why = f"it cannot convert {found[1].strip()}" if found else error.reason
        remedy = REMEDY
    return ONNXTargetError(
        f"{error.runtime} cannot run {place_of(node)}: {why}. {remedy}, or lower the model for "
        "another target"
    )


def _is_in_bfloat16(node: Node) -> bool:
    values: list[Any] = [each.meta.get("val") for each in (node, *node.all_input_nodes)]
    return any(isinstance(v, torch.Tensor) and v.dtype is torch.bfloat16 for v in values)
