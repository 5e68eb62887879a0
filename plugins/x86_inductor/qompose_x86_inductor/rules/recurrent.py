# SPDX-License-Identifier: Apache-2.0
"""The rules for whole layers of LSTM and GRU, whose matrices are quantized under any int8 configuration.

Inputs and states have no scales that calibration finds: the kernel rounds them to 16 bits when it reads them.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from qompose.backend import Match, OperatorPattern, Rule, kit
from torch import Tensor
from torch.fx import Node

from qompose_x86_inductor.kernels.recurrent import kernel_of
from qompose_x86_inductor.operators.recurrent import GATES
from qompose_x86_inductor.rules.static import ACCEPTS

aten = torch.ops.aten
_WIDTH: Final = 8
_STEPS: Final = (3, 2, _WIDTH)


def fits(match: Match) -> str | None:
    """Require float32, no dropout in training, and sums that fit into int32."""
    tensors = [match.node("input"), *match.tensors("hx"), *match.tensors("params")]
    dtypes = {node.meta["val"].dtype for node in tensors if isinstance(node, Node)}
    if dtypes != {torch.float32}:
        return "the kernel only supports float32"
    applied = match.argument("output", "dropout") != 0 and match.argument("output", "train")
    if applied and match.argument("output", "num_layers") > 1:
        return "it uses dropout between its layers, in training mode"
    depth = max(kit.shape_of(node)[-1] for node in match.tensors("params"))
    if depth > kit.MAX_DEPTH:
        return f"a sum of {depth} products may overflow int32 (at most {kit.MAX_DEPTH} are safe)"
    return None


def _example(name: str) -> OperatorPattern:
    operator: Any = getattr(aten, name).input
    rest = (True, 1, 0.0, False, False, False)

    def layer(
        input: Tensor, params_0: Tensor, params_1: Tensor, params_2: Tensor, params_3: Tensor
    ) -> Tensor:
        state = input.new_zeros(1, input.shape[1], params_1.shape[1])
        hx = [state, state] if name == "lstm" else state
        result: Tensor = operator(input, hx, [params_0, params_1, params_2, params_3], *rest)[0]
        return result

    rows = GATES[name] * _WIDTH
    return OperatorPattern(
        (operator,), layer, (_STEPS, (rows, _WIDTH), (rows, _WIDTH), (rows,), (rows,))
    )


RECURRENT_RULES: tuple[Rule, ...] = tuple(
    Rule(
        name=name,
        patterns=(_example(name),),
        activations=(),
        weight="params",
        output=False,
        modes=frozenset({"static", "dynamic", "weight-only"}),
        accepts={"weight": ACCEPTS["weight"]},
        guard=(fits,),
        kernels={"torch": kernel_of(name)},
    )
    for name in GATES
)
