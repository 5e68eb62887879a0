# SPDX-License-Identifier: Apache-2.0
"""Packed linears that read the same few rows are one call of compiled code."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import qompose
import torch
from qompose_x86_inductor import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config as config,
)
from qompose_x86_inductor.inductor.joined_linears import join
from qompose_x86_inductor.operators.linear_packed import OPERATOR, SEVERAL
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.core.toy import Model

INPUTS = 512
PER_TOKEN = {"is_dynamic": True, "per_token": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "eight": PER_TOKEN,
    "four": PER_TOKEN | {"group_size": 32},
    "symmetric": PER_TOKEN | {"group_size": 32, "symmetric": True},
    "floats": {"weight_only": True, "group_size": 32},
}
Function = Callable[..., Any]


class Layers(nn.Module):
    """Queries (with a bias), keys and values: work for two threads. A panel between is not full."""

    def __init__(self) -> None:
        super().__init__()
        for name, width in {"q": 600, "k": 296, "v": 304}.items():
            self.add_module(name, nn.Linear(INPUTS, width, bias=name == "q"))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.q(x).relu(), self.k(x).tanh(), self.v(x).sigmoid()], -1)


def lowered(
    function: Function,
    *inputs: Tensor,
    names: Iterable[str] = ("eight",),
    dtype: torch.dtype = torch.float32,
) -> GraphModule:
    torch.manual_seed(0)
    quantizer = X86InductorQuantizer()
    for name in names:
        quantizer.set_module_name(name, config(algorithms=(), **CONFIGS[name]))
    model = Model(function, **{name: Layers() for name in names}).eval().to(dtype)
    program = torch.export.export(model, inputs)
    return qompose.lower(qompose.convert_pt2e(qompose.prepare_pt2e(program, quantizer)))


def one_of(m: Any, x: Tensor) -> Tensor:
    found: Tensor = m.eight(x)
    return found


def results(m: Any, x: Tensor) -> Any:
    return m.eight.q(x), m.eight.k(x).tanh(), m.eight.v(x).tanh()


def of_two(m: Any, x: Tensor) -> Tensor:
    return torch.cat([m.eight.q(x).relu(), m.eight.k(x.tanh()).tanh(), m.eight.v(x).tanh()], -1)


def test_compiled_code_computes_what_they_do_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(*rows, INPUTS, generator=generator) for rows in ((1,), (2, 3))]
    program = lowered(
        lambda m, x, y: [getattr(m, name)(rows) for name in CONFIGS for rows in (x, y)],
        *inputs,
        names=CONFIGS,
    )
    expected = program(*inputs)
    compiled = qompose.compile_lowered(program)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            torch.testing.assert_close(compiled(*inputs), expected)
    finally:
        torch.set_num_threads(before)
    join(program)
    program.recompile()
    called = [len(node.args[1]) // 5 for node in program.graph.nodes if node.target is SEVERAL]
    assert sorted(called) == [
        3,
        3,
        3,
        3,
        6,
        6,
    ]  # those of four bits are together, with zero points or not
    # torch's tanh rounds otherwise where rows lie apart, as they do in a joined result.
    torch.testing.assert_close(program(*inputs), expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("function", "rows", "alone"),
    [
        pytest.param(one_of, 8, 0, id="few rows"),
        pytest.param(one_of, 9, 3, id="many rows"),
        pytest.param(results, 1, 1, id="a result of the program"),
        pytest.param(of_two, 1, 1, id="other rows"),
    ],
)
def test_which_are_joined(function: Function, rows: int, alone: int) -> None:
    program = lowered(function, torch.ones(rows, INPUTS))
    join(program)
    assert [node.target for node in program.graph.nodes].count(OPERATOR) == alone
    program.graph.lint()


def test_half_precision_is_cast_once() -> None:
    """Rows and biases are cast to float32 for each linear."""
    x = torch.ones(1, INPUTS, dtype=torch.bfloat16)
    program = lowered(
        lambda m, x: (m.floats.k(x).tanh(), m.floats.q(x).tanh()),
        x,
        names=["floats"],
        dtype=x.dtype,
    )
    expected = program(x)
    join(program)
    program.recompile()
    assert [node.target for node in program.graph.nodes].count(OPERATOR) == 0
    assert all(map(torch.equal, program(x), expected))
