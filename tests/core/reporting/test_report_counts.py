# SPDX-License-Identifier: Apache-2.0
"""What reports count is what graphs hold, at every stage and in every body, over many kinds of programs."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
from qompose import QuantizationSpec
from qompose.backend import Kernel, OperatorPattern, Region
from qompose.observers import PlaceholderObserver
from qompose.reporting.report_data import KERNEL, REFERENCE, Counts
from torch import nn

from tests.core.toy import (
    DYNAMIC,
    LINEAR,
    LINEAR_RELU,
    RELU,
    RULES,
    STATIC_UINT8,
    Annotator,
    Model,
    annotate,
    aten,
    convert,
    export,
    graph_text,
    nodes_calling,
    prepare,
    randn,
    rule,
    seeded,
    toy,
)
from tests.counting import check, first_of_every_tag
from tests.zoo import by_name, tagged

BODIES = tagged("control_flow", without="transformers")
NAMES = {model.name for model in (*first_of_every_tag(), *BODIES)}
FEW = {"conv_bn_relu", "lstm", "branches", "key_cache"}
KINDS = FEW | {"bn_conv_skip", "loop", "map_rows", "no_grad_region", "bfloat16_mlp"}
"""Of each kind of program one, but where kinds are much alike."""


def unsigned_sigmoids() -> qompose.Quantizer:
    """Two members that want different integers, so that boundaries are requantized."""
    unsigned: Any = toy(*RULES, RELU, config=None, name="unsigned")
    for kind in (aten.sigmoid.default, aten.relu.default, aten.add.Tensor):
        unsigned.set_object_type(kind, STATIC_UINT8)
    return qompose.compose(unsigned, toy())


def dynamic_linears() -> qompose.Quantizer:
    return qompose.compose(toy(LINEAR, LINEAR_RELU, config=DYNAMIC, name="dynamic"), toy())


CASES = [
    pytest.param(name, quantizer, marks=[] if name in default else pytest.mark.full)
    for quantizer, default in ((unsigned_sigmoids, KINDS), (dynamic_linears, FEW))
    for name in sorted(NAMES | KINDS)
]


@pytest.mark.parametrize(("name", "quantizer"), CASES)
def test_reports_say_what_graphs_hold(name: str, quantizer: Any, tmp_path: Path) -> None:
    model = by_name(name)
    prepared = prepare(model.export(), quantizer())
    check(prepared)
    with torch.no_grad(), warnings.catch_warnings():
        prepared(*model.inputs())
        warnings.simplefilter("ignore", qompose.QomposeWarning)
        converted = qompose.convert_pt2e(prepared, allow_uncalibrated=True)
        lowered = qompose.lower(converted)
    report = check(converted)
    check(lowered)
    qompose.save(converted, tmp_path / "model")
    assert check(qompose.load(tmp_path / "model")) == report


def skip(region: Region) -> Any:
    """Give the integers that come in."""
    return region.quantized("self").node


SKIPPED = rule(
    "skipped", OperatorPattern((aten.clone.default,)), activations=("self",), shares=True,
    kernels={"torch": Kernel("nothing", skip)},
)  # fmt: skip


@pytest.mark.parametrize("table", [(LINEAR, SKIPPED), (SKIPPED, LINEAR)], ids=["last", "first"])
def test_a_kernel_that_inserts_nothing_is_counted(table: Any) -> None:
    """Between two products: the node that stands for its region stands for another one too, and may be
    replaced later."""
    x = randn(6, 3)
    layers = {"first": nn.Linear(3, 4), "second": nn.Linear(4, 2)}
    chain = Model(lambda m, x: m.second(m.first(x).clone()), **layers)
    lowered = qompose.lower(convert(export(seeded(chain), x), toy(*table), x), strict=True)
    report = check(lowered)
    assert (report.counts.kernels, report.counts.quantize, report.counts.dequantize) == (3, 1, 1)
    assert report.count(KERNEL) == 3


def test_casts_are_counted_and_those_of_the_program_are_not() -> None:
    casting = Model(
        lambda m, x: m.linear(x).to(torch.float64).to(torch.float32), linear=nn.Linear(3, 4)
    )
    half = QuantizationSpec(torch.float16, PlaceholderObserver.with_args(dtype=torch.float16))
    x = randn(6, 3)

    def linears(node: torch.fx.Node) -> None:
        if node.target is aten.linear.default:
            annotate(node, dict.fromkeys(node.args[:2], half))

    prepared = prepare(export(seeded(casting), x), Annotator(linears))
    prepared(x)
    converted = qompose.convert_pt2e(prepared)
    assert len(nodes_calling(converted, "to")) == 3
    assert check(converted).counts == Counts(cast=5)  # the input: 2, the stored weight: 3
    assert str(check(converted).counts) == "5 cast"


@pytest.mark.parametrize(
    "name",
    ["conv_bn_relu", "scan_cell", pytest.param("cond_shared_weight", marks=pytest.mark.full)],
)
def test_a_reference_model_reports_the_same_when_it_is_loaded(name: str, tmp_path: Path) -> None:
    model = by_name(name)
    prepared = prepare(model.export(), unsigned_sigmoids())
    with torch.no_grad():
        prepared(*model.inputs())
        reference = qompose.convert_pt2e(
            prepared, allow_uncalibrated=True, use_reference_representation=True
        )
    report = check(reference)
    assert report.stage == "reference"
    assert report.counts == Counts()
    assert report.count(REFERENCE)
    qompose.save(reference, tmp_path / "model")
    loaded = qompose.load(tmp_path / "model")
    assert check(loaded) == report
    assert graph_text(loaded) == graph_text(reference)
