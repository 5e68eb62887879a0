# SPDX-License-Identifier: Apache-2.0
"""Batches from files, and errors that name the file, the batch and the input."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
from qompose.cli.calibration_data import Batch, Input, Inputs, program_inputs, read_batches
from qompose.errors import CalibrationError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from tests.core.toy import export, randn, seeded


class Mixed(nn.Module):
    """Positional and keyword arguments, a nested one, and a number."""

    def forward(self, x: Tensor, times: int, *, extra: dict[str, Tensor], ids: Tensor) -> Tensor:
        return x * times + extra["a"] + ids.sum()


def mixed() -> ExportedProgram:
    batch = Dim("batch", min=2, max=64)
    return torch.export.export(
        Mixed(),
        (randn(4, 3), 2),
        {"extra": {"a": randn(3)}, "ids": torch.ones(4, dtype=torch.int64)},
        dynamic_shapes={"x": {0: batch}, "times": None, "extra": {"a": None}, "ids": {0: batch}},
    )


class Two(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


def one(batch: int = 4, dynamic: bool = False) -> Inputs:
    shapes = ({0: Dim("batch", min=2, max=8)},) if dynamic else None
    return program_inputs(export(nn.ReLU(), randn(batch, 3), dynamic_shapes=shapes))


def two() -> Inputs:
    return program_inputs(export(Two(), randn(4, 3), randn(4, 3)))


class Nested(nn.Module):
    def forward(self, d: dict[str, list[Tensor]], n: int) -> Tensor:
        return d["a"][0].sum() * n + d["a"][1]


def nested() -> Inputs:
    return program_inputs(torch.export.export(Nested(), ({"a": [randn(3), randn(2)]}, 3)))


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
            (SAMPLES, "a.pt"),
            ({"input": SAMPLES}, "a.pt"),
            ({"arg0": SAMPLES}, "a.pth"),
            ({"input": SAMPLES}, "a.safetensors"),
            ({"arg0": SAMPLES}, "a.SAFETENSORS"),
        ],
        ids=["tensor", "dict", "dict by number", "safetensors", "safetensors by number"],
    )
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
            (False, None, [4, 4], 2),
            (True, None, [4, 4, 2], 0),
            (True, 3, [3, 3, 3], 1),
            (True, 8, [8, 2], 0),
            (True, 5, [5, 5], 0),
        ],
        ids=["fixed", "smaller last one", "last one too small", "greatest", "even"],
    )
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
            assert f"{path}: the last {left_out} of 10 samples" in str(warning.message)

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
        with pytest.raises(CalibrationError, match="another structure"):
            read(write(tmp_path, [{k: v for k, v in whole.items() if k != "ids"}]), mixed_inputs())
        (batch,) = read(write(tmp_path, [whole]), mixed_inputs())
        assert batch.leaves[1] == 3
        assert torch.equal(batch.leaves[3], ids)


CASES = [
    pytest.param([randn(4, 3), randn(4, 2)], one, "FILE, batch 2, input input: it is float32[4, 2], and the "
                 "program takes float32[4, 3]", id="shape"),
    pytest.param([randn(4, 3).half()], one, "batch 1, input input: it is float16[4, 3]", id="dtype"),
    pytest.param([randn(4, 3)], two, "FILE, batch 1: it has 1 value in another structure than the program's "
                 "inputs, which are x: float32[4, 3], y: float32[4, 3]", id="one for two"),
    pytest.param([{"x": randn(4, 3), "z": randn(4, 3)}], two, "batch 1: it has 2 values in another structure",
                 id="wrong name in a list"),
    pytest.param([3], one, "batch 1, input input: it is of type int, not a tensor", id="no tensor"),
    pytest.param([], one, "holds an empty list", id="no batch"),
    pytest.param(3, one, "FILE must hold a tensor, a list of batches or a dict", id="a number"),
    pytest.param(SAMPLES, two, "FILE holds one tensor, and the program takes x:", id="a tensor for two"),
    pytest.param({"x": SAMPLES}, two, "FILE has nothing for y; the program takes x: float32[4, 3], y:",
                 id="missing name"),
    pytest.param({"x": SAMPLES, "yy": SAMPLES}, two, "no input 'yy' (did you mean 'y'?); it takes x:",
                 id="wrong name"),
    pytest.param({"x": SAMPLES, "y": [1]}, two, "input y: it is a list; expected a tensor",
                 id="list by name"),
    pytest.param({"x": SAMPLES, "y": SAMPLES[:5]}, two, "different numbers of samples (x 10, y 5)",
                 id="lengths"),
    pytest.param({"x": SAMPLES, "y": torch.tensor(1.0)}, two, "(x 10, y none)", id="no samples"),
    pytest.param(SAMPLES[:3], one, "FILE: 3 samples in batches of 4 do not fit what the program takes",
                 id="too few samples"),
    pytest.param(SAMPLES[:0], one, "0 samples in batches of 4", id="no sample"),
    pytest.param(SAMPLES.double(), one, "FILE, batch 1, input input: it is float64[4, 3]", id="sample dtype"),
    pytest.param(NotATensor(), one, "cannot be read as a file of torch.save with weights_only=True "
                 "(UnpicklingError)", id="code"),
]  # fmt: skip


UNUSABLE = [
    pytest.param(
        SAMPLES.to_sparse(),
        one,
        "FILE, input input: it has the layout sparse_coo, and programs take dense "
        "tensors: store its .to_dense()",
        id="sparse samples",
    ),
    pytest.param(
        [randn(4, 3), randn(4, 3).to_sparse()],
        one,
        "FILE, batch 2, input input: it has the layout sparse_coo",
        id="a sparse batch",
    ),
    pytest.param(
        SAMPLES.to("meta"),
        one,
        "FILE, input input: it is a tensor of the device 'meta', which has no values",
        id="samples without values",
    ),
    pytest.param(
        [{"x": randn(4, 3), "y": randn(4, 3).to("meta")}],
        two,
        "FILE, batch 1, input y: it is a tensor of the device 'meta'",
        id="a batch without values",
    ),
    pytest.param(
        {"x": SAMPLES, "y": SAMPLES, "arg1": SAMPLES},
        two,
        "FILE has the input y twice: by its name, and as arg1",
        id="name and number",
    ),
    pytest.param(
        {"arg0": SAMPLES, "x": SAMPLES, "y": SAMPLES},
        two,
        "FILE has the input x twice: by its name, and as arg0",
        id="number and name",
    ),
    pytest.param(
        [({"b": randn(3)}, 2)],
        nested,
        "FILE, batch 1: it has 2 values in another structure than the program's "
        "inputs, which are d: {'a': [float32[3], float32[2]]}, n: 3; it is ({'b': float32[3]}, 2)",
        id="structure",
    ),
    pytest.param(
        {"d": SAMPLES},
        nested,
        "no input 'd'; it takes d_a_0: "
        "float32[3], d_a_1: float32[2] (in d: {'a': [float32[3], float32[2]]}, n: 3)",
        id="nested name",
    ),
]


@pytest.mark.parametrize(("data", "inputs", "said"), [*CASES, *UNUSABLE])
def test_what_does_not_fit(tmp_path: Path, data: Any, inputs: Any, said: str) -> None:
    path = write(tmp_path, data)
    with pytest.raises(CalibrationError) as caught:
        read(path, inputs())
    assert said.replace("FILE", str(path)) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a.npy", "must be one of .pt, .pth, .safetensors"),
        ("a.safetensors", "is not a valid safetensors file"),
        ("a.pt", "cannot be read as a file of torch.save"),
        ("hi.pt", "cannot be read as a file of torch.save"),
    ],
)
def test_files_of_other_kinds(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / name).write_text("hi" if name == "hi.pt" else "words")
    with pytest.raises(CalibrationError, match=said):
        read(tmp_path / name, one())


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "a.pt", one())


def test_a_batch_size_for_a_list_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="leave it out"):
        read(write(tmp_path, [randn(4, 3)]), one(), size=2)


def test_a_batch_size_that_the_program_does_not_take_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="10 samples in batches of 2 are nothing"):
        read(write(tmp_path, SAMPLES), one(), size=2)


class TestInputs:
    """Names, types and sizes of the tensors; other values are those of the export."""

    def test_as_text(self) -> None:
        assert str(program_inputs(mixed())) == (
            "x: float32[2..64, 3], extra_a: float32[3], ids: int64[2..64] "
            "(in x: float32[2..64, 3], times: 2, extra: {'a': float32[3]}, ids: int64[2..64])"
        )
        assert (
            str(program_inputs(export(seeded(nn.Linear(3, 4)), randn(2, 3))))
            == "input: float32[2, 3]"
        )

    def test_other_leaves_have_their_value(self) -> None:
        others = [leaf for leaf in program_inputs(mixed()).leaves if not isinstance(leaf, Input)]
        assert others == [2]

    def test_call(self) -> None:
        """Values by name become arguments by name, in the structure of the program."""
        inputs = program_inputs(mixed())
        x, a, ids = randn(2, 3), randn(3), torch.ones(2, dtype=torch.int64)
        leaves = inputs.filled({"x": x, "extra_a": a, "ids": ids})
        call = inputs.call(leaves)
        assert call == {"x": x, "times": 2, "extra": {"a": a}, "ids": ids}

    @pytest.mark.parametrize(
        ("value", "said"),
        [
            (randn(2, 3), None),
            (randn(64, 3), None),
            (randn(65, 3), "is float32[65, 3], and the program takes float32[2..64, 3]"),
            (randn(1, 3), "is float32[1, 3]"),
            (randn(2, 4), "is float32[2, 4]"),
            (randn(2, 3, 1), "is float32[2, 3, 1]"),
            (randn(2, 3).double(), "is float64[2, 3]"),
            (3, "is of type int, not a tensor"),
        ],
        ids=["least", "most", "too many", "too few", "other size", "other rank", "dtype", "type"],
    )
    def test_objection(self, value: object, said: str | None) -> None:
        objection = program_inputs(mixed()).tensors[0].objection(value)
        assert objection == said if said is None else said in (objection or "")

    @pytest.mark.parametrize(("size", "taken"), [(1, False), (2, True), (64, True), (65, False)])
    def test_batches(self, size: int, taken: bool) -> None:
        x, a, _ = program_inputs(mixed()).tensors
        assert x.takes_batch(size) is taken
        assert x.example_batch == 4
        assert a.takes_batch(3)
