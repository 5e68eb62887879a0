# SPDX-License-Identifier: Apache-2.0
"""Methods of one program: names, state that is one, constants that are equal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import qompose
import torch
from qompose import QuantizationConfig
from qompose.calibration import calibrator
from qompose.errors import CalibrationError, StageError, UserError
from qompose.observers import MovingAverageMinMaxObserver
from qompose.plan.methods import by_method, share_constants, share_state, states_of
from torch import Tensor, nn

from tests.core.toy import DYNAMIC, INT8, LINEAR, STATIC, WEIGHT, WEIGHT_ONLY, Model, export, toy

WIDTH, LENGTH = 8, 6


class Memory(nn.Module):
    """Keeps what it reads in two buffers, one of which begins with values, and reads all of them."""

    def __init__(self, start: float = 0.5) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(LENGTH, WIDTH))
        self.register_buffer("count", torch.full((1,), start))

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        self.seen.index_copy_(0, at, self.linear(x))
        self.count.add_(1)
        return self.seen * self.count


class Reader(Memory):
    """Computes with all that it keeps."""

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        self.seen.index_copy_(0, at, x)
        self.count.add_(1)
        return self.linear(self.seen * self.count)


def calibrate_apart(methods: Any, tokens: Any, **options: Any) -> None:
    """Calibrate one method behind the other, which reads what the first wrote."""
    qompose.calibrate(methods["prompt"], [PROMPT])
    qompose.calibrate(methods["token"], tokens, **options)


def inputs(first: int, size: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(first)
    return torch.randn(size, WIDTH), torch.arange(first, first + size)


PROMPT, TOKENS = inputs(0, 3), [inputs(place, 1) for place in range(3, LENGTH)]


def memory() -> Memory:
    torch.manual_seed(0)
    return Memory().eval()


def exported(model: nn.Module) -> dict[str, Any]:
    return {"prompt": export(model, *PROMPT), "token": export(model, *TOKENS[0])}


def run(methods: Any) -> list[Tensor]:
    with torch.no_grad():
        return [
            methods["prompt"](*PROMPT).clone(),
            *(methods["token"](*x).clone() for x in TOKENS),
        ]


def expected() -> list[Tensor]:
    model = memory()
    return run({"prompt": model, "token": model})


def equal(found: list[Tensor], other: list[Tensor], bound: float = 0.0) -> bool:
    pairs = zip(found, other, strict=True)
    return all(bool(((a - b).abs() <= bound * b.abs().max()).all()) for a, b in pairs)


@pytest.fixture(scope="module")
def converted() -> dict[str, Any]:
    prepared = qompose.prepare_pt2e(exported(memory()), toy(LINEAR, config=STATIC))
    run(prepared)
    return qompose.convert_pt2e(prepared)


class TestStages:
    def test_prepared_methods_share_state(self) -> None:
        prepared = qompose.prepare_pt2e(exported(memory()), toy(LINEAR, config=DYNAMIC))
        assert list(prepared) == ["prompt", "token"]
        assert equal(run(prepared), expected())

    def test_converted_lowered_and_loaded_ones_too(self, converted: Any, tmp_path: Any) -> None:
        lowered = qompose.lower(converted)
        assert lowered["prompt"].linear.weight_q is lowered["token"].linear.weight_q
        want = run(converted)
        assert equal(want, expected(), bound=0.05)
        assert equal(run(lowered), want, bound=1e-5)
        qompose.save(converted, tmp_path / "model")
        assert equal(run(qompose.load(tmp_path / "model")), want)

    def test_a_lowered_model_has_state_of_its_own(self, converted: Any) -> None:
        run(converted)  # what was written here is not what the lowered model begins with
        alone = qompose.lower(converted["prompt"])
        assert equal([alone(*PROMPT)], expected()[:1], bound=0.05)
        assert alone.seen is not converted["prompt"].seen

    def test_a_file_of_two_has_equal_content_once(self, tmp_path: Any) -> None:
        model = memory()
        model.linear = nn.Linear(WIDTH, 4096).eval()
        model.seen = torch.zeros(LENGTH, 4096)
        quantizer = toy(LINEAR, config=DYNAMIC)
        methods = {
            name: qompose.convert_pt2e(qompose.prepare_pt2e(program, quantizer))
            for name, program in exported(model).items()
        }  # each by itself: only the file has them together
        sizes = []
        for saved in (methods["token"], methods):
            qompose.save(saved, tmp_path / "model")
            sizes.append((tmp_path / "model").stat().st_size)
        assert sizes[1] < 1.3 * sizes[0]

    def test_errors_name_the_method(self) -> None:
        programs = exported(memory())
        with pytest.raises(StageError, match="method 'token'"):
            qompose.convert_pt2e(
                {
                    "prompt": qompose.prepare_pt2e(programs["prompt"], toy(LINEAR, config=DYNAMIC)),
                    "token": programs["token"].module(),
                }
            )
        with pytest.raises(UserError):
            qompose.prepare_pt2e({}, toy(LINEAR))


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(LENGTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.seen.sum()


class TestAMethodThatOnlyReads:
    def test_begins_with_the_exported_values_at_every_stage(self) -> None:
        programs = {"token": export(memory(), *TOKENS[0]), "read": export(Reads(), PROMPT[0])}
        prepared = qompose.prepare_pt2e(programs, toy(LINEAR, config=DYNAMIC))
        with torch.no_grad():
            prepared["token"](*TOKENS[0])
            assert prepared["read"].seen.any()
            alone = qompose.convert_pt2e(prepared["read"])
            assert not alone.seen.any()
            converted = qompose.convert_pt2e(prepared)
            assert not converted["read"].seen.any()
            converted["token"](*TOKENS[0])
            assert converted["read"].seen.any()
            lowered = qompose.lower(converted)
        assert not lowered["read"].seen.any()
        assert lowered["read"].seen is lowered["token"].seen


class TestCalibrated:
    """Methods are calibrated with the batches of some, and all go by what those saw."""

    @pytest.fixture
    def prepared(self) -> dict[str, Any]:
        return qompose.prepare_pt2e(exported(memory()), toy(LINEAR, config=STATIC))

    def test_methods_without_batches_go_by_those_of_others(self, prepared: Any) -> None:
        done = qompose.calibrate(prepared, {"prompt": [PROMPT]})
        assert done.keys() == prepared.keys()
        prompt, token = (qompose.statistics(prepared[name]) for name in ("prompt", "token"))
        assert len(prompt) and not prompt.diff(token)
        made = run(qompose.convert_pt2e(done))  # tokens beyond the range of the prompt are clipped
        assert equal(made[:1], expected()[:1], bound=0.05)

    def test_what_several_saw_is_put_together(self, prepared: Any) -> None:
        alone = [
            qompose.statistics(
                qompose.calibrate(qompose.prepare_pt2e(program, toy(LINEAR)), batches)
            )
            for program, batches in zip(
                exported(memory()).values(), ([PROMPT], TOKENS), strict=True
            )
        ]
        qompose.calibrate(prepared, {"prompt": [PROMPT], "token": TOKENS})
        for method in prepared.values():
            assert not qompose.statistics(method).diff(alone[0].merged(alone[1]))

    def test_a_failure_leaves_buffers_as_they_were(self, prepared: Any) -> None:
        """They have the values that they had, and are still those of all methods."""
        count, seen = prepared["prompt"].count, prepared["token"].seen
        bad = [(torch.zeros(1, WIDTH + 1), TOKENS[0][1])]
        for batches in ({"prompt": [PROMPT], "token": [*TOKENS, *bad]}, {"prompt": [PROMPT, *bad]}):
            with pytest.raises(CalibrationError):
                qompose.calibrate(prepared, batches)
            assert float(count) == 0.5 and not seen.any()
            for method in prepared.values():
                assert method.count is count and method.seen is seen

    @pytest.mark.parametrize("anew", [True, False])
    def test_a_method_is_resumed_where_the_one_before_left_the_cache(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, anew: bool
    ) -> None:
        monkeypatch.setattr(calibrator, "EVERY", 0.0)
        programs, quantizer = exported(Reader().eval()), toy(LINEAR, config=STATIC)
        whole, resumed = (qompose.prepare_pt2e(programs, quantizer) for _ in range(2))
        calibrate_apart(whole, TOKENS)
        path = tmp_path / "seen.safetensors"
        calibrate_apart(resumed, TOKENS[:1], resume=path)
        if anew:
            resumed = qompose.prepare_pt2e(programs, quantizer)
            qompose.calibrate(resumed["prompt"], [PROMPT])
        qompose.calibrate(resumed["token"], TOKENS, resume=path)
        assert resumed["token"].seen is resumed["prompt"].seen
        one, other = (qompose.statistics(methods["token"]) for methods in (resumed, whole))
        assert len(one) and not one.diff(other)

    def test_nothing_counts_twice(self, prepared: Any) -> None:
        """Nor after a failure of one method, which leaves all as they were."""
        with pytest.raises(CalibrationError, match="method 'token'"):
            qompose.calibrate(prepared, {"prompt": [PROMPT], "token": []})
        assert not any(len(qompose.statistics(method)) for method in prepared.values())
        given = {"prompt": [PROMPT], "token": TOKENS}
        seen = qompose.statistics(qompose.calibrate(prepared, given)["prompt"])
        with pytest.raises(CalibrationError, match="already have statistics"):
            qompose.calibrate(prepared, given)
        assert not qompose.statistics(prepared["prompt"]).diff(seen)

    @pytest.mark.parametrize("batches", [{}, {"prmpt": [PROMPT]}, [PROMPT]])
    def test_batches_of_no_method(self, prepared: Any, batches: Any) -> None:
        with pytest.raises(UserError, match="prompt, token"):
            qompose.calibrate(prepared, batches)

    def test_errors_name_the_method(self, prepared: Any) -> None:
        with pytest.raises(CalibrationError, match="method 'prompt'"):
            qompose.calibrate(prepared, {"prompt": []})
        with pytest.raises(UserError, match="resume"):
            qompose.calibrate(prepared, {"prompt": [PROMPT]}, resume="x.json")  # type: ignore[call-overload]

    @pytest.mark.filterwarnings("ignore::qompose.QomposeWarning")
    @pytest.mark.parametrize("algorithms", [(), ("gptq",)], ids=str)
    def test_statistics_are_not_counted_once_per_method(self, algorithms: tuple[str, ...]) -> None:
        """Of weights alone there are those of algorithms."""
        config = replace(WEIGHT_ONLY if algorithms else STATIC, algorithms=algorithms)
        prepared = qompose.prepare_pt2e(exported(memory()), toy(LINEAR, config=config))
        data = {"prompt": [PROMPT], "token": TOKENS}
        qompose.calibrate(prepared, data)
        with pytest.raises(CalibrationError, match="prompt"):
            qompose.calibrate(prepared, data)

    def test_what_depends_on_the_order_is_for_one_method(self) -> None:
        averaged = replace(INT8, observer_or_fake_quant_ctr=MovingAverageMinMaxObserver)
        config = QuantizationConfig(averaged, averaged, WEIGHT, name="averaged", algorithms=())
        prepared = qompose.prepare_pt2e(exported(memory()), toy(LINEAR, config=config))
        with pytest.raises(CalibrationError, match="MovingAverage"):
            qompose.calibrate(prepared, {"prompt": [PROMPT], "token": TOKENS})
        qompose.calibrate(prepared, {"prompt": [PROMPT]})
        made = run(qompose.convert_pt2e(prepared))
        assert equal(made[:1], expected()[:1], bound=0.05)


class TestCompiled:
    def test_methods_are_compiled_with_one_state(self, converted: Any) -> None:
        lowered = qompose.lower(converted)
        compiled = qompose.compile_lowered(lowered)
        assert equal(run(compiled), run(converted_again(converted)), bound=1e-5)

    def test_one_of_several_is_refused(self, converted: Any) -> None:
        lowered = qompose.lower(converted)
        with pytest.raises(UserError, match="prompt, token"):
            qompose.compile_lowered(lowered["token"])

    def test_methods_that_were_lowered_apart_are_refused(self, converted: Any) -> None:
        apart = {name: qompose.lower(model) for name, model in converted.items()}
        with pytest.raises(UserError, match=r"'(seen|count)'"):
            qompose.compile_lowered(apart)

    def test_a_constant_that_another_method_writes_to_is_refused(self, converted: Any) -> None:
        reader = Model(lambda m, x: m.linear(x) + m.seen.sum(), linear=nn.Linear(WIDTH, WIDTH))
        reader.register_buffer("seen", torch.zeros(LENGTH, WIDTH))
        quantizer = toy(LINEAR, config=DYNAMIC)
        read = qompose.convert_pt2e(qompose.prepare_pt2e(export(reader, PROMPT[0]), quantizer))
        lowered = qompose.lower({"token": converted["token"], "read": read})
        with torch.no_grad():
            lowered["token"](*TOKENS[0])
            assert bool((lowered["read"].seen == lowered["token"].seen).all())
        with pytest.raises(UserError, match="'read' only reads the buffer 'seen'"):
            qompose.compile_lowered(lowered)


def converted_again(methods: Any) -> Any:
    """The methods with the state that they were exported with."""
    share_state(methods, states_of(methods))
    return methods


class Held(nn.Module):
    """Writes to two tensors in a list, which may be buffers as well, in either order."""

    def __init__(self, named: bool, linear: nn.Module | None = None) -> None:
        super().__init__()
        self.linear, self.swaps = linear or nn.Linear(WIDTH, WIDTH), False
        self.held = [torch.zeros(LENGTH, WIDTH) for _ in range(2)]
        for number, tensor in enumerate(self.held if named else ()):
            self.register_buffer(f"held_{number}", tensor)

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        rows = self.linear(x)
        for place in (1, 0) if self.swaps else (0, 1):
            self.held[place].index_copy_(0, at, rows + place)
        return self.held[0] - 2 * self.held[1]


def run_both(model: nn.Module) -> list[Tensor]:
    return run({"prompt": model, "token": model})


class TestClashes:
    @pytest.mark.parametrize(
        ("other", "named"),
        [
            (lambda: Memory(start=2.0), "initial values"),
            (lambda: with_buffer(torch.zeros(1, dtype=torch.float64)), "dtype"),
            (lambda: with_buffer(torch.zeros(LENGTH, 1)), "shape"),
        ],
        ids=["values", "dtype", "shape"],
    )
    def test_buffers_of_one_name_that_differ_are_named(self, other: Any, named: str) -> None:
        programs = {"prompt": export(memory(), *PROMPT), "token": export(other(), *TOKENS[0])}
        with pytest.raises(UserError, match=f"'count' has .*{named}|'count' has {named}"):
            qompose.prepare_pt2e(programs, toy(LINEAR, config=DYNAMIC))

    @pytest.mark.parametrize(
        ("named", "swaps"), [(False, False), (False, True), (True, True), (True, False)]
    )
    def test_numbers_are_no_names(self, named: bool, swaps: bool) -> None:
        """The exporter counts in the order of use; a second name says which of two tensors it is."""
        model = Held(named).eval().requires_grad_(False)
        programs = {"prompt": export(model, *PROMPT)}
        model.swaps = swaps
        programs["token"] = export(model, *TOKENS[0])
        quantizer = toy(LINEAR, config=DYNAMIC)
        apart = {
            n: qompose.convert_pt2e(qompose.prepare_pt2e(p, quantizer)) for n, p in programs.items()
        }
        if named and not swaps:
            prepared = qompose.prepare_pt2e(programs, quantizer)
            for methods in (qompose.convert_pt2e(prepared), apart):
                assert equal(run(qompose.lower(methods)), run_both(Held(named, model.linear)), 0.05)
            return
        for refused in (
            lambda: qompose.prepare_pt2e(programs, quantizer),
            lambda: qompose.lower(apart),
        ):
            with pytest.raises(UserError, match="lifted_tensor_"):
                refused()

    def test_a_method_that_quantizes_what_another_writes_to_is_named(self) -> None:
        class Reader(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("seen", torch.zeros(LENGTH, WIDTH))

            def forward(self, x: Tensor) -> Tensor:
                return nn.functional.linear(x, self.seen)

        quantizer = toy(LINEAR, config=DYNAMIC)
        programs = {"token": export(memory(), *TOKENS[0]), "read": export(Reader(), PROMPT[0])}
        prepared = qompose.prepare_pt2e(programs, quantizer)
        with pytest.raises(UserError, match="'read' quantizes the buffer 'seen'"):
            qompose.convert_pt2e(prepared)

    def test_weights_that_differ_are_kept_and_named(self) -> None:
        models = {"one": nn.Linear(WIDTH, WIDTH), "two": nn.Linear(WIDTH, WIDTH)}
        programs = {name: export(model, PROMPT[0]) for name, model in models.items()}
        prepared = qompose.prepare_pt2e(programs, toy(LINEAR, config=DYNAMIC))
        lowered = qompose.lower(qompose.convert_pt2e(prepared))
        assert not torch.equal(lowered["one"].weight_q, lowered["two"].weight_q)
        notes = qompose.report(lowered["one"]).notes
        assert any("weight_q" in note for note in notes)


def with_buffer(value: Tensor) -> nn.Module:
    model = memory()
    model.count = value
    return model


class TestNames:
    def test_a_model_alone_has_no_name(self) -> None:
        model = nn.Linear(2, 2)
        assert by_method(model, "lower") == {"": model}

    @pytest.mark.parametrize("names", [["a b"], [""], [3], []])
    def test_names_are_identifiers(self, names: Any) -> None:
        with pytest.raises(UserError, match="lower expects"):
            by_method(dict.fromkeys(names), "lower")


def test_equal_constants_are_shared_and_nan_is_equal_to_itself() -> None:
    first, second = (torch.fx.symbolic_trace(nn.Linear(2, 2)) for _ in range(2))
    for model in (first, second):
        model.weight.data.fill_(float("nan"))
        model.bias.data.fill_(1.0)
    assert share_constants({"a": first, "b": second}, {"a": {}, "b": {}}) == ()
    assert first.weight is second.weight and first.bias is second.bias
