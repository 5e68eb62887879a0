# SPDX-License-Identifier: Apache-2.0
"""What cannot be compared is an error that says so, and is put down to whoever made it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
from qompose import UserError
from qompose.errors import BatchError, CalibrationError, MemberError, StageError
from qompose.program.meta import KERNELS_TAG, META_KEY, tag_of
from qompose.reporting.report_data import CLIPPING, KERNEL_ERROR, NOT_FINITE
from torch import Tensor, nn

from tests.core.diagnosis.brute import stages
from tests.core.toy import Model, export, randn, seeded, toy

BATCHES = [randn(4, 6, seed=n) for n in range(2)]


def forms(model: nn.Module) -> dict[str, Any]:
    made = stages(export(model.eval(), BATCHES[0]), toy(), BATCHES)
    qompose.assert_lowered(made["lowered"])
    return made


def net(seed: int = 0) -> nn.Module:
    return seeded(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)), seed)


@pytest.fixture(scope="module")
def linear() -> dict[str, Any]:
    return forms(net())


@pytest.fixture(scope="module")
def others() -> dict[str, Any]:
    """The same structure with other parameters."""
    return forms(net(5))


def _raises(reference: Tensor, other: Tensor) -> float:
    raise ZeroDivisionError("nothing to divide")


def _raises_later(reference: Tensor, other: Tensor) -> float:
    if reference.shape == BATCHES[0].shape:
        raise ZeroDivisionError("nothing to divide")
    return 0.0


@pytest.mark.parametrize(
    ("metrics", "error"),
    [
        ({"mine": _raises}, MemberError),
        ({"mine": _raises_later}, MemberError),
        *(({"mine": lambda *_, n=n: n}, UserError) for n in (None, "7", torch.zeros(2), math.nan)),
        ([_raises], UserError),
        ({"mine": 3}, UserError),
        ("mine", UserError),
    ],
)
def test_metrics_that_say_nothing(linear: Any, metrics: Any, error: type[Exception]) -> None:
    """The first two raise something of their own; the last three are no functions by name."""
    with pytest.raises(error, match="metric") as caught:
        qompose.compare(linear["float"], linear["converted"], BATCHES, metrics=metrics)
    assert error is UserError or "'mine' raised ZeroDivisionError" in str(caught.value)


def test_a_metric_may_write_to_what_it_gets(linear: dict[str, Any]) -> None:
    def largest(reference: Tensor, other: Tensor) -> float:
        return float(other.sub_(reference).abs().max() + 0 * reference.zero_().sum())

    programs = linear["float"], linear["converted"]
    before = {name: value.clone() for name, value in linear["float"].state_dict.items()}
    expected = qompose.compare(*programs, BATCHES)
    found = qompose.compare(*programs, BATCHES, metrics={"largest": largest})
    assert [row.sqnr for row in found] == [row.sqnr for row in expected]
    for name, value in linear["float"].state_dict.items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


@pytest.mark.parametrize("stage", ["float", "prepared", "lowered", "called"])
def test_kernels_are_judged_beside_a_converted_model(linear: Any, stage: str) -> None:
    beside = linear.get(stage, nn.Linear(6, 3))
    with pytest.raises(StageError, match="converted"):
        qompose.compare(linear["float"], linear["lowered"], BATCHES, converted=beside)


def test_kernels_are_judged_beside_the_model_of_their_own(linear: Any, others: Any) -> None:
    models = linear["float"], linear["lowered"], BATCHES
    with pytest.raises(UserError, match="converted"):
        qompose.compare(*models, converted=others["converted"])
    assert not qompose.compare(*models, converted=linear["converted"]).of_cause(KERNEL_ERROR)


@pytest.mark.parametrize(
    ("one", "other", "data", "named"),
    [
        (1, "converted", BATCHES, "got int"),
        ("float", None, BATCHES, "got NoneType"),
        ("float", {"one": 1, "two": 2}, BATCHES, "one, two"),
        ("float", export(nn.Sigmoid(), BATCHES[0]), BATCHES, None),
        (lambda x: x.argmax(-1), lambda x: x.argmin(-1), BATCHES, None),
        (lambda x: x, lambda x: x[:1], BATCHES, None),
        ("float", "converted", BATCHES[0], "compare"),
        ("float", "converted", 5, "compare"),
        ("float", "converted", [], "compare"),
    ],
    ids=["number", "none", "methods", "another", "integers", "shapes", "input", "data", "empty"],
)
def test_what_cannot_be_compared(linear: Any, one: Any, other: Any, data: Any, named: Any) -> None:
    models = [linear[model] if isinstance(model, str) else model for model in (one, other)]
    with pytest.raises(CalibrationError if data == [] else UserError, match=named):
        qompose.compare(*models, data)


def test_a_batch_that_does_not_fit_is_still_said_to_be_that(linear: dict[str, Any]) -> None:
    with pytest.raises(BatchError) as caught:
        qompose.compare(linear["float"], linear["converted"], [BATCHES[0], randn(4, 5)])
    assert caught.value.number == 2


def test_no_inputs_at_all(linear: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="limit"):
        qompose.compare(linear["float"], linear["converted"], BATCHES, limit=0)


def test_a_kernel_that_returns_another_shape_is_named() -> None:
    made = forms(net())
    kernel = next(n for n in made["lowered"].graph.nodes if tag_of(n, KERNELS_TAG) is not None)
    whole = kernel.target
    kernel.target = lambda *args: whole(*args)[:1]
    found = qompose.compare(made["float"], made["lowered"], BATCHES)
    (note,) = (note for note in found.notes if "0: aten.linear" in note)
    assert "[4, 6]" in note and "[1, 6]" in note


def test_an_input_with_nan_is_said_to_be_that(linear: dict[str, Any]) -> None:
    """Integers have no NaN, which is neither rounding nor clipping."""
    odd = BATCHES[0].clone()
    odd[0, 0] = math.nan
    found = qompose.compare(linear["float"], linear["converted"], [odd])
    (given,) = (row for row in found if row.operator == "input")
    assert given.cause == NOT_FINITE
    assert not found.of_cause(CLIPPING)


def test_a_program_with_other_parameters_is_said_to_be_one(linear: Any, others: Any) -> None:
    """Its structure is the same, so there are values to compare, which mean little."""
    found = qompose.compare(others["float"], linear["lowered"], BATCHES)
    assert any("different parameters" in note for note in found.notes)
    found = qompose.compare(linear["float"], linear["lowered"], BATCHES)
    assert not any("different parameters" in note for note in found.notes)


def test_what_holds_integers_alone_lacks_no_parameters() -> None:
    made = forms(net())
    reference = qompose.convert_pt2e(made["prepared"], use_reference_representation=True)
    record = made["lowered"].meta[META_KEY]
    made["lowered"].meta[META_KEY] = replace(record, source=None)  # as of one that was loaded
    for other in (reference, made["lowered"]):
        found = qompose.compare(made["float"], other, BATCHES)
        assert found.unpaired == ()
        assert any("parameters inside kernels and integer references" in n for n in found.notes)


def parts(m: Any, x: Tensor) -> Tensor:
    """An operator of several results."""
    first, second = m.one(x).split(3, -1)
    return m.two(first) * second


def stages_of_parts() -> dict[str, Any]:
    return forms(seeded(Model(parts, one=nn.Linear(6, 6), two=nn.Linear(3, 3))))


def test_one_of_several_results_has_the_row_of_its_operator() -> None:
    made = stages_of_parts()
    found = qompose.compare(made["float"], made["lowered"], BATCHES)
    rows = [row for row in found if row.operator == "aten.split.Tensor"]
    assert {row.value[-9:] for row in rows} == {"output[0]", "output[1]"}
    assert {(row.name, row.state) for row in rows} == {("split", "float")}


def test_a_comparison_of_another_model_is_not_drawn(
    linear: Any, others: Any, tmp_path: Path
) -> None:
    found = qompose.compare(linear["float"], linear["lowered"], BATCHES)
    report, page = qompose.report(linear["lowered"]), tmp_path / "page.html"
    for stage in ("prepared", "converted", "lowered"):
        qompose.report(linear[stage]).save(page, found)
    earlier = replace(report, fingerprint="")  # of a release that wrote none
    earlier.save(page, found)
    page.unlink()
    with_parts = stages_of_parts()
    for made, saved, path in (
        (others, report, page),
        (with_parts, report, page),
        (with_parts, earlier, page),
        (others, report, page.with_suffix(".md")),
    ):
        other = qompose.compare(made["float"], made["lowered"], BATCHES)
        mark = qompose.report(made["lowered"]).fingerprint[:8]
        with pytest.raises(UserError, match=mark):
            saved.save(path, other)
    for none in (3, report, [found]):
        with pytest.raises(UserError, match="compare"):
            report.save(page, none)  # type: ignore[arg-type]
    assert not [*tmp_path.iterdir()]
