# SPDX-License-Identifier: Apache-2.0
"""The rule table on small models: what becomes the bounds of a product, in process and on the runtime."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import qompose
import torch
import torch.nn.functional as F
from qompose_xnnpack import XNNPACKQuantizer, get_symmetric_quantization_config
from torch import Tensor, nn

from tests.core.toy import Model, nodes_calling, randn
from tests.sampling import at_once
from tests.xnnpack.executorch_target.runtime import converted

X = randn(2, 3, 6, 6)
BOUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    "relu6": F.relu6, "relu6 in place": lambda x: F.relu6(x, inplace=True),
    "hardtanh": lambda x: F.hardtanh(x, -0.1, 0.2), "clamp": lambda x: x.clamp(-0.1, 0.2),
    "clamp_": lambda x: x.clamp_(-0.1, 0.2), "clip": lambda x: x.clip(-0.1, 0.2),
    "clip_": lambda x: x.clip_(-0.1, 0.2), "one side": lambda x: x.clamp(max=0.2),
}  # fmt: skip


def model_of(function: Callable[[Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    first, second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 1)
    return Model(lambda m, x: m.second(function(m.first(x))), first=first, second=second).eval()


@pytest.mark.parametrize("name", at_once([*BOUNDED], "relu6 in place", "clip_", "one side"))
def test_bounds_behind_a_product_are_part_of_it(name: str) -> None:
    quantized = converted(model_of(BOUNDED[name]), X)
    lowered = qompose.lower(quantized)
    owned = {row.rule for row in qompose.report(lowered).rows}
    assert owned == {"conv2d_hardtanh", "conv2d"}
    qompose.assert_lowered(lowered)
    with torch.no_grad():
        expected, found = quantized(X), lowered(X)
    step = float((expected.max() - expected.min()) / 255)
    assert (expected - found).abs().max() <= 1.01 * step  # one step of the output


@pytest.mark.parametrize("name", at_once(["clip_", "one side"], "one side"))
def test_clamps_become_the_bounds_of_a_delegated_product(name: str) -> None:
    pytest.importorskip("executorch")
    quantized = converted(model_of(BOUNDED[name]), X)
    program = qompose.lower(quantized, target="executorch")
    report = qompose.report(program)
    assert {row.kernel for row in report.rows} == {"XNNPACK delegate"}
    expected = quantized(X)
    step = float((expected.max() - expected.min()) / 255)
    assert (expected - program(X)).abs().max() <= 1.01 * step  # one step of the output


READERS: dict[str, tuple[Callable[[Tensor, nn.Module], Tensor], bool]] = {
    "a product": (lambda x, last: last(x), True),
    "a product and a float operator": (lambda x, last: last(x) + x.sigmoid(), True),
    "a float operator": (lambda x, last: x.sigmoid(), False),
    "nobody": (lambda x, last: x, False),
}


@pytest.mark.parametrize("name", ["add", "sub", "mul"])
def test_what_only_floats_read_is_computed_in_float(name: str) -> None:
    """A sum in front of a gate's sigmoid is not rounded once more; with an integer reader it is."""
    function = getattr(torch, name)
    for read, taken in READERS.values():
        layers = {part: nn.Linear(8, 8) for part in ("one", "two", "last")}
        model = Model(lambda m, x, read=read: read(function(m.one(x), m.two(x)), m.last), **layers)
        found = converted(model, randn(3, 8))
        claimed = {row.rule for row in qompose.report(found).rows if row.rule}
        assert (name in claimed) == taken


SPECS = {
    "q": {"is_per_channel": True}, "k": {"group_size": 32}, "v": {"is_per_channel": True},
    "whole": {"is_per_channel": True, "per_token": False},
}  # fmt: skip


def projected(*names: str) -> torch.fx.GraphModule:
    """Linears of one tensor that are quantized when they run, as `SPECS` says; then lowered."""
    quantizer = XNNPACKQuantizer()
    for name in names:
        quantizer.set_module_name(
            name, get_symmetric_quantization_config(is_dynamic=True, **SPECS[name])
        )
    torch.manual_seed(0)
    layers = {name: nn.Linear(64, 16) for name in SPECS}
    model = Model(lambda m, x: tuple(getattr(m, name)(x) for name in names), **layers)
    sizes = ({0: torch.export.Dim("rows", min=0)},)
    return qompose.lower(converted(model, randn(5, 64), quantizer=quantizer, sizes=sizes))


def test_dynamic_linears_of_one_tensor_quantize_it_once() -> None:
    """Whatever their weights are; one with a scale for all rows has its own. Each bit is as of one alone."""
    lowered = projected(*SPECS)
    assert len(nodes_calling(lowered, "quantize_dynamic")) == 2
    assert len(nodes_calling(lowered, "linear_dynamic")) == 4
    alone = [projected(name) for name in SPECS]
    spread = torch.tensor([[1e-6], [1.0], [1e9]])
    for x in (randn(5, 64), randn(3, 64, seed=1) * spread, randn(0, 64)):
        results = lowered(x)
        assert [y.shape for y in results] == [(len(x), 16)] * 4
        assert all(map(torch.equal, results, (one(x)[0] for one in alone)))
