# SPDX-License-Identifier: Apache-2.0
"""The range that is chosen by the error of what reads a tensor."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
from qompose import QuantizationConfig, activation_spec, weight_spec
from qompose.errors import StatisticsError, UncalibratedError
from qompose.observers import AutoRangeObserver, HistogramObserver, MinMaxObserver
from qompose.observers.auto_range import WHOLE, Reader, measured_against
from qompose.observers.channel_ranges import base_observer
from qompose.observers.make_observer import observer_nodes, observers_of
from qompose.spec.qparams import fake_quantize
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional as F

from tests.core.toy import (
    CAT,
    CONV,
    LINEAR,
    RELU,
    VIEW,
    Model,
    export,
    plan_of,
    prepare,
    randn,
    toy,
)


def observed(x: Tensor, *readers: Reader, dim: int = -1, **options: Any) -> AutoRangeObserver:
    observer = AutoRangeObserver(torch.uint8, **options)
    observer.channel_dim = dim
    if readers:
        observer.readers = readers
    for part in x.split(16):
        observer(part)
    return observer


def ends(observer: nn.Module) -> tuple[float, float]:
    scale, zero_point = observer.calculate_qparams()  # type: ignore[operator]
    return float(-zero_point * scale), float((255 - zero_point) * scale)


def with_outliers(rows: int = 512, channels: int = 16, largest: float = 60.0) -> Tensor:
    """Values of one size, and in each hundredth row one that is much larger."""
    x = randn(rows, channels)
    x[::100, 3] = largest
    return x


@pytest.mark.parametrize(
    ("shape", "groups", "transposed"),
    [((6, 4), 1, False), ((6, 2, 3, 3), 2, False), ((4, 3, 5), 2, True), ((4, 1, 3), 4, False)],
)
def test_the_error_of_a_product_is_that_of_all_its_taps(
    shape: tuple[int, ...], groups: int, transposed: bool
) -> None:
    weight, rows = randn(*shape), randn(5, 4)
    reader = Reader(weight, groups, transposed)
    wanted = torch.zeros(5)
    each = 4 // groups
    for group in range(groups):
        part = rows[:, group * each : (group + 1) * each]
        if transposed:
            taps = weight[group * each : (group + 1) * each].flatten(1)
        else:
            outputs = shape[0] // groups
            taps = weight[group * outputs : (group + 1) * outputs].transpose(0, 1).flatten(1)
        wanted += (part @ taps).square().sum(1)
    assert reader.channels == 4
    assert torch.allclose(reader.squared_sizes(rows), wanted, rtol=1e-4)


def test_small_rows_are_measured_against_the_mean() -> None:
    sizes, weights = torch.tensor([1.0, 5.0, 9.0]), torch.tensor([1.0, 2.0, 1.0])
    assert measured_against(sizes, weights).tolist() == [5.0, 5.0, 9.0]


def test_a_rare_value_is_clipped_where_the_product_hardly_reads_it() -> None:
    x, weight = with_outliers(), randn(8, 16)
    weight[:, 3] = 0.0
    observer = observed(x, Reader(weight))
    assert ends(observer)[1] < 10
    assert observer.choice.name != WHOLE and observer.choice.error < 0.5


@pytest.mark.parametrize(
    ("largest", "levels", "named"),
    [(-60.0, 256, "1/16"), (60.0, 256, "1/16"), (400.0, 16, "1/64")],
)
def test_candidates_of_every_kind_are_chosen(largest: float, levels: int, named: str) -> None:
    weight = randn(8, 16)
    weight[:, 3] = 0.0
    observer = AutoRangeObserver(torch.uint8, quant_min=0, quant_max=levels - 1)
    observer.readers = [Reader(weight)]
    observer(with_outliers(2048, largest=largest))
    assert named in observer.choice.name


@pytest.mark.parametrize(
    ("shape", "dim", "rows"),
    [((9, 4), 1, 9), ((9, 5), 1, 0), ((4, 9), 1, 0), ((4,), 1, 0), ((4,), 0, 1), ((4,), -1, 1)],
    ids=str,
)
def test_tensors_of_other_channels_have_no_rows(shape: Any, dim: int, rows: int) -> None:
    observer = AutoRangeObserver(torch.uint8)
    observer.channel_dim, observer.channels = dim, 4
    observer(randn(*shape))
    assert observer.sample.seen == rows


def test_nothing_is_chosen_of_nothing() -> None:
    with pytest.raises(UncalibratedError):
        _ = AutoRangeObserver(torch.uint8).choice


def test_it_is_kept_where_it_makes_the_output() -> None:
    """Its row is nothing but that value to the product, and an error there is the whole of the row."""
    x, weight = with_outliers(), randn(8, 16)
    assert ends(observed(x, Reader(weight)))[1] == pytest.approx(60.0, rel=0.02)
    assert ends(observed(x))[1] == pytest.approx(60.0, rel=0.02)


def test_ranges_that_are_a_little_better_are_not_worth_what_they_clip_elsewhere() -> None:
    x = torch.cat([randn(2000, 8), randn(2000, 8) * 1.5])
    observer = observed(x)
    assert observer.choice.name == WHOLE
    assert ends(observer) == ends(fed(MinMaxObserver(torch.uint8), x))


def fed(observer: nn.Module, x: Tensor) -> nn.Module:
    observer(x)
    return observer


@pytest.mark.parametrize("examples", [1, 7, 8])
def test_few_examples_are_not_gone_by(examples: int) -> None:
    x, weight = with_outliers(64 * examples).view(examples, 64, 16), randn(8, 16)
    weight[:, 3] = 0.0
    observer = observed(x, Reader(weight))
    if examples < 8:
        assert observer.choice.name == WHOLE
        assert str(examples) in observer.choice.reason
    else:
        assert observer.choice.name != WHOLE
        assert not observer.choice.reason


def test_a_row_that_only_the_held_back_half_has_decides_too() -> None:
    """Every example of large rows is of one half: what the other half would choose clips them."""
    x, weight = randn(2000, 16), randn(8, 16)
    probe = observed(x)
    rows, half = probe.sample.rows, probe.sample.half
    for side in (half, ~half):
        changed = x.clone()
        chosen = {tuple(row.tolist()) for row in rows[side][:40]}
        for number, row in enumerate(x):
            if tuple(row.tolist()) in chosen:
                changed[number, 3] += 60.0
        assert ends(observed(changed, Reader(weight)))[1] > 55


def on_background(background: Tensor, seed: int = 0) -> Tensor:
    """Images with something in the middle: `(32, C, 12, 12)`."""
    x = background[:, None, None].expand(32, -1, 12, 12).clone()
    x[..., 4:9, 3:10] = randn(32, len(background), 5, 7, seed=seed)
    return x


@pytest.mark.parametrize("seed", range(8))
def test_a_background_is_represented_better_by_a_range_that_is_a_little_wider(seed: int) -> None:
    """Judged on other images than those that were observed, by what the convolution makes of them."""
    background, weight = randn(4, seed=seed), randn(6, 4, 3, 3, seed=seed + 100)
    one, unseen = (
        observed(on_background(background), Reader(weight), dim=1),
        on_background(background, 9),
    )
    whole = fed(MinMaxObserver(torch.uint8), on_background(background))
    errors = []
    for observer in (one, whole):
        scale, zero_point = observer.calculate_qparams()  # type: ignore[operator]
        rounded = fake_quantize(unseen, scale, zero_point, 0, 255)
        errors.append(float(F.conv2d(rounded - unseen, weight).square().mean()))
    if one.choice.name == WHOLE:
        assert errors[0] == errors[1]
    else:
        assert errors[0] < 0.85 * errors[1]
        assert ends(whole)[0] * 1.08 <= ends(one)[0] <= ends(whole)[0]
        assert ends(whole)[1] <= ends(one)[1] <= ends(whole)[1] * 1.08


def test_a_background_between_steps_widens_the_range_and_no_other_does() -> None:
    weight = randn(6, 4, 3, 3)
    chosen = {
        name: observed(on_background(background), Reader(weight), dim=1).choice.name
        for name, background in {"between": randn(4), "zero": torch.zeros(4)}.items()
    }
    assert chosen["between"].startswith("widened")
    assert chosen["zero"] == WHOLE
    assert observed(randn(32, 4, 12, 12), Reader(weight), dim=1).choice.name == WHOLE
    seldom = randn(32, 4, 12, 12)
    seldom[..., :3, :10] = randn(4)[:, None, None]  # a fifth of the places
    assert observed(seldom, Reader(weight), dim=1).choice.name == WHOLE


@pytest.mark.parametrize(
    "reader",
    [
        Reader(),
        Reader(randn(6, 4)),
        Reader(randn(6, 4, 1, 1)),
        Reader(randn(4, 6, 2, 2), transposed=True),
    ],
    ids=["values", "linear", "of one tap", "transposed"],
)
def test_only_for_windows_is_a_range_widened(reader: Reader) -> None:
    """Of other products the error is that of the background alone, which may be nothing but padding."""
    assert observed(on_background(randn(4)), reader, dim=1).choice.name == WHOLE


def test_without_an_error_of_the_background_nothing_is_better() -> None:
    x = on_background(randn(4))
    assert observed(x, Reader(torch.zeros(6, 4, 3, 3)), dim=1).choice.name == WHOLE


@pytest.mark.parametrize("power", [-100, 65, 100])
def test_magnitudes_whose_squares_float32_does_not_hold_are_as_good(power: int) -> None:
    reader, x = Reader(randn(6, 4, 3, 3)), on_background(randn(4))
    usual, other = (observed(x * s, reader, dim=1, eps=1e-38).choice for s in (1.0, 2.0**power))
    assert usual.name == other.name != WHOLE
    assert other.high == usual.high * 2.0**power and math.isclose(other.error, usual.error)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_widened_range_has_all_values(sign: int) -> None:
    """Of values that are all far from zero, too."""
    weight, widened = randn(6, 4, 3, 3), 0
    for seed in range(6):
        x = sign * (on_background(randn(4, seed=seed)) + 9)
        choice = observed(x, Reader(weight), dim=1).choice
        assert choice.low <= float(x.min()) and float(x.max()) <= choice.high
        widened += choice.name != WHOLE
    assert widened


@pytest.mark.parametrize("kind", ["outliers", "background"])
def test_a_state_dict_has_the_rows(kind: str) -> None:
    x, weight, dim = with_outliers(), randn(8, 16), -1
    weight[:, 3] = 0.0
    if kind == "background":
        x, weight, dim = on_background(randn(4)), randn(6, 4, 3, 3), 1
    one, other = observed(x, Reader(weight), dim=dim), AutoRangeObserver(torch.uint8)
    other.load_state_dict(one.state_dict())
    other.readers = one.readers
    assert other.choice == one.choice
    assert copy.deepcopy(one).choice == one.choice
    assert one.choice.name != WHOLE


def test_facts_without_rows_are_not_enough() -> None:
    histogram = fed(HistogramObserver(torch.uint8), randn(40, 4))
    with pytest.raises(StatisticsError):
        AutoRangeObserver(torch.uint8).take(histogram.facts())  # type: ignore[operator]


def test_masks_are_no_rows() -> None:
    x = randn(64, 4)
    x[5, 2] = torch.finfo(torch.float32).min
    assert float(observed(x).sample.rows.abs().amax()) < 10


def test_a_weight_that_changes_is_looked_at_again() -> None:
    x, weight = with_outliers(), randn(8, 16)
    observer = observed(x, Reader(weight))
    assert observer.choice.name == WHOLE
    weight[:, 3] = 0.0
    assert observer.choice.name != WHOLE


CONFIG = QuantizationConfig(
    activation_spec(torch.int8, -128, 127),
    activation_spec(torch.int8, -128, 127),
    weight_spec(-127, 127),
)


def auto_observers(prepared: GraphModule) -> dict[str, AutoRangeObserver]:
    """By the tensor that it observes first, in the order of the program."""
    calls = observer_nodes(prepared)
    plan, known = plan_of(prepared), observers_of(calls)
    found = {str(plan.groups[n].points[0].source): base_observer(o) for n, o in known.items()}
    return {name: o for name, o in found.items() if isinstance(o, AutoRangeObserver)}


def test_prepare_tells_who_reads() -> None:
    """Of a convolution the channels are its own; a relu that reads floats sees values."""

    def forward(self: Any, x: Tensor) -> Tensor:
        image = self.first(x)
        return self.third(self.second(image).mean((2, 3))) + image.relu().mean()

    model = Model(
        forward,
        first=nn.Conv2d(3, 4, 3, padding=1),
        second=nn.Conv2d(4, 4, 1, groups=2),
        third=nn.Linear(4, 5),
    )
    program = export(model, randn(2, 3, 8, 8))
    found = auto_observers(prepare(program, toy(config=CONFIG)))
    told = {
        name: (o.channel_dim, o.channels, [(r.weight is not None, r.groups) for r in o.readers])
        for name, o in found.items()
    }
    assert told["x"] == (1, 3, [(True, 1)])
    assert told["conv2d"] == (1, 4, [(True, 2), (False, 1)])
    assert told["mean"] == (1, 4, [(True, 1)])
    assert told["linear"] == (1, 5, [(False, 1)])


def test_tensors_that_share_a_range_have_rows_of_the_one_that_is_read() -> None:
    layers = {"one": nn.Linear(3, 4), "other": nn.Linear(3, 2), "linear": nn.Linear(6, 2)}
    model = Model(lambda m, x, y: m.linear(torch.cat([m.one(x), m.other(y)], 1)), **layers)
    prepared = prepare(export(model, randn(9, 3), randn(9, 3)), toy(config=CONFIG))
    prepared(randn(9, 3), randn(9, 3))
    shared = next(o for o in auto_observers(prepared).values() if o.shared)
    assert shared.sample.rows.shape == (9, 6)


@pytest.mark.parametrize("kind", ["json", "safetensors"])
@pytest.mark.parametrize("values", [8, 0], ids=["read as it is flattened", "nothing fits"])
def test_views_of_what_was_seen_have_rows(values: int, kind: str, tmp_path: Path) -> None:
    """They count once. Statistics go to another model even where no view has the channels that are read."""
    layers = {"conv": nn.Conv2d(2, 3, 1), "linear": nn.Linear(12, 5)}
    model = Model(lambda m, x: m.linear(m.conv(x).view(9, 12)), **layers)
    program = export(model, randn(9, 2, 2, 2))
    quantizer = toy(CONV, VIEW, LINEAR, config=CONFIG)
    prepared = prepare(program, quantizer)
    shared = next(o for o in auto_observers(prepared).values() if o.shared)
    shared.channels = 12 if values else 7
    prepared(randn(9, 2, 2, 2))
    assert (shared.sample.seen, shared.histogram.total) == (9 * bool(values), 9 * 12)
    file = tmp_path / f"seen.{kind}"
    qompose.statistics(prepared).save(file)
    prepare(program, quantizer).load_state_dict(prepared.state_dict())
    applied = qompose.Statistics.load(file).apply(prepare(program, quantizer))
    found = next(o for o in auto_observers(applied).values() if o.shared)
    assert (found.choice.low, found.choice.high) == (shared.choice.low, shared.choice.high)
    assert ("channels" in shared.choice.reason) == (not values)


@pytest.mark.parametrize("kind", ["json", "safetensors"])
def test_a_statistics_file_has_the_background(kind: str, tmp_path: Path) -> None:
    x = on_background(randn(4))
    program = export(nn.Sequential(nn.Conv2d(4, 6, 3)), x)
    observed_model, other = (prepare(program, toy(CONV, config=CONFIG)) for _ in range(2))
    qompose.calibrate(observed_model, [(x,)], progress=False)
    file = tmp_path / f"seen.{kind}"
    qompose.statistics(observed_model).save(file)
    qompose.Statistics.load(file).apply(other)
    chosen, again = (
        next(iter(auto_observers(model).values())).choice for model in (observed_model, other)
    )
    assert chosen == again and chosen.name.startswith("widened")


def test_a_view_with_the_channels_that_are_read_hides_no_reader() -> None:
    layers = {"conv": nn.Conv2d(2, 3, 1), "other": nn.Conv2d(3, 5, 1)}
    model = Model(lambda m, x: m.other(m.conv(x).view(9, 3, 4, 1)), **layers)
    prepared = prepare(export(model, randn(9, 2, 2, 2)), toy(CONV, VIEW, config=CONFIG))
    (shared,) = (o for o in auto_observers(prepared).values() if o.shared)
    assert [reader.weight is not None for reader in shared.readers] == [True]


def test_sizes_that_are_open_are_no_channels() -> None:
    """Rows of batches of several widths have the dimension whose size is known, if there is one."""
    width = torch.export.Dim("width", min=2, max=64)
    for shape, dims, rows in [((9, 3, 8), {2: width}, 9 * (8 + 12)), ((8,), {0: width}, 0)]:
        model = Model(lambda m, x: (x.relu() * 2).relu())
        program = export(model, randn(*shape), dynamic_shapes=(dims,))
        prepared = prepare(program, toy(RELU, config=CONFIG))
        for size in (8, 12):
            prepared(randn(*shape[:-1], size))
        (first, *_) = auto_observers(prepared).values()
        assert first.sample.seen == rows
        qompose.convert_pt2e(prepared)(randn(*shape[:-1], 16))


def test_an_observer_that_nobody_told_keeps_rows_of_the_first_width() -> None:
    observer = AutoRangeObserver(torch.uint8)
    for width in (4, 6, 4):
        observer(randn(10, width))
    assert observer.sample.rows.shape == (10, 4) and observer.choice.name == WHOLE


def test_of_tensors_that_no_product_touches_it_is_the_one_of_most_channels() -> None:
    model = Model(lambda m, x, y: torch.cat([x.relu(), y.relu()], 1))
    prepared = prepare(export(model, randn(9, 2), randn(9, 6)), toy(RELU, CAT, config=CONFIG))
    assert 8 in {o.channels for o in auto_observers(prepared).values() if o.shared}
