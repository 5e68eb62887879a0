# SPDX-License-Identifier: Apache-2.0
"""Compiled programs hold recurrent layers of our own, and compute what the lowered model computes."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
from qompose_x86_inductor.inductor import native_calls
from qompose_x86_inductor.inductor.decomposition import with_prepack_in_graph
from qompose_x86_inductor.native import processor
from torch import Tensor, nn
from torch.export import Dim

from tests.core.toy import Model, randn
from tests.products import x86
from tests.sampling import at_once

pytestmark = [
    pytest.mark.usefixtures("nothing_is_kept"),
    pytest.mark.filterwarnings("ignore:The tensor attributes:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
]
needs_native = pytest.mark.skipif(
    processor.of_machine() is None, reason="the C++ is not for this processor"
)
X = randn(3, 6, 20)


def lowered() -> Any:
    """An LSTM whose last cell state nobody reads, and a GRU that reads its outputs; for any batch."""

    def forward(m: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out, (hidden, _) = m.lstm(torch.relu(x.transpose(0, 1)))
        return (*m.gru(out.transpose(0, 1)), hidden)

    torch.manual_seed(0)
    lstm = nn.LSTM(20, 24, num_layers=2, bidirectional=True, proj_size=10)
    model = Model(forward, lstm=lstm, gru=nn.GRU(20, 24, batch_first=True)).eval()
    result = qompose.quantize(
        model, (X,), backends=x86(), calibration=[(X,)], progress=False,
        dynamic_shapes=({0: Dim("batch", min=1, max=64)},),
    )  # fmt: skip
    return result.model


def assert_same(run: Any, model: Any) -> None:
    for batch in (3, 1, 40):
        x = randn(batch, 6, 20, seed=batch)
        with torch.no_grad():
            pairs = zip(run(x), model(x), strict=True)
        for one, two in pairs:
            torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-3)


@needs_native
@pytest.mark.parametrize("mode", at_once(["package", "default"], "default"))
def test_any_batch(mode: str, tmp_path: Path) -> None:
    model = lowered()
    assert native_calls.options(model)
    path = tmp_path / "model.pt2" if mode == "package" else None
    assert_same(qompose.compile_lowered(model, "package" if path else "default", path=path), model)
    if path is not None:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith(".wrapper.cpp")]
            code = "".join(archive.read(name).decode() for name in names)
        assert code.count("aoti_torch_cpu_native_lstm(") == 2  # and a declaration
        assert code.count("aoti_torch_cpu_native_gru(") == 2


@pytest.mark.usefixtures("by_onednn")
def test_elsewhere_torch_computes_them_in_float() -> None:
    model = lowered()
    assert native_calls.options(model) == {}
    assert_same(with_prepack_in_graph(model), model)
