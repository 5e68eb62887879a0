# SPDX-License-Identifier: Apache-2.0
"""The configurations of tables: what each asks for, what is refused, and what eps does."""

from __future__ import annotations

import re
from typing import Any

import pytest
import qompose
import torch
from qompose_embedding import (
    EmbeddingBackend,
    EmbeddingQuantizer,
    get_default_embedding_quantization_config,
    get_embedding_quantization_config,
)
from torch import nn

IDS = torch.tensor([[0, 1, 2]])


def prepared(model: nn.Module, config: Any) -> Any:
    return qompose.prepare_pt2e(torch.export.export(model, (IDS,)), EmbeddingQuantizer(config))


def test_the_default_is_the_fields_embedding_byte() -> None:
    spec = get_default_embedding_quantization_config().weight
    assert isinstance(spec, qompose.QuantizationSpec)
    assert (spec.dtype, spec.qscheme, spec.ch_axis, spec.quant_min, spec.quant_max) == (
        torch.uint8, torch.per_channel_affine_float_qparams, 0, None, None,
    )  # fmt: skip
    observer: Any = spec.observer_or_fake_quant_ctr(dtype=torch.uint8, qscheme=spec.qscheme)
    assert observer.eps == 2**-23


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("group_size", [None, 16])
def test_every_scheme_keeps_what_its_steps_allow(
    bits: int, symmetric: bool, group_size: int | None
) -> None:
    torch.manual_seed(bits)
    table = nn.Embedding(50, 64)
    config = get_embedding_quantization_config(
        bits, symmetric=symmetric, group_size=group_size, algorithms=()
    )
    converted = qompose.convert_pt2e(prepared(table, config))
    integers = converted.state_dict()["weight_q"]
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if symmetric else (0, 2**bits - 1)
    assert integers.dtype is (torch.int8 if symmetric else torch.uint8)
    assert (int(integers.min()), int(integers.max())) == (low, high)
    ids = torch.arange(50)[None, :3]
    actual, wanted = converted(ids), table(ids).detach()
    grouped = wanted.unflatten(-1, (-1, group_size or 64))
    spread = 2 * grouped.abs().amax(-1) if symmetric else grouped.amax(-1) - grouped.amin(-1)
    # Half a step inside the range; a symmetric one clips half a step at its upper end; float16 scales.
    steps = spread / (2**bits - 1) * 0.51 + spread * 2**-10
    error = (actual - wanted).abs().unflatten(-1, (-1, group_size or 64)).amax(-1)
    assert bool((error <= steps).all())


@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize("group_size", [None, 8])
def test_below_eight_bits_scales_and_offsets_are_float16(bits: int, group_size: int | None) -> None:
    table = nn.Embedding(50, 16)
    config = get_embedding_quantization_config(bits, group_size=group_size)
    state = qompose.convert_pt2e(prepared(table, config)).state_dict()
    scale, offset = state["weight_scale"], -state["weight_zero_point"] * state["weight_scale"]
    assert torch.equal(scale.half().float(), scale)
    assert torch.allclose(offset.half().float(), offset, rtol=2**-21, atol=0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("bits", value) for value in (3, True, 8.0)),
        *(("eps", value) for value in (1e300, 0, float("inf"))),
        *(("group_size", value) for value in (1, 2.0)),
        ("symmetric", 1),
    ],
)
def test_wrong_arguments(name: str, value: Any) -> None:
    with pytest.raises(qompose.errors.ConfigError, match=f"{name} .*{re.escape(str(value))}"):
        get_embedding_quantization_config(**{name: value})


def test_a_quantizer_takes_a_configuration_or_nothing() -> None:
    with pytest.raises(qompose.errors.ConfigError, match="'int4'"):
        EmbeddingQuantizer("int4")  # type: ignore[arg-type]


def test_configurations_are_told_apart_by_name() -> None:
    configs = EmbeddingBackend().configs
    assert next(iter(configs)) == "uint8 rows" and len(set(configs.values())) == len(configs) == 8
    assert str(get_embedding_quantization_config(4, symmetric=True, group_size=32)) == (
        "int4 rows in groups of 32"
    )
    assert "eps 1e-06" in str(get_embedding_quantization_config(eps=1e-6))


def test_rows_below_eps_are_coarse_and_named() -> None:
    """Not wiped out, as they are by torch's observer."""
    table = nn.Embedding(4, 8)
    table.weight.data = torch.randn(4, 8)
    table.weight.data[1:3] *= 1e-3
    coarse = get_embedding_quantization_config(eps=2**-12)
    converted = qompose.convert_pt2e(prepared(table, coarse))
    assert float((converted(IDS) - table(IDS)).detach()[0, 1].abs().max()) <= 0.51 * 2**-12
    (note,) = [note for note in qompose.report(converted).notes if "eps" in note]
    assert "weight" in note and "2 of 4" in note
    report = qompose.report(qompose.convert_pt2e(prepared(table, None)))
    assert not [note for note in report.notes if "eps" in note]


def test_a_group_has_to_divide_the_rows() -> None:
    config = get_embedding_quantization_config(group_size=4)
    with pytest.warns(qompose.QomposeWarning, match="weight"):
        prepared(nn.Embedding(4, 6), config)
