# SPDX-License-Identifier: Apache-2.0
"""`qompose calibrate`, `qompose quantize` and `qompose report`, with a backend that exists only here."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
from qompose import Statistics
from qompose.backend import Finished, Kernel, Target
from qompose.preparation import prepare
from torch import Tensor, nn

from tests.core.backend.test_plugins import Install, install
from tests.core.cli.conftest import Command
from tests.core.cli.test_calibration_files import mixed
from tests.core.toy import (
    LINEAR,
    LINEAR_RELU,
    VIEW,
    Model,
    NullQuantizer,
    ToyBackend,
    export,
    randn,
    rule,
    seeded,
)

__all__ = ["install"]  # a fixture


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


PROGRAM = export(seeded(nn.Linear(8, 4)), randn(2, 8))


def backend() -> ToyBackend:
    kernel = Kernel("chip linear", LINEAR.kernels["torch"].emit)
    kernels = {**LINEAR.kernels, "chip": kernel, "full": kernel, "bare": kernel}
    linear = rule("linear", *LINEAR.patterns, anchor="op", weight="weight", kernels=kernels)
    targets = (
        Target("chip", lambda module, signature: Finished(Program(module))),
        Target("full", lambda module, signature: Finished(Unsaveable(module))),
        Target("bare", lambda module, signature: Finished(module)),
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
    torch.export.save(PROGRAM, "m.pt2")
    torch.save(randn(6, 8), "data.pt")
    return tmp_path


@pytest.fixture
def quantize(command: Command) -> Command:
    return partial(command, "quantize", "m.pt2")


ALPHA = ("--backend", "alpha")
DATA = ("--calibration", "data.pt")


def batch_of_mixed(times: int) -> dict[str, Any]:
    ids = torch.ones(4, dtype=torch.int64)
    return {"x": randn(4, 3), "times": times, "extra": {"a": randn(3)}, "ids": ids}


@pytest.mark.usefixtures("folder")
@pytest.mark.filterwarnings("always::qompose.QomposeWarning")  # they become messages
class TestQuantize:
    """From files to files."""

    def test_the_saved_model_is_what_python_makes(self, quantize: Command) -> None:
        printed = quantize(*ALPHA, *DATA)
        assert "toy linear" in printed.out
        assert printed.err.startswith("qompose: wrote m.qompose (")
        loaded = qompose.load("m.qompose")
        data = torch.load("data.pt")
        again = qompose.prepare_pt2e(torch.export.load("m.pt2"), qompose.compose("alpha"))
        qompose.calibrate(again, data.split(2))
        assert torch.equal(loaded(data[:2]), qompose.convert_pt2e(again)(data[:2]))

    def test_the_report_of_the_file(self, quantize: Command, command: Command) -> None:
        quantize(*ALPHA, *DATA, "--output", "o.qompose")
        expected = qompose.report(qompose.load("o.qompose"))
        assert json.loads(command("report", "o.qompose", "--json").out) == expected.to_dict()
        assert command("report", "o.qompose", "--markdown").out == f"{expected.to_markdown()}\n"
        assert "simulated" in command("report", "o.qompose").out

    def test_a_program_of_another_runtime(self, folder: Path, quantize: Command) -> None:
        quantize(*ALPHA, *DATA, "--target", "chip", "--lowered", "m.bin")
        assert Path("m.bin").read_text() == "a program"
        files = {path.name for path in folder.iterdir()}
        assert files == {"data.pt", "m.bin", "m.pt2", "m.qompose"}

    @pytest.mark.parametrize("config", ["dynamic", "weight-only"])
    def test_data_is_needed_only_for_what_is_static(self, config: str, quantize: Command) -> None:
        printed = quantize("--backend", f"alpha:{config}", "--json").out
        found = json.loads(printed)  # which is all that is printed there
        (row,) = found["rows"]
        assert (found["stage"], row["config"], row["mode"]) == ("lowered", config, config)

    def test_several_backends_in_order_of_priority(self, quantize: Command) -> None:
        (row,) = json.loads(quantize("--backend", "gamma", *ALPHA, *DATA, "--json").out)["rows"]
        assert row["owner"] == "alpha"

    def test_a_configuration(self, quantize: Command) -> None:
        text = json.dumps(qompose.compose("alpha").to_dict())
        Path("q.json").write_text(text, encoding="utf-8-sig")  # as editors of Windows save it
        (row,) = json.loads(quantize("--config", "q.json", *DATA, "--json").out)["rows"]
        assert (row["owner"], row["config"]) == ("alpha", "static")

    def test_batches_are_those_that_are_asked_for(self, quantize: Command) -> None:
        torch.save(torch.cat([randn(2, 8), 1000 * randn(2, 8)]), "data.pt")
        quantize(*ALPHA, *DATA, "--batches", "1")
        few = qompose.load("m.qompose")
        quantize(*ALPHA, *DATA)
        x = randn(2, 8)
        assert not torch.equal(few(x), qompose.load("m.qompose")(x))

    def test_arguments_of_every_form(self, quantize: Command) -> None:
        torch.export.save(mixed(), "m.pt2")
        torch.save([batch_of_mixed(times=2)], "data.pt")
        assert "qompose: warning: " in quantize(*ALPHA, *DATA).err


@pytest.mark.usefixtures("folder")
@pytest.mark.filterwarnings("always::qompose.QomposeWarning")
class TestProblems:
    """One message, exit code 1, and no file."""

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (ALPHA, "--calibration FILE"),
            ((*ALPHA, "--calibration", "no.pt"), "no.pt: No such file or directory"),
            ((*ALPHA, *DATA, "--batch-size", "4"), "6 samples in batches of 4"),
            (("--backend", "alpho", *DATA), "'alpha'"),
            (("--backend", "alpha:statc", *DATA), "'static'"),
            (("--backend", "delta:static", *DATA), "'delta'"),
            ((*ALPHA, *DATA, "--target", "moon"), "'moon'"),
            ((*ALPHA, *DATA, "--lowered", "m.bin"), "'torch'"),
            ((*ALPHA, *DATA, "--output", "no/m.qompose"), "no is not a directory"),
            ((*ALPHA, *DATA, "--output", "m.pt2"), "m.pt2 is an input"),
            ((*ALPHA, *DATA, "--output", "data.pt"), "data.pt is an input"),
            ((*ALPHA, *DATA, "--output", "."), "directory"),
            (
                (*ALPHA, *DATA, "--target", "chip", "--output", "a", "--lowered", "./a"),
                "same file, a",
            ),
            ((*ALPHA, *DATA, "--target", "bare", "--lowered", "m.bin"), "--lowered"),
            (("--config", "no.json", *DATA), "no.json: No such file or directory"),
            (("--config", "data.pt", *DATA), "data.pt"),
            (("--config", "q.json", "--on-conflict", "first"), "--on-conflict"),
            (("--backend", "gamma", *DATA, "--strict"), "linear"),
            ((*ALPHA, *DATA, "--statistics", "seen.json"), "--statistics"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_is_said(
        self, folder: Path, arguments: tuple[str, ...], said: str, quantize: Command
    ) -> None:
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        printed = quantize(*arguments, code=1)
        assert printed.out == ""
        assert printed.err.startswith("qompose: ")
        assert said in printed.err
        assert "internal" not in printed.err
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before

    def test_what_may_stay_in_float_without_data(self, quantize: Command) -> None:
        (row,) = json.loads(quantize(*ALPHA, "--allow-uncalibrated", "--json").out)["rows"]
        assert row["state"] == "float"

    def test_what_is_quantized_without_data_is_named(self, quantize: Command) -> None:
        printed = quantize(*ALPHA, "--unit-scale", "--json")
        report = json.loads(printed.out)
        assert [row["state"] for row in report["rows"]] == ["int8 kernel"]
        assert sum(note in printed.err for note in report["notes"]) == 2

    def test_batch_norms_may_be_folded_in_float(self, folder: Path, quantize: Command) -> None:
        model = seeded(nn.Sequential(nn.Conv2d(1, 4, 1), nn.BatchNorm2d(4)))
        torch.export.save(export(model, randn(2, 1, 3, 3)), folder / "m.pt2")
        report = json.loads(quantize(*ALPHA, "--fold-batch-norms", "--json").out)
        assert len(report["rewrites"]) == 1

    def test_a_program_that_cannot_be_written_leaves_neither_file(
        self, folder: Path, quantize: Command
    ) -> None:
        before = sorted(folder.iterdir())
        files = ("--target", "full", "--lowered", "m.bin")
        assert "No space left on device" in quantize(*ALPHA, *DATA, *files, code=1).err
        assert sorted(folder.iterdir()) == before

    def test_a_batch_that_fails_is_named_with_its_file(self, quantize: Command) -> None:
        picky = Model(lambda m, ids: nn.functional.embedding(ids, torch.zeros(4, 2)))
        torch.export.save(export(picky, torch.zeros(2, dtype=torch.int64)), "m.pt2")
        torch.save([torch.tensor([0, 1]), torch.tensor([0, 9])], "data.pt")
        assert "data.pt, batch 2 " in quantize(*ALPHA, *DATA, code=1).err

    @pytest.mark.parametrize("option", ["--output", "--lowered"])
    def test_what_is_no_file_is_refused_before_any_work(
        self, option: str, monkeypatch: pytest.MonkeyPatch, quantize: Command
    ) -> None:
        os.mkfifo("pipe")
        Path("link").symlink_to("pipe")
        monkeypatch.setattr(prepare, "prepare_pt2e", None)
        for name in ("pipe", "link"):
            files = ("--target", "chip", option, name)
            assert f"{name} " in quantize(*ALPHA, *DATA, *files, code=1).err
        assert Path("pipe").is_fifo()

    def test_a_link_to_what_is_read_is_refused(self, quantize: Command) -> None:
        Path("link").symlink_to("data.pt")
        Path("q.json").write_text(json.dumps(qompose.compose("alpha").to_dict()))
        for arguments in (
            (*ALPHA, "--output", "link"),
            ("--config", "q.json", "--output", "q.json"),
        ):
            assert "overwritten" in quantize(*arguments, *DATA, code=1).err

    @pytest.mark.parametrize(("value", "said"), [("nan", "NaN"), ("inf", "infinite")])
    def test_bad_values_are_told_once(self, value: str, said: str, quantize: Command) -> None:
        data = randn(6, 8)
        data[3, 0] = float(value)
        torch.save(data, "data.pt")
        # The difference of infinities is NaN.
        difference = Model(lambda m, x: m.linear(x - x), linear=nn.Linear(8, 4))
        torch.export.save(export(difference, randn(2, 8)), "m.pt2")
        message = quantize(*ALPHA, *DATA, code=1).err
        assert message.startswith("qompose: data.pt, batch 2 ")
        assert said in message
        assert message.count("batch 2") == 1

    def test_another_constant_than_that_of_the_export_is_refused(self, quantize: Command) -> None:
        torch.export.save(mixed(), "m.pt2")
        torch.save([batch_of_mixed(times=2), batch_of_mixed(times=3)], "data.pt")
        said = quantize(*ALPHA, *DATA, code=1).err
        assert "data.pt, batch 2 " in said and "input times is 3" in said

    def test_a_program_without_inputs_needs_no_data(self, quantize: Command) -> None:
        model = Model(lambda m: m.linear(torch.arange(16.0).view(2, 8)), linear=nn.Linear(8, 4))
        torch.export.save(torch.export.export(model, ()), "m.pt2")
        assert "--calibration" in quantize(*ALPHA, *DATA, code=1).err
        rows = json.loads(quantize(*ALPHA, "--json").out)["rows"]
        assert "toy linear" in [row["kernel"] for row in rows]

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("no.qompose", "no.qompose: No such file"),
            ("m.pt2", "m.pt2"),
            (".", "qompose: .: Is a directory"),
        ],
        ids=["missing", "program", "directory"],
    )
    def test_a_report_of_something_else(self, name: str, said: str, command: Command) -> None:
        printed = command("report", name, code=1)
        assert printed.out == ""
        assert said in printed.err
        assert "internal" not in printed.err


@pytest.fixture
def calibrate(command: Command) -> Command:
    return partial(command, "calibrate")


@pytest.mark.usefixtures("folder")
class TestCalibrate:
    """Statistics as files, and `qompose quantize` by them."""

    def test_statistics_are_what_python_collects(self, calibrate: Command) -> None:
        said = calibrate("m.pt2", *ALPHA, *DATA, "--output", "seen.json").err
        assert said.startswith("qompose: wrote seen.json (2 tensors, ")
        prepared = qompose.prepare_pt2e(torch.export.load("m.pt2"), qompose.compose("alpha"))
        qompose.calibrate(prepared, torch.load("data.pt").split(2))
        assert Statistics.load("seen.json").diff(qompose.statistics(prepared)) == ()

    def test_jobs_are_merged_and_quantize_goes_by_them(
        self, quantize: Command, calibrate: Command
    ) -> None:
        data = torch.load("data.pt")
        for number, part in enumerate([data[:2], data[2:]]):
            torch.save(part, f"part{number}.pt")
            files = ("--calibration", f"part{number}.pt", "--output", f"{number}.safetensors")
            calibrate("m.pt2", *ALPHA, *files)
        merging = ["--merge", "1.safetensors", "0.safetensors", "--output", "all.safetensors"]
        calibrate(*merging)
        quantize(*ALPHA, "--statistics", "all.safetensors", "--output", "a.qompose")
        quantize(*ALPHA, *DATA, "--output", "b.qompose")
        x = data[:2]
        assert torch.equal(qompose.load("a.qompose")(x), qompose.load("b.qompose")(x))

    @pytest.mark.parametrize(
        ("arguments", "named"),
        [
            ((), "--merge"), (("m.pt2",), "--config"), (("m.pt2", *ALPHA), "--calibration"),
            (("m.pt2", "--merge", "a.json"), "--merge"), (("--merge", "a.json"), "a.json: No such file"),
        ],
    )  # fmt: skip
    def test_refusals(self, arguments: tuple[str, ...], named: str, calibrate: Command) -> None:
        assert named in calibrate(*arguments, "--output", "seen.json", code=1).err
        assert not Path("seen.json").exists()

    @pytest.mark.parametrize(
        ("output", "named"), [("no/a.json", "no is not"), ("d.safetensors", "overwritten")]
    )
    def test_where_nothing_may_be_written(
        self, output: str, named: str, calibrate: Command
    ) -> None:
        data = ("--calibration", "d.safetensors")
        assert named in calibrate("m.pt2", *ALPHA, *data, "--output", output, code=1).err
