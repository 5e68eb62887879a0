# SPDX-License-Identifier: Apache-2.0
"""Arguments, their names and sizes, and results survive a file."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
from qompose.program.call_signature import call_signature
from torch import Tensor, nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from tests.core.preparation.test_zoo import assert_same_outputs
from tests.core.storage.test_artefact import MLP, X, assert_same_model, stored, unquantized
from tests.core.toy import LINEAR, NullQuantizer, prepare, randn, seeded, toy


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.qompose"


Pair = namedtuple("Pair", "low high")


class TestCalls:
    """Arguments, their names and sizes, and results."""

    def test_keywords_and_nested_arguments(self, path: Path) -> None:
        class Nested(nn.Module):
            def forward(self, a: Any, pair: Any, *rest: Tensor, flag: bool, **named: Any) -> Any:
                total = a["x"] + a["y"][0] + pair[0] * pair[1] + sum(rest)
                return {"sum": total, "more": [named["z"] + 1, None, 3, "text", (total - 1,)]}

        args = ({"x": randn(3), "y": [randn(3)]}, (randn(3), 2.0), randn(3), randn(3))
        kwargs = {"flag": True, "z": randn(2)}
        program = torch.export.export(Nested(), args, kwargs)
        saved = qompose.convert_pt2e(prepare(program, NullQuantizer()))
        loaded = stored(saved, path)
        assert_same_model(loaded, saved)
        assert_same_outputs(saved(*args, **kwargs), loaded(*args, **kwargs))

    def test_dynamic_sizes_need_no_help(self, path: Path) -> None:
        batch = Dim("batch", min=2, max=64)
        shapes = {"x": {0: batch}, "shift": {0: 2 * batch}}

        class Double(MLP):
            def forward(self, x: Tensor, *, shift: Tensor) -> Tensor:  # type: ignore[override]
                return torch.cat([super().forward(x)] * 2) + shift

        program = torch.export.export(
            seeded(Double()), (X,), {"shift": randn(12, 4)}, dynamic_shapes=shapes
        )
        prepared = prepare(program, toy(LINEAR))
        prepared(X, shift=randn(12, 4))
        saved = qompose.convert_pt2e(prepared)
        loaded = stored(saved, path)
        assert_same_model(loaded, saved)
        for size in (2, 3, 64):
            x, shift = randn(size, 8), randn(2 * size, 4)
            assert torch.equal(loaded(x, shift=shift), saved(x, shift=shift))
        signature = call_signature(loaded)
        again = torch.export.export(
            loaded,
            signature.args,
            dict(signature.kwargs),
            dynamic_shapes=signature.dynamic_shapes,
        )
        found = sorted((int(r.lower), int(r.upper)) for r in again.range_constraints.values())
        assert found == [(2, 64), (4, 128)]
        assert again.module()(randn(64, 8), shift=randn(128, 4)).shape == (128, 4)

    def test_sizes_that_only_the_data_tell(self, path: Path) -> None:
        class Count(nn.Module):
            def forward(self, x: Tensor) -> Any:
                rows = x.nonzero()
                length = x.sum().item()
                torch._check(length >= 0)
                return (rows + 1).flatten(), torch.zeros(length), rows.shape[0] * 2

        x = torch.tensor([0, 1, 2])
        saved = unquantized(Count(), x)
        loaded = stored(saved, path)
        assert_same_model(loaded, saved)
        for values in ([0, 1, 2], [3, 3, 3]):
            given = torch.tensor(values)
            assert_same_outputs(saved(given), loaded(given))

    def test_names_that_python_has_too(self, path: Path) -> None:
        class Same(nn.Module):
            def forward(self, input: Tensor, *, sum: Tensor) -> Tensor:
                return input + sum

        program = torch.export.export(Same(), (X,), {"sum": X})
        saved = qompose.convert_pt2e(prepare(program, NullQuantizer()))
        loaded = stored(saved, path)
        assert_same_model(loaded, saved)
        assert torch.equal(loaded(X, sum=X), X + X)

    def test_names_that_python_cannot_have(self, path: Path) -> None:
        class Odd(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.parts = nn.ModuleDict({"a-b": nn.Linear(8, 4), "1 {x}": nn.Linear(8, 4)})

            def forward(self, **inputs: Tensor) -> Tensor:
                return self.parts["a-b"](inputs["x"]) + self.parts["1 {x}"](inputs["y"])

        inputs = {"x": X, "y": X}
        program = torch.export.export(seeded(Odd()), (), inputs)
        saved = qompose.convert_pt2e(prepare(program, NullQuantizer()))
        loaded = stored(saved, path)
        assert_same_model(loaded, saved)
        assert torch.equal(loaded(**inputs), saved(**inputs))

    def test_a_name_with_quotes_is_refused(self, path: Path) -> None:
        class Quoted(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("it's", torch.ones(8))

            def forward(self, x: Tensor) -> Tensor:
                return x + getattr(self, "it's")

        with pytest.raises(qompose.UserError, match=r"it's.*not a key or a step"):
            qompose.save(unquantized(Quoted(), X), path)

    def test_types_without_a_name_are_refused(self, path: Path) -> None:
        class Named(nn.Module):
            def forward(self, x: Tensor) -> Pair:
                return Pair(x, x + 1)

        with pytest.raises(qompose.UserError, match=r"Pair.*serializated_type_name"):
            qompose.save(unquantized(Named(), X), path)

    def test_dataclasses_and_named_tuples(self, path: Path) -> None:
        @dataclass
        class Batch:
            x: Tensor
            weight: Tensor | None

        Ends = namedtuple("Ends", "first last")
        torch.export.register_dataclass(Batch, serialized_type_name="tests.Batch")
        pytree._register_namedtuple(Ends, serialized_type_name="tests.Ends")

        class Typed(nn.Module):
            def forward(self, batch: Any, **named: Any) -> Any:
                return Ends(batch.x + named["bias"]["b"], Batch(batch.x * 2, None))

        batch, bias = Batch(X, None), OrderedDict(b=randn(8))
        program = torch.export.export(Typed(), (batch,), {"bias": bias})
        loaded = stored(qompose.convert_pt2e(prepare(program, NullQuantizer())), path)
        result = loaded(batch, bias=bias)
        assert torch.equal(result.first, X + bias["b"])
        assert isinstance(result.last, Batch) and torch.equal(result.last.x, X * 2)

    def test_registered_types_are_looked_up(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Box:
            def __init__(self, value: Tensor, label: str) -> None:
                self.value, self.label = value, label

        pytree.register_pytree_node(
            Box,
            lambda box: ([box.value], box.label),
            lambda values, label: Box(*values, label),
            serialized_type_name="tests.Box",
        )

        class Boxed(nn.Module):
            def forward(self, x: Tensor) -> Any:
                return Box(x + 1, "sum")

        loaded = stored(unquantized(Boxed(), X), path)
        result = loaded(X)
        assert result.label == "sum" and torch.equal(result.value, X + 1)
        monkeypatch.delitem(pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE, "tests.Box")
        pytree.treespec_loads.cache_clear()  # another process has not read the tree before
        with pytest.raises(qompose.UserError, match=r"not registered in this process .*tests\.Box"):
            qompose.load(path)
