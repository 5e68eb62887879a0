# SPDX-License-Identifier: Apache-2.0
"""Files of torch.export, and what the programs in them are called with."""

from __future__ import annotations

import logging
import zipfile
from pathlib import Path

import pytest
import qompose
import torch
from qompose import UserError
from qompose.storage.export_archive import Input, load_program, program_inputs
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from tests.core.toy import LINEAR, convert, export, randn, seeded, toy


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


def linear() -> ExportedProgram:
    return export(seeded(nn.Linear(3, 4)), randn(2, 3))


class TestLoad:
    """What torch.export.save wrote, and nothing else."""

    def test_a_program_as_it_was(self, tmp_path: Path) -> None:
        torch.export.save(linear(), tmp_path / "a.pt2")
        loaded = load_program(tmp_path / "a.pt2")
        x = randn(2, 3, seed=1)
        assert torch.equal(loaded.module()(x), linear().module()(x))

    def test_the_name_of_the_file_says_nothing(self, tmp_path: Path) -> None:
        torch.export.save(linear(), tmp_path / "a.pt2")
        (tmp_path / "a.pt2").rename(tmp_path / "a.export")
        assert load_program(tmp_path / "a.export").graph

    @pytest.mark.parametrize(
        ("kind", "said"),
        [
            ("artefact", "it holds a model that is quantized already (`qompose report "),
            ("safetensors", "it is a safetensors file"),
            ("pickle", "torch.save wrote it"),
            ("zip", "it is some other zip archive"),
            ("text", "it is no zip archive"),
            ("empty", "it is no zip archive"),
        ],
        ids=lambda value: value if " " not in value else "",
    )
    def test_other_files_are_named(self, tmp_path: Path, kind: str, said: str) -> None:
        path = tmp_path / "file.pt2"
        if kind == "artefact":
            qompose.save(convert(linear(), toy(LINEAR), randn(2, 3)), path)
        elif kind == "safetensors":
            save_file({"a": randn(2)}, path)
        elif kind == "pickle":
            torch.save({"a": 1}, path)
        elif kind == "zip":
            with zipfile.ZipFile(path, "w") as archive:
                archive.writestr("a.txt", "a")
        else:
            path.write_text("some words" * (kind == "text"))
        with pytest.raises(UserError) as caught:
            load_program(path)
        assert f"{path} is no archive of torch.export: {said}" in str(caught.value)
        assert "torch.export.save(torch.export.export(model, inputs)" in str(caught.value)

    @pytest.mark.parametrize(
        ("part", "said"),
        [("model.json", "TypeError: "), ("archive_format", "AssertionError: ")],
    )
    def test_a_damaged_one_says_why_and_logs_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, said: str
    ) -> None:
        """torch logs the cause of the second with its traceback, and raises an error that says nothing."""
        heard: list[logging.LogRecord] = []
        ear = logging.Handler()
        ear.emit = heard.append  # type: ignore[method-assign]
        for name in ("torch", "torch.export"):
            logger = logging.getLogger(name)
            monkeypatch.setattr(logger, "handlers", [*logger.handlers, ear])
        torch.export.save(linear(), tmp_path / "a.pt2")
        whole = zipfile.ZipFile(tmp_path / "a.pt2")
        with whole, zipfile.ZipFile(tmp_path / "b.pt2", "w") as archive:
            for name in whole.namelist():
                archive.writestr(name, b"{}" if name.endswith(part) else whole.read(name))
        with pytest.raises(UserError) as caught:
            load_program(tmp_path / "b.pt2")
        assert f"b.pt2 cannot be read by torch.export: {said}" in str(caught.value)
        assert heard == []

    def test_a_missing_file_is_an_os_error(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            load_program(tmp_path / "a.pt2")


class TestInputs:
    """Names, types and sizes of the tensors; other values are those of the export."""

    def test_as_text(self) -> None:
        assert str(program_inputs(mixed())) == (
            "x: float32[2..64, 3], extra_a: float32[3], ids: int64[2..64] "
            "(in x: float32[2..64, 3], times: 2, extra: {'a': float32[3]}, ids: int64[2..64])"
        )
        assert str(program_inputs(linear())) == "input: float32[2, 3]"

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
            (3, "is int, and not a tensor"),
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
