# SPDX-License-Identifier: Apache-2.0
"""Constraints with the meaning of PyTorch's BackendConfig: what breaks one is refused, and never silently."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import qompose
import torch
from qompose import QuantizationConfig, QuantizationSpec
from qompose.backend import TensorConstraint
from qompose.errors import ConfigError
from qompose.observers import (
    FixedQParamsObserver,
    HistogramObserver,
    MinMaxObserver,
    PerChannelMinMaxObserver,
    PlaceholderObserver,
)
from qompose.quantizer.arbitration import inherit_specs
from qompose.spec import FixedQParamsQuantizationSpec
from qompose.spec.claim import Claim, Point, PointSpec, shared_with
from qompose.spec.qparams import Bounds
from torch import nn
from torch.ao.quantization.fake_quantize import FakeQuantize
from torch.ao.quantization.observer import MinMaxObserver as TorchMinMaxObserver

from tests.core.toy import (
    ADD,
    DYNAMIC,
    INT8,
    LINEAR,
    STATIC,
    VIEW,
    WEIGHT,
    Model,
    convert,
    export,
    nodes_calling,
    plan_of,
    prepare,
    randn,
    seeded,
    sqnr,
    toy,
)

X = randn(3, 3)
SCHEMES = torch.per_tensor_affine, torch.per_tensor_symmetric, torch.per_channel_symmetric


def constraint(*dtypes: torch.dtype, **facts: Any) -> TensorConstraint:
    return TensorConstraint(
        dtypes=frozenset(dtypes or {torch.int8}), qschemes=frozenset(SCHEMES), **facts
    )


def bounded(spec: QuantizationSpec, kind: Any, **facts: Any) -> QuantizationSpec:
    return replace(spec, observer_or_fake_quant_ctr=kind.with_args(eps=2**-12), **facts)


TUTORIAL = {"quant_max_upper_bound": 127, "scale_min_lower_bound": 2**-12}


class TestTheTutorial:
    """PyTorch's BackendConfig tutorial: integers up to 127 and scales from 2**-12 on.

    There, the default configuration breaks both bounds, and prepare quietly quantizes nothing.
    """

    activation = constraint(torch.uint8, quant_min_lower_bound=0, **TUTORIAL)
    weight = constraint(torch.int8, quant_min_lower_bound=-128, **TUTORIAL)
    rule = replace(
        LINEAR, accepts={"activation": activation, "output": activation, "weight": weight}
    )
    wide = QuantizationSpec(torch.uint8, HistogramObserver, 0, 255, torch.per_tensor_affine)
    narrow = bounded(wide, HistogramObserver, quant_max=127)
    default = QuantizationConfig(wide, wide, WEIGHT, name="default")
    within = QuantizationConfig(
        narrow, narrow, bounded(WEIGHT, PerChannelMinMaxObserver), name="within the bounds"
    )

    def test_the_default_is_refused_when_it_is_set_with_every_bound(self) -> None:
        with pytest.raises(ConfigError, match=r"quant_max_upper_bound.*scale_min_lower_bound"):
            toy(self.rule, config=self.default)

    def test_what_keeps_every_bound_is_taken(self) -> None:
        assert self.rule.objection(self.within) is None

    @pytest.mark.parametrize("role", ["input_activation", "output_activation", "weight"])
    def test_one_role_that_breaks_a_bound_is_enough(self, role: str) -> None:
        config = replace(self.within, **{role: getattr(self.default, role)})
        with pytest.raises(ConfigError, match="scale_min_lower_bound"):
            toy(self.rule, config=config)


@pytest.mark.parametrize("name", ["scale_exact_match", "scale_min_lower_bound", "ch_axis"])
def test_true_is_no_number(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        constraint(**{name: True})


class Nameless(nn.Module):
    """An observer that does not say its least scale."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def calculate_qparams(self) -> None:
        """Estimate nothing."""


def fixed(scale: float, zero_point: int, dtype: torch.dtype = torch.int8) -> Any:
    return FixedQParamsQuantizationSpec(dtype, scale, zero_point)


SYMMETRIC = replace(INT8, qscheme=torch.per_tensor_symmetric)
PER_TOKEN = QuantizationSpec(
    torch.int8, PlaceholderObserver.with_args(eps=1.0), -128, 127, torch.per_channel_symmetric,
    is_dynamic=True, block_size=(-1,),
)  # fmt: skip
OBSERVED_FIXED = FixedQParamsObserver.with_args(scale=0.75, zero_point=0)
TORCHS_EPS = TorchMinMaxObserver.with_args(eps=1e-3)
LEAST = {"scale_min_lower_bound": 2**-12}


def by(factory: Any) -> QuantizationSpec:
    return replace(INT8, observer_or_fake_quant_ctr=factory)


# (the bounds, the specification, what the objection names or None)
OBJECTIONS = {
    "ours": (LEAST, by(MinMaxObserver), "MinMaxObserver"),
    "ours, bounded": (LEAST, by(MinMaxObserver.with_args(eps=1e-3)), None),
    "torch's": (LEAST, by(TorchMinMaxObserver), "MinMaxObserver"),
    "torch's, bounded": (LEAST, by(TORCHS_EPS), None),
    "torch's, fake": (LEAST, by(FakeQuantize.with_args(observer=TorchMinMaxObserver)), "scale_min"),
    "torch's, fake and bounded": (LEAST, by(FakeQuantize.with_args(observer=TORCHS_EPS)), None),
    "the bound, which float32 does not hold": (
        {"scale_min_lower_bound": 1e-5}, by(MinMaxObserver.with_args(eps=1e-5)), None
    ),
    "exact": (
        {"scale_exact_match": 1 / 256, "zero_point_exact_match": -128}, fixed(1 / 256, -128), None
    ),
    "exact as float32": ({"scale_exact_match": 0.1, "zero_point_exact_match": 0}, fixed(0.1, 0), None),
    "symmetric": ({"zero_point_exact_match": 0}, SYMMETRIC, None),
    "what only data tells": ({"scale_max_upper_bound": 0.5}, INT8, None),
    "an unknown least scale": (LEAST, by(Nameless), "Nameless"),
    "a scale from data": ({"scale_exact_match": 1 / 256}, INT8, "scale_exact_match"),
    "a zero point from data": ({"zero_point_exact_match": 0}, INT8, "zero_point_exact_match"),
    "another symmetric zero point": ({"zero_point_exact_match": 128}, SYMMETRIC, "exactly 128"),
    "another fixed scale": ({"scale_exact_match": 1 / 256}, fixed(1 / 128, 0), "0.0078125"),
    "another fixed zero point": ({"zero_point_exact_match": -128}, fixed(1 / 256, 0), "-128"),
    "a fixed scale below": ({"scale_min_lower_bound": 0.5}, fixed(1 / 256, 0), "0.00390625"),
    "a fixed scale above": ({"scale_max_upper_bound": 0.5}, fixed(0.75, 0), "0.75"),
    "a fixed scale outside, from an observer": (
        {"scale_max_upper_bound": 0.5}, by(OBSERVED_FIXED), "0.75"
    ),
    "a largest scale at run time": (
        {"scale_max_upper_bound": 0.5}, DYNAMIC.input_activation, "scale_max_upper_bound"
    ),
    "the least scale at run time": (LEAST, DYNAMIC.input_activation, "PlaceholderObserver"),
    "the least scale per token": (LEAST, PER_TOKEN, "7.87402e-08"),
    "another type, fixed": ({}, fixed(1 / 256, 0, torch.uint8), "torch.uint8"),
    "another range, fixed": ({"quant_min_lower_bound": -127}, fixed(1 / 256, 0), "quant_min=-128"),
}  # fmt: skip


@pytest.mark.parametrize(("facts", "spec", "named"), OBJECTIONS.values(), ids=OBJECTIONS)
def test_what_is_known_before_calibration_is_refused_when_it_is_set(
    facts: dict[str, Any], spec: Any, named: str | None
) -> None:
    row = replace(LINEAR, accepts={"activation": constraint(blocks=True, **facts)})
    output = None if spec.is_dynamic else STATIC.output_activation
    config = replace(STATIC, input_activation=spec, output_activation=output)
    refused = nullcontext() if named is None else pytest.raises(ConfigError, match=named)
    assert (row.objection(config) is None) is (named is None)
    with refused:
        toy(row, config=config)


def test_a_cast_has_no_scale_to_be_bounded() -> None:
    half = QuantizationSpec(torch.float16, PlaceholderObserver)
    takes = TensorConstraint(
        dtypes=frozenset({torch.float16}), qschemes=frozenset({None}), scale_max_upper_bound=1e-9
    )
    assert takes.objection("weight", half) is None


def test_the_output_of_a_rule_that_shares_is_held_to_its_constraint() -> None:
    row = replace(VIEW, condition=None, accepts={"output": constraint(quant_min_lower_bound=0)})
    assert "quant_min=-128" in str(row.objection(STATIC))


def scales_of(converted: Any) -> list[float]:
    return [node.args[1] for node in nodes_calling(converted, "quantize_per_tensor")]


def two() -> Any:
    """A small first product and a large second one."""
    layers = {"small": nn.Linear(3, 4), "large": nn.Linear(4, 5)}
    return seeded(Model(lambda self, x: self.large(self.small(x) * 100.0), **layers))


class TestAtConvert:
    """What only data tells: the region stays in float, and the report says which bound was broken."""

    def converted(self, **facts: Any) -> Any:
        row = replace(LINEAR, accepts={"output": constraint(**facts)})
        return convert(export(two(), X), toy(row), X)

    def test_a_scale_above_its_bound(self) -> None:
        converted = self.converted(scale_max_upper_bound=1.0)
        small, large = (r for r in qompose.report(converted).rows if r.operator == "aten.linear")
        assert small.state == "simulated (Q/DQ)"
        assert large.state == "float"
        assert "output of linear_1" in large.reason
        assert "scale_max_upper_bound" in large.reason
        with pytest.warns(qompose.QomposeWarning, match="linear_1 in large"):
            lowered = qompose.lower(converted)
        assert qompose.report(lowered).count("int8 kernel") == 1
        assert sqnr(two()(X), lowered(X)) > 25

    def test_the_bound_itself_is_allowed(self) -> None:
        prepared = prepare(export(two(), X), toy(LINEAR))
        prepared(X)
        largest = max(scales_of(qompose.convert_pt2e(prepared)))
        assert not self.converted(scale_max_upper_bound=largest).meta["qompose"].dropped
        assert self.converted(scale_max_upper_bound=0.999 * largest).meta["qompose"].dropped

    def test_observers_that_a_callback_put_in_are_held_to_the_bound(self) -> None:
        """When the configuration was set, the least scale was that of its own observer."""

        class Swapping(qompose.RuleQuantizer):
            def prepare_obs_or_fq_callback(self, model: Any, observers: Any) -> None:
                for place, observer in list(observers.items()):
                    if observer.qscheme == torch.per_tensor_affine:
                        observers[place] = MinMaxObserver(torch.int8, qscheme=observer.qscheme)

        least = constraint(scale_min_lower_bound=1e-3)
        spec = replace(INT8, observer_or_fake_quant_ctr=MinMaxObserver.with_args(eps=1e-3))
        row = replace(LINEAR, accepts={"activation": least})
        config = replace(STATIC, input_activation=spec, output_activation=None)
        quantizer = Swapping(toy(row, config=None).backend).set_global(config)
        converted = convert(export(seeded(nn.Linear(3, 4)), X * 1e-4), quantizer, X * 1e-4)
        (reason,) = converted.meta["qompose"].dropped.values()
        assert "scale_min_lower_bound" in reason

    def test_bounds_survive_saving(self, tmp_path: Any) -> None:
        converted = self.converted(scale_max_upper_bound=1.0)
        qompose.save(converted, tmp_path / "model.qompose")
        loaded = qompose.load(tmp_path / "model.qompose")
        assert loaded.meta["qompose"].dropped == converted.meta["qompose"].dropped
        bounds = [[s.bounds for s in c.specs] for c in plan_of(converted).claims]
        assert [[s.bounds for s in c.specs] for c in plan_of(loaded).claims] == bounds
        assert bounds[0][-1] == Bounds(scale_max_upper_bound=1.0)


def test_fixed_parameters_take_no_part_in_balancing() -> None:
    """Factors would change the scale that is fixed."""
    rule = replace(LINEAR, bias="bias", channels=(-1, -1))
    x = X * torch.tensor([1.0, 1000.0, 1e-3])
    config = replace(STATIC, input_activation=fixed(4.0, 0), output_activation=None, balance=True)
    converted = convert(export(seeded(nn.Linear(3, 4)), x), toy(rule, config=config), x)
    assert scales_of(converted) == [4.0]
    assert converted.meta["qompose"].balanced == ()


def test_dropping_a_claim_undoes_the_balancing_that_it_took_part_in() -> None:
    """Another reader of a balanced tensor reads it in float now, and must see it as it was."""
    spread = torch.tensor([1.0, 300.0, 1e-2])
    x = randn(64, 3) * spread
    model: Any = seeded(
        Model(
            lambda self, x: torch.cat([self.one(x), self.other(x) * 1.0], -1),
            one=nn.Linear(3, 64), other=nn.Linear(3, 64),
        )
    )  # fmt: skip
    with torch.no_grad():
        for part in (model.one, model.other):
            part.weight /= spread
        model.other.weight *= 1e4
    rule = replace(
        LINEAR, bias="bias", channels=(-1, -1),
        accepts={"weight": constraint(scale_max_upper_bound=10.0)},
    )  # fmt: skip
    config = replace(STATIC, output_activation=None, balance=True)
    free = convert(export(model, x), toy(replace(rule, accepts={}), config=config), x)
    assert free.meta["qompose"].balanced
    converted = convert(export(model, x), toy(rule, config=config), x)
    assert len(converted.meta["qompose"].dropped) == 1
    assert converted.meta["qompose"].balanced == ()
    exact, found = model(x), converted(x)
    assert torch.equal(found[:, 64:], exact[:, 64:])
    assert sqnr(exact[:, :64], found[:, :64]) > 0


def test_two_consumers_of_a_tensor_are_judged_apart() -> None:
    """One kernel takes the scale of the shared tensor, the other does not."""
    fork = Model(lambda self, x: self.linear(x) + x, linear=nn.Linear(3, 3))
    bounded = replace(ADD, accepts={"activation": constraint(scale_max_upper_bound=1e-6)})
    converted = convert(export(seeded(fork), X), toy(LINEAR, bounded), X)
    states = {row.rule: row.state for row in qompose.report(converted).rows}
    assert states == {"linear": "simulated (Q/DQ)", "add": "float"}


def test_constraints_are_data() -> None:
    bounds = {"scale_min_lower_bound": 2**-12, "zero_point_exact_match": 0, "ch_axis": 0}
    value = constraint(
        torch.int8, torch.uint8, quant_range=(-128, 127), block_sizes={(2, 1)}, **bounds
    )
    data = value.to_dict()
    assert json.loads(json.dumps(data)) == data
    schemes = ["per_channel_symmetric", "per_tensor_affine", "per_tensor_symmetric"]
    assert data == {
        "dtypes": ["int8", "uint8"], "qschemes": schemes, "quant_range": [-128, 127],
        **bounds, "blocks": True, "block_sizes": [[2, 1]],
    }  # fmt: skip


def test_no_bound_is_no_bound() -> None:
    assert constraint().bounds is None
    assert Bounds().objections(torch.tensor([0.1, 1e9]), torch.tensor([0, 3])) == []


def test_who_inherits_a_specification_keeps_the_bounds_of_its_own_kernel() -> None:
    lost, kept = Point("x", "a"), Point("a", "b")
    bounds = Bounds(scale_max_upper_bound=0.5)
    loser = Claim(
        owner="A", rule="r", anchor="a", nodes=("a",), output="a", specs=(PointSpec(lost, INT8),)
    )
    heir = replace(shared_with(kept, lost), bounds=bounds)
    standing = replace(loser, nodes=("b",), output="b", specs=(heir,))

    (claim,) = inherit_specs([standing], [loser])

    assert claim.specs == (PointSpec(kept, INT8, bounds=bounds),)


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ({"dtypes": torch.int8}, "dtypes"),
        ({"qschemes": ()}, "qschemes"),
        ({"quant_min_lower_bound": 5, "quant_max_upper_bound": 4}, "quant_min_lower_bound=5"),
        ({"scale_min_lower_bound": 1.0, "scale_max_upper_bound": 0.5}, "scale_min_lower_bound=1.0"),
        ({"scale_max_upper_bound": float("nan")}, "scale_max_upper_bound"),
        ({"scale_exact_match": 0.0}, "scale_exact_match"),
        ({"scale_max_upper_bound": float("inf")}, "scale_max_upper_bound"),
        ({"ch_axis": "0"}, "ch_axis"),
        ({"quant_range": (3,)}, "quant_range"),
    ],
    ids=str,
)
def test_a_constraint_that_nothing_meets_is_refused(facts: dict[str, Any], named: str) -> None:
    base = {"dtypes": {torch.int8}, "qschemes": {torch.per_tensor_affine}}
    with pytest.raises(ConfigError, match=named):
        qompose.backend.TensorConstraint(**{**base, **facts})


def test_sets_and_ranges_of_other_kinds_are_taken_for_what_they_are() -> None:
    made = qompose.backend.TensorConstraint(
        dtypes=[torch.int8],  # type: ignore[arg-type]
        qschemes={torch.per_tensor_affine},  # type: ignore[arg-type]
        quant_range=[-128, 127],  # type: ignore[arg-type]
    )
    assert (made.dtypes, made.quant_range) == (frozenset({torch.int8}), (-128, 127))
    assert made.objection("activation", INT8) is None
