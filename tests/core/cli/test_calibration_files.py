# SPDX-License-Identifier: Apache-2.0
"""Batches from files, and errors that name the file, the batch and the input."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
from qompose.cli.calibration_data import Batch, Inputs, program_inputs, read_batches
from qompose.errors import CalibrationError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from tests.core.toy import Model, export, randn


def mixed() -> ExportedProgram:
    """Positional and keyword arguments, a nested one, and a number."""

    def forward(m: Any, x: Tensor, times: int, *, extra: Any, ids: Tensor) -> Tensor:
        return x * times + extra["a"] + ids.sum()

    batch = Dim("batch", min=2, max=64)
    return torch.export.export(
        Model(forward),
        (randn(4, 3), 2),
        {"extra": {"a": randn(3)}, "ids": torch.ones(4, dtype=torch.int64)},
        dynamic_shapes={"x": {0: batch}, "times": None, "extra": {"a": None}, "ids": {0: batch}},
    )


def one(batch: int = 4, dynamic: bool = False) -> Inputs:
    shapes = ({0: Dim("batch", min=2, max=8)},) if dynamic else None
    return program_inputs(export(nn.ReLU(), randn(batch, 3), dynamic_shapes=shapes))


def two() -> Inputs:
    return program_inputs(export(Model(lambda m, x, y: x + y), randn(4, 3), randn(4, 3)))


def nested() -> Inputs:
    module = Model(lambda m, d, n: d["a"][0].sum() * n + d["a"][1])
    return program_inputs(torch.export.export(module, ({"a": [randn(3), randn(2)]}, 3)))


class NotATensor:
    """What only a pickle that runs code can hold."""


def write(folder: Path, data: Any, name: str = "data.pt") -> Path:
    path = folder / name
    if path.suffix == ".safetensors":
        save_file(data, path)
    else:
        torch.save(data, path)
    return path


def read(
    path: Path, inputs: Inputs, size: int | None = None, limit: int | None = None
) -> list[Batch]:
    return read_batches([path], inputs, size, limit)


def sizes(batches: list[Batch]) -> list[int]:
    return [len(batch.leaves[0]) for batch in batches]


SAMPLES = randn(10, 3)


class TestSamples:
    """A tensor, or tensors by name, cut into batches."""

    @pytest.mark.parametrize(
        ("data", "name"),
        [
            (SAMPLES, "a.pt"), ({"input": SAMPLES}, "a.pt"), ({"arg0": SAMPLES}, "a.pth"),
            ({"input": SAMPLES}, "a.safetensors"), ({"arg0": SAMPLES}, "a.SAFETENSORS"),
        ],
        ids=["tensor", "dict", "dict by number", "safetensors", "safetensors by number"],
    )  # fmt: skip
    def test_forms(self, tmp_path: Path, data: Any, name: str) -> None:
        if name.endswith("SAFETENSORS"):
            write(tmp_path, data, "a.safetensors").rename(tmp_path / name)
        else:
            write(tmp_path, data, name)
        batches = read(tmp_path / name, one(batch=5))
        assert [batch.number for batch in batches] == [1, 2]
        assert torch.equal(torch.cat([batch.leaves[0] for batch in batches]), SAMPLES)

    @pytest.mark.parametrize(
        ("dynamic", "size", "expected", "left_out"),
        [
            (False, None, [4, 4], 2), (True, None, [4, 4, 2], 0), (True, 3, [3, 3, 3], 1),
            (True, 8, [8, 2], 0), (True, 5, [5, 5], 0),
        ],
        ids=["fixed", "smaller last one", "last one too small", "greatest", "even"],
    )  # fmt: skip
    def test_cutting(
        self, tmp_path: Path, dynamic: bool, size: int | None, expected: list[int], left_out: int
    ) -> None:
        path = write(tmp_path, SAMPLES)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert sizes(read(path, one(dynamic=dynamic), size)) == expected
        assert len(said) == bool(left_out)
        for warning in said:
            assert warning.category is qompose.QomposeWarning
            assert f"last {left_out} of 10 samples" in str(warning.message)

    def test_a_limit_over_several_files(self, tmp_path: Path) -> None:
        first, second = write(tmp_path, SAMPLES, "a.pt"), write(tmp_path, SAMPLES, "b.pt")
        batches = read_batches([first, second], one(batch=5), None, 3)
        assert [(b.file, b.number) for b in batches] == [(first, 1), (first, 2), (second, 1)]

    def test_what_is_no_tensor_comes_from_the_export(self, tmp_path: Path) -> None:
        data = {"x": SAMPLES[:3], "extra_a": randn(3), "ids": torch.ones(3, dtype=torch.int64)}
        (batch,) = read(write(tmp_path, data), mixed_inputs())
        assert batch.leaves[1] == 2


def mixed_inputs() -> Inputs:
    return program_inputs(mixed())


class TestLists:
    """Batches as they are."""

    def test_forms(self, tmp_path: Path) -> None:
        x, y = randn(4, 3), randn(4, 3, seed=1)
        data = [(x, y), [x, y], {"y": y, "x": x}]
        for batch in read(write(tmp_path, data), two()):
            assert torch.equal(batch.leaves[0], x)
            assert torch.equal(batch.leaves[1], y)

    def test_a_tensor_for_one_input(self, tmp_path: Path) -> None:
        assert sizes(read(write(tmp_path, [randn(4, 3)] * 3), one())) == [4, 4, 4]

    def test_positional_and_keyword_arguments_by_name(self, tmp_path: Path) -> None:
        ids = torch.ones(5, dtype=torch.int64)
        whole = {"ids": ids, "x": randn(5, 3), "times": 3, "extra": {"a": randn(3)}}
        with pytest.raises(CalibrationError, match="ids"):
            read(write(tmp_path, [{k: v for k, v in whole.items() if k != "ids"}]), mixed_inputs())
        (batch,) = read(write(tmp_path, [whole]), mixed_inputs())
        assert batch.leaves[1] == 3
        assert torch.equal(batch.leaves[3], ids)


CASES = [
    pytest.param([randn(4, 3), randn(4, 2)], one, ("batch 2", "input", "[4, 2]", "[4, 3]"), id="shape"),
    pytest.param([randn(4, 3).half()], one, ("batch 1", "input", "float16"), id="dtype"),
    pytest.param([randn(4, 3)], two, ("batch 1", "x: float32[4, 3], y: float32[4, 3]"), id="one for two"),
    pytest.param([{"x": randn(4, 3), "z": randn(4, 3)}], two, ("batch 1",), id="wrong name in a list"),
    pytest.param([3], one, ("batch 1", "input", "int"), id="no tensor"),
    pytest.param([], one, (), id="no batch"),
    pytest.param(3, one, (), id="a number"),
    pytest.param(SAMPLES, two, ("x:", "y:"), id="a tensor for two"),
    pytest.param({"x": SAMPLES}, two, ("for y.",), id="missing name"),
    pytest.param({"x": SAMPLES, "yy": SAMPLES}, two, ("'yy'", "'y'"), id="wrong name"),
    pytest.param({"x": SAMPLES, "y": [1]}, two, ("input y", "list"), id="list by name"),
    pytest.param({"x": SAMPLES, "y": SAMPLES[:5]}, two, ("x 10, y 5",), id="lengths"),
    pytest.param({"x": SAMPLES, "y": torch.tensor(1.0)}, two, ("x 10, y none",), id="no samples"),
    pytest.param(SAMPLES[:3], one, ("3 samples", "batches of 4"), id="too few samples"),
    pytest.param(SAMPLES[:0], one, ("0 samples", "batches of 4"), id="no sample"),
    pytest.param(SAMPLES.double(), one, ("batch 1", "float64[4, 3]"), id="sample dtype"),
    pytest.param(NotATensor(), one, ("weights_only=True",), id="code"),
    pytest.param(SAMPLES.to_sparse(), one, ("input", "sparse_coo"), id="sparse samples"),
    pytest.param([randn(4, 3), randn(4, 3).to_sparse()], one, ("batch 2", "sparse_coo"), id="a sparse batch"),
    pytest.param(SAMPLES.to("meta"), one, ("input", "'meta'"), id="samples without values"),
    pytest.param([{"x": randn(4, 3), "y": randn(4, 3).to("meta")}], two, ("batch 1", "input y", "'meta'"),
                 id="a batch without values"),
    pytest.param({"x": SAMPLES, "y": SAMPLES, "arg1": SAMPLES}, two, ("y", "arg1"), id="name and number"),
    pytest.param({"arg0": SAMPLES, "x": SAMPLES, "y": SAMPLES}, two, ("x", "arg0"), id="number and name"),
    pytest.param([({"b": randn(3)}, 2)], nested, ("batch 1", "({'b': float32[3]}, 2)"), id="structure"),
    pytest.param({"d": SAMPLES}, nested, ("'d'", "d_a_0: float32[3], d_a_1: float32[2]"), id="nested name"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "inputs", "named"), CASES)
def test_what_does_not_fit(tmp_path: Path, data: Any, inputs: Any, named: tuple[str, ...]) -> None:
    path = write(tmp_path, data)
    with pytest.raises(CalibrationError) as caught:
        read(path, inputs())
    assert all(words in str(caught.value) for words in (str(path), *named)), str(caught.value)


@pytest.mark.parametrize("name", ["a.npy", "a.safetensors", "a.pt", "hi.pt"])
def test_files_of_other_kinds(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("hi" if name == "hi.pt" else "words")
    with pytest.raises(CalibrationError, match=name):
        read(tmp_path / name, one())


@pytest.mark.parametrize("data", [[randn(4, 3)], SAMPLES], ids=["for a list", "not of the program"])
def test_batch_sizes_that_are_refused(tmp_path: Path, data: Any) -> None:
    with pytest.raises(CalibrationError):
        read(write(tmp_path, data), one(), size=2)


class TestInputs:
    """Names, types and sizes of the tensors; other values are those of the export."""

    def test_as_text(self) -> None:
        assert str(mixed_inputs()) == (
            "x: float32[2..64, 3], extra_a: float32[3], ids: int64[2..64] "
            "(in x: float32[2..64, 3], times: 2, extra: {'a': float32[3]}, ids: int64[2..64])"
        )
        assert str(one(batch=2)) == "input: float32[2, 3]"

    def test_call(self) -> None:
        """Values by name become arguments by name, in the structure of the program."""
        inputs = mixed_inputs()
        x, a, ids = randn(2, 3), randn(3), torch.ones(2, dtype=torch.int64)
        leaves = inputs.filled({"x": x, "extra_a": a, "ids": ids})
        call = inputs.call(leaves)
        assert call == {"x": x, "times": 2, "extra": {"a": a}, "ids": ids}

    @pytest.mark.parametrize(
        ("value", "named"),
        [
            (randn(2, 3), None), (randn(64, 3), None), (randn(65, 3), "float32[65, 3]"),
            (randn(1, 3), "float32[1, 3]"), (randn(2, 4), "float32[2, 4]"),
            (randn(2, 3, 1), "float32[2, 3, 1]"), (randn(2, 3).double(), "float64[2, 3]"), (3, "int"),
        ],
        ids=["least", "most", "too many", "too few", "other size", "other rank", "dtype", "type"],
    )  # fmt: skip
    def test_objection(self, value: object, named: str | None) -> None:
        objection = mixed_inputs().tensors[0].objection(value)
        assert objection is None if named is None else named in (objection or "")

    @pytest.mark.parametrize(("size", "taken"), [(1, False), (2, True), (64, True), (65, False)])
    def test_batches(self, size: int, taken: bool) -> None:
        x, a, _ = mixed_inputs().tensors
        assert x.takes_batch(size) is taken
        assert x.example_batch == 4
        assert a.takes_batch(3)
