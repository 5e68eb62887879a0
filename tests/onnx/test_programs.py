# SPDX-License-Identifier: Apache-2.0
"""Programs in ONNX Runtime and OpenVINO: what is fused, what they compute, and files."""

from __future__ import annotations

import copy
import pickle
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import qompose
import torch
from qompose.backend import CallInterface
from qompose.errors import ConfigError, TargetError
from qompose_onnx import ONNXProgram, ONNXQuantizer, get_onnx_quantization_config
from qompose_onnx.errors import ONNXInputError, ONNXTargetError
from torch import Tensor, nn
from torch._higher_order_ops.map import map as map_rows

from tests.onnx.models import Images, Texts, images, sqnr, texts

pytest.importorskip("onnxruntime")
BATCH = torch.export.Dim("batch", max=64)


@pytest.fixture(scope="module")
def program() -> torch.export.ExportedProgram:
    torch.manual_seed(0)
    return torch.export.export(Images().eval(), images(1)[0], dynamic_shapes=({0: BATCH},))


@pytest.fixture(scope="module")
def converted(program: torch.export.ExportedProgram) -> Any:
    prepared = qompose.prepare_pt2e(program, qompose.compose("onnx"))
    qompose.calibrate(prepared, images(3), progress=False)
    return qompose.convert_pt2e(prepared)


@pytest.fixture(scope="module")
def lowered(converted: Any) -> ONNXProgram:
    result: ONNXProgram = qompose.lower(converted, "onnxruntime", strict=True)
    return result


def executed(model: ONNXProgram) -> dict[str, int]:
    """Read the note that counts what the runtime executes."""
    (note,) = (n for n in qompose.report(model).notes if " executes " in n)
    pairs = note.partition(" executes ")[2].split(", ")
    return {name: int(count) for count, _, name in (pair.partition(" ") for pair in pairs)}


class TestONNXRuntime:
    def test_it_computes_what_the_converted_model_does(
        self, program: Any, converted: Any, lowered: ONNXProgram
    ) -> None:
        (x,) = images(7, batch=5)[0]
        with torch.no_grad():
            wanted, simulated = program.module()(x), converted(x)
        for real, expected, found in zip(wanted, simulated, lowered(x), strict=True):
            assert sqnr(expected, found) > 60
            assert abs(sqnr(real, found) - sqnr(real, expected)) < 0.5

    def test_the_report_counts_what_the_runtime_executes(self, lowered: ONNXProgram) -> None:
        counts, report = executed(lowered), qompose.report(lowered)
        rows = [row for row in report.rows if row.kernel.startswith(("QLinear", "QGemm"))]
        anchors = Counter(
            row.kernel for row in rows if row.name.split("_")[0] not in ("relu", "relu6", "batch")
        )
        assert anchors == {k: n for k, n in counts.items() if k.startswith(("QLinear", "QGemm"))}
        assert counts["QLinearConv"] == 2 and counts["QGemm"] == 3
        assert {"Conv", "Gemm", "MatMul", "Add", "Relu", "Clip"}.isdisjoint(counts)
        assert [row.name for row in report.rows if row.state == "float"] == ["softmax"]

    def test_a_linear_gives_floats_to_those_that_read_floats(self, lowered: ONNXProgram) -> None:
        # the input; the integers of tokens, which softmax and the caller read as floats
        assert executed(lowered)["QuantizeLinear"] == 1
        assert executed(lowered).get("DequantizeLinear", 0) == 0

    def test_inputs_that_do_not_fit_are_named(self, lowered: ONNXProgram) -> None:
        with pytest.raises(ONNXInputError, match=r"'x'.*float64"):
            lowered(torch.zeros(2, 3, 16, 16, dtype=torch.float64))
        with pytest.raises(ONNXInputError):
            lowered()
        with pytest.raises(ONNXTargetError, match=r"\(2, 3, 8, 8\)"):
            lowered(torch.zeros(2, 3, 8, 8))

    def test_it_is_timed_beside_the_float_program(self, program: Any, converted: Any) -> None:
        model = qompose.lower(converted, "onnxruntime")
        result = qompose.QuantizedModel(program, converted, model, qompose.compose("onnx"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", qompose.QomposeWarning)  # that it is slower
            timings = result.benchmark(*images(1)[0], seconds=0.001)
        assert [row.name for row in timings.rows] == ["float", "lowered"]


class TestFiles:
    def test_a_file_knows_how_it_is_called(self, lowered: ONNXProgram, tmp_path: Path) -> None:
        path = lowered.save(tmp_path / "model.onnx")
        assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]
        (x,) = images(1)[0]
        for found, wanted in zip(ONNXProgram.read(path)(x), lowered(x), strict=True):
            assert torch.equal(found, wanted)
        assert all(v.uses() for v in lowered.model.graph.initializers.values())  # nothing twice
        assert copy.deepcopy(lowered) is lowered
        with pytest.raises(TypeError):
            pickle.dumps(lowered)

    def test_structures_that_a_process_does_not_know_are_flat(
        self, lowered: ONNXProgram, tmp_path: Path
    ) -> None:
        """As where the classes of a package are registered that this process has not imported."""
        program = ONNXProgram.read(lowered.save(tmp_path / "model.onnx"))
        data = program.interface.to_dict()
        for side in ("inputs", "outputs"):
            assert "builtins.tuple" in data[side]
            data[side] = data[side].replace("builtins.tuple", "elsewhere.Pair")
        program.interface = CallInterface.from_dict(data)
        (x,) = images(1)[0]
        found = program(x)
        assert isinstance(found, list)
        assert all(map(torch.equal, found, lowered(x)))

    def test_a_file_that_is_cut_short_is_refused(
        self, lowered: ONNXProgram, tmp_path: Path
    ) -> None:
        path = lowered.save(tmp_path / "model.onnx")
        path.write_bytes(path.read_bytes()[:-500])
        with pytest.raises(ONNXTargetError, match=r"model\.onnx"):
            ONNXProgram.read(path)
        with pytest.raises(FileNotFoundError):
            ONNXProgram.read(tmp_path / "none.onnx")

    def test_a_file_of_another_tool_is_refused(self, lowered: ONNXProgram, tmp_path: Path) -> None:
        path = lowered.save(tmp_path / "model.onnx")
        model = ir.load(path)
        model.metadata_props.clear()
        ir.save(model, path)
        with pytest.raises(ONNXTargetError, match="metadata"):
            ONNXProgram.read(path)

    @pytest.mark.parametrize("runtime", ["onnx-runtime", "numpy"])
    def test_a_runtime_that_does_not_exist_is_refused(
        self, lowered: ONNXProgram, tmp_path: Path, runtime: str
    ) -> None:
        path = lowered.save(tmp_path / "model.onnx")
        with pytest.raises(ConfigError, match="openvino"):
            ONNXProgram.read(path, runtime)

    def test_constants_that_are_cut_short_are_refused(
        self, lowered: ONNXProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """They are in a file of their own, which is read when they are needed."""
        monkeypatch.setattr("qompose_onnx.program.LARGEST", 100)
        path = lowered.save(tmp_path / "model.onnx")
        data = tmp_path / "model.onnx.data"
        data.write_bytes(data.read_bytes()[:-1])
        with pytest.raises(ONNXTargetError, match=r"model\.onnx\.data"):
            ONNXProgram.read(path)

    def test_large_constants_are_in_a_file_of_their_own(
        self, lowered: ONNXProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("qompose_onnx.program.LARGEST", 100)
        path = lowered.save(tmp_path / "model.onnx")
        assert {p.name for p in tmp_path.iterdir()} == {"model.onnx", "model.onnx.data"}
        (x,) = images(1)[0]
        assert torch.equal(ONNXProgram.read(path)(x)[0], lowered(x)[0])

    def test_nothing_is_left_of_a_file_that_cannot_be_written(
        self, lowered: ONNXProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: Any, **__: Any) -> None:
            raise OSError("no space")

        monkeypatch.setattr("onnx_ir.save", fail)
        with pytest.raises(OSError):
            lowered.save(tmp_path / "model.onnx")
        assert not [*tmp_path.iterdir()]


class TestWithoutARuntime:
    def test_a_file_can_be_made(
        self, converted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for module in ("last_steps", "program"):
            monkeypatch.setattr(f"qompose_onnx.{module}.missing", lambda name: f"{name} is missing")
        with pytest.warns(qompose.QomposeWarning):
            model = qompose.lower(converted, "onnx")
        assert model.save(tmp_path / "model.onnx").stat().st_size > 1000
        rows = qompose.report(model).rows
        assert not [row for row in rows if row.state == "int8 kernel"]
        assert any("onnxruntime is missing" in row.reason for row in rows)
        with pytest.raises(ONNXTargetError, match="onnxruntime is missing"):
            model(*images(1)[0])

    def test_a_target_says_what_is_missing(
        self, converted: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("qompose_onnx.targets.missing", lambda name: f"{name} is missing")
        with pytest.raises(TargetError, match="onnxruntime is missing"):
            qompose.lower(converted, "onnxruntime")

    @pytest.mark.parametrize("target", ["onnx", "onnxruntime"])
    def test_a_runtime_that_is_broken_is_named(
        self, converted: Any, monkeypatch: pytest.MonkeyPatch, target: str
    ) -> None:
        monkeypatch.setitem(sys.modules, "onnxruntime", None)  # its import fails
        monkeypatch.setattr("qompose_onnx.runtimes.find_spec", lambda name: name)
        with pytest.raises(ONNXTargetError, match="onnxruntime"):
            qompose.lower(converted, target)


@pytest.mark.full
@pytest.mark.parametrize("word", ["gptq", "gptq_sequential"])
@pytest.mark.parametrize(
    "options",
    [{}, {"is_dynamic": True}, {"weight_only": True, "group_size": 16}],
    ids=["static", "dynamic", "int4"],
)
def test_integers_that_an_algorithm_chose_are_in_the_file(
    program: Any, options: dict[str, Any], word: str
) -> None:
    for words in ((), (word,)):
        config = get_onnx_quantization_config(**options, algorithms=words)
        prepared = qompose.prepare_pt2e(program, ONNXQuantizer().set_global(config))
        qompose.calibrate(prepared, images(8), progress=False)
        made = qompose.convert_pt2e(prepared)
        assert any(line.startswith(word) for line in qompose.report(made).rewrites) == bool(words)
        (x,) = images(7, batch=5)[0]
        with torch.no_grad():
            exact = made(x)
        for found, wanted in zip(qompose.lower(made, "onnxruntime")(x), exact, strict=True):
            assert sqnr(wanted, found) > 45  # activations between two steps may go either way


@pytest.mark.full
def test_openvino_runs_the_same_file(converted: Any, lowered: ONNXProgram) -> None:
    pytest.importorskip("openvino")
    model = qompose.lower(converted, "openvino", strict=True)
    assert {row.kernel for row in qompose.report(model).rows if row.kernel} == {"OpenVINO int8"}
    (x,) = images(7, batch=5)[0]
    for found, wanted in zip(model(x), lowered(x), strict=True):
        assert sqnr(wanted, found) > 40


@pytest.fixture(scope="module")
def converted_texts() -> Any:
    torch.manual_seed(0)
    shapes = {"ids": {0: BATCH}, "bag": {0: BATCH}}
    inputs = texts()
    with torch.no_grad():
        program = torch.export.export(
            Texts().eval(), (inputs.pop("ids"),), inputs, dynamic_shapes=shapes
        )
    prepared = qompose.prepare_pt2e(program, qompose.compose("embedding", "onnx"))
    qompose.calibrate(prepared, [texts(2), texts(3)], progress=False)
    return qompose.convert_pt2e(prepared)


class TestCompositions:
    def test_tables_stay_integers_until_rows_are_gathered(self, converted_texts: Any) -> None:
        model = qompose.lower(converted_texts, "onnxruntime", strict=True)
        inputs = texts(7)
        found, wanted = model(inputs["ids"], bag=inputs["bag"]), converted_texts(**inputs)
        assert found["batch"] == wanted["batch"] == 7
        assert sqnr(wanted["texts"], found["texts"]) > 60
        assert sqnr(wanted["bags"], found["bags"]) > 60
        gathers = [n for n in model.model.graph.all_nodes() if n.op_type == "Gather"]
        tables = [n for n in gathers if n.inputs[0].is_initializer() and n.inputs[0].shape[0] > 9]
        kinds = {n.inputs[0].const_value.numpy().dtype.name for n in tables}
        assert "uint8" in kinds
        assert {n.inputs[0].const_value.size for n in tables if n.inputs[0].shape[-1] == 32} == {
            50 * 32,
            20 * 32,
        }

    def test_a_member_without_kernels_is_named(self) -> None:
        with pytest.raises(TargetError, match="xnnpack has kernels for executorch, torch"):
            qompose.quantize(
                nn.Linear(8, 8), (torch.randn(2, 8),), backends=["xnnpack", "onnx"],
                calibration=[(torch.randn(2, 8),)], target="onnxruntime", progress=False,
            )  # fmt: skip


@pytest.mark.parametrize(
    "runtime", ["onnxruntime", pytest.param("openvino", marks=pytest.mark.full)]
)
def test_attention_of_nothing_is_zero(runtime: str) -> None:
    """A boolean mask leaves nothing of rows of padding; torch's exporter makes means of them."""
    pytest.importorskip(runtime)

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            return nn.functional.scaled_dot_product_attention(y, y, y, attn_mask=mask)

    torch.manual_seed(0)
    mask = torch.ones(2, 5, 5, dtype=torch.bool).tril()
    mask[0, :2] = mask[1, 4] = False
    given = (torch.randn(2, 5, 8), mask)
    result = qompose.quantize(
        Attention().eval(), given, backends=["onnx"], calibration=[given], target=runtime,
        progress=False,
    )  # fmt: skip
    with torch.no_grad():
        found, wanted = result.model(*given), result.converted(*given)
    assert not found[0, :2].any() and not found[1, 4].any()
    assert sqnr(wanted, found) > 60


def test_numbers_and_texts_among_results_are_returned(tmp_path: Path) -> None:
    """torch's exporter fails with them; the file's interface has them."""

    class Told(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            return {"none": None, "many": 3, "y": self.inner(x), "kind": ("a", 0.5, x)}

    x = torch.randn(3, 4)
    result = qompose.quantize(
        Told().eval(),
        (x,),
        backends=["onnx"],
        calibration=[(x,)],
        target="onnxruntime",
        progress=False,
    )
    found = ONNXProgram.read(result.model.save(tmp_path / "model.onnx"))(x)
    assert (found["none"], found["many"], found["kind"][:2]) == (None, 3, ("a", 0.5))
    assert torch.equal(found["kind"][2], x)
    with torch.no_grad():
        assert sqnr(result.converted(x)["y"], found["y"]) > 60


def test_the_largest_of_all_numbers() -> None:
    """torch's exporter has the largest along dimensions alone."""

    class Extremes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = self.inner(x)
            return y.amax(), y.amin(), y.amax(1, keepdim=True), y.amin((0, 1))

    x = torch.randn(3, 4)
    result = qompose.quantize(
        Extremes().eval(), (x,), backends=["onnx"], calibration=[(x,)], target="onnxruntime",
        progress=False,
    )  # fmt: skip
    with torch.no_grad():
        for found, wanted in zip(result.model(x), result.converted(x), strict=True):
            torch.testing.assert_close(found, wanted)


def test_bounds_of_two_types() -> None:
    """torch's exporter fails with them."""

    class Bounded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self.inner(x).clamp(0.1, 3).clamp_(max=2, min=0.25), ids.clamp(0, 2.5)

    inputs = torch.randn(3, 4), torch.arange(4)
    result = qompose.quantize(
        Bounded().eval(), inputs, backends=["onnx"], calibration=[inputs], target="onnxruntime",
        progress=False,
    )  # fmt: skip
    with torch.no_grad():
        for found, wanted in zip(result.model(*inputs), result.converted(*inputs), strict=True):
            torch.testing.assert_close(found, wanted)


def test_a_model_that_keeps_state_is_refused_by_name() -> None:
    """Its file would give the results of a first call again and again."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.calls = nn.Linear(4, 4), nn.Buffer(torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)
            y: torch.Tensor = self.inner(x) * self.calls
            return y

    x = torch.randn(4, 4)
    with pytest.raises(ONNXTargetError, match="calls"):
        qompose.quantize(
            Counting(), (x,), backends=["onnx"], calibration=[(x,)], target="onnx", progress=False
        )


class Lgamma(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.lgamma(x)


class Mapped(nn.Module):
    """A higher-order operator, for which ONNX has none."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def sines(row: Any, *rest: Any) -> Any:
            return row.sin()

        y: torch.Tensor = map_rows(sines, x)
        return y


class NumberLessIntegers(nn.Module):
    """The exporter of torch 2.13 fails on the subtraction, while it decomposes the graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1.0 - (x > 0).to(torch.int64)


def test_results_in_a_dict_are_named_by_their_keys(tmp_path: Path) -> None:
    class Keyed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            y = self.layer(x)
            return {"logits": y, "past": (y + 1, {"last": y * 2}), "size": 4, "given": x}

    x = torch.randn(3, 4)
    result = qompose.quantize(
        Keyed().eval(), (x,), backends="onnx", calibration=[(x,)], target="onnx", progress=False
    )
    program = ONNXProgram.read(result.model.save(tmp_path / "keyed.onnx"))
    names = [value.name for value in program.model.graph.outputs]
    assert names == ["logits", "past.0", "past.1.last", "given"]
    found, wanted = program(x), result.converted(x)
    torch.testing.assert_close(found["past"][1]["last"], wanted["past"][1]["last"])
    assert found["size"] == 4 and torch.equal(found["given"], x)


@pytest.mark.parametrize(
    ("odd", "place"),
    [
        (Lgamma, r"lgamma \(aten\.lgamma in parts\.odd\)"),
        (Mapped, r"map_impl \(map_impl"),
        (NumberLessIntegers, r"test_programs\.py:\d+ \(return 1\.0 - \(x > 0\)"),
    ],
)
def test_an_operator_that_cannot_be_exported_is_named(odd: type[nn.Module], place: str) -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.parts = nn.Linear(4, 4), nn.ModuleDict({"odd": odd()})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.parts["odd"](self.inner(x))
            return y

    x = torch.randn(4, 4)
    with pytest.raises(ONNXTargetError, match=place):
        qompose.quantize(
            Network(), (x,), backends=["onnx"], calibration=[(x,)], target="onnx", progress=False
        )


def test_tables_of_narrow_types_stay_narrow_in_the_file() -> None:
    """Casts that make numbers wider run when a runtime loads the file."""

    class Tables(nn.Module):
        bytes: Tensor
        halves: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 1)
            self.register_buffer("bytes", torch.arange(16_000).view(16, 1000).to(torch.uint8))
            self.register_buffer("halves", torch.randn(16, 1000).half())

        def forward(self, x: Tensor) -> Tensor:
            return torch.atan2(self.linear(x), self.bytes.float()) + self.halves.T.float().T

    x = torch.randn(16, 16)
    result = qompose.quantize(
        Tables(), (x,), backends=["onnx"], calibration=[x], target="onnxruntime", progress=False
    )
    assert result.model.nbytes < 16_000 * (1 + 2) + 2_000
    torch.testing.assert_close(result.model(x), result.converted(x))


def test_a_mean_over_an_image_may_be_a_result() -> None:
    class Means(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self.inner(x), x.mean((2, 3), True), x.mean((2, 3)), x.mean((), True)

    x = torch.randn(2, 3, 5, 4)
    result = qompose.quantize(
        Means().eval(), (x,), backends=["onnx"], calibration=[(x,)], target="onnxruntime",
        progress=False,
    )  # fmt: skip
    kinds = [node.op_type for node in result.model.model.graph.all_nodes()]
    assert kinds.count("GlobalAveragePool") == 1 and kinds.count("ReduceMean") == 2
    with torch.no_grad():
        for found, wanted in zip(result.model(x)[1:], result.converted(x)[1:], strict=True):
            torch.testing.assert_close(found, wanted)
