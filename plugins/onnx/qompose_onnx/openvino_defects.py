# SPDX-License-Identifier: Apache-2.0
"""What OpenVINO would compute wrongly without a word, in a form that it computes rightly."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from qompose_onnx import padded_pools, pads, reductions, signed_activations


def settle(model: ir.Model) -> bool:
    """Settle all that is known, in place, and tell whether there was any.

    Raises:
        ONNXTargetError: there is no such form for some of it.
    """
    settled = [part.settle(model) for part in (padded_pools, pads, reductions, signed_activations)]
    return any(settled)


def settle_file(path: Path) -> None:
    """Settle it in a file, in place; see `settle`."""
    model = ir.load(path)
    if settle(model):
        ir.save(model, path)
