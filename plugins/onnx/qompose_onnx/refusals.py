# SPDX-License-Identifier: Apache-2.0
"""What a runtime's refusal of a file is about: an operator of the program, rather than a node of the file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from qompose_onnx.errors import ONNXRefusalError, ONNXTargetError
from qompose_onnx.export import REMEDY, calls_of, place_of


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
