# SPDX-License-Identifier: Apache-2.0
"""The configurations of the ONNX backend, and what they ask of a processor."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
from qompose.backend import load_backend
from qompose.errors import ConfigError, RequirementWarning
from qompose_onnx import (
    ONNXProgram,
    configs,
    get_onnx_quantization_config as config,
    machine,
    runtimes,
    saturation,
)
from torch import nn

from tests.onnx.models import sqnr
from tests.processes import python

X = (torch.cat([torch.rand(9, 64), torch.ones(1, 64)]),)


@pytest.mark.parametrize(
    "options",
    [
        {"activation": "uint4"},
        {"activation": "uint16", "is_dynamic": True},
        {"activation": "uint16", "tensorrt": True},
        {"tensorrt": True, "weight_only": True},
        {"symmetric_activations": 1},
        {"attention": 1},
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


def test_names_tell_the_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "sums_are_exact_here", lambda: True)
    assert config().name == "static"
    assert config(bits=7).name == "static int7"
    symmetric = config("int8", symmetric_activations=True)
    assert symmetric.name == "static, int8 symmetric activations"
    assert config(weight_only=True, group_size=32).name == "weight-only int4 groups of 32"


def test_symmetric_activations_have_a_symmetric_scheme() -> None:
    spec = config("int8", symmetric_activations=True).input_activation
    assert spec.qscheme is torch.per_tensor_symmetric and spec.dtype is torch.int8


def test_groups_of_weights_have_zero_points_where_they_are_asked_for() -> None:
    spec = config(weight_only=True, group_size=32, symmetric=False).weight
    assert spec.qscheme is torch.per_channel_affine


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        (config(bits=8), {"isa": "vnni"}),
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


RUNTIMES = pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])


@RUNTIMES
@pytest.mark.parametrize("name", ["onnx", "onnx:static", "onnx:static int7"])
def test_a_processor_whose_sums_saturate_is_named_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, runtime: str, name: str
) -> None:
    pytest.importorskip(runtime)
    monkeypatch.setattr(machine, "sums_are_exact_here", lambda: False)
    monkeypatch.setattr(saturation, "sums_are_exact", lambda _: False)
    given: Any = {"example_inputs": X, "calibration": [X], "target": runtime, "backends": [name]}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", RequirementWarning)
        result = qompose.quantize(nn.Linear(64, 16), **given)
        result.model(*X)
    needed = result.converted.meta["qompose"].requirements["onnx"]["isa"]
    assert ["bits=7" in str(w.message) for w in said] == [True] * (needed == "vnni")
    assert needed == "any" or name != "onnx:static int7"


@pytest.mark.parametrize(
    ("settings", "runtime", "is_told"),
    [
        (config(tensorrt=True), "openvino", True),
        (config(tensorrt=True), "onnxruntime", False),
        (config(is_dynamic=True, bits=8), "onnxruntime", True),
        (config(tensorrt=True, bits=7), "onnxruntime", False),
        (config(weight_only=True), "onnxruntime", False),
    ],
    ids=["tensorrt", "tensorrt in float", "dynamic", "seven bits", "weights alone"],
)
def test_a_file_warns_when_it_is_called_where_its_sums_saturate(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    settings: qompose.QuantizationConfig,
    runtime: str,
    is_told: bool,
) -> None:
    """Once, whatever it was made for: a file for TensorRT has eight bits on each machine."""
    pytest.importorskip(runtime)
    monkeypatch.setattr(saturation, "sums_are_exact", lambda _: False)
    quantizer = qompose.RuleQuantizer(load_backend("onnx")).set_global(settings)
    given: Any = {"example_inputs": X, "calibration": [X], "strict": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", qompose.QomposeWarning)
        made = qompose.quantize(nn.Linear(64, 16), backends=[quantizer], target="onnx", **given)
    program = ONNXProgram.read(made.model.save(tmp_path / "model.onnx"), runtime)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        program(*X)
        program(*X)
    assert [(w.category, w.filename) for w in said] == [(RequirementWarning, __file__)] * is_told


@RUNTIMES
@pytest.mark.parametrize("bits", [None, 8])
def test_the_default_is_right_on_this_processor(runtime: str, bits: int | None) -> None:
    """Sums of products of the largest integers are far from what 16 bits hold."""
    pytest.importorskip(runtime)
    model = nn.Linear(64, 16)
    nn.init.ones_(model.weight)
    quantizer = qompose.RuleQuantizer(load_backend("onnx")).set_global(config(bits=bits))
    given: Any = {"example_inputs": X, "calibration": [X], "target": runtime}
    found = qompose.quantize(model, backends=[quantizer], **given).model(*X)[-1]
    is_right = torch.allclose(found, model(*X)[-1], rtol=0.02)
    assert is_right == (bits is None or runtimes.sums_are_exact(runtime))


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


def test_importing_the_plugin_imports_no_runtime_and_no_exporter() -> None:
    """Which files alone need, and questions about capabilities do not."""
    heavy = "{'onnx', 'onnx_ir', 'onnxscript', 'onnxruntime', 'openvino'}"
    printed = python("-c", f"import sys, qompose_onnx; print(*sorted({heavy} & {{*sys.modules}}))")
    assert printed.split() == []


@pytest.mark.parametrize("is_per_channel", [True, False], ids=["per channel", "per tensor"])
def test_onnx_runtime_can_make_sums_of_eight_bits_exact_everywhere(
    tmp_path: Path, is_per_channel: bool
) -> None:
    """Its option makes weights unsigned, and gives them and their zero points new names."""
    ort = pytest.importorskip("onnxruntime")
    model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 16)).eval()
    nn.init.ones_(model[0].weight)
    settings = config(bits=8, is_per_channel=is_per_channel)
    quantizer = qompose.RuleQuantizer(load_backend("onnx")).set_global(settings)
    result = qompose.quantize(
        model, X, backends=quantizer, calibration=[X], target="onnx", progress=False
    )
    options = ort.SessionOptions()
    options.add_session_config_entry("session.x64quantprecision", "1")
    path = str(result.model.save(tmp_path / "model.onnx"))
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: X[0].numpy()})
    with torch.no_grad():
        assert sqnr(result.converted(*X), torch.from_numpy(found)) > 100
