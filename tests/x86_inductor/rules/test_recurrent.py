# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers: what is claimed, what is refused and why, how large it is, and how well it computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
import torch.nn.functional as F
from qompose.reporting.report_data import FLOAT, FLOAT_KERNEL
from torch import Tensor, nn

from tests.core.toy import Model, randn, sqnr
from tests.products import x86
from tests.x86_inductor.small_models import calls, reasons

pytestmark = pytest.mark.filterwarnings("ignore:The tensor attributes:UserWarning")
X = randn(3, 11, 20)


def layers(kind: type[nn.RNNBase], *sizes: int, **options: Any) -> nn.Module:
    """Layers alone, and all of their results."""

    def forward(m: Any, x: Tensor, *states: Tensor) -> list[Tensor]:
        given = (tuple(states) if len(states) == 2 else states[0],) if states else ()
        out, last = m.layers(x, *given)
        return [out, *(last if isinstance(last, tuple) else (last,))]

    torch.manual_seed(0)
    return Model(forward, layers=kind(*sizes, batch_first=True, **options)).eval()


def quantized(model: nn.Module, *inputs: Tensor, **choices: Any) -> Any:
    return qompose.quantize(
        model, inputs, backends=x86(**choices), calibration=[inputs], progress=False
    )


FORMS: dict[str, tuple[nn.Module, int]] = {
    "lstm": (layers(nn.LSTM, 20, 64, num_layers=3), 0),
    "lstm, both ways, projected": (
        layers(nn.LSTM, 20, 64, num_layers=2, bidirectional=True, proj_size=24), 0),
    "lstm without biases, with first states": (layers(nn.LSTM, 20, 40, bias=False), 2),
    "gru": (layers(nn.GRU, 20, 64, num_layers=2), 0),
    "gru, both ways, with a first state": (layers(nn.GRU, 20, 40, bidirectional=True), 1),
}  # fmt: skip


def states_of(form: str) -> tuple[Tensor, ...]:
    model, states = FORMS[form]
    recurrent: Any = model.layers
    count = recurrent.num_layers * (2 if recurrent.bidirectional else 1)
    return tuple(randn(count, len(X), recurrent.hidden_size, seed=i) for i in range(states))


@pytest.mark.parametrize(
    "choices",
    [{}, {"is_dynamic": True}, {"weight_only": True}],
    ids=["static", "dynamic", "weights"],
)
@pytest.mark.parametrize("form", FORMS)
def test_layers_have_int8_weights_under_every_int8_configuration(
    form: str, choices: dict[str, Any]
) -> None:
    model, inputs = FORMS[form][0], (X, *states_of(form))
    result = quantized(model, *inputs, **choices)
    (row,) = (row for row in result.report.rows if row.rule in ("lstm", "gru"))
    assert row.state == FLOAT_KERNEL
    assert f"qompose_x86.{row.rule}" in row.kernel
    assert f"qompose_x86.{row.rule}" in calls(result.model)
    other = [each * 0.7 for each in inputs]
    with torch.no_grad():
        wanted, simulated, found = model(*other), result.converted(*other), result.model(*other)
    for one, two, three in zip(wanted, simulated, found, strict=True):
        assert torch.equal(two, three)
        assert sqnr(one, three) > 35
        assert F.cosine_similarity(one.flatten(), three.flatten(), 0) > 0.999


def test_what_is_stored_is_a_quarter(tmp_path: Path) -> None:
    result = quantized(layers(nn.LSTM, 40, 256, num_layers=3), randn(2, 5, 40))
    before, after = result.report.bytes_before, result.report.bytes_after
    assert after < 0.27 * before
    qompose.save(result.model, tmp_path / "model.pt2")
    loaded = qompose.load(tmp_path / "model.pt2")
    other = randn(2, 5, 40, seed=1)
    with torch.no_grad():
        for one, two in zip(loaded(other), result.model(other), strict=True):
            assert torch.equal(one, two)


def test_groups_of_four_bits_leave_them_in_float_with_the_reason() -> None:
    with pytest.warns(qompose.QomposeWarning):
        result = quantized(FORMS["gru"][0], X, weight_only=True, group_size=32)
    assert "per_channel_affine" in reasons(result.model)
    assert all(row.state == FLOAT for row in result.report.rows)


def test_dropout_in_training_is_refused() -> None:
    model = layers(nn.LSTM, 20, 24, num_layers=2, dropout=0.5)
    quantizer = x86()
    program = torch.export.export(model.train(), (X,))
    with pytest.warns(qompose.QomposeWarning):
        prepared = qompose.prepare_pt2e(program, quantizer)
    assert "dropout" in reasons(prepared)


def _voices(speakers: Tensor, generator: torch.Generator) -> Tensor:
    """Energies of 40 bands over 40 steps: two formants that each speaker has, moving, and noise."""
    bands, time = torch.arange(40.0), torch.arange(40.0)[:, None]
    drawn = torch.randn(len(speakers), 3, 1, 1, generator=generator)
    low = 6 + speakers[:, None, None] + 2 * torch.sin(time / 6 + drawn[:, 0]) * drawn[:, 1]
    high = 33 - 2 * (speakers[:, None, None] % 4) + torch.cos(time / 5 + drawn[:, 2])
    noise = torch.randn(len(speakers), 40, 40, generator=generator) / 2
    return torch.exp(-((bands - low) ** 2) / 8) + torch.exp(-((bands - high) ** 2) / 6) + noise


@pytest.mark.full
def test_a_trained_speaker_encoder_keeps_its_embeddings() -> None:
    """Three layers as in Wan et al., "Generalized end-to-end loss" (2018), small; on unseen voices."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)

    def forward(m: Any, x: Tensor) -> Tensor:
        hidden = m.lstm(x)[1][0][-1]
        return F.normalize(torch.relu(m.out(hidden)), dim=-1)

    model = Model(forward, lstm=nn.LSTM(40, 48, 3, batch_first=True), out=nn.Linear(48, 48))
    head = nn.Linear(48, 12)
    optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], 4e-3)
    for _ in range(250):
        speakers = torch.randint(12, (48,), generator=generator)
        loss = F.cross_entropy(10 * head(model(_voices(speakers, generator))), speakers)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    speakers = torch.randint(12, (256,), generator=generator)
    calibration, unseen = (_voices(speakers, generator) for _ in range(2))
    result = quantized(model.eval(), calibration)
    with torch.no_grad():
        wanted, found = model(unseen), result.model(unseen)
        guesses = [head(each).argmax(-1) for each in (wanted, found)]
    assert float((guesses[0] == speakers).double().mean()) > 0.8
    assert float((guesses[0] == guesses[1]).double().mean()) > 0.98
    assert float(F.cosine_similarity(wanted, found).mean()) > 0.999
