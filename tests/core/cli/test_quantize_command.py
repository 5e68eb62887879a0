# SPDX-License-Identifier: Apache-2.0
"""`qompose quantize` and `qompose report`, with a backend that exists only here."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
from qompose.backend import Finished, Kernel, Target
from qompose.cli import main
from qompose.preparation import prepare
from torch import Tensor, nn

from tests.core.backend.test_plugins import Install, install
from tests.core.cli.test_calibration_files import mixed
from tests.core.toy import (
    LINEAR,
    LINEAR_RELU,
    VIEW,
    NullQuantizer,
    ToyBackend,
    export,
    randn,
    rule,
    seeded,
)

__all__ = ["install"]  # a fixture

Capture = pytest.CaptureFixture[str]


class Program:
    """What the last step for the target "chip" makes: a program that can be saved."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.meta: dict[str, Any] = {}

    def __call__(self, *inputs: Tensor) -> Any:
        return self.model(*inputs)

    def save(self, path: Path) -> None:
        path.write_text("a program")


class Unsaveable(Program):
    """One whose file cannot be written."""

    def save(self, path: Path) -> None:
        path.write_text("half a pro")
        raise OSError(28, "No space left on device", str(path))


class Difference(nn.Module):
    """Infinite values become NaN in it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x - x)


class NoInput(nn.Module):
    """A program that takes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self) -> Tensor:
        return self.linear(torch.arange(16.0).view(2, 8))


def backend() -> ToyBackend:
    kernel = Kernel("chip linear", LINEAR.kernels["torch"].emit)
    kernels = {**LINEAR.kernels, "chip": kernel, "full": kernel}
    linear = rule("linear", *LINEAR.patterns, anchor="op", weight="weight", kernels=kernels)
    targets = (
        Target("chip", lambda module, signature: Finished(Program(module))),
        Target("full", lambda module, signature: Finished(Unsaveable(module))),
    )
    return ToyBackend([linear, VIEW], name="alpha", targets=targets)


@pytest.fixture
def folder(install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a program `m.pt2` and samples `data.pt` for it."""
    install(
        alpha=backend,
        gamma=lambda: ToyBackend([LINEAR_RELU], name="gamma"),
        delta=lambda: ToyBackend(name="delta", quantizer_class=NullQuantizer),
    )
    monkeypatch.chdir(tmp_path)
    torch.export.save(export(seeded(nn.Linear(8, 4)), randn(2, 8)), "m.pt2")
    torch.save(randn(6, 8), "data.pt")
    return tmp_path


def quantize(*arguments: str, model: str = "m.pt2") -> int:
    return main.main(["quantize", model, *arguments])


ALPHA = ("--backend", "alpha")
DATA = ("--calibration", "data.pt")


@pytest.mark.usefixtures("folder")
@pytest.mark.filterwarnings("always::qompose.QomposeWarning")  # they become messages
class TestQuantize:
    """From files to files."""

    def test_the_saved_model_is_what_python_makes(self, capsys: Capture) -> None:
        assert quantize(*ALPHA, *DATA) == 0
        printed = capsys.readouterr()
        assert "toy linear" in printed.out
        assert printed.err.startswith("qompose: wrote m.qompose (")
        loaded = qompose.load("m.qompose")
        data = torch.load("data.pt")
        again = qompose.prepare_pt2e(torch.export.load("m.pt2"), qompose.compose("alpha"))
        qompose.calibrate(again, data.split(2))
        assert torch.equal(loaded(data[:2]), qompose.convert_pt2e(again)(data[:2]))

    def test_the_report_is_json_and_nothing_else(self, capsys: Capture) -> None:
        assert quantize(*ALPHA, *DATA, "--json") == 0
        found = json.loads(capsys.readouterr().out)
        assert found["stage"] == "lowered"
        assert [row["kernel"] for row in found["rows"]] == ["toy linear"]

    def test_the_report_of_the_file(self, capsys: Capture) -> None:
        quantize(*ALPHA, *DATA, "--output", "o.qompose")
        capsys.readouterr()
        expected = qompose.report(qompose.load("o.qompose"))
        assert main.main(["report", "o.qompose", "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == expected.to_dict()
        assert main.main(["report", "o.qompose", "--markdown"]) == 0
        assert capsys.readouterr().out == f"{expected.to_markdown()}\n"
        assert main.main(["report", "o.qompose"]) == 0
        assert "simulated" in capsys.readouterr().out

    def test_a_program_of_another_runtime(self, folder: Path) -> None:
        assert quantize(*ALPHA, *DATA, "--target", "chip", "--lowered", "m.bin") == 0
        assert Path("m.bin").read_text() == "a program"
        assert sorted(path.name for path in folder.iterdir()) == [
            "data.pt",
            "m.bin",
            "m.pt2",
            "m.qompose",
        ]

    @pytest.mark.parametrize("config", ["dynamic", "weight-only"])
    def test_data_is_needed_only_for_what_is_static(self, config: str, capsys: Capture) -> None:
        assert quantize("--backend", f"alpha:{config}", "--json") == 0
        (row,) = json.loads(capsys.readouterr().out)["rows"]
        assert (row["config"], row["mode"]) == (config, config)

    def test_several_backends_in_order_of_priority(self, capsys: Capture) -> None:
        assert quantize("--backend", "gamma", *ALPHA, *DATA, "--json") == 0
        (row,) = json.loads(capsys.readouterr().out)["rows"]
        assert row["owner"] == "alpha"

    def test_a_configuration(self, capsys: Capture) -> None:
        quantizer = qompose.compose("alpha")
        Path("q.json").write_text(json.dumps(quantizer.to_dict()))
        assert quantize("--config", "q.json", *DATA, "--json") == 0
        (row,) = json.loads(capsys.readouterr().out)["rows"]
        assert (row["owner"], row["config"]) == ("alpha", "static")

    def test_a_configuration_as_windows_editors_save_it(self) -> None:
        text = json.dumps(qompose.compose("alpha").to_dict())
        Path("q.json").write_text(text, encoding="utf-8-sig")
        assert quantize("--config", "q.json", *DATA) == 0

    def test_batches_are_those_that_are_asked_for(self) -> None:
        torch.save(torch.cat([randn(2, 8), 1000 * randn(2, 8)]), "data.pt")
        assert quantize(*ALPHA, *DATA, "--batches", "1") == 0
        few = qompose.load("m.qompose")
        assert quantize(*ALPHA, *DATA) == 0
        x = randn(2, 8)
        assert not torch.equal(few(x), qompose.load("m.qompose")(x))

    def test_arguments_of_every_form(self, capsys: Capture) -> None:
        torch.export.save(mixed(), "m.pt2")
        batch = {"x": randn(4, 3), "times": 2, "extra": {"a": randn(3)}}
        torch.save([{**batch, "ids": torch.ones(4, dtype=torch.int64)}], "data.pt")
        assert quantize(*ALPHA, *DATA) == 0
        assert "qompose: warning: Nothing was quantized" in capsys.readouterr().err


@pytest.mark.usefixtures("folder")
@pytest.mark.filterwarnings("always::qompose.QomposeWarning")
class TestProblems:
    """One message, exit code 1, and no file."""

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (ALPHA, "2 tensors are quantized statically, and there is no data"),
            ((*ALPHA, "--calibration", "no.pt"), "no.pt: No such file or directory"),
            ((*ALPHA, *DATA, "--batch-size", "4"), "6 samples in batches of 4 are nothing that"),
            (("--backend", "alpho", *DATA), "No backend named 'alpho' is installed (did you mean"),
            (("--backend", "alpha:statc", *DATA),
             "has no configuration 'statc' (did you mean 'static'?); it has static, dynamic, weight-only"),
            (("--backend", "delta:static", *DATA),
             "the quantizer of 'delta' takes no configuration: leave out ':static'"),
            ((*ALPHA, *DATA, "--target", "moon"), "a target 'moon'"),
            ((*ALPHA, *DATA, "--lowered", "m.bin"), "The target 'torch' runs in process"),
            ((*ALPHA, *DATA, "--output", "no/m.qompose"), "no is not a directory"),
            ((*ALPHA, *DATA, "--output", "m.pt2"), "m.pt2 would be overwritten, and is read"),
            ((*ALPHA, *DATA, "--output", "data.pt"), "data.pt would be overwritten, and is read"),
            ((*ALPHA, *DATA, "--output", "."), "it is a directory"),
            ((*ALPHA, *DATA, "--target", "chip", "--output", "a", "--lowered", "./a"), "are both a"),
            (("--config", "no.json", *DATA), "no.json: No such file or directory"),
            (("--config", "data.pt", *DATA), "data.pt: 'utf-8' codec can't decode"),
            (("--config", "q.json", "--on-conflict", "first"), "--on-conflict needs --backend"),
            (("--backend", "gamma", *DATA, "--strict"), "Nothing was quantized"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )  # fmt: skip
    def test_is_said(
        self, folder: Path, arguments: tuple[str, ...], said: str, capsys: Capture
    ) -> None:
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        assert quantize(*arguments) == 1
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith("qompose: ")
        assert said in printed.err
        assert "internal" not in printed.err
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before

    def test_missing_data_names_the_argument_and_the_tensors(self, capsys: Capture) -> None:
        quantize(*ALPHA)
        said = capsys.readouterr().err
        assert "--calibration FILE" in said
        assert "linear" in said

    def test_what_may_stay_in_float_without_data(self, capsys: Capture) -> None:
        assert quantize(*ALPHA, "--allow-uncalibrated", "--json") == 0
        (row,) = json.loads(capsys.readouterr().out)["rows"]
        assert row["state"] == "float"

    def test_a_program_that_cannot_be_written_leaves_neither_file(
        self, folder: Path, capsys: Capture
    ) -> None:
        before = sorted(folder.iterdir())
        assert quantize(*ALPHA, *DATA, "--target", "full", "--lowered", "m.bin") == 1
        assert "No space left on device" in capsys.readouterr().err
        assert sorted(folder.iterdir()) == before

    def test_a_batch_that_fails_is_named_with_its_file(
        self, capsys: Capture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Picky(nn.Module):
            def forward(self, ids: Tensor) -> Tensor:
                return nn.functional.embedding(ids, torch.zeros(4, 2))

        torch.export.save(export(Picky(), torch.zeros(2, dtype=torch.int64)), "m.pt2")
        torch.save([torch.tensor([0, 1]), torch.tensor([0, 9])], "data.pt")
        assert quantize(*ALPHA, *DATA) == 1
        assert "data.pt, batch 2 does not fit the model: IndexError" in capsys.readouterr().err

    @pytest.mark.parametrize("option", ["--output", "--lowered"])
    def test_what_is_no_file_is_refused_before_any_work(
        self, option: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        os.mkfifo("pipe")
        Path("link").symlink_to("pipe")
        monkeypatch.setattr(prepare, "prepare_pt2e", None)
        for name in ("pipe", "link"):
            assert quantize(*ALPHA, *DATA, "--target", "chip", option, name) == 1
            assert f"{name} cannot be written: it is a pipe" in capsys.readouterr().err
        assert Path("pipe").is_fifo()

    def test_links_are_written_through(self) -> None:
        for name in ("o.qompose", "o.bin"):
            Path(f"link-{name}").symlink_to(name)
        files = ("--output", "link-o.qompose", "--lowered", "link-o.bin")
        assert quantize(*ALPHA, *DATA, "--target", "chip", *files) == 0
        assert qompose.load("o.qompose")
        assert Path("o.bin").read_text() == "a program"
        assert Path("link-o.bin").is_symlink()

    def test_a_link_to_what_is_read_is_refused(self, capsys: Capture) -> None:
        Path("link").symlink_to("data.pt")
        Path("q.json").write_text(json.dumps(qompose.compose("alpha").to_dict()))
        for arguments in (
            (*ALPHA, "--output", "link"),
            ("--config", "q.json", "--output", "q.json"),
        ):
            assert quantize(*arguments, *DATA) == 1
            assert "would be overwritten, and is read" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("value", "said"),
        [(float("nan"), "the batch itself holds NaN"),
         (float("inf"), "the batch itself holds infinite values")],
        ids=["nan", "inf"],
    )  # fmt: skip
    def test_bad_values_are_told_once(self, value: float, said: str, capsys: Capture) -> None:
        data = randn(6, 8)
        data[3, 0] = value
        torch.save(data, "data.pt")
        torch.export.save(export(Difference(), randn(2, 8)), "m.pt2")
        assert quantize(*ALPHA, *DATA) == 1
        message = capsys.readouterr().err
        assert message.startswith("qompose: data.pt, batch 2 cannot be used: ")
        assert message.strip().endswith(f"holds NaN; {said}")
        assert message.count("batch 2") == 1

    def test_another_constant_than_that_of_the_export_is_refused(self, capsys: Capture) -> None:
        torch.export.save(mixed(), "m.pt2")
        batch = {
            "x": randn(4, 3),
            "extra": {"a": randn(3)},
            "ids": torch.ones(4, dtype=torch.int64),
        }
        torch.save([{**batch, "times": 2}, {**batch, "times": 3}], "data.pt")
        assert quantize(*ALPHA, *DATA) == 1
        assert (
            "data.pt, batch 2 does not fit the model: the input times is 3, and the program was "
            "exported for 2"
        ) in capsys.readouterr().err

    def test_a_program_without_inputs_needs_no_data(self, capsys: Capture) -> None:
        torch.export.save(torch.export.export(NoInput(), ()), "m.pt2")
        assert quantize(*ALPHA, *DATA) == 1
        assert (
            "takes no tensors, and needs no data: leave out --calibration"
            in capsys.readouterr().err
        )
        assert quantize(*ALPHA, "--json") == 0
        rows = json.loads(capsys.readouterr().out)["rows"]
        assert "toy linear" in [row["kernel"] for row in rows]

    def test_a_saved_model_is_not_a_program(self, capsys: Capture) -> None:
        quantize(*ALPHA, *DATA)
        capsys.readouterr()
        assert quantize(*ALPHA, *DATA, model="m.qompose") == 1
        assert "a model that is quantized already" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("no.qompose", "no.qompose: No such file"),
            ("m.pt2", "was not written by qompose.save"),
            (".", "qompose: .: Is a directory"),
        ],
        ids=["missing", "program", "directory"],
    )
    def test_a_report_of_something_else(self, name: str, said: str, capsys: Capture) -> None:
        assert main.main(["report", name]) == 1
        printed = capsys.readouterr()
        assert printed.out == ""
        assert said in printed.err
        assert "internal" not in printed.err
