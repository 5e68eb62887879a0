# SPDX-License-Identifier: Apache-2.0
"""One program of several methods: constants are shared, each method has its own facts, errors name it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
from qompose.backend import CallInterface
from qompose_xnnpack import ExecutorchProgram
from qompose_xnnpack.executorch_target.errors import ExecutorchTargetError
from qompose_xnnpack.executorch_target.lowering import lower_methods
from qompose_xnnpack.executorch_target.method_interface import Interface
from qompose_xnnpack.executorch_target.program import INTERFACE
from torch import Tensor, nn
from torch.export import Dim

from tests.core.toy import Model
from tests.products import xnnpack
from tests.xnnpack.executorch_target.runtime import converted

pytest.importorskip("executorch")

WIDTH = 192
X = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(0))


def encoder() -> Model:
    torch.manual_seed(0)
    one, two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    return Model(lambda m, x: m.two(m.one(x).relu()), one=one, two=two)


def decode(m: Any, x: Tensor) -> dict[str, Tensor]:
    """The encoder and a head in float, whose constants ExecuTorch keeps itself."""
    y = m.encoder(x)
    return {"y": y, "norm": m.norm(y)}


def quantized(model: nn.Module, sizes: Any = None) -> Any:
    return converted(model, X, quantizer=xnnpack(balance=False), sizes=sizes)


@pytest.fixture(scope="module")
def parts() -> dict[str, Any]:
    part = encoder()
    decoder = Model(decode, encoder=part, norm=nn.LayerNorm(WIDTH))
    return {"encode": quantized(part), "decode": quantized(decoder)}


@pytest.fixture(scope="module")
def program(parts: dict[str, Any]) -> Any:
    return qompose.lower(parts, "executorch")


@pytest.fixture(scope="module")
def alone(parts: dict[str, Any]) -> Any:
    """The decoder as a program of its own."""
    return qompose.lower(parts["decode"], "executorch")


@pytest.mark.full
class TestTogether:
    def test_each_method_is_what_it_is_alone(self, parts: Any, program: Any, alone: Any) -> None:
        assert list(program.methods) == ["encode", "decode"]
        actual, expected = program.methods["decode"](X), alone(X)
        assert list(actual) == ["y", "norm"]
        assert all(torch.equal(actual[name], expected[name]) for name in expected)
        assert torch.equal(program.methods["encode"].run(X), expected["y"])

    def test_weights_are_in_the_file_once(self, program: Any, alone: Any) -> None:
        weights = 2 * WIDTH * WIDTH
        overhead = alone.nbytes - weights
        assert alone.nbytes < program.nbytes < weights + 2 * overhead

    def test_facts_and_reports_are_the_methods(self, program: Any, alone: Any) -> None:
        method = program.methods["decode"]
        assert method.delegation == alone.delegation
        mine, other = qompose.report(method), qompose.report(alone)
        assert mine.rows == other.rows and mine.bytes_after == program.nbytes
        assert len(qompose.report(program.methods["encode"]).rows) < len(mine.rows)
        assert "encode: 1 XNNPACK delegate" in str(program)

    def test_copies_and_files_have_all_methods(self, program: Any, tmp_path: Path) -> None:
        expected = program.methods["encode"].run(X)
        twin = pickle.loads(pickle.dumps(program))
        again = ExecutorchProgram.read(program.save(tmp_path / "model.pte"))
        for copy in (twin, again):
            assert torch.equal(copy.methods["encode"].run(X), expected)
            assert copy.methods["decode"].delegation == program.methods["decode"].delegation
        assert qompose.report(twin.methods["encode"]).stage == "lowered"

    def test_bounds_of_one_method_are_not_those_of_another(self) -> None:
        models = {
            name: quantized(encoder(), ({0: Dim("batch", max=most)},))
            for name, most in (("few", 4), ("many", 40))
        }
        methods = qompose.lower(models, "executorch").methods
        many = X[:1].repeat(40, 1)
        assert methods["many"].run(many).shape == (40, WIDTH)
        assert methods["few"].run(many[:4]).shape == (4, WIDTH)
        with pytest.raises(ExecutorchTargetError, match="'x' of 'few'"):
            methods["few"].run(many)


class TestErrors:
    def test_the_program_itself_says_to_name_one(self) -> None:
        parts: Any = dict.fromkeys(["encode", "decode"], (Interface(call=CallInterface(())), None))
        program = ExecutorchProgram(b"", parts)
        for use in (lambda: program.run(X), lambda: program.delegation):
            with pytest.raises(ExecutorchTargetError, match="encode, decode"):
                use()
        with pytest.raises(qompose.errors.StageError, match="encode, decode"):
            qompose.report(program)

    def test_a_size_without_a_bound_names_the_method(self, parts: Any) -> None:
        free = quantized(encoder(), ({0: Dim("batch")},))
        with pytest.raises(ExecutorchTargetError, match="'free'"):
            qompose.lower({"encode": parts["encode"], "free": free}, "executorch")

    def test_the_files_own_method_is_taken(self, parts: Any) -> None:
        with pytest.raises(ExecutorchTargetError, match="qompose_interface"):
            lower_methods({INTERFACE: (parts["encode"], None)})  # type: ignore[dict-item]

    def test_without_executorch_the_torch_target_still_works(
        self, parts: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("qompose_xnnpack.executorch_target.target.find_spec", lambda name: None)
        with pytest.raises(qompose.errors.TargetError, match=r"qompose-xnnpack\[executorch\]"):
            qompose.lower(parts["encode"], "executorch")
        lowered = qompose.lower(parts, "torch")
        assert set(lowered) == {"encode", "decode"}
        assert (lowered["encode"](X) - parts["encode"](X)).abs().max().item() < 0.1
