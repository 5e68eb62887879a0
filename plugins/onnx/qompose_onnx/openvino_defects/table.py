# SPDX-License-Identifier: Apache-2.0
"""The table of OpenVINO's defects, what rewrites a model around them, and what refuses one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import onnx_ir as ir

from qompose_onnx.openvino_defects import (
    padded_pools,
    pads,
    reductions,
    signed_activations,
    sized_convolutions,
)

_TESTS: Final = "tests/onnx/openvino_defects"


@dataclass(frozen=True)
class Defect:
    """One thing that OpenVINO computes wrongly without a word.

    Attributes:
        name: of the module here that knows the way around it.
        wrong: what OpenVINO does.
        way_around: what it is given to read, or that it is refused.
        seen: the version of OpenVINO, the last in which it was seen.
        tests: the file, in the repository, that compares OpenVINO with the converted model. In that version
            they fail without the way around.
        settle: rewrites a model in place and tells whether it had to.
        check: raises an error at a node of the compiled graph that shows it, where nothing else does.
    """

    name: str
    wrong: str
    way_around: str
    seen: str
    tests: str
    settle: Callable[[ir.Model], bool] | None = None
    check: Callable[[Any, Mapping[str, str]], None] | None = None


DEFECTS: Final = (
    Defect(
        "padded_pools",
        "averages that count padding pad integers with 0 rather than their zero point",
        "a Pad before the average; refused where `ceil_mode` meets a dynamic size",
        "2026.4",
        f"{_TESTS}/test_padded_pools.py",
        padded_pools.settle,
    ),
    Defect(
        "pads",
        "padding of one dimension pads integers with 0, and moves their zero point behind",
        "a Pad of two dimensions, of which one is cut off again",
        "2026.4",
        f"{_TESTS}/test_pads.py",
        pads.settle,
    ),
    Defect(
        "reductions",
        "scales of channels move behind a reduction in the shape that they had before it",
        "reductions that keep their dimensions, and a Squeeze",
        "2026.4",
        f"{_TESTS}/test_reductions.py",
        reductions.settle,
    ),
    Defect(
        "signed_activations",
        "int8 that is concatenated is quantized before, to a few steps; without VNNI, convolutions of "
        "int8 are some hundredths off",
        "uint8, with integers and a zero point that are larger by 128",
        "2026.4",
        f"{_TESTS}/test_signed_activations.py",
        signed_activations.settle,
    ),
    Defect(
        "sized_convolutions",
        "a convolution of integers whose size is read at run time takes the bias of one channel for all",
        "refused",
        "2026.4",
        f"{_TESTS}/test_sized_convolutions.py",
        check=sized_convolutions.check,
    ),
)
"""In the order in which they are settled: a pool may get a Pad of one dimension."""


def settle(model: ir.Model) -> bool:
    """Settle all that is known, in place, and tell whether there was any.

    Raises:
        ONNXTargetError: there is no form that OpenVINO computes rightly for some of it.
    """
    settled = [each.settle(model) for each in DEFECTS if each.settle is not None]
    return any(settled)


def check(node: Any, origins: Mapping[str, str]) -> None:
    """Look for all that is known at a node of a graph that OpenVINO compiled.

    Args:
        origins: by the name of a node in the file, that of the program's node.

    Raises:
        ONNXTargetError: OpenVINO would compute wrong numbers.
    """
    for each in DEFECTS:
        if each.check is not None:
            each.check(node, origins)


def settle_file(path: Path) -> None:
    """Settle it in a file, in place; see `settle`."""
    model = ir.load(path)
    if settle(model):
        ir.save(model, path)
