# SPDX-License-Identifier: Apache-2.0
"""Observers of other engines, by their shape alone: what they are made of, shown, asked and blamed for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import qompose
import torch
from qompose.errors import CalibrationError, ConfigError, MemberError, StageError, UncalibratedError
from qompose.observers.foreign_observer import guard, guard_of
from qompose.observers.make_observer import has_data
from qompose.program.meta import GROUP_TAG, tag_of
from torch import Tensor, nn
from torch.ao.quantization import fake_quantize, observer
from torch.ao.quantization.observer import MinMaxObserver, PerChannelMinMaxObserver
from torch.fx import GraphModule, Node

from tests.core.quantizer.interop.foreign import INT8, By, Derived, Spec, aten, calls, named, put
from tests.core.toy import (
    WEIGHT_ONLY,
    Call,
    Model,
    convert,
    export,
    nodes_calling,
    observers_of,
    prepare,
    randn,
    seeded,
    sqnr,
    toy,
)

X = randn(8, 6)
AFFINE, SYMMETRIC = torch.per_tensor_affine, torch.per_tensor_symmetric
CHANNELS = torch.per_channel_symmetric
LINEAR = aten.linear.default


class Duck(nn.Module):
    """An observer with no base class, of the range [-1, 1]; it keeps what it was made of and shown."""

    result: Any = (torch.tensor(1 / 127), torch.tensor(0))

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.arguments, self.seen = arguments, []  # type: ignore[var-annotated]

    def forward(self, x: Tensor) -> Any:
        self.seen.append(x.clone())
        return x

    def calculate_qparams(self) -> Any:
        return self.result


def spec(maker: Any = Duck, **facts: Any) -> Spec:
    facts = {"dtype": torch.int8, "quant_min": -128, "quant_max": 127, "qscheme": AFFINE, **facts}
    return Spec(observer_or_fake_quant_ctr=maker, **facts)


def member(x: Any = None, weight: Any = None, bias: Any = None, output: Any = None) -> Any:
    """A foreign quantizer of all linears; `bias` may be a function of the node."""

    def write(model: GraphModule) -> None:
        for node in calls(model, LINEAR):
            made = bias(node) if callable(bias) and not isinstance(bias, Spec) else bias
            asked = zip(node.args, (x, weight, made), strict=False)
            put(node, {source: each for source, each in asked if each is not None}, output)

    return qompose.compose(By(write))


def model() -> Any:
    return seeded(Model(lambda self, x: self.inner(x), inner=nn.Linear(6, 4)))


def giving(result: Any, **facts: Any) -> type[Duck]:
    """A class of observers whose parameters are these."""
    return type("Giving", (Duck,), {"result": result, **facts})


def observed(module: GraphModule, number: int = 0) -> Any:
    return module.get_submodule(str(observers_of(module)[number].target))


class TestMaking:
    """The conventions of this field, and who is named where they cannot be followed."""

    def test_it_is_moved_to_where_its_tensor_is(self) -> None:
        moved: list[Any] = []

        class Moving(Duck):
            def to(self, *args: Any) -> Any:
                moved.append(args)
                return super().to(*args)

        prepare(export(model(), X), member(spec(Moving)))
        assert moved == [(X.device,)]

    def test_torchs_float_zero_points_begin_at_zero(self) -> None:
        """Its formula has no least integer, so that signed ones would stand for other values."""
        scheme = torch.per_channel_affine_float_qparams
        facts: dict[str, Any] = {"dtype": torch.int8, "qscheme": scheme, "ch_axis": 0}
        with pytest.raises(ConfigError, match="float_qparams"):
            prepare(export(model(), X), member(weight=spec(PerChannelMinMaxObserver, **facts)))
        facts |= {"dtype": torch.uint8, "quant_min": 0, "quant_max": 255}
        prepare(export(model(), X), member(weight=spec(PerChannelMinMaxObserver, **facts)))

    def test_the_observer_has_the_last_word_on_the_axis(self) -> None:
        """It cannot be told of axis 1, and estimates along its own."""

        class Rows(PerChannelMinMaxObserver):
            def __init__(self, dtype: Any, qscheme: Any, is_dynamic: Any, **bounds: Any) -> None:
                super().__init__(0, dtype, qscheme, is_dynamic=is_dynamic, **bounds)

        made = lambda dtype, qscheme, quant_min, quant_max, is_dynamic: Rows(  # noqa: E731
            dtype, qscheme, is_dynamic, quant_min=quant_min, quant_max=quant_max
        )
        weight = spec(made, qscheme=CHANNELS, ch_axis=1)
        converted = convert(export(model(), X), member(weight=weight), X)
        (node,) = nodes_calling(converted, "dequantize_per_channel")
        assert node.args[3] == 0
        assert converted.get_buffer("inner.weight_scale").shape == (4,)
        assert sqnr(model()(X), converted(X)) > 30

    @pytest.mark.parametrize(
        ("maker", "error", "named"),
        [
            (lambda **_: 3, ConfigError, "3"),
            (lambda **_: nn.Identity(), ConfigError, "calculate_qparams"),
            (lambda: Duck(), ConfigError, "keyword"),
            (lambda **_: 1 / 0, MemberError, "ZeroDivisionError"),
            (lambda **_: MinMaxObserver(torch.qint32), ConfigError, "torch.qint32"),
            (lambda **_: MinMaxObserver(torch.qint8, quant_min=0, quant_max=200), ConfigError, "200"),
        ],
        ids=["3", "no observer", "arguments", "fails", "another type", "range"],
    )  # fmt: skip
    def test_who_is_blamed(self, maker: Any, error: type[Exception], named: str) -> None:
        """Tensor, module path, owner and rule; wherever the fault shows."""
        with pytest.raises(error, match=named) as caught:
            convert(export(model(), X), member(spec(maker)), X)
        assert "x -> linear in inner (tests.By, rule annotation)" in str(caught.value)


class TestGuard:
    """What an observer is shown, and what becomes of what it returns."""

    def calibrated(self, kind: Callable[..., nn.Module], x: Tensor = X, **facts: Any) -> Any:
        prepared = prepare(export(model(), X), member(spec(kind, **facts)))
        prepared(x)
        return observed(prepared)

    def test_it_is_the_very_module_that_was_made(self) -> None:
        made: list[nn.Module] = []
        maker = lambda **arguments: made.append(Duck(**arguments)) or made[-1]  # type: ignore[func-returns-value]  # noqa: E731
        assert self.calibrated(maker) is made[0]
        assert torch.equal(made[0].seen[0], X)  # type: ignore[union-attr, index]

    @pytest.mark.parametrize("result", [None, 3, torch.ones(2)])
    def test_what_it_returns_is_a_tensor_of_that_size(self, result: Any) -> None:
        returning = type("Returning", (Duck,), {"forward": lambda self, x: result})
        with pytest.raises(MemberError, match=r"Returning .*x -> linear"):
            self.calibrated(returning)

    def test_a_guard_stands_once_and_is_copied_with_its_observer(self) -> None:
        first = guard(Duck(), "a")
        assert guard(first, "b") is first
        assert guard_of(first).subject == "a"  # type: ignore[union-attr]
        twin: Any = copy.deepcopy(first)
        twin(X)
        assert len(twin.seen) == 1
        assert first.seen == []
        assert guard_of(twin).screen.values == X.numel()  # type: ignore[union-attr]
        assert guard_of(first).screen.values == 0  # type: ignore[union-attr]


class TestParameters:
    """Nonsense from `calculate_qparams` is refused by name, and what can be read is read."""

    @pytest.mark.parametrize(
        ("result", "error"),
        [
            (None, MemberError),
            ((torch.tensor(1.0),), MemberError),
            ((torch.tensor(1.0), None), MemberError),
            (("a", "b"), MemberError),
            ((torch.tensor(0.0), torch.tensor(0)), CalibrationError),
            ((torch.tensor(float("nan")), torch.tensor(0)), CalibrationError),
            ((torch.ones(3), torch.zeros(3)), CalibrationError),
            ((torch.tensor(1.0), torch.tensor(200)), CalibrationError),
            ((torch.tensor(1.0), torch.tensor(0.5)), CalibrationError),
            ((torch.tensor(1.0), torch.tensor(float("nan"))), CalibrationError),
        ],
        ids=str,
    )
    def test_nonsense(self, result: Any, error: type[Exception]) -> None:
        prepared = prepare(export(model(), X), member(spec(giving(result))))
        prepared(X)
        with pytest.raises(error, match=r"x -> linear in inner \(tests.By, rule annotation\)"):
            qompose.convert_pt2e(prepared)
        assert observers_of(prepared), "it is as it was"

    @pytest.mark.parametrize(
        "result", [(0.25, 3), (torch.tensor([0.25]), torch.tensor([3.0])), [0.25, torch.tensor(3)]]
    )
    def test_numbers_in_any_form(self, result: Any) -> None:
        converted = convert(export(model(), X), member(spec(giving(result))), X)
        (node,) = nodes_calling(converted, "quantize_per_tensor")
        assert node.args[1:3] == (0.25, 3)
        assert isinstance(node.args[2], int)

    def test_channels_in_a_column(self) -> None:
        column = torch.full((4, 1), 0.5), torch.zeros(4, 1, dtype=torch.int64)
        weight = spec(giving(column, qscheme=CHANNELS, ch_axis=0), qscheme=CHANNELS, ch_axis=0)
        converted = convert(export(model(), X), member(weight=weight), X)
        assert torch.equal(converted.get_buffer("inner.weight_scale"), torch.full((4,), 0.5))
        assert torch.equal(
            converted.get_buffer("inner.weight_q"),
            torch.round(model().inner.weight * 2).to(torch.int8),
        )

    @pytest.mark.parametrize("calibrate", [False, True], ids=["never run", "run twice"])
    def test_parameters_are_shown_once_for_each_run(self, calibrate: bool) -> None:
        """Where nothing ran, conversion shows them: weights need no data."""
        prepared = prepare(export(model(), X), member(weight=spec(Duck)))
        for _ in range(2 if calibrate else 0):
            prepared(X)
        qompose.convert_pt2e(prepared)
        assert len(observed(prepared).seen) == (2 if calibrate else 1)

    @pytest.mark.parametrize(
        "maker",
        [
            MinMaxObserver, observer.HistogramObserver, fake_quantize.FusedMovingAvgObsFakeQuantize,
        ],
    )  # fmt: skip
    def test_what_saw_no_data_is_named(self, maker: Any) -> None:
        prepared = prepare(export(model(), X), member(spec(maker)))
        with pytest.raises(UncalibratedError, match=r"x -> linear in inner \(tests.By, rule annot"):
            qompose.convert_pt2e(prepared)

    def test_channels_saw_data_if_each_did(self) -> None:
        found = PerChannelMinMaxObserver()
        assert not has_data(found)  # it has bounds of no channel
        found(X)
        assert has_data(found)
        found.min_val[0] = torch.inf
        assert not has_data(found)

    def test_derived_parameters_see_the_very_observers(self) -> None:
        seen: list[list[Any]] = []

        def derive(observers: list[Any]) -> tuple[Tensor, Tensor]:
            seen.append(observers)
            scales = [o.calculate_qparams()[0] for o in observers]
            return scales[0] * scales[1], torch.zeros(1)

        def bias(node: Node) -> Derived:
            edges = tuple((source, node) for source in node.args[:2])
            return Derived(edges, derive, torch.int32, -(2**31), 2**31 - 1)

        weight = spec(MinMaxObserver, qscheme=SYMMETRIC)

        derivable = type("Derivable", (MinMaxObserver,), {})
        prepared = prepare(export(model(), X), member(spec(derivable), weight, bias))
        prepared(X)
        converted = qompose.convert_pt2e(prepared)
        assert [type(o) for o in seen[0]] == [derivable, MinMaxObserver]
        assert all(any(o is other for other in prepared.modules()) for o in seen[0])
        assert converted.get_buffer("inner.bias_q").dtype is torch.int32
        assert sqnr(model()(X), converted(X)) > 25


class Looking(Duck):
    """Like one of the field: it keeps the graph it was annotated on, and looks observers up in it."""

    def __init__(self, graph: Any, node_name: str, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.graph, self.node_name = graph, node_name
        next(n for n in graph.nodes if n.name == node_name)

    def forward(self, x: Tensor) -> Tensor:
        (cat,) = (n for n in self.graph.nodes if n.name == self.node_name)
        for node in cat.args[0]:
            getattr(node.graph.owning_module, node.name).width = float(x.abs().max())
        return x


CAT = Call(lambda x: torch.cat([torch.tanh(x), torch.sin(x)]).cos())


class TestNames:
    """Observers find one another in the prepared program."""

    def quantizer(self) -> Any:
        def write(model: GraphModule) -> None:
            cat = named(model, "cat")
            maker = observer._with_args(Looking, graph=model.graph, node_name="cat")
            put(cat, dict.fromkeys(cat.all_input_nodes, spec()), spec(maker, quant_max=126))

        return qompose.compose(By(write))

    def test_an_observer_that_keeps_the_annotated_graph(self) -> None:
        prepared = prepare(export(CAT, X), self.quantizer())
        prepared(X)
        found = [getattr(observed(prepared, n), "width", None) for n in range(3)]
        assert found == [float(X.tanh().abs().max().maximum(X.sin().abs().max()))] * 2 + [None]
        assert observed(prepared, 2).graph is prepared.graph
        assert prepared.graph.owning_module is prepared
        assert sqnr(CAT(X), qompose.convert_pt2e(prepared)(X)) > 15

    def test_every_call_has_the_name_of_its_module_at_the_root(self) -> None:
        """One observer for several tensors has several names."""

        def write(model: GraphModule) -> None:
            for node in calls(model, aten.tanh.default, aten.sin.default):
                put(node, output=INT8)
            cat = named(model, "cat")
            put(cat, dict.fromkeys(cat.all_input_nodes, INT8), INT8)

        prepared = prepare(export(CAT, X), qompose.compose(By(write)))
        nodes = observers_of(prepared)
        assert [node.name for node in nodes] == [node.target for node in nodes]
        assert {node.name for node in nodes} == {f"activation_post_process_{n}" for n in range(3)}
        assert prepared.graph.owning_module is prepared
        shared = {tag_of(node, GROUP_TAG): prepared.get_submodule(node.name) for node in nodes}
        for node in nodes:
            assert prepared.get_submodule(node.name) is shared[tag_of(node, GROUP_TAG)]

    def test_names_that_the_program_has_already_are_left_to_it(self) -> None:
        taken = {"activation_post_process_0": nn.Linear(6, 4)}
        float_model = seeded(Model(lambda self, x: self.activation_post_process_0(x), **taken))
        prepared = prepare(export(float_model, X), member(spec(), spec(MinMaxObserver)))
        assert torch.equal(prepared(X), float_model(X))
        assert isinstance(observed(prepared, 1), Duck)

    def test_observers_that_are_gone_are_named(self) -> None:
        prepared = prepare(export(model(), X), toy(config=WEIGHT_ONLY))
        (node,) = observers_of(prepared)
        node.replace_all_uses_with(node.args[0])
        prepared.graph.erase_node(node)
        with pytest.raises(StageError, match="inner_weight -> linear"):
            qompose.convert_pt2e(prepared)

    def test_a_claim_without_one_of_its_observers_stays_in_float(self) -> None:
        """Scripts of this field take observers out of a prepared graph to keep a tensor in float."""
        prepared = prepare(export(model(), X), toy())
        prepared(X)
        (node, *_) = observers_of(prepared)
        node.replace_all_uses_with(node.args[0])
        prepared.graph.erase_node(node)
        prepared.recompile()
        with pytest.warns(qompose.QomposeWarning):
            converted = qompose.convert_pt2e(prepared)
        (row,) = (row for row in qompose.report(converted).rows if row.macs)
        assert row.state == "float" and "removed" in row.reason
        assert torch.equal(converted(X), model()(X))

    def test_an_observer_that_a_user_puts_in_its_place(self) -> None:
        """Tools of this field replace observers of a prepared program by name."""
        prepared = prepare(export(model(), X), member(spec(MinMaxObserver)))
        (node,) = observers_of(prepared)
        other = observer.FixedQParamsObserver(0.125, 42, torch.int8, AFFINE, -128, 127)
        setattr(prepared, node.name, other)
        prepared(X)
        (quantize,) = nodes_calling(qompose.convert_pt2e(prepared), "quantize_per_tensor")
        assert quantize.args[1:3] == (0.125, 42)
        setattr(prepared, node.name, observer.FixedQParamsObserver(0.125, 42, torch.uint8))
        with pytest.raises(ConfigError, match=r"x -> linear in inner.*torch.uint8"):
            qompose.convert_pt2e(prepared)
