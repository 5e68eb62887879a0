# SPDX-License-Identifier: Apache-2.0
"""A convolution adds in place where nobody reads the summand later, and to a copy everywhere else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import qompose
import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from tests.core.toy import Model
from tests.sampling import at_once
from tests.x86_inductor.small_models import lowered

pytestmark = [
    pytest.mark.usefixtures("by_onednn"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
]

Body = Callable[[nn.ModuleList, Tensor], Tensor]


def convolutions(body: Body) -> nn.Module:
    layers = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4))
    return Model(lambda m, x: body(m.layers, x), layers=layers)


def residual(layers: nn.ModuleList, x: Tensor) -> Tensor:
    y = layers[0](x).relu()
    y = (layers[2](layers[1](y).relu()) + y).relu()
    return layers[3](y)


def two_residuals(layers: nn.ModuleList, x: Tensor) -> Tensor:
    y = layers[0](x).relu()
    z = (layers[1](y) + y).relu()
    return layers[3]((layers[2](z) + z).relu())


def several(layers: nn.ModuleList, x: Tensor) -> Tensor:
    """What is added in place and what to copies, in one graph."""
    return two_residuals(layers, residual(layers, x))


def read_later(layers: nn.ModuleList, x: Tensor) -> Tensor:
    y = layers[0](x).relu()
    z = (layers[1](y) + y).relu()
    return layers[3](torch.cat([layers[2](z), y], 2))


def adds_its_own_input(layers: nn.ModuleList, x: Tensor) -> Tensor:
    y = layers[0](x).relu()
    return layers[3]((layers[1](y) + y).relu())


def a_view_is_read_later(layers: nn.ModuleList, x: Tensor) -> Tensor:
    y = layers[0](x).relu()
    half = y[:, :, :4]
    z = (layers[2](layers[1](y).relu()) + y).relu()
    return layers[3](torch.cat([z, half], 2))


def compiled_graphs(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[bool, bool]]]:
    """For every graph that is compiled, of each sum in it: whether it adds in place, or to a copy."""
    from qompose.lowering.compilation import LateReplacement

    seen: list[list[tuple[bool, bool]]] = []
    replace = LateReplacement.__call__

    def watched(self: LateReplacement, graph: Graph) -> None:
        replace(self, graph)
        sums = graph.find_nodes(
            op="call_function", target=torch.ops.onednn.qconv2d_pointwise.binary
        )
        seen.append([_kind(node) for node in sums])

    monkeypatch.setattr(LateReplacement, "__call__", watched)
    return seen


def _kind(node: Node) -> tuple[bool, bool]:
    copied = getattr(node.args[6], "target", None) is torch.ops.aten.clone.default
    return (not copied, copied)


IN_PLACE, COPIED = (True, False), (False, True)
SUMS = [
    (several, [IN_PLACE, COPIED, COPIED]), (residual, [IN_PLACE]), (two_residuals, [COPIED, COPIED]),
    (a_view_is_read_later, [COPIED]), (read_later, [COPIED]), (adds_its_own_input, [COPIED]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "wanted", "mode"),
    at_once(
        [(*sums, mode) for sums in SUMS for mode in ("default", "package")],
        (*SUMS[0], "default"),
    ),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_sums(
    body: Body,
    wanted: list[tuple[bool, bool]],
    mode: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.randn(2, 8, 8, 8)
    model = lowered(convolutions(body), x)
    seen = compiled_graphs(monkeypatch)
    path = tmp_path / "model.pt2" if mode == "package" else None
    with torch.compiler.config.patch(force_disable_caches=True):
        compiled = qompose.compile_lowered(model, mode, path=path)
    assert wanted in seen
    for inputs in (x, torch.randn(2, 8, 8, 8)):
        kept = inputs.clone()
        torch.testing.assert_close(compiled(inputs), model(inputs), atol=1e-5, rtol=1e-5)
        assert torch.equal(inputs, kept)
