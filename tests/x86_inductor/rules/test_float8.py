# SPDX-License-Identifier: Apache-2.0
"""Models whose linears are float8."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
import torch.nn.functional as F
from qompose.errors import ConfigError
from qompose_x86_inductor import X86InductorQuantizer, get_x86_inductor_linear_float8_config
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.core.toy import sqnr
from tests.sampling import at_once

CONFIG = get_x86_inductor_linear_float8_config
DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


class Block(nn.Module):
    """The layers of a transformer's block, attention in float between them, and a convolution before."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv1d(8, width, 3, padding=1), nn.LayerNorm(width)
        self.parts, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, 10)

    def forward(self, signal: Tensor) -> Tensor:
        x = self.stem(signal).transpose(1, 2)
        heads = self.parts(self.norm(x)).unflatten(-1, (3, 4, -1)).transpose(1, 3)
        mixed = F.scaled_dot_product_attention(*heads.unbind(2))
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return self.narrow(F.gelu(self.wide(x)))


def batches(first: int, count: int) -> list[tuple[Tensor]]:
    made = (torch.Generator().manual_seed(seed) for seed in range(first, first + count))
    return [(torch.randn(4, 8, 20, generator=generator),) for generator in made]


SEEN, NEW = batches(0, 8), batches(100, 8)


def model() -> nn.Module:
    torch.manual_seed(0)
    return Block().eval()


def converted(config: Any) -> GraphModule:
    program = torch.export.export(model(), SEEN[0])
    prepared = qompose.prepare_pt2e(program, X86InductorQuantizer().set_global(config))
    qompose.calibrate(prepared, SEEN)
    return qompose.convert_pt2e(prepared)


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def both(request: pytest.FixtureRequest) -> tuple[torch.dtype, GraphModule, GraphModule]:
    """A type, the converted model, and the lowered one."""
    made = converted(CONFIG(request.param))
    return request.param, made, qompose.lower(made)


def quality(wanted: Any, actual: Any, given: list[tuple[Tensor]]) -> float:
    with torch.no_grad():
        return sqnr(torch.cat([wanted(*x) for x in given]), torch.cat([actual(*x) for x in given]))


def test_on_data_not_calibrated_on(both: Any) -> None:
    """Rounding to 4 and 3 significant bits costs about 26 and 20 dB at a product, several in a row more."""
    dtype, simulated, lowered = both
    least = {torch.float8_e4m3fn: 24, torch.float8_e5m2: 18}[dtype]
    assert quality(model(), lowered, NEW) > least
    assert quality(simulated, lowered, NEW) > 50  # a value that rounds the other way costs a step


def test_the_report_says_where_floats_are_multiplied(both: Any) -> None:
    dtype, _, lowered = both
    report = qompose.report(lowered)
    linears = [row for row in report.rows if row.operator == "aten.linear"]
    assert {(row.rule, row.kernel, row.state) for row in linears} == {
        ("linear_float8", "qompose_x86.linear_float8", "float kernel on integers")
    }
    assert len(linears) == 4
    assert report.coverage() == 0.0 < 0.89 < report.coverage("float kernel on integers") < 0.9
    (stem,) = (row for row in report.rows if row.operator == "aten.conv1d")
    assert stem.state == "float" and str(dtype) in stem.reason
    qompose.assert_lowered(lowered, 0.89)


def test_weights_take_a_byte_each(both: Any) -> None:
    dtype, _, lowered = both
    stored = [b for b in lowered.buffers() if b.dtype is dtype]
    assert sum(b.nbytes for b in stored) == 64 * (192 + 64 + 256) + 256 * 10
    assert not any(p.dim() == 2 for p in lowered.parameters())


def test_saved_and_loaded_it_is_the_same(both: Any, tmp_path: Path) -> None:
    _, simulated, lowered = both
    qompose.save(simulated, tmp_path / "model.pt2")
    again = qompose.load(tmp_path / "model.pt2")
    assert torch.equal(qompose.lower(again)(*NEW[0]), lowered(*NEW[0]))


@pytest.mark.parametrize(
    ("both", "mode"),
    at_once(itertools.product(DTYPES, ("default", "package")), (DTYPES[0], "default")),
    indirect=["both"],
)
def test_compiled(both: Any, mode: str) -> None:
    """In one piece: what asks for the processor's features while torch traces would break it."""
    _, _, lowered = both
    torch._dynamo.utils.counters.clear()
    compiled = qompose.compile_lowered(lowered, mode=mode)
    assert quality(lowered, compiled, NEW) > 50
    assert not torch._dynamo.utils.counters["graph_break"]


def test_any_number_of_rows() -> None:
    net, rows = nn.Sequential(nn.Linear(16, 8)).eval(), torch.export.Dim("rows", max=64)
    program = torch.export.export(net, (torch.randn(5, 16),), dynamic_shapes=({0: rows},))
    prepared = qompose.prepare_pt2e(program, X86InductorQuantizer().set_global(CONFIG()))
    prepared(torch.randn(5, 16))
    lowered = qompose.lower(qompose.convert_pt2e(prepared))
    assert [len(lowered(torch.randn(n, 16))) for n in (0, 1, 33)] == [0, 1, 33]


def test_one_scale_for_a_weight_and_two_types() -> None:
    spec = qompose.QuantizationSpec
    one = spec(DTYPES[1], qompose.observers.MinMaxObserver, qscheme=torch.per_tensor_symmetric)
    config = qompose.QuantizationConfig(CONFIG().input_activation, None, one, None, algorithms=())
    made = converted(config)
    assert quality(model(), qompose.lower(made), NEW) > 18
    assert quality(made, qompose.lower(made), NEW) > 50


def test_it_requires_no_processor() -> None:
    assert not any(converted(CONFIG()).meta["qompose"].requirements.values())


def test_other_types_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"float8_e4m3fn or torch\.float8_e5m2, got torch\.int8"):
        CONFIG(torch.int8)
