# SPDX-License-Identifier: Apache-2.0
"""The targets: files, and the runtimes that load them."""

from __future__ import annotations

from typing import Final

from qompose.backend import CallSignature, Finished, Target
from torch.fx import GraphModule

from qompose_onnx.names import ONNXRUNTIME, OPENVINO, TENSORRT
from qompose_onnx.runtimes import missing


def _target(name: str, *, needs: str = "") -> Target:
    """Return a target whose program runs here, in the package that it needs, or is only written."""

    def finish(module: GraphModule, signature: CallSignature) -> Finished:
        from qompose_onnx import last_steps  # here: importing torch's exporter takes a second

        return last_steps.STEPS[name](module, signature)

    def availability() -> str | None:
        return missing(needs) if needs else None

    return Target(name, finish, availability, reads_qdq=True, runs_here=bool(needs))


TARGETS: Final = (
    _target("onnx"),
    _target("onnxruntime", needs=ONNXRUNTIME),
    _target(TENSORRT),
    _target("openvino", needs=OPENVINO),
)
