# SPDX-License-Identifier: Apache-2.0
"""Two forms of a program beside each other: every value paired, and each difference put down to its cause."""

from __future__ import annotations

import gc
import io
import math
import re
import weakref
from dataclasses import replace
from typing import Any

import pytest
import qompose
import torch
from qompose.plan.plan import attach
from qompose.program.meta import STAGE_KEY, values_of
from qompose.reporting.report_data import (
    CLIPPING,
    EQUAL,
    FALLBACK,
    INHERITED,
    KERNEL_ERROR,
    ROUNDING,
    UNKNOWN,
)
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.core.diagnosis.brute import stages
from tests.core.live_bytes import LiveBytes
from tests.core.toy import LINEAR, Model, convert, export, randn, seeded, sqnr, toy


def net() -> Any:
    """A convolution with a batch norm, two linear layers and a sum."""

    def forward(m: Any, image: Tensor, *, bias: Tensor) -> dict[str, Tensor]:
        x = m.norm(m.conv(image)).relu().flatten(1)
        x = x.view(-1, 64)
        y = m.two(m.one(x))
        return {"sum": x + y, "last": (y * bias).tanh()}

    linears = {"one": nn.Linear(64, 64), "two": nn.Linear(64, 64)}
    return seeded(
        Model(forward, conv=nn.Conv2d(3, 4, 3, padding=1), norm=nn.BatchNorm2d(4), **linears)
    )


BATCHES = [{"image": randn(2, 3, 4, 4, seed=n), "bias": randn(64, seed=10 + n)} for n in range(3)]


@pytest.fixture(scope="module", name="stages")
def all_stages() -> dict[str, Any]:
    model = net()
    for parameter in model.parameters():
        parameter.data *= 0.2
    program = torch.export.export(model, (BATCHES[0]["image"],), {"bias": BATCHES[0]["bias"]})
    return stages(program, toy(), BATCHES)


def lowered_from(converted: GraphModule) -> Any:
    with pytest.warns(qompose.QomposeWarning, match="relu"):
        return qompose.lower(converted)


def of_sums(model: Any, program: Any) -> float:
    """The SQNR of the first output, computed from whole runs."""
    wanted, ours = (
        torch.cat([called(batch["image"], bias=batch["bias"])["sum"] for batch in BATCHES])
        for called in (program.module(), model)
    )
    return sqnr(wanted, ours)


PAIRS = [
    *(("float", stage) for stage in ("prepared", "converted", "lowered")),
    *(("prepared", stage) for stage in ("converted", "lowered")),
    ("converted", "lowered"),
    ("lowered", "converted"),
]


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_every_value_that_is_quantized_is_paired(stages: Any, one: str, other: str) -> None:
    found = qompose.compare(stages[one], stages[other], BATCHES)
    assert found.unpaired == ()
    assert (found.reference, found.other, found.batches) == (one, other, 3)
    computed = [row.value for row in found if row.operator != "parameter"]
    assert len(computed) == len(set(computed)) >= 6


@pytest.mark.parametrize("stage", ["float", "prepared", "converted", "lowered"])
def test_a_program_equals_itself(stages: Any, stage: str) -> None:
    found = qompose.compare(stages[stage], stages[stage], BATCHES)
    assert found.unpaired == ()
    own = {row.cause for row in found if stage == "float" or stage == "prepared"}
    assert own <= {EQUAL}
    assert {row.sqnr for row in found} == {math.inf}


def test_figures_are_those_of_the_values_and_own_ones_leave_out_what_came_before(
    stages: Any,
) -> None:
    found = qompose.compare(stages["float"], stages["converted"], BATCHES)
    row = found["add"]
    assert row.sqnr == pytest.approx(of_sums(stages["converted"], stages["float"]), abs=0.01)
    assert row.module == ""
    assert found["linear"].module == "one"
    assert found["linear"].operator == "aten.linear"
    assert found["linear_1"].own_sqnr > found["linear_1"].sqnr + 1
    assert found["tanh"].cause == INHERITED
    assert found["tanh"].own_sqnr == math.inf
    assert found["linear"].cause == ROUNDING


def test_rewriting_is_told_from_rounding(stages: Any) -> None:
    found = qompose.compare(stages["float"], stages["prepared"], BATCHES)
    assert {row.cause for row in found} <= {EQUAL, "arithmetic"}
    assert found["batch_norm"].cause == "arithmetic"
    assert found["batch_norm"].sqnr > 110


def test_a_region_without_a_kernel_is_a_fallback(stages: Any) -> None:
    found = qompose.compare(stages["float"], stages["lowered"], BATCHES)
    assert found["relu"].cause == FALLBACK
    assert found["linear"].cause == ROUNDING
    assert found.of_cause(KERNEL_ERROR) == ()


def test_values_beyond_the_range_are_clipping(stages: Any) -> None:
    wide = [{**BATCHES[0], "image": BATCHES[0]["image"] * 4}]
    found = qompose.compare(stages["float"], stages["converted"], wide)
    row = next(row for row in found if row.operator == "input" and "image" in row.value)
    assert row.cause == CLIPPING
    seen = torch.cat([batch["image"].flatten() for batch in BATCHES])
    x = wide[0]["image"]
    beyond = float(((x > seen.max() * 1.01) | (x < seen.min() * 1.01)).float().mean())
    assert row.clipping == pytest.approx(beyond, abs=0.02)
    assert row.clipping > 0.1


@pytest.mark.parametrize("given", [True, False], ids=["given", "kept"])
@pytest.mark.parametrize("reference", ["float", "converted"])
def test_a_wrong_kernel_is_the_first_row(stages: Any, given: bool, reference: str) -> None:
    """Though every value behind it is further off."""
    converted = stages["converted"]
    lowered = lowered_from(converted)
    broken = _node_of(lowered, "one: aten.linear.default, output")
    kernel = broken.target
    broken.target = lambda *args: (kernel(*args).float() * 0.9).round().to(torch.int8)
    found = qompose.compare(
        stages[reference], lowered, BATCHES, converted=converted if given else None
    )
    assert found.rows[0].cause == KERNEL_ERROR
    assert found.rows[0].name == "linear"
    assert found.rows[0].steps > 2
    assert [row.name for row in found.of_cause(KERNEL_ERROR)] == ["linear"]
    (line,) = [one for one in found.to_markdown().splitlines() if "kernel error (" in one]
    assert found.rows[0].value in line
    # 80 columns wrap the cell.
    assert re.search(r"^ one: +int8 +kernel .*\n.* error \(", str(found), re.MULTILINE)


def _node_of(model: GraphModule, value: str) -> Any:
    return next(node for node in model.graph.nodes if value in values_of(node))


def test_without_the_converted_model_a_line_says_what_is_not_told(stages: Any) -> None:
    again = lowered_from(qompose.convert_pt2e(stages["prepared"]))
    assert not qompose.compare(stages["float"], again, BATCHES).notes
    pickled = replace(again.meta[STAGE_KEY], source=None)
    found = qompose.compare(stages["float"], attach(again, pickled), BATCHES)
    assert any("pass the converted model" in note for note in found.notes)
    told = qompose.compare(stages["float"], again, BATCHES, converted=stages["converted"])
    assert not told.notes


def test_nothing_is_observed_or_written() -> None:
    def counts(m: Any, x: Tensor) -> Tensor:
        m.seen.add_(x.sum(0))
        return m.linear(x) + m.seen

    model = Model(counts, linear=nn.Linear(4, 4), seen=nn.Buffer(torch.zeros(4)))
    program = export(seeded(model), randn(2, 4))
    prepared = qompose.calibrate(qompose.prepare_pt2e(program, toy()), [randn(2, 4)])
    before, seen = str(qompose.statistics(prepared)), prepared.seen.clone()
    converted = qompose.convert_pt2e(prepared)
    data = [10 * randn(2, 4, seed=n) for n in range(2)]
    found = qompose.compare(prepared, converted, data)
    assert str(qompose.statistics(prepared)) == before
    assert torch.equal(prepared.seen, seen)
    assert not converted.seen.any()
    assert min(row.sqnr for row in found if "add" in row.operator) > 0
    assert {row.cause for row in qompose.compare(program, prepared, data)} == {EQUAL}


@pytest.mark.filterwarnings("ignore:.*treespec:FutureWarning")
def test_ids_survive_torch_own_passes(stages: Any) -> None:
    """A converted program that torch saved, loaded and decomposed is paired value by value."""
    again = torch.export.export(stages["converted"], (), BATCHES[0])
    file = io.BytesIO()
    torch.export.save(again, file)
    file.seek(0)
    for program in (again, torch.export.load(file), again.run_decompositions()):
        found = qompose.compare(stages["float"], program, BATCHES)
        assert {"linear", "linear_1", "add"} <= {row.name for row in found}
        direct = qompose.compare(stages["float"], stages["converted"], BATCHES)
        assert found["linear"].sqnr == pytest.approx(direct["linear"].sqnr, abs=0.1)


def test_ids_survive_a_file_of_ours(stages: Any, tmp_path: Any) -> None:
    qompose.save(stages["converted"], tmp_path / "model.qompose")
    found = qompose.compare(stages["float"], qompose.load(tmp_path / "model.qompose"), BATCHES)
    assert found.unpaired == ()
    assert found.rows == qompose.compare(stages["float"], stages["converted"], BATCHES).rows


def test_what_can_only_be_called_is_compared_by_its_outputs(stages: Any) -> None:
    net = stages["float"].module()
    found = qompose.compare(lambda image, bias: net(image, bias=bias), stages["lowered"], BATCHES)
    assert [row.operator for row in found] == ["output", "output"]
    assert len(found.notes) == 1
    assert {row.cause for row in found} == {UNKNOWN}
    again = qompose.compare(lambda image, bias: net(image, bias=bias), net, BATCHES)
    assert {row.cause for row in again} == {EQUAL}
    wanted = of_sums(stages["lowered"], stages["float"])
    assert any(row.sqnr == pytest.approx(wanted, abs=0.01) for row in found)


def test_metrics_of_the_callers_own(stages: Any) -> None:
    metrics = {"largest": lambda one, other: float((one - other).abs().max())}
    found = qompose.compare(stages["float"], stages["converted"], BATCHES, metrics=metrics)
    assert found["add"].metrics["largest"] > 0
    assert "largest" in found.to_text()
    assert found.to_dict()["rows"][0]["metrics"].keys() == {"largest"}


def test_forms_of_the_table(stages: Any) -> None:
    found = qompose.compare(stages["float"], stages["converted"], BATCHES, limit=2)
    assert found.batches == 2
    assert found.to_markdown().count("\n| ") == 1 + len(found)
    assert all(row.value in found.to_dict()["rows"][i]["value"] for i, row in enumerate(found))
    with pytest.raises(qompose.UserError, match="'linear'"):
        found["linaer"]
    with pytest.raises(qompose.UserError, match=KERNEL_ERROR):
        found.of_cause("kernels")


def test_a_trained_model_in_training_is_refused() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    program = export(seeded(net), randn(2, 4))
    prepared = qompose.prepare_qat_pt2e(program, toy())
    prepared.train()
    with pytest.raises(qompose.errors.StageError, match=r"eval\(\)"):
        qompose.compare(program, prepared, [randn(2, 4)])
    qompose.calibrate(prepared.eval(), [randn(2, 4)])
    found = qompose.compare(program, prepared, [randn(2, 4)])
    assert found.unpaired == ()
    assert min(row.sqnr for row in found) > 20


def test_a_batch_norm_that_was_trained_leaves_nothing_unpaired() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    program = export(seeded(net), randn(2, 3, 6, 6))
    prepared = qompose.prepare_qat_pt2e(program, toy())
    qompose.calibrate(prepared, [randn(2, 3, 6, 6)])
    converted = qompose.convert_pt2e(prepared.eval())
    for one, other in ((prepared, converted), (program, converted), (program, prepared)):
        found = qompose.compare(one, other, [randn(2, 3, 6, 6)])
        assert found.unpaired == ()
        assert any(row.operator == "parameter" for row in found)


@pytest.mark.full
@pytest.mark.parametrize("batches", [1, 8])
def test_memory_grows_neither_with_layers_nor_with_inputs(batches: int) -> None:
    def peak(layers: int) -> int:
        net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
        for layer in net:
            nn.init.orthogonal_(layer.weight)
        data = [randn(4096, 8, seed=n) for n in range(batches)]
        program = export(net, data[0])
        prepared = qompose.calibrate(qompose.prepare_pt2e(program, toy()), data)
        converted = qompose.convert_pt2e(prepared)
        with LiveBytes() as live:
            qompose.compare(program, converted, data)
        return live.peak

    assert peak(24) < 1.2 * peak(6)


def test_records_hold_a_copy_of_the_converted_model(stages: Any) -> None:
    """It shares the tensors; whoever edits the model edits that alone."""
    converted = qompose.convert_pt2e(stages["prepared"])
    lowered = lowered_from(converted)
    gone = weakref.ref(converted)
    del converted
    gc.collect()
    assert gone() is None
    assert STAGE_KEY in lowered.meta


@pytest.mark.parametrize("kernel", [True, False])
def test_a_copy_has_no_row_beside_what_it_copies(kernel: bool) -> None:
    """Dropout that drops nothing would be named where its input was quantized."""
    x, layers = randn(6, 3), {"linear": nn.Linear(3, 4), "dropout": nn.Dropout(0.1)}
    program = export(seeded(Model(lambda m, x: m.dropout(m.linear(x)).clone(), **layers)), x)
    converted = convert(program, toy(LINEAR), x)
    other = qompose.lower(converted) if kernel else converted
    rows = qompose.compare(program, other, [(x,)]).rows
    operators = [row.operator for row in rows]
    assert operators.count("aten.linear") == 1
    assert not {"aten.dropout", "aten.clone"} & {*operators}
