# SPDX-License-Identifier: Apache-2.0
"""What the result of the one call can do; no test here depends on how fast anything is."""

from __future__ import annotations

import copy
import json
import pickle
import re
import warnings
from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
from qompose import QuantizedModel, UserError
from qompose.errors import BatchError, ExportError, InputError, NotLoweredError, TargetError
from torch import Tensor, nn
from torch.fx.graph import CodeGen
from torch.utils.benchmark import Measurement, Timer

from tests.core.quantizer.interop.foreign import Foreign, Tanhs
from tests.core.toy import LINEAR, WEIGHT_ONLY, Model, export, operators, randn, seeded, toy

X = randn(6, 3)


def quantized(module: nn.Module, *args: Tensor, **kwargs: Tensor) -> QuantizedModel:
    program = torch.export.export(seeded(module), args, kwargs)
    prepared = qompose.prepare_pt2e(program, toy(LINEAR))
    prepared(*args, **kwargs)
    converted = qompose.convert_pt2e(prepared)
    return QuantizedModel(program, converted, qompose.lower(converted), toy(LINEAR))


class Timed:
    """A model that is told how long it takes, and remembers how it was called."""

    latest = 1.0

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.calls: list[tuple[Any, Any, bool]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append((args, kwargs, torch.is_grad_enabled()))
        Timed.latest = self.seconds


@pytest.fixture(autouse=True)
def told_times(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(timer: Timer, min_run_time: float) -> Measurement:
        timer._timer.timeit(1)
        return Measurement(1, [Timed.latest], timer._task_spec)

    monkeypatch.setattr(Timer, "blocked_autorange", told)


def with_models(seconds: float, *others: float) -> tuple[QuantizedModel, list[Timed]]:
    """A result whose float program, lowered model and compiled one take so many seconds."""
    result, models = quantized(nn.Linear(3, 4), X), [Timed(s) for s in (seconds, *others)]
    # They take whatever comes, and so does a graph without names.
    result.converted.graph.set_codegen(CodeGen())
    object.__setattr__(result, "_float_program", lambda: models[0])
    object.__setattr__(result, "model", models[1])
    if len(models) > 2:
        result.compiled["max-autotune"] = models[2]  # type: ignore[assignment]
    return result, models


def test_the_result_is_called_as_its_model_is_and_shows_itself_in_a_line() -> None:
    result = quantized(
        Model(lambda m, x, *, by: m.linear(x) * by, linear=nn.Linear(3, 4)), X, by=X[:, :1]
    )
    assert torch.equal(result(X, by=X[:, 1:2]), result.model(X, by=X[:, 1:2]))
    shown = repr(result)
    assert "\n" not in shown and " at 0x" not in shown
    assert {"torch", "toy", str(result.report.bytes_after)} <= {*re.split(r"[^\w,]+", shown)}
    object.__setattr__(result, "model", lambda *args, **kwargs: (args, kwargs))
    assert result(1, by=2) == ((1,), {"by": 2}), (
        "the lowered model's call, and not the converted one's"
    )
    object.__setattr__(result, "model", b"a program")
    with pytest.raises(TargetError, match="bytes"):
        result(X)


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch copies its own
def test_a_result_says_how_it_is_kept() -> None:
    result = quantized(nn.Linear(3, 4), X)
    with pytest.raises(UserError, match=r"qompose\.save\("):
        pickle.dumps(result)
    assert copy.copy(result).model is result.model
    object.__setattr__(result, "quantizer", None)  # the tests' own has what Python does not copy
    other = copy.deepcopy(result)
    assert other.model is not result.model and torch.equal(other(X), result(X))


@pytest.mark.parametrize(
    ("module", "options", "line"),
    [
        (Model(lambda m, x: x + 1 if x.sum() > 0 else x), {}, "core/test_quantizing.py:"),
        (nn.Linear(3, 4), {"dynamic_shapes": ({1: torch.export.Dim("columns")},)}, ""),
    ],
    ids=["branch", "dynamic_shapes"],
)
def test_what_torch_cannot_export_is_an_error_with_its_reason(
    module: nn.Module, options: dict[str, Any], line: str
) -> None:
    with pytest.raises(ExportError) as raised:
        qompose.quantize(module, X, backends=toy(LINEAR), **options)
    cause = raised.value.__cause__
    assert cause is not None and str(cause).splitlines()[0] in str(raised.value)
    assert raised.value.line.startswith(line) and bool(raised.value.line) is bool(line)


def test_torchs_advice_on_sizes_is_kept_and_ours_fits_the_error() -> None:
    columns = ({1: torch.export.Dim("columns")},)
    with pytest.raises(ExportError, match="columns = 3"):
        qompose.quantize(nn.Linear(3, 4), X, backends=toy(LINEAR), dynamic_shapes=columns)
    with torch.inference_mode():
        module = nn.Linear(3, 4)
    with pytest.raises(ExportError, match="outside"):
        qompose.quantize(module, X, backends=toy(LINEAR))


def test_sparse_tensors_are_refused_with_the_remedy() -> None:
    with pytest.raises(BatchError, match="to_dense"):
        qompose.quantize(nn.Linear(3, 4), X, backends=toy(LINEAR), calibration=[X.to_sparse()])
    result = qompose.quantize(nn.Linear(3, 4), X, backends=toy(LINEAR), calibration=[X])
    with pytest.raises(InputError, match="to_dense") as raised:
        result.model(X.to_sparse())
    assert raised.value.name == "input"


def test_float_lowered_and_compiled_are_timed() -> None:
    result, models = with_models(2.0, 3.0, 1.0)
    with pytest.warns(qompose.QomposeWarning, match=r"lowered \(takes 1.50x as long\)") as said:
        timings = result.benchmark(X, keywords={"factor": X})
    assert [Path(w.filename).name for w in said] == ["test_quantizing.py"]
    assert [(row.name, row.seconds, row.ratio) for row in timings.rows] == [
        ("float", 2.0, 1.0),
        ("lowered", 3.0, 1.5),
        ("compiled, max-autotune", 1.0, 0.5),
    ]
    assert json.loads(json.dumps(timings.to_dict()))[2]["ratio"] == 0.5
    assert all(model.calls == [((X,), {"factor": X}, False)] for model in models)
    assert "compiled, max-autotune   1000.000 ms" in str(timings)


def test_as_fast_as_float_is_no_warning() -> None:
    result, _ = with_models(1.0, 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result.benchmark(X)


def test_without_inputs_the_example_inputs_are_those_of_export() -> None:
    scaled = Model(lambda m, x, *, factor: m.linear(x) * factor, linear=nn.Linear(3, 4))
    result = quantized(scaled, X, factor=torch.tensor(2.0))
    assert [row.name for row in result.benchmark().rows] == ["float", "lowered"]


def test_inputs_need_not_have_the_form_that_they_had_for_export() -> None:
    scaled = Model(lambda m, x, factor: m.linear(x) * factor, linear=nn.Linear(3, 4))
    result, other = quantized(scaled, x=X, factor=torch.tensor(2.0)), torch.tensor(3.0)
    for args, named in (
        ((X, other), {}),
        ((X,), {"factor": other}),
        ((), {"factor": other, "x": X}),
    ):
        assert [row.name for row in result.benchmark(*args, **named).rows] == ["float", "lowered"]


def test_torch_does_not_warn_of_its_own_recurrent_modules() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        qompose.quantize(nn.LSTM(3, 4).eval(), randn(5, 2, 3), backends=toy(LINEAR))
    assert [str(each.message) for each in seen if "_flat_weights" in str(each.message)] == []


def test_a_program_without_example_inputs_needs_some() -> None:
    result = quantized(nn.Linear(3, 4), X)
    result.exported.example_inputs = None
    with pytest.raises(UserError, match="benchmark"):
        result.benchmark()


def test_what_cannot_be_called_is_not_timed() -> None:
    result = QuantizedModel(export(nn.Linear(3, 4), X), None, b"program", toy(LINEAR))  # type: ignore[arg-type]
    with pytest.raises(TargetError, match="bytes"):
        result.benchmark(X)


def test_compile_keeps_what_it_made_by_mode() -> None:
    result = quantized(nn.Linear(3, 4), X)
    compiled = result.compile()
    assert result.compiled == {"default": compiled}
    torch.testing.assert_close(compiled(X), result.model(X))
    with pytest.raises(UserError, match="mode"):
        result.compile("fast")
    assert [*result.compiled] == ["default"]
    torch._dynamo.reset()


def never() -> Any:
    raise AssertionError("data was read")
    yield


class TestWhatIsKnownBeforeData:
    """What lowering would refuse whatever the data is refused before they are read."""

    @pytest.mark.parametrize(
        ("backends", "options", "error"),
        [
            pytest.param([Foreign()], {}, TargetError, id="nobody has kernels"),
            pytest.param([toy(LINEAR)], {"target": "troch"}, TargetError, id="misspelt"),
            pytest.param([Tanhs(), toy(LINEAR)], {"strict": True}, NotLoweredError, id="strict"),
        ],
    )
    def test_it_is_refused(self, backends: Any, options: Any, error: type[Exception]) -> None:
        model = Model(lambda m, x: m.linear(x).tanh(), linear=nn.Linear(3, 4))
        with pytest.raises(error):
            qompose.quantize(model, (X,), backends=backends, calibration=never(), **options)

    def test_a_member_without_kernels_is_only_warned_of(self) -> None:
        model = Model(lambda m, x: m.linear(x).tanh(), linear=nn.Linear(3, 4))
        with pytest.warns(qompose.QomposeWarning, match="only annotates"):
            result = qompose.quantize(
                model, (X,), backends=[Tanhs(), toy(LINEAR)], calibration=[(X,)]
            )
        assert [row.state for row in result.report.rows] == ["int8 kernel", "simulated (Q/DQ)"]


def test_the_one_call_takes_the_options_of_its_stages() -> None:
    """A batch norm of a layer that no rule claims is folded, and kernels are there before data."""
    model = seeded(nn.Sequential(nn.Conv2d(1, 4, 1), nn.BatchNorm2d(4), nn.Linear(3, 3)))
    options: Any = {"fold_batch_norms": True, "allow_uncalibrated": "unit_scale"}
    with pytest.warns(qompose.QomposeWarning) as caught:
        result = qompose.quantize(model, (randn(2, 1, 3, 3),), backends=[toy(LINEAR)], **options)
    assert len(caught) == 1
    assert {row.name: row.state for row in result.report.rows} == {
        "conv2d": "float", "batch_norm": "float", "linear": "int8 kernel",
    }  # fmt: skip
    assert operators(result.converted)["batch_norm"] == 0


class Masked(nn.Module):
    """Called with keyword arguments, as networks of the hub of Hugging Face are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
        return self.linear(x if mask is None else x * mask) * scale


MASK = torch.ones(6, 1)
CALLS = [
    pytest.param((X, MASK), None, [2], id="tuple"),
    pytest.param([X, MASK], None, [2], id="list"),
    pytest.param(X, None, [1], id="tensor"),
    pytest.param({"x": X, "mask": MASK}, None, [0, "x", "mask"], id="dict"),
    pytest.param(UserDict(x=X, mask=MASK), None, [0, "x", "mask"], id="another mapping"),
    pytest.param(None, {"x": X, "mask": MASK}, [0, "x", "mask"], id="kwargs"),
    pytest.param((X,), {"mask": MASK}, [1, "mask"], id="both"),
    pytest.param(X, {"mask": MASK, "scale": 2.0}, [1, "mask", "scale"], id="tensor and kwargs"),
]


@pytest.mark.filterwarnings("ignore:1 quantized region:qompose.QomposeWarning")
@pytest.mark.parametrize(("example_inputs", "kwargs", "call"), CALLS)
def test_example_inputs_have_the_forms_of_a_batch(
    example_inputs: Any, kwargs: Any, call: list[Any]
) -> None:
    backends = toy(LINEAR, config=WEIGHT_ONLY)  # needs no data, and has no kernel
    result = qompose.quantize(seeded(Masked()), example_inputs, kwargs=kwargs, backends=backends)
    args, keywords = result.exported.example_inputs or ((), {})
    assert [len(args), *keywords] == call
    assert [row.name for row in result.benchmark().rows] == ["float", "lowered"]


@pytest.mark.parametrize(
    ("example_inputs", "kwargs", "said"),
    [
        pytest.param(None, None, "example_inputs", id="none"),
        pytest.param(3, None, "tuple", id="number"),
        pytest.param({"x": X}, {"x": X}, "both.*: x", id="twice"),
        pytest.param({"y": X}, None, r"Masked.*'x'.*wrap it in a tuple", id="not a keyword of it"),
        pytest.param((X, MASK, 1.0, X), None, "Masked", id="too many"),
    ],
)
def test_example_inputs_that_do_not_fit(example_inputs: Any, kwargs: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        qompose.quantize(Masked(), example_inputs, kwargs=kwargs, backends=toy(LINEAR))


def test_a_benchmark_is_called_as_the_model_is() -> None:
    for inputs, keywords in (
        ((X, MASK), {}), ((), {"x": X, "mask": MASK}), (({"x": X, "mask": MASK},), {})
    ):  # fmt: skip
        result, models = with_models(1.0, 1.0)
        result.benchmark(*inputs, **keywords)
        expected = (inputs, keywords) if not (inputs and isinstance(inputs[0], dict)) else (
            (), inputs[0]
        )  # fmt: skip
        assert all(model.calls == [(*expected, False)] for model in models)


def test_a_dict_is_an_input_where_the_program_takes_one() -> None:
    result, models = with_models(1.0, 1.0)
    object.__setattr__(result.exported, "_example_inputs", (({"x": X},), {}))
    result.benchmark({"x": MASK})
    assert all(model.calls == [(({"x": MASK},), {}, False)] for model in models)


def test_nor_is_it_by_name_where_the_export_passed_one_by_name() -> None:
    model = seeded(Model(lambda m, *, batch: m.linear(batch["x"]), linear=nn.Linear(3, 4)))
    backends, batch = toy(LINEAR, config=WEIGHT_ONLY), {"x": X}
    with pytest.warns(qompose.QomposeWarning):
        result = qompose.quantize(model, kwargs={"batch": batch}, backends=backends)
    assert torch.equal(result.model(batch), result.model(batch=batch))
    for given, named in (((batch,), {}), ((), {"batch": batch}), (({"batch": batch},), {})):
        assert len(result.benchmark(*given, **named).rows) == 2


@pytest.mark.parametrize(
    ("inputs", "keywords", "names", "said"),
    [
        ((), {"inptu": X}, "inptu", "unknown.* input, by"),
        ((X,), {"factor": X}, "factor", "unknown"),
        ((), {"by": X}, "input", "missing"),
        ((X, X), {"by": X}, "by", "twice"),
        ((X, X, X), {}, "number 3", "too many"),
    ],
)
def test_arguments_of_a_benchmark_that_the_program_does_not_have(
    inputs: Any, keywords: Any, names: str, said: str
) -> None:
    scaled = Model(lambda m, input, by: m.linear(input) * by[:, :1], linear=nn.Linear(3, 4))
    result = quantized(scaled, X, X)
    with pytest.raises(InputError, match=said) as raised:
        result.benchmark(*inputs, **keywords)
    assert raised.value.name == names
