# SPDX-License-Identifier: Apache-2.0
"""What the plugins list is what they do: rows, questions and claims agree, and so do the pages of docs/."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import qompose
import torch
from qompose.backend import load_backend

from docs.generate import page
from tests.sampling import at_once
from tests.zoo import by_name

ROOT = Path(__file__).parents[2]
BACKENDS = ("embedding", "x86_inductor", "xnnpack")
PAGES = (*BACKENDS, "onnx")


@pytest.mark.parametrize("backend", at_once(BACKENDS, "embedding"))
def test_every_row_is_supported_however_it_is_asked_for(backend: str) -> None:
    table = load_backend(backend).quantization_capabilities()
    for row in table:
        assert row.settings == load_backend(backend).configs[row.config]
        assert table.supports(row.pattern, row.settings).rule == row.pattern
        for asked in (row.drawing, *map(tuple, row.operators)):
            answer = table.supports(asked, row.settings)
            assert answer, f"{row.pattern}, {row.config}, {asked}: {answer.reason}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_configurations_are_data_and_are_called_what_they_are(backend: str) -> None:
    for name, config in load_backend(backend).configs.items():
        assert str(config) == name
        data = qompose.observers.config_to_json(config)
        assert qompose.observers.config_from_json(data) == config


MODELS = ("lenet", "mobilenet_v2", "tied_language_model", "cond_conv")


def prepared(name: str, quantizer: qompose.Quantizer) -> torch.fx.GraphModule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", qompose.QomposeWarning)  # a backend may find nothing there
        return qompose.prepare_pt2e(by_name(name).export(), quantizer)


@pytest.mark.parametrize("model", at_once(MODELS, "lenet", "cond_conv"))
def test_every_claim_is_in_a_row(model: str) -> None:
    quantizer = qompose.compose(*BACKENDS)
    rows = {(r.backend, r.pattern): r for r in quantizer.quantization_capabilities()}
    plan = prepared(model, quantizer).meta["qompose"].plan
    assert plan.claims
    operators = {operator.name: operator.operator for operator in plan.operators}
    for claim in plan.claims:
        row = rows[claim.owner, claim.rule]
        called = [operators[node] for node in claim.nodes if node in operators]
        assert any(
            called == [name.removesuffix(".default") for name in variant]
            for variant in row.operators
        ), f"{claim.rule} took {called}"
        assert claim.mode == row.mode


@pytest.mark.parametrize("backend", PAGES)
def test_support_tables_are_generated(backend: str) -> None:
    """`python docs/generate.py` writes them."""
    config = load_backend(backend).default_config
    weight = None if config is None else config.weight
    if weight is not None and weight.quant_max == 63:
        pytest.skip("this processor adds int8 products in 16 bits: weights have seven bits here")
    assert (ROOT / "docs" / "support" / f"{backend}.md").read_text("utf-8") == page(backend)
