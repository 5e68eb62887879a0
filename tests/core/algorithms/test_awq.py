# SPDX-License-Identifier: Apache-2.0
"""AWQ scales the columns of weights by what they read, on data that it did not see, and says where not."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import qompose
import torch
from qompose import QuantizationConfig
from qompose.algorithms import Algorithm, Divided, Operands, SignRound, product_node
from qompose.errors import ConfigError, MemberError
from qompose.observers import PerBlockMinMaxObserver
from qompose.observers.config import weight_spec
from qompose.spec import qdq
from torch import Tensor, nn

from tests.core.algorithms.test_smoothing import lines
from tests.core.toy import (
    DYNAMIC,
    PRODUCTS,
    STATIC,
    WEIGHT,
    Model,
    export,
    prepare,
    randn,
    seeded,
    sqnr,
    toy,
)

FOUR = weight_spec(-8, 7, group_size=16, symmetric=False)
PLAIN = QuantizationConfig(None, None, FOUR, algorithms=())
AWQ = replace(PLAIN, algorithms=("awq",))
LOUD = [3, 20, 33]


class Written(nn.Module):
    """An RMS norm as Llama spells it: the scale is a product."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


def behind(
    norm: nn.Module, *products: nn.Module, forward: Callable[..., Tensor] | None = None
) -> Any:
    """Products behind a normalization three of whose channels are loud."""

    def run(m: Any, x: Tensor) -> Tensor:
        h = m.norm(x)
        return torch.cat([product(h) for product in m.products], -1)

    made = seeded(Model(forward or run, norm=norm, products=nn.ModuleList(products)))
    with torch.no_grad():
        made.norm.weight.fill_(1.0)
        made.norm.weight[LOUD] = 30.0
    return made.eval()


def converted(module: Any, config: QuantizationConfig, *batches: Tensor, **options: Any) -> Any:
    prepared = prepare(export(module, batches[0]), toy(*PRODUCTS, config=config))
    for batch in batches:
        prepared(batch)
    return qompose.convert_pt2e(prepared, **options)


def said(model: Any) -> tuple[list[str], list[str]]:
    return lines(model, "awq")


def multiplications(model: Any) -> int:
    return sum(node.target is torch.ops.aten.mul.Tensor for node in model.graph.nodes)


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm, Written])
def test_a_normalization_takes_up_the_factors(norm: Any) -> None:
    """At least 2 dB on other data, for one product and for two that share factors, without an operator."""
    for count in (1, 2):
        model = behind(norm(48), *(nn.Linear(48, 24) for _ in range(count)))
        seen, other = randn(256, 48), randn(256, 48, seed=1)
        plain, scaled = (converted(model, config, seen) for config in (PLAIN, AWQ))
        gained = sqnr(model(other), scaled(other)) - sqnr(model(other), plain(other))
        assert gained > 2
        made, refused = said(scaled)
        assert len(made) == 1 and not refused and "norm.weight" in made[0]
        assert multiplications(scaled) == multiplications(plain)


def test_a_product_divides_where_others_read_the_tensor_too() -> None:
    """They read what they read before; the loud channels are the values' own."""

    def residual(m: Any, x: Tensor) -> Tensor:
        h = m.norm(x)
        return m.products[0](h) + h

    model = behind(nn.LayerNorm(48), nn.Linear(48, 48), forward=residual)
    seen, other = randn(256, 48), randn(256, 48, seed=1)
    plain, scaled = (converted(model, config, seen) for config in (PLAIN, AWQ))
    assert multiplications(scaled) == multiplications(plain) + 1
    assert sqnr(model(other), scaled(other)) > sqnr(model(other), plain(other)) + 2
    assert "multiplication in the graph" in said(scaled)[0][0]


def test_what_leaves_the_program_is_left_alone() -> None:
    """The value of a normalization that is an output too, and one that another reads through an observer."""

    def both(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        h = m.norm(x)
        return m.products[0](h), h

    seen, other = randn(256, 48), randn(256, 48, seed=1)
    model = behind(nn.RMSNorm(48), nn.Linear(48, 24), forward=both)
    first, second = converted(model, AWQ, seen)(other)
    assert torch.equal(second, model(other)[1]) and sqnr(model(other)[0], first) > 20
    two = behind(nn.RMSNorm(48), nn.Linear(48, 24), nn.Linear(48, 24))
    for others in (STATIC, DYNAMIC, PLAIN):
        prepared = prepare(
            export(two, seen), toy(*PRODUCTS, config=others).set_module_name("products.0", AWQ)
        )
        prepared(seen)
        found = qompose.convert_pt2e(prepared)(other)
        for part, wanted in zip(found.split(24, -1), two(other).split(24, -1), strict=True):
            assert sqnr(wanted, part) > 18


def test_one_loud_token_does_not_decide() -> None:
    """Tokens beside it lose 1 dB at most."""
    model = seeded(nn.Sequential(nn.Linear(48, 24))).eval()
    seen, other = randn(16, 16, 48), randn(16, 16, 48, seed=1)
    seen[:, 0, 0] = other[:, 0, 0] = 3000.0
    plain, scaled = (converted(model, config, seen)(other)[:, 1:] for config in (PLAIN, AWQ))
    exact = model(other)[:, 1:]
    assert sqnr(exact, scaled) > sqnr(exact, plain) - 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm, Written])
def test_parameters_keep_their_type(norm: Any, dtype: torch.dtype) -> None:
    model = behind(norm(48), nn.Linear(48, 24)).to(dtype)
    seen, other = randn(256, 48).to(dtype), randn(256, 48, seed=1).to(dtype)
    plain, scaled = (converted(model, config, seen) for config in (PLAIN, AWQ))
    assert said(scaled)[0] and scaled.norm.weight.dtype is dtype
    expected = model(other).float()
    assert sqnr(expected, scaled(other).float()) > sqnr(expected, plain(other).float()) + 1


def test_a_product_with_a_parameter_is_no_normalization() -> None:
    """Its values may be small: SmoothQuant by default leaves their range as it is."""
    model = seeded(Model(lambda m, x: m.linear(x * m.scale), linear=nn.Linear(48, 24))).eval()
    model.scale = nn.Parameter(torch.ones(48).index_fill_(0, torch.tensor(LOUD), 20.0))
    small = 0.01 * randn(256, 48)
    static = replace(STATIC, algorithms=("smooth_quant",), output_activation=None)
    plain = converted(model, replace(static, algorithms=()), small)
    smooth = converted(model, static, small)
    assert sqnr(model(small), smooth(small)) > sqnr(model(small), plain(small)) - 0.5


def test_a_convolution_has_a_factor_for_all_taps_of_a_channel() -> None:
    model = seeded(nn.Sequential(nn.Conv2d(16, 24, 3, padding=1))).eval()
    loud = torch.ones(16, 1, 1).index_fill_(0, torch.tensor([2, 9]), 30.0)
    seen, other = randn(32, 16, 9, 9) * loud, randn(32, 16, 9, 9, seed=1) * loud
    per_channel = replace(PLAIN, weight=replace(WEIGHT, quant_min=-8, quant_max=7))
    plain = converted(model, per_channel, seen)
    scaled = converted(model, replace(per_channel, algorithms=("awq",)), seen)
    assert sqnr(model(other), scaled(other)) > sqnr(model(other), plain(other)) + 1.5


def test_gptq_goes_by_the_divided_inputs() -> None:
    """Each helps the other: better than either alone."""
    model = behind(nn.LayerNorm(48), nn.Linear(48, 24), nn.Linear(48, 24))
    mixing = randn(48, 48, seed=5)
    seen, other = randn(256, 48) @ mixing, randn(256, 48, seed=1) @ mixing
    words: list[tuple[str, ...]] = [("awq",), ("gptq",), ("awq", "gptq")]
    found = [
        sqnr(model(other), converted(model, replace(PLAIN, algorithms=w), seen)(other))
        for w in words
    ]
    assert found[2] > max(found[:2]) + 1


@pytest.mark.parametrize("fold", [True, False])
def test_in_float_the_program_computes_what_it_did(fold: bool) -> None:
    """With so many bits that rounding is nothing, scaled and plain agree."""
    model = behind(nn.LayerNorm(48), nn.Linear(48, 24))
    wide = replace(
        AWQ, weight=replace(WEIGHT, dtype=torch.int32, quant_min=-(2**22), quant_max=2**22)
    )
    seen = randn(256, 48)
    scaled = converted(model, wide, seen, fold_quantize=fold)
    assert sqnr(model(seen), scaled(seen)) > 100


class Unrounded(torch.fx.Interpreter):
    """Runs a converted program as if nothing were rounded, with its float parameters."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in qdq.QUANTIZE | qdq.DEQUANTIZE:
            return args[0]
        return super().call_function(target, args, kwargs)


def attention(m: Any, x: Tensor) -> Tensor:
    """Of two heads, by one linear for queries, keys and values."""
    n, t, c = x.shape
    q, k, v = m.first(x).view(n, t, 3, 2, c // 2).permute(2, 0, 3, 1, 4).unbind(0)
    mixed = nn.functional.scaled_dot_product_attention(q, k, v)
    return m.last(mixed.transpose(1, 2).reshape(n, t, c)) + x


def written_attention(m: Any, x: Tensor) -> Tensor:
    """Of four heads, two of which share keys and values."""
    n, t, c = x.shape
    kv = m.first(x).chunk(2, -1)
    k, v = (
        part.view(n, t, 2, 1, c // 4).expand(n, t, 2, 2, c // 4).reshape(n, t, 4, c // 4)
        for part in kv
    )
    q, k, v = (part.transpose(1, 2) for part in (x.view(n, t, 4, c // 4), k, v))
    mixed = (q @ k.transpose(-1, -2)).softmax(-1) @ v
    return m.last(mixed.transpose(1, 2).reshape(n, t, c))


def gated(m: Any, x: Tensor) -> Tensor:
    return m.last(nn.functional.silu(m.gate(x)) * m.first(x))


def convolved(m: Any, x: Tensor) -> Tensor:
    image = x.transpose(1, 2).reshape(len(x), 48, 4, 4)
    return m.last(nn.functional.max_pool2d(m.first(image).relu(), 2).flatten(1))


def smooth(m: Any, x: Tensor) -> Tensor:
    return m.last(nn.functional.gelu(m.first(x)))


def twice_read(m: Any, x: Tensor) -> Tensor:
    h = m.first(x)
    return m.last(h.relu()) + h


FOLDED = {
    "attention": (attention, nn.Linear(48, 144), nn.Linear(48, 48)),
    "shared heads": (written_attention, nn.Linear(48, 48), nn.Linear(48, 48)),
    "gate": (gated, nn.Linear(48, 48), nn.Linear(48, 48)),
    "convolution": (convolved, nn.Conv2d(48, 24, 1), nn.Linear(96, 48)),
}
LEFT = {
    "gelu": (smooth, nn.Linear(48, 48), nn.Linear(48, 48)),
    "another reads it": (twice_read, nn.Linear(48, 48), nn.Linear(48, 48)),
}


def loud_rows(forward: Callable[..., Tensor], first: nn.Module, last: nn.Module) -> Any:
    """Two layers, the last rows of the first of which are loud one by one."""
    model = seeded(Model(forward, first=first, last=last, gate=nn.Linear(48, 48)))
    with torch.no_grad():
        model.first.weight[-20::5] *= 30.0
    return model.eval()


@pytest.mark.parametrize("name", FOLDED)
def test_a_layer_in_front_takes_up_the_factors(name: str) -> None:
    """In float the program is the same to rounding, without another operator; its report says so."""
    model = loud_rows(*map(copy.deepcopy, FOLDED[name]))
    seen, other = randn(16, 16, 48), randn(16, 16, 48, seed=1)
    plain, scaled = (converted(model, config, seen, fold_quantize=False) for config in (PLAIN, AWQ))
    assert multiplications(scaled) == multiplications(plain)
    (line,) = (line for line in said(scaled)[0] if "first.weight and first.bias" in line)
    assert "(aten.linear in last)" in line
    assert not torch.equal(scaled.first.weight, model.first.weight)
    with torch.no_grad():
        assert sqnr(model(other), Unrounded(scaled).run(other)) > 120
        found = sqnr(model(other), scaled(other))
        assert found > sqnr(model(other), plain(other)) + 0.1
    compared = qompose.compare(export(model, other), scaled, [(other,)])
    assert min(row.sqnr for row in compared.rows) > found - 3, "values on the way have factors"


def test_blocks_are_compared_without_factors() -> None:
    """A layer alone, whose rows have taken up factors, has the outputs that it had."""
    model = loud_rows(*map(copy.deepcopy, FOLDED["gate"]))
    *seen, other = (randn(16, 16, 12, seed=n) @ randn(12, 48, seed=5) / 4 for n in range(3))
    config = replace(PLAIN, algorithms=("awq", SignRound(iterations=8)))
    prepared = qompose.calibrate(
        prepare(export(model, seen[0]), toy(*PRODUCTS, config=config)), seen
    )
    trained, scaled = qompose.convert_pt2e(prepared), converted(model, AWQ, *seen)
    made = lines(trained, "sign_round")[0]
    assert said(trained)[0] and any("linear in first" in line for line in made)
    assert sqnr(model(other), trained(other)) > sqnr(model(other), scaled(other)) + 1


@pytest.mark.parametrize("name", LEFT)
def test_what_no_factor_passes_through_has_a_product_in_the_graph(name: str) -> None:
    model = loud_rows(*map(copy.deepcopy, LEFT[name]))
    seen, other = randn(16, 16, 48), randn(16, 16, 48, seed=1)
    plain, scaled = (converted(model, config, seen) for config in (PLAIN, AWQ))
    assert not any("first.weight" in line for line in said(scaled)[0])
    assert multiplications(scaled) > multiplications(plain)
    assert sqnr(model(other), scaled(other)) > sqnr(model(other), plain(other)) - 0.5


@pytest.mark.parametrize("moved", [False, True])
def test_what_the_program_returns_keeps_its_values(moved: bool) -> None:
    def returned(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = m.first(x)
        return m.second(y.relu()), y.view(-1, 48) if moved else y

    layers = {"first": nn.Linear(48, 48), "second": nn.Linear(48, 24)}
    model = seeded(Model(returned, **layers))
    with torch.no_grad():
        model.first.weight[:4] *= 60
    x = randn(256, 48)
    made = converted(model, replace(AWQ, algorithms=("awq",)), x)
    plain = converted(model, replace(AWQ, algorithms=()), x)
    assert torch.equal(made(x)[1], plain(x)[1])
    assert not any("first.weight" in line for line in said(made)[0])


def test_reports_and_questions_know_the_factors(tmp_path: Path) -> None:
    """Sensitivity, compare, and a file."""
    model = behind(nn.LayerNorm(48), nn.Linear(48, 24))
    seen = randn(256, 48)
    program = export(model, seen)
    prepared = prepare(program, toy(*PRODUCTS, config=AWQ))
    prepared(seen)
    (row,) = qompose.sensitivity(prepared, [(seen,)], progress=False)
    scaled = qompose.convert_pt2e(prepared)
    alone = 10 ** (-sqnr(model(seen), scaled(seen)) / 10)
    assert row.cost == pytest.approx(alone, rel=0.05)
    compared = qompose.compare(program, scaled, [(seen,)])
    assert min(r.sqnr for r in compared.rows) > 15
    qompose.save(scaled, tmp_path / "model.pt")
    assert torch.equal(qompose.load(tmp_path / "model.pt")(seen), scaled(seen))


def test_what_cannot_be_scaled_is_named() -> None:
    """Groups of a convolution, a weight that something else reads, inputs that are all alike."""
    grouped = seeded(nn.Sequential(nn.Conv1d(24, 8, 3, groups=2)))
    per_channel = replace(AWQ, weight=replace(WEIGHT, quant_min=-8, quant_max=7))
    assert "grouped" in said(converted(grouped, per_channel, randn(8, 24, 9)))[1][0]

    def twice(m: Any, x: Tensor) -> Tensor:
        return m.one(m.one(x))

    tied = seeded(Model(twice, one=nn.Linear(48, 48)))
    made, refused = said(converted(tied, AWQ, randn(64, 48)))
    assert not made and refused
    assert all("other operators" in line for line in refused), refused
    even = seeded(nn.Sequential(nn.Linear(48, 24)))
    made, refused = said(converted(even, AWQ, randn(256, 48)))
    assert not made and "is required" in refused[0]


def test_silent_and_dead_channels_make_nothing_infinite() -> None:
    model = behind(nn.LayerNorm(48), nn.Linear(48, 24))
    with torch.no_grad():
        model.norm.weight[5] = 0.0
        model.norm.bias.zero_()
        model.products[0].weight[:, 7] = 0.0
    seen = randn(256, 48)
    scaled = converted(model, AWQ, seen)
    assert said(scaled)[0]
    assert bool(scaled(seen).isfinite().all())
    assert "all zeros" in said(converted(model, AWQ, torch.zeros(64, 48)))[1][0]


@pytest.mark.parametrize("config", [STATIC, DYNAMIC])
def test_inputs_that_are_integers_have_another_word(config: QuantizationConfig) -> None:
    with pytest.raises(ConfigError, match="smooth_quant"):
        replace(config, algorithms=("awq",))


def divided_by(values: Tensor, times: int = 1) -> QuantizationConfig:
    """A configuration with an algorithm that divides the input of each product by its own factors."""

    class Divide(Algorithm):
        word = "divide"

        def scale_inputs(self, found: Any) -> None:
            for claim in found.plan.claims * times:
                product = Operands.of(product_node(claim, found.nodes))  # type: ignore[arg-type]
                by = Divided(values, 1, (product.node.name,))
                found.divide(product.source.name, by, [product.weight.name])

    return replace(PLAIN, algorithms=(Divide(),))


def test_an_algorithm_of_ones_own_divides() -> None:
    """By any factors: the products are what they were."""
    model = seeded(nn.Sequential(nn.Linear(48, 24))).eval()
    seen = randn(64, 48)
    wide = replace(WEIGHT, dtype=torch.int32, quant_min=-(2**22), quant_max=2**22)
    scaled = converted(model, replace(divided_by(torch.linspace(0.5, 3, 48)), weight=wide), seen)
    assert sqnr(model(seen), scaled(seen)) > 100


@pytest.mark.parametrize("block", [(1, 16), (4, 16), (-1, 16)])
def test_scales_of_blocks_are_of_the_scaled_weight(block: tuple[int, ...]) -> None:
    """Also where a weight is gone through in parts of some rows, which must not cut blocks."""
    observer = PerBlockMinMaxObserver.with_args(block_size=block)
    spec = replace(WEIGHT, ch_axis=None, block_size=block, observer_or_fake_quant_ctr=observer)
    model = seeded(nn.Sequential(nn.Linear(48, 24))).eval()
    seen = randn(64, 48)
    with mock.patch.object(qdq, "_CHUNK", 7 * 48):
        config = replace(divided_by(torch.linspace(0.5, 3, 48)), weight=spec)
        scaled = converted(model, config, seen)
    assert sqnr(model(seen), scaled(seen)) > 35


@pytest.mark.parametrize(
    ("values", "times", "word"),
    [
        (torch.ones(48), 2, "already"),
        (torch.ones(47), 1, "48 positive"),
        (torch.zeros(48), 1, "48 positive"),
        (torch.full((48,), math.inf), 1, "48 positive"),
    ],
)
def test_factors_that_are_none(values: Tensor, times: int, word: str) -> None:
    with pytest.raises(MemberError, match=f"divide.*{word}"):
        converted(
            seeded(nn.Sequential(nn.Linear(48, 24))), divided_by(values, times), randn(64, 48)
        )
