# SPDX-License-Identifier: Apache-2.0
"""Control flow on real backends: integer kernels in bodies, from `quantize` to the report."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import qompose
import torch
from qompose.program.control_flow import graphs_in
from torch.utils import _pytree as pytree

from tests.core.program.test_nested import batches
from tests.core.toy import sqnr
from tests.sampling import at_once
from tests.zoo import ZooModel, by_name

PRODUCTS = {"xnnpack": "qompose_xnnpack", "x86_inductor": "qompose_x86"}
MODELS = [
    by_name(name)
    for name in (
        "cond_nested", "cond_conv", "cond_shared_weight", "cond_two_outputs", "loop",
        "loop_of_branches", "scan_cell", "scan_two_values", "map_rows", "no_grad_method",
        "no_grad_forward", "grad_modes",
    )
]  # fmt: skip
AT_ONCE = [
    *((by_name(n), "xnnpack") for n in ("cond_shared_weight", "no_grad_method")),
    *((by_name(n), "x86_inductor") for n in ("loop", "map_rows")),
]
BOUNDS = {"map_rows": 18, "cond_two_outputs": 20}
"""For others 25 dB. What `map_rows` adds up nearly cancels; three layers follow one another in the other."""

pytestmark = [
    pytest.mark.filterwarnings("ignore::qompose.QomposeWarning"),  # regions left simulated
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


def outputs(module: Any, inputs: Any) -> list[torch.Tensor]:
    with torch.no_grad():
        return pytree.tree_leaves(module(*inputs))


@pytest.mark.parametrize(
    ("model", "product"), at_once(itertools.product(MODELS, PRODUCTS), *AT_ONCE), ids=str
)
def test_products_in_bodies_run_in_kernels(model: ZooModel, product: str) -> None:
    program = model.export()  # with gradients: without, there are no regions that have none
    result = qompose.quantize(program, backends=product, calibration=batches(model))
    rows = [row for row in result.report.rows if row.macs]
    assert {(row.state, row.owner) for row in rows} == {("int8 kernel", product)}
    assert result.report.coverage() == 1.0
    kernels = {
        module
        for module in graphs_in(result.model)
        for node in module.graph.nodes
        if str(node.target).startswith(PRODUCTS[product])
    }
    assert kernels - {result.model}, "inside bodies"
    expected, simulated, actual = (
        outputs(m, model.inputs()) for m in (program.module(), result.converted, result.model)
    )
    for one, two, three in zip(expected, simulated, actual, strict=True):
        assert one.dtype is two.dtype is three.dtype
        assert sqnr(one, two) > BOUNDS.get(model.name, 25)
        assert sqnr(two, three) > 35


@pytest.mark.parametrize("product", PRODUCTS)
def test_an_embedding_in_front_of_a_branch_that_reads_its_table(product: str) -> None:
    model = by_name("cond_weight_outside")
    program, words = model.export(), model.inputs()[0]
    other = next(
        t for t in (torch.full_like(words, i) for i in range(20))
        if program.module()(t).count_nonzero(dim=-1).max() > 6
    )  # fmt: skip
    result = qompose.quantize(
        program, backends=["embedding", product], calibration=[(words,), (other,)]
    )
    states = {(row.operator, row.state) for row in result.report.rows}
    assert {
        ("aten.linear", "int8 kernel"),
        ("aten.embedding", "float kernel on integers"),
    } <= states
    matrices = {n: t for n, t in result.converted.state_dict().items() if t.dim() == 2}
    assert set(matrices) == {"embedding.weight_q", "linear.weight_q"}
    assert all(t.dtype is torch.int8 for t in matrices.values())
    for batch in (words, other):
        assert sqnr(program.module()(batch), result.model(batch)) > 25
        assert sqnr(result.converted(batch), result.model(batch)) > 35


@pytest.mark.parametrize("product", at_once(PRODUCTS, "x86_inductor"))
def test_regions_in_bfloat16_say_why_they_stay(product: str) -> None:
    model = by_name("autocast_off")
    program = model.export()
    result = qompose.quantize(program, backends=product, calibration=batches(model))
    rows = [row for row in result.report.rows if row.macs]
    assert [row.module for row in rows if row.state == "float"] == ["shared"]
    assert all("bfloat16" in row.reason for row in rows if row.state == "float")
    assert [r.module for r in rows if r.state == "int8 kernel"] == ["head", "shared", "frozen"]
    (one,), (two,) = (outputs(m, model.inputs()) for m in (program.module(), result.model))
    assert sqnr(one, two) > 25
