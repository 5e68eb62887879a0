# SPDX-License-Identifier: Apache-2.0
"""Models of seven and of eight bits here and without VNNI: the same integers, or a refusal that says why."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
from qompose import QuantizationSpec
from qompose.backend import RuleUse
from qompose_x86_inductor import machine_requirements
from qompose_x86_inductor.onednn import exactness
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.core.toy import Model
from tests.products import x86

LIMIT = "ONEDNN_MAX_CPU_ISA"
vnni = pytest.mark.skipif(not exactness.vnni_exact(), reason="eight bits need VNNI")
HIGHEST = {"avx2": 63, "vnni": 127}


def worst() -> nn.Module:
    """Products of the largest integers, which saturate first: all weights and all inputs are equal."""
    layers = {"conv": nn.Conv2d(16, 8, 3, bias=False), "linear": nn.Linear(64, 8, bias=False)}
    model = Model(lambda m, image, row: (m.conv(image), m.linear(row)), **layers).eval()
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    return model


BIG = (torch.ones(2, 16, 6, 6), torch.ones(3, 64))


def prepared(name: str) -> GraphModule:
    torch.manual_seed(0)
    exported = torch.export.export(worst(), BIG)
    model = qompose.prepare_pt2e(exported, x86(isa=name, balance=False))
    model(*BIG)
    return model


def converted(name: str) -> GraphModule:
    model = qompose.convert_pt2e(prepared(name))
    weights = [p for p in model.state_dict().values() if p.dtype == torch.int8]
    assert [int(weight.max()) for weight in weights] == [HIGHEST[name]] * 2
    return model


def in_integers(name: str) -> tuple[Tensor, ...]:
    """What core's reference says, which spells the sums out in integers of 32 bits."""
    model = qompose.convert_pt2e(prepared(name), use_reference_representation=True)
    result: tuple[Tensor, ...] = model(*BIG)
    return result


def assert_exact(results: tuple[Tensor, ...], name: str) -> None:
    for result, truth in zip(results, in_integers(name), strict=True):
        torch.testing.assert_close(result, truth, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["avx2", pytest.param("vnni", marks=vnni)])
def test_the_worst_sums_are_exact_here(name: str) -> None:
    model = converted(name)
    assert f"x86_inductor requires isa {name}" in qompose.report(model).notes
    assert_exact(qompose.lower(model, strict=True)(*BIG), name)


def elsewhere(path: Path, argument: str = "") -> subprocess.CompletedProcess[str]:
    """Load, lower and run on a processor without VNNI, as far as oneDNN can tell."""
    code = (
        "import sys, warnings, torch, qompose\n"
        "warnings.simplefilter('always', qompose.QomposeWarning)\n"
        f"model = qompose.load(sys.argv[1]{argument})\n"
        "lowered = qompose.lower(model, strict=True)\n"
        "out = lowered(torch.ones(2, 16, 6, 6), torch.ones(3, 64))\n"
        "torch.save(out, sys.argv[2])\n"
    )
    command = [sys.executable, "-c", code, str(path), f"{path}.out"]
    environment = {**os.environ, LIMIT: "AVX2"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.full
def test_seven_bits_give_the_same_integers_without_vnni(tmp_path: Path) -> None:
    model, path = converted("avx2"), tmp_path / "model"
    qompose.save(model, path)
    done = elsewhere(path)
    assert done.returncode == 0, done.stderr
    assert "RequirementWarning" not in done.stderr
    expected = qompose.lower(model)(*BIG)
    for there, here in zip(torch.load(f"{path}.out"), expected, strict=True):
        assert torch.equal(there, here)
    assert_exact(torch.load(f"{path}.out"), "avx2")


@vnni
def test_eight_bits_are_refused_without_vnni(tmp_path: Path) -> None:
    path = tmp_path / "model"
    qompose.save(converted("vnni"), path)
    done = elsewhere(path)
    assert done.returncode == 1
    for named in (
        "RequirementError",
        "x86_inductor requires isa vnni",
        'isa="avx2"',
        "allow_mismatch",
    ):
        assert named in done.stderr
    assert not Path(f"{path}.out").exists()


@vnni
@pytest.mark.full
def test_eight_bits_run_exactly_where_the_mismatch_is_allowed(tmp_path: Path) -> None:
    path = tmp_path / "model"
    qompose.save(converted("vnni"), path)
    done = elsewhere(path, ", allow_mismatch=True")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("x86_inductor requires isa vnni") == 2  # load and lower
    assert_exact(torch.load(f"{path}.out"), "vnni")


def use(mode: str = "static", **weight: Any) -> RuleUse:
    spec = QuantizationSpec(
        torch.int8, qompose.observers.MinMaxObserver, qscheme=torch.per_tensor_symmetric, **weight
    )
    return RuleUse("linear", mode, {"weight": spec})


NARROW = use(quant_min=-64, quant_max=63)


@pytest.mark.parametrize(
    ("uses", "asked"),
    [
        ([], {}),
        ([NARROW], {"isa": "avx2"}),
        ([NARROW, use(quant_min=-65, quant_max=63)], {"isa": "vnni"}),
        ([use(quant_min=-64, quant_max=64), NARROW], {"isa": "vnni"}),
        ([use("dynamic", quant_min=-127, quant_max=127)], {"isa": "vnni"}),
        ([use("weight-only", quant_min=-127, quant_max=127)], {}),
        ([RuleUse("max_pool2d", "static", {"self": NARROW.specs["weight"]})], {}),
        ([use()], {"isa": "vnni"}),
    ],
)
def test_what_is_asked(uses: list[RuleUse], asked: dict[str, str]) -> None:
    assert machine_requirements.requirements(uses) == asked


def test_what_nobody_asked_is_not_objected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exactness, "vnni_exact", lambda: False)
    assert machine_requirements.objection({}) is None
    assert machine_requirements.objection({"isa": "avx2"}) is None
    assert machine_requirements.objection({"isa": "vnni"})


@pytest.mark.usefixtures("by_onednn")
@pytest.mark.parametrize("is_dynamic", [False, True], ids=["static", "dynamic"])
def test_weights_that_onednn_gets_wrong_have_a_kernel_of_another_name(
    is_dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the report, and where a package refuses them: no int8 kernel is claimed for what is float64."""
    monkeypatch.setattr(
        exactness, "_arithmetic", lambda: exactness._Arithmetic(exactness.NARROW, "no VNNI")
    )
    states = {}
    for name in HIGHEST:
        x = torch.linspace(-1, 1, 24).view(3, 8)
        exported = torch.export.export(nn.Linear(8, 4), (x,))
        model = qompose.prepare_pt2e(exported, x86(is_dynamic=is_dynamic, isa=name))
        model(x)
        with pytest.warns(qompose.errors.RequirementWarning) if name == "vnni" else nullcontext():
            lowered = qompose.lower(qompose.convert_pt2e(model))
        (row,) = qompose.report(lowered).rows
        states[name] = (row.state, row.kernel)
    operator = "qompose_x86.linear_dynamic" if is_dynamic else "qompose_x86.linear"
    assert states == {
        "avx2": ("int8 kernel", operator),
        "vnni": ("float kernel on integers", f"{operator} in float64"),
    }
    with pytest.raises(qompose.errors.CompilationError, match=f"{operator} in float64"):
        qompose.compile_lowered(lowered, "package")
