# SPDX-License-Identifier: Apache-2.0
"""Scale search: other ranges of weights of few bits, where they have a smaller error."""

from __future__ import annotations

from dataclasses import replace

import pytest
import qompose
import torch
from hypothesis import given, settings, strategies as st
from qompose import QuantizationConfig
from qompose.observers import PerBlockMinMaxObserver, PerChannelHistogramObserver
from qompose.observers.input_sums import (
    SKETCHED,
    Columns,
    MomentObserver,
    Moments,
    distinct_rows,
)
from qompose.spec.quantization_spec import QuantizationSpec
from torch import Tensor, nn

from tests.core import toy as toys
from tests.core.algorithms.test_correction import padded
from tests.core.algorithms.test_gptq import ALONG_ONE, BLOCKS, FOUR_BITS, PER_TENSOR, data
from tests.core.algorithms.test_smoothing import lines
from tests.core.toy import PRODUCTS, WEIGHT, convert, export, toy

FLOAT_ZERO_POINTS = QuantizationSpec(
    torch.uint8, PerBlockMinMaxObserver, 0, 15, torch.per_channel_affine_float_qparams,
    block_size=(1, 16),
)  # fmt: skip
FORMS = {
    "per tensor": PER_TENSOR, "per channel": FOUR_BITS, "blocks": BLOCKS,
    "three bits": replace(FOUR_BITS, quant_min=-4, quant_max=3),
    "float zero points": FLOAT_ZERO_POINTS,
}  # fmt: skip


def weight_only(
    spec: QuantizationSpec, algorithms: tuple[str, ...] | None = None
) -> QuantizationConfig:
    return QuantizationConfig(None, None, spec, algorithms=algorithms)


def outliers() -> nn.Linear:
    """A weight with one large value in each row, and one in each block of a few."""
    model = toys.seeded(nn.Linear(48, 16)).eval()
    with torch.no_grad():
        model.weight[:, ::16] *= 3
    return model


def run(model: nn.Module, config: QuantizationConfig, *shape: int) -> torch.fx.GraphModule:
    x = data(0, *shape)
    return convert(export(model, x), toy(*PRODUCTS, config=config), x)


def error(model: nn.Module, quantized: torch.fx.GraphModule, *shape: int) -> float:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(1)) + 1
    return float((model(x) - quantized(x)).detach().square().mean())


@pytest.mark.parametrize("form", FORMS)
def test_below_eight_bits_the_error_becomes_smaller(form: str) -> None:
    model, shape = outliers(), (64, 48)
    searched, plain = (run(model, weight_only(FORMS[form], w), *shape) for w in (None, ()))
    made, refused = lines(searched, "scale_search")
    assert len(made) == 1 and not refused and lines(plain, "scale_search") == ([], [])
    assert error(model, searched, *shape) < 0.97 * error(model, plain, *shape)


@pytest.mark.parametrize(
    "model, shape, spec",
    [
        (nn.Conv2d(8, 8, 3, groups=4), (8, 8, 9, 9), FOUR_BITS),
        (nn.ConvTranspose2d(8, 8, 2), (8, 8, 6, 6), ALONG_ONE),
        (nn.Conv1d(8, 8, 3), (8, 8, 9), replace(BLOCKS, block_size=(1, 4, -1))),
    ],
)
def test_in_every_layout_of_a_weight(
    model: nn.Module, shape: tuple[int, ...], spec: QuantizationSpec
) -> None:
    model = toys.seeded(model).eval()
    searched, plain = (run(model, weight_only(spec, words), *shape) for words in (None, ()))
    assert error(model, searched, *shape) < error(model, plain, *shape)


def loud(seed: int, *shape: int) -> Tensor:
    """Every fourth channel, along dimension 1, is ten times as large as the others."""
    sizes = torch.ones(shape[1])
    sizes[::4] = 10.0
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) + 0.2
    return x * sizes.view(-1, *[1] * (len(shape) - 2))


@pytest.mark.parametrize(
    "model, shape, spec",
    [
        (nn.Linear(48, 16), (64, 48), FOUR_BITS),
        (nn.Linear(48, 16), (64, 48), BLOCKS),
        (nn.Conv2d(8, 8, 3, groups=2), (16, 8, 9, 9), FOUR_BITS),
        (nn.ConvTranspose2d(8, 8, 2, groups=2), (16, 8, 6, 6), PER_TENSOR),
        (nn.Conv1d(8, 8, 3), (16, 8, 9), replace(BLOCKS, block_size=(1, 4, -1))),
    ],
)
def test_loud_channels_decide(
    model: nn.Module, shape: tuple[int, ...], spec: QuantizationSpec
) -> None:
    """With data, a range serves the values whose inputs are large; without, it is that of all values."""
    model = toys.seeded(model).eval()
    x, unseen = loud(0, *shape), loud(1, *shape)

    def off(algorithms: tuple[str, ...] | None) -> float:
        config = weight_only(spec, algorithms)
        quantized = convert(export(model, x), toy(*PRODUCTS, config=config), x)
        return float((model(unseen) - quantized(unseen)).detach().square().mean())

    assert off(None) < 0.9 * off(())


@pytest.mark.parametrize("seed", [0, 1, 4])
def test_where_no_bias_is_corrected_errors_in_the_mean_count_more(seed: int) -> None:
    """A pool leaves nothing else of them; by the error of each layer alone, two of these networks lost."""
    torch.manual_seed(seed)
    first, second = (nn.Conv2d(*both, 3, padding=1, bias=False) for both in ((3, 16), (16, 8)))
    model = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.AdaptiveAvgPool2d(1)).eval()
    generator = torch.Generator().manual_seed(seed)
    x, unseen = (torch.randn(16, 3, 12, 12, generator=generator) for _ in range(2))

    def off(algorithms: tuple[str, ...] | None) -> float:
        config = weight_only(FOUR_BITS, algorithms)
        quantized = convert(export(model, x), toy(*PRODUCTS, config=config), x)
        return float((model(unseen) - quantized(unseen)).detach().square().mean())

    assert off(None) < 0.4 * off(())


def low_rank(seed: int) -> Tensor:
    """48 channels that come from two, and a little noise."""
    generator = torch.Generator().manual_seed(seed)
    both = torch.randn(2, 48, generator=torch.Generator().manual_seed(102))
    x = torch.randn(256, 2, generator=generator) @ both
    return x + 0.05 * torch.randn(256, 48, generator=generator)


def test_where_inputs_correlate_it_is_never_worse_than_nearest() -> None:
    """What is best for channels one by one loses 4 % here: it is judged on the channels as they are."""
    model = nn.Linear(48, 16).eval()
    with torch.no_grad():
        model.weight.copy_(data(102, 16, 48).sub(1).pow(3))
    x, unseen = low_rank(2), low_rank(52)

    def made(algorithms: tuple[str, ...] | None) -> torch.fx.GraphModule:
        quantizer = toy(*PRODUCTS, config=weight_only(FOUR_BITS, algorithms))
        return convert(export(model, x), quantizer, x)

    def off(algorithms: tuple[str, ...] | None) -> float:
        return float((model(unseen) - made(algorithms)(unseen)).detach().square().mean())

    assert off(None) <= off(())
    (reason,) = lines(made(("scale_search",)), "scale_search")[1]
    assert "is required" in reason


@given(st.integers(0, 99), st.sampled_from([(64, 24, 12), (64, 12), (16, 12, 5, 5)]))
@settings(max_examples=10)
def test_a_sketch_says_what_errors_do_to_outputs(seed: int, shape: tuple[int, ...]) -> None:
    """However the data came in; within 30 % for a hundred errors at once."""
    generator = torch.Generator().manual_seed(seed)
    dim = 1 if len(shape) == 4 else len(shape) - 1
    x = torch.randn(shape, generator=generator)
    whole, parts = (MomentObserver(Columns(dim, correlated=False), 12) for _ in range(2))
    whole(x)
    for part in (x[9:], x[:2], x[2:9]):
        parts(part)
    assert torch.allclose(whole.total, parts.total, rtol=1e-9, atol=1e-9)
    errors = torch.randn(100, 12, generator=generator).double()
    exact = (distinct_rows(x, dim)[0] @ errors.T).square().sum()
    found = (whole.total[:, 0, 2:] @ errors.T).square().sum() / SKETCHED
    assert float(found / exact) == pytest.approx(1, abs=0.3)


@pytest.mark.parametrize("correlated", [True, False])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4], ids=str)
def test_sums_in_another_order_are_the_same_and_sums_of_other_data_are_not(
    correlated: bool, size: float
) -> None:
    generator = torch.Generator().manual_seed(2)
    sizes = size * torch.logspace(-2, 2, 24)
    x = torch.randn(200, 7, 24, generator=generator) * sizes
    x[100:] = -x[:100]  # the sum of all is nothing but rounding

    def sums(*parts: Tensor) -> Moments:
        observer = MomentObserver(Columns(2, correlated=correlated), 24)
        for part in parts:
            observer(part)
        return observer.seen()

    whole = sums(x)
    other = sums(x[150:], x[:3]).merged(sums(x[3:77], x[77:150]))
    assert not torch.equal(whole.total, other.total)
    assert whole.same(other) and other.same(whole)
    for channel in (0, 23):
        changed = x.clone()
        changed[5, 3, channel] += sizes[channel]
        assert not whole.same(sums(changed))
    assert not whole.same(sums(x, x))


def test_without_data_it_is_made_only_if_asked_for() -> None:
    model, program = outliers(), export(outliers(), data(0, 64, 48))

    def made(algorithms: tuple[str, ...] | None) -> torch.fx.GraphModule:
        quantizer = toy(*PRODUCTS, config=weight_only(FOUR_BITS, algorithms))
        return qompose.convert_pt2e(qompose.prepare_pt2e(program, quantizer))

    plain, nearest, asked = made(None), made(()), made(("scale_search",))
    assert lines(plain, "scale_search") == ([], [])
    assert torch.equal(plain.get_buffer("weight_scale"), nearest.get_buffer("weight_scale"))
    (line,), refused = lines(asked, "scale_search")
    assert "no calibration data" in line and not refused
    assert error(model, asked, 64, 48) < error(model, plain, 64, 48)


@pytest.mark.parametrize(
    "x, reason",
    [
        (torch.zeros(64, 48), "zeros"),
        (torch.ones(1, 48), "too few distinct examples"),
        (torch.full((64, 48), float("nan")), "non-finite"),
    ],
)
@pytest.mark.parametrize("algorithms", [None, ("scale_search",)])
def test_data_that_says_nothing_is_named(
    algorithms: tuple[str, ...] | None, x: Tensor, reason: str
) -> None:
    quantizer = toy(*PRODUCTS, config=weight_only(FOUR_BITS, algorithms))
    prepared = qompose.prepare_pt2e(export(outliers(), torch.ones_like(x)), quantizer)
    prepared(x)
    made, refused = lines(qompose.convert_pt2e(prepared), "scale_search")
    assert made == [] and reason in refused[0]


def test_padding_counts_once_in_each_example() -> None:
    """Most rows are the same, and what they are says nothing of the others."""
    model, (texts, words) = toys.seeded(nn.Linear(64, 32)).eval(), (padded(0.9, 0), padded(0.0, 1))

    def off(algorithms: tuple[str, ...] | None) -> float:
        quantizer = toy(*PRODUCTS, config=weight_only(FOUR_BITS, algorithms))
        quantized = convert(export(model, texts), quantizer, texts)
        return float((model(words) - quantized(words)).detach().square().mean())

    assert off(None) < off(())


@given(st.integers(1, 4), st.integers(1, 30), st.integers(1, 5), st.integers(0, 99))
def test_distinct_rows(examples: int, rows: int, channels: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 3, (examples, rows, channels), generator=generator).double()
    expected = [row for example in x for row in {tuple(row) for row in example.tolist()}]
    assert sorted(map(tuple, distinct_rows(x, 2)[0].tolist())) == sorted(expected)
    moved, _ = distinct_rows(x.transpose(1, 2).unsqueeze(-1), 1)
    assert sorted(map(tuple, moved.tolist())) == sorted(expected)


@pytest.mark.parametrize("word", ["scale_search", "gptq"])
def test_an_input_of_one_dimension_is_a_row(word: str) -> None:
    quantizer = toy(*PRODUCTS, config=weight_only(FOUR_BITS, (word,)))
    prepared = qompose.prepare_pt2e(export(outliers(), torch.ones(48)), quantizer)
    for seed in range(64):
        prepared(data(seed, 1, 48)[0])
    made, refused = lines(qompose.convert_pt2e(prepared), word)
    assert len([*made, *refused]) == 1 and "held-out" in [*made, *refused][0]


def test_what_counts_is_in_statistics() -> None:
    """Merged and stored, they give the same scales; without them a range is that of all values."""
    config, (first, second) = weight_only(FOUR_BITS), (loud(0, 64, 48), loud(1, 64, 48))
    program = export(outliers(), first)

    def prepared() -> torch.fx.GraphModule:
        return qompose.prepare_pt2e(program, toy(*PRODUCTS, config=config))

    whole, one, other, again = (prepared() for _ in range(4))
    for model, batches in ((whole, (first, second)), (one, (first,)), (other, (second,))):
        for batch in batches:
            model(batch)
    merged = qompose.statistics(other).merged(qompose.statistics(one))
    merged.apply(again)
    scales = [qompose.convert_pt2e(m).get_buffer("weight_scale") for m in (whole, again)]
    assert torch.equal(*scales)
    replace(merged, moments=()).apply(again)
    with_none = qompose.convert_pt2e(again).get_buffer("weight_scale")
    assert not torch.equal(with_none, scales[0])


def test_other_ranges_than_that_of_all_values_are_left_alone() -> None:
    searching = replace(FOUR_BITS, observer_or_fake_quant_ctr=PerChannelHistogramObserver)
    model = outliers()
    assert lines(run(model, weight_only(searching), 64, 48), "scale_search") == ([], [])
    made, refused = lines(
        run(model, weight_only(searching, ("scale_search",)), 64, 48), "scale_search"
    )
    assert made == [] and len(refused) == 1
    assert lines(run(model, weight_only(WEIGHT), 64, 48), "scale_search") == ([], [])


def test_scales_stay_those_that_a_kernel_can_store() -> None:
    stored = BLOCKS.observer_or_fake_quant_ctr.with_args(scale_dtype=torch.bfloat16)
    model = outliers()
    converted = run(model, weight_only(replace(BLOCKS, observer_or_fake_quant_ctr=stored)), 64, 48)
    scale = converted.get_buffer("weight_scale")
    assert torch.equal(scale, scale.bfloat16().float()) and len(scale.unique()) > 8
    floor = FOUR_BITS.observer_or_fake_quant_ctr.with_args(eps=0.1)
    converted = run(
        model, weight_only(replace(FOUR_BITS, observer_or_fake_quant_ctr=floor)), 64, 48
    )
    assert float(converted.get_buffer("weight_scale").min()) >= 0.1
