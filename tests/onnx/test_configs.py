# SPDX-License-Identifier: Apache-2.0
"""The configurations of the ONNX backend, and what they ask of a processor."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import qompose
import torch
from qompose.backend import load_backend
from qompose.errors import ConfigError, RequirementWarning
from qompose_onnx import get_onnx_quantization_config as config, machine
from torch import nn

from tests.onnx.models import sqnr


@pytest.mark.parametrize(
    "options",
    [
        {"activation": "uint4"},
        {"activation": "uint16", "is_dynamic": True},
        {"activation": "uint16", "tensorrt": True},
        {"tensorrt": True, "weight_only": True},
        {"symmetric_activations": 1},
        {"activation": "int8", "is_dynamic": True},
        {"activation": "int8", "weight_only": True},
        {"is_dynamic": True, "per_token": True},
        {"group_size": 32},
        {"weight_only": True, "group_size": 48},
        {"bit": 7},
    ],
    ids=str,
)
def test_options_that_no_runtime_has_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        config(**options)


def test_names_tell_the_choices() -> None:
    assert config().name == "static"
    assert config(bits=7).name == "static int7"
    symmetric = config("int8", symmetric_activations=True)
    assert symmetric.name == "static, int8 symmetric activations"
    assert config(weight_only=True, group_size=32).name == "weight-only int4 groups of 32"


def test_symmetric_activations_have_a_symmetric_scheme() -> None:
    spec = config("int8", symmetric_activations=True).input_activation
    assert spec.qscheme is torch.per_tensor_symmetric and spec.dtype is torch.int8


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        (config(), {"isa": "vnni"}),
        (config(bits=7), {"isa": "any"}),
        (config(tensorrt=True), {}),
        (config("uint16"), {}),
    ],
    ids=["eight bits", "seven bits", "tensorrt", "16 bits"],
)
def test_a_model_for_processors_asks_for_vnni_unless_weights_have_seven_bits(
    settings: qompose.QuantizationConfig, wanted: dict[str, str]
) -> None:
    x = torch.randn(4, 8)
    quantizer = qompose.RuleQuantizer(load_backend("onnx")).set_global(settings)
    program = torch.export.export(nn.Linear(8, 8), (x,))
    prepared = qompose.prepare_pt2e(program, quantizer)
    prepared(x)
    converted = qompose.convert_pt2e(prepared)
    assert converted.meta["qompose"].requirements.get("onnx", {}) == wanted


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_a_processor_whose_sums_saturate_is_named_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, runtime: str
) -> None:
    pytest.importorskip(runtime)
    batches = [(torch.rand(4, 64),), (torch.ones(4, 64),)]
    monkeypatch.setattr(machine, "sums_are_exact", lambda runtime: False)
    given: Any = {"example_inputs": batches[0], "calibration": batches, "target": runtime}
    with pytest.warns(RequirementWarning, match=r"bits=7"):
        qompose.quantize(nn.Linear(64, 16), backends=["onnx"], **given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qompose.quantize(nn.Linear(64, 16), backends=["onnx:static int7"], **given)


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_sums_are_asked_of_the_runtime(runtime: str) -> None:
    pytest.importorskip(runtime)
    model = nn.Linear(64, 16)
    nn.init.ones_(model.weight)
    batches = [(torch.ones(4, 64),)]
    given: Any = {"example_inputs": batches[0], "calibration": batches, "target": runtime}
    wanted = model(*batches[0])
    found = qompose.quantize(model, backends=["onnx"], **given).model(*batches[0])
    assert machine.sums_are_exact(runtime) == torch.allclose(found, wanted, rtol=0.02)


def test_seven_bits_cost_little(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)).eval()
    (x,), batches = (torch.randn(16, 32),), [(torch.randn(16, 32),) for _ in range(3)]
    quantizer = qompose.RuleQuantizer(load_backend("onnx")).set_global(config(bits=7))
    result = qompose.quantize(
        model, (x,), backends=quantizer, calibration=batches, target="onnxruntime", progress=False
    )
    with torch.no_grad():
        assert sqnr(model(x), result.model(x)) > 25
