# SPDX-License-Identifier: Apache-2.0
"""Capability rows are values and data; `supports` answers from the table, with the reason of a no."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
import qompose
import torch
from qompose import Capabilities, QuantizationConfig
from qompose.backend import TensorConstraint
from qompose.backend.capabilities import capability_rows
from qompose.backend.pattern_question import MODULES
from qompose.errors import ConfigError
from qompose.program.graph import module_path
from rich.console import Console
from torch import nn
from torch.ao.quantization.observer import MinMaxObserver as TorchMinMaxObserver
from torch.nn import functional as F

from tests.core.toy import (
    CAT,
    CONV,
    CONV_ADD_RELU,
    CONV_RELU,
    DYNAMIC,
    INT8,
    LINEAR,
    LINEAR_RELU,
    PER_TENSOR,
    RELU,
    SIGMOID,
    STATIC,
    STATIC_UINT8,
    VIEW,
    Annotator,
    Model,
    NullQuantizer,
    ToyBackend,
    export,
    prepare,
    toy,
)

aten = torch.ops.aten
INT8_ONLY = TensorConstraint(
    dtypes=frozenset({torch.int8}), qschemes=frozenset({torch.per_tensor_affine}),
    scale_min_lower_bound=None, quant_min_lower_bound=-128,
)  # fmt: skip
BOUNDED = replace(LINEAR, accepts={"activation": INT8_ONLY}, drawing="linear, exactly")


def rows_of(
    *rules: qompose.backend.Rule, config: QuantizationConfig | None = STATIC
) -> Capabilities:
    return toy(*rules, config=config).quantization_capabilities()


class TestRows:
    def test_a_row_says_all_that_the_table_says(self) -> None:
        row, *_ = rows_of(BOUNDED)
        assert (row.backend, row.pattern, row.drawing) == ("toy", "linear", "linear, exactly")
        assert row.operators == (("aten.linear.default",),)
        assert (row.config, row.mode, row.granularity, row.qat) == (
            "static", "static", "per-channel", True
        )  # fmt: skip
        assert (row.settings, row.activation, row.output) == (STATIC, INT8, INT8)
        assert row.kernels == (("torch", "toy linear"),)
        assert row.targets == ("torch",)
        assert dict(row.constraints) == {"activation": INT8_ONLY}
        (note,) = row.notes
        assert note.startswith("activation: int8")

    def test_sharing_and_every_operator_of_a_fused_pattern_are_told(self) -> None:
        view, cat, fused = (rows_of(rule)[0] for rule in (VIEW, CAT, CONV_ADD_RELU))
        assert view.shares and view.output is None
        assert len(view.notes) == len(cat.notes) == 2 and view.notes[1] != cat.notes[1]
        assert fused.operators == (("aten.conv2d.default", "aten.add.Tensor", "aten.relu.default"),)

    def test_configurations_of_selectors_have_rows_beside_the_named_ones(self) -> None:
        quantizer = toy(LINEAR, config=STATIC_UINT8).set_module_name("head", PER_TENSOR)
        quantizer.set_object_type(nn.Linear, DYNAMIC)  # which has a name
        rows = quantizer.quantization_capabilities()
        assert [row.config for row in rows] == [
            "static", "dynamic", "weight-only", "static uint8", "per tensor"
        ]  # fmt: skip
        assert rows[3].settings == STATIC_UINT8
        *_, numbered = rows_of(LINEAR, config=replace(STATIC_UINT8, name="static"))
        assert numbered.config == "static (2)"

    @pytest.mark.parametrize("name", ["other", ""])
    def test_a_configuration_has_one_name_in_rows_and_reports(self, name: str) -> None:
        backend = ToyBackend((LINEAR,))
        assert list(backend.quantization_capabilities()) == list(capability_rows(backend))
        backend.configs = {"mine": replace(STATIC, name=name)}
        reported = name or "static per-channel"
        with pytest.raises(ConfigError, match=f"'mine'.*'{reported}'"):
            capability_rows(backend)


class TestCompositions:
    def test_a_backend_is_listed_twice_only_with_configurations_of_its_own(self) -> None:
        composed = qompose.compose(toy(LINEAR), toy(LINEAR).set_module_name("head", DYNAMIC))
        assert list(composed.quantization_capabilities()) == list(rows_of(LINEAR))
        composed = qompose.compose(toy(LINEAR), toy(LINEAR, config=PER_TENSOR))
        *_, last = composed.quantization_capabilities()
        assert last.config == "per tensor"

    def test_who_lists_nothing_is_named(self) -> None:
        composed = qompose.compose(toy(LINEAR), Annotator(print, "theirs"), NullQuantizer())
        rows = composed.quantization_capabilities()
        assert rows.silent == ("theirs", "NullQuantizer")
        assert "theirs, NullQuantizer" in rows.supports(nn.Conv2d, STATIC).reason
        assert "theirs" in str(rows)

    def test_conditions_of_one_side_do_not_bind_the_other(self) -> None:
        static = toy(LINEAR, name="A").quantization_capabilities().filter(mode="static")
        both = static + toy(LINEAR, name="B").quantization_capabilities()
        assert both.supports("linear", DYNAMIC).backend == "B"


class TestFilter:
    rows = toy(LINEAR, SIGMOID, VIEW).quantization_capabilities()

    @pytest.mark.parametrize(
        ("facts", "left"),
        [
            ({"mode": "dynamic"}, 3), ({"pattern": "linear", "mode": "static"}, 1), ({"target": "torch"}, 5),
            ({"target": "nowhere"}, 0), ({"shares": True}, 2), ({"weight": None}, 4),
            ({"granularity": "per-channel"}, 3),
        ],
    )  # fmt: skip
    def test_by_facts(self, facts: dict[str, Any], left: int) -> None:
        found = self.rows.filter(**facts)
        assert isinstance(found, Capabilities)
        assert len(found) == left

    def test_by_a_predicate(self) -> None:
        assert len(self.rows.filter(lambda row: row.kernels, mode="static")) == 2

    def test_an_unknown_fact_is_an_error_with_near_names(self) -> None:
        with pytest.raises(ConfigError, match=r"'modes'.*'mode'"):
            self.rows.filter(modes="static")

    def test_questions_are_about_what_is_left(self) -> None:
        static = self.rows.filter(mode="static", target="torch")
        assert static.supports("linear", STATIC_UINT8)
        assert "mode='static'" in static.supports("linear", DYNAMIC).reason
        assert "target='torch'" in static.supports("sigmoid", STATIC).reason


def named(config: QuantizationConfig, name: str) -> QuantizationConfig:
    return replace(config, name=name)


FUSED = toy(CONV_ADD_RELU, CONV_RELU, LINEAR_RELU, LINEAR, SIGMOID).quantization_capabilities()
YES: dict[str, tuple[Any, str]] = {
    "a rule's name": ("conv_relu", "conv_relu"), "operators in a drawing": ("conv2d -> relu", "conv_relu"),
    "spaces in a drawing": (" conv2d  ->relu ", "conv_relu"), "modules": ((nn.Conv2d, nn.ReLU), "conv_relu"),
    "a list": ([nn.Conv2d, nn.ReLU], "conv_relu"), "functionals": ((F.conv2d, F.relu), "conv_relu"),
    "packets": ((aten.conv2d, aten.relu), "conv_relu"),
    "overloads": ((aten.conv2d.default, aten.relu.default), "conv_relu"),
    "all kinds": ((nn.Conv2d, torch.add, aten.relu), "conv_add_relu"), "one module": (nn.Linear, "linear"),
    "one function": (torch.sigmoid, "sigmoid"), "one operator": (aten.linear.default, "linear"),
    "an operator's name": ("aten.linear", "linear"),
    "a batch norm between": ((nn.Conv2d, nn.BatchNorm2d, nn.ReLU), "conv_relu"),
    "a batch norm between functionals": ((F.conv2d, F.batch_norm, F.relu), "conv_relu"),
    "a batch norm behind": ((nn.Linear, nn.BatchNorm1d), "linear"),
    "a batch norm in a drawing": ("conv2d -> batch_norm -> relu", "conv_relu"),
}  # fmt: skip
NO: dict[str, tuple[Any, str]] = {
    "no such rule": ("conv_rel", "'conv_relu'"),
    "no such operator": (nn.Hardswish, "Hardswish"),
    "a part of a fusion": (nn.Conv2d, "conv_relu of toy, conv_add_relu of toy$"),
    "a second batch norm": ((nn.Conv2d, nn.BatchNorm2d, nn.BatchNorm2d, nn.ReLU), "Conv2d"),
    "an operator too many": ((nn.Linear, nn.ReLU, nn.Dropout), "no rule has Dropout"),
    "the wrong order": ((nn.ReLU, nn.Linear), "linear of toy"),
    "a batch norm before": (
        (nn.BatchNorm2d, nn.Conv2d, nn.ReLU), "no rule has BatchNorm2d; .*conv_relu of toy"
    ),
    "a batch norm too many": ((nn.Conv2d, nn.BatchNorm2d, nn.Sigmoid), "sigmoid of toy"),
    "another overload": ((aten.conv2d.padding, aten.relu.default), "aten.conv2d.padding"),
    "several operators": (nn.MultiheadAttention, "MultiheadAttention"),
    "a module of one's own": (type("Conv2", (nn.Conv2d,), {}), "Conv2 .*'Conv2d'"),
    "the batch norm of an image behind rows": (
        (nn.Linear, nn.BatchNorm2d, nn.ReLU), "no rule has BatchNorm2d"
    ),
    "the batch norm of rows behind an image": (
        (nn.Conv2d, nn.BatchNorm1d, nn.ReLU), "no rule has BatchNorm1d"
    ),
    "a function of several operators": (F.multi_head_attention_forward, "multi_head_attention"),
}  # fmt: skip


class TestSupports:
    @pytest.mark.parametrize(("pattern", "rule"), YES.values(), ids=YES)
    def test_yes(self, pattern: Any, rule: str) -> None:
        answer = FUSED.supports(pattern, STATIC)
        assert answer
        assert answer.by == f"toy, rule {rule}"
        assert answer.reason == ""

    @pytest.mark.parametrize(("pattern", "reason"), NO.values(), ids=NO)
    def test_no(self, pattern: Any, reason: str) -> None:
        answer = FUSED.supports(pattern, STATIC)
        assert not answer
        assert (answer.by, answer.kernels) == ("", ())
        assert re.search(reason, answer.reason)

    def test_a_yes_names_the_kernels(self) -> None:
        answer = FUSED.supports(nn.Linear, STATIC)
        assert answer.kernels == (("torch", "toy linear"),)
        assert answer.by in str(answer) and "toy linear" in str(answer)

    def test_a_yes_that_depends_on_the_operator_says_so(self) -> None:
        guarded = replace(LINEAR, guard=lambda match: "never")
        (note,) = rows_of(guarded).supports(nn.Linear, STATIC).notes
        assert "qompose.can_quantize" in note

    def test_without_the_convolution_the_answer_says_what_is_missing(self) -> None:
        """As BackendConfig's users met it: conv-relu declared, conv-bn-relu in the model."""
        asked = (nn.Conv2d, nn.BatchNorm2d, nn.ReLU)
        neither = rows_of(LINEAR).supports(asked, STATIC)
        assert "Conv2d or ReLU" in neither.reason
        alone = rows_of(CONV).supports(asked, STATIC)
        assert "conv of toy" in alone.reason
        apart = rows_of(CONV, RELU).supports(asked, STATIC)
        assert "conv of toy, relu of toy" in apart.reason
        assert all("Conv2d -> ReLU" in a.reason for a in (neither, alone, apart))
        for config in (STATIC, qompose.training_config(STATIC)):
            folded = FUSED.supports(asked, config)
            assert folded.rule == "conv_relu" and "Conv2d -> ReLU" in folded.notes[0]

    def test_every_rule_is_asked_before_a_no_whose_reason_is_the_rules(self) -> None:
        answer = rows_of(BOUNDED).supports(nn.Linear, STATIC_UINT8)
        assert "toy: activation is torch.uint8" in answer.reason
        rows = rows_of(BOUNDED, replace(LINEAR, name="any"))
        assert rows.supports(nn.Linear, STATIC_UINT8).rule == "any"

    @pytest.mark.parametrize(
        "pattern", [3, None, torch.int8, (), (nn.Linear, 3), dict, "", "conv2d ->"]
    )
    def test_what_is_no_question(self, pattern: Any) -> None:
        with pytest.raises(ConfigError):
            FUSED.supports(pattern, STATIC)

    @pytest.mark.parametrize("config", [3, nn.Linear, "statc", ""])
    def test_what_is_no_configuration(self, config: Any) -> None:
        with pytest.raises(ConfigError, match=r"QuantizationConfig|'static'"):
            FUSED.supports(nn.Linear, config)

    def test_without_a_configuration_any_of_the_rows_will_do(self) -> None:
        static, dynamic = (frozenset({mode}) for mode in ("static", "dynamic"))
        rows = rows_of(
            replace(BOUNDED, modes=static), replace(LINEAR, modes=dynamic, name="other"), SIGMOID
        )
        answer = rows.supports(nn.Linear)
        assert (answer.rule, answer.configs) == ("linear", ("static", "dynamic"))
        assert rows.filter(mode="dynamic").supports(nn.Linear).configs == ("dynamic",)
        later = rows_of(replace(LINEAR, modes=dynamic, name="later"), replace(LINEAR, modes=static))
        answer = later.supports(nn.Linear)
        assert (answer.rule, answer.configs) == ("linear", ("static", "dynamic"))
        assert later.supports(nn.Linear, "dynamic").rule == "later"
        both = rows_of(LINEAR).supports(nn.Linear)
        assert both.configs == ("static", "dynamic", "weight-only")
        assert "dynamic, weight-only" in str(both)
        assert "mode='static'" in rows.filter(mode="static").supports(nn.Sigmoid, "dynamic").reason
        assert not rows.supports(nn.Conv2d)

    def test_a_configuration_by_its_name_or_mode(self) -> None:
        rows = toy(LINEAR, config=PER_TENSOR).quantization_capabilities()
        assert rows.supports(nn.Linear, "per tensor").configs == ("per tensor",)
        assert rows.supports(nn.Linear, "dynamic").configs == ("dynamic",)
        assert rows.supports(nn.Linear, PER_TENSOR).configs == ("per tensor",)

    def test_a_composition_answers_for_each_member_with_its_own(self) -> None:
        first = toy(SIGMOID, name="first", configs={"static": STATIC})
        second = toy(LINEAR, name="second", configs={"other": named(DYNAMIC, "other")}, config=None)
        rows = qompose.compose(first, second).quantization_capabilities()
        answers = [rows.supports(kind) for kind in (nn.Linear, nn.Sigmoid)]
        assert [(a.backend, a.configs) for a in answers] == [
            ("second", ("other",)), ("first", ("static",))
        ]  # fmt: skip
        assert not rows.supports(nn.Linear, "static")
        assert "second" in rows.supports(nn.Linear, "static").reason

    def test_a_backend_says_why_it_leaves_an_operator_in_float(self) -> None:
        facts = {"left_in_float": {aten.tanh.default: "the chip has no tanh"}}
        rows = toy(LINEAR, **facts).quantization_capabilities()
        for asked in (nn.Tanh, torch.tanh, "tanh", aten.tanh.default, (nn.Linear, nn.Tanh)):
            assert "toy: the chip has no tanh" in rows.supports(asked, STATIC).reason
        assert "chip" not in rows.supports(nn.Sigmoid, STATIC).reason

    @pytest.mark.parametrize(
        ("module", "rewrite"),
        [
            (nn.LSTM, "unroll_recurrent"), (nn.GRU, "unroll_recurrent"), (nn.RNN, "unroll_recurrent"),
            (nn.LSTMCell, "split_cells"), (nn.RNNCell, "split_cells"),
        ],
    )  # fmt: skip
    def test_what_is_taken_apart_is_answered_by_its_products(
        self, module: Any, rewrite: str
    ) -> None:
        rows = toy(LINEAR, rewrites=(rewrite,)).quantization_capabilities()
        answer = rows.supports(module, STATIC)
        assert answer.rule == "linear" and rewrite in answer.notes[-1]
        assert not toy(LINEAR).quantization_capabilities().supports(module, STATIC)
        bounded = toy(BOUNDED, rewrites=(rewrite,)).quantization_capabilities()
        assert not bounded.supports(module, STATIC_UINT8)


class TestData:
    rows = toy(BOUNDED, SIGMOID, VIEW, CAT, config=PER_TENSOR).quantization_capabilities()

    def test_text_has_the_data_of_every_row(self) -> None:
        data = json.loads(self.rows.to_json())
        assert data == {"schema": 1, "rows": [row.to_dict() for row in self.rows]}
        assert data == self.rows.to_dict()
        assert [row["pattern"] for row in data["rows"]] == [row.pattern for row in self.rows]
        assert data["rows"][0]["notes"] == list(self.rows[0].notes)
        assert data["rows"][0]["kernels"] == {"torch": "toy linear"}

    def test_names_of_reports_are_found(self) -> None:
        program = export(Model(lambda m, x: m.linear(x), linear=nn.Linear(3, 4)), torch.ones(2, 3))
        (found,) = qompose.report(prepare(program, toy(LINEAR, config=DYNAMIC))).rows
        rows = rows_of(LINEAR, SIGMOID)
        (row,) = rows.filter(backend=found.owner, rule=found.rule, config=found.config)
        assert row.pattern == found.rule == row.rule
        text = rows_of(BOUNDED, LINEAR_RELU, SIGMOID).to_markdown()
        starts = ("| linear, exactly (linear) |", "| linear_relu |", "| sigmoid |")
        assert all(any(line.startswith(s) for line in text.splitlines()) for s in starts)

    def test_observers_of_other_packages_are_known_by_name(self) -> None:
        """One plugin with torch's observers must not keep the rows of all the others from being data."""
        theirs = replace(INT8, observer_or_fake_quant_ctr=TorchMinMaxObserver.with_args(eps=1.0))
        rows = toy(LINEAR, config=replace(STATIC, input_activation=theirs))
        *_, last = json.loads(rows.quantization_capabilities().to_json())["rows"]
        name = "torch.ao.quantization.observer.MinMaxObserver"
        assert last["activation"]["observer"] == {"elsewhere": name}
        assert last["settings"]["input_activation"]["observer"] == {"elsewhere": name}


def test_a_console_shows_the_table() -> None:
    file = StringIO()
    Console(width=90, file=file).print(toy(LINEAR, SIGMOID).quantization_capabilities())
    assert "toy linear" in file.getvalue()
    assert "all static" not in file.getvalue()  # there is but one


_INPUTS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "Linear": ((4, 4), (2, 4)), "Bilinear": ((4, 4, 3), (2, 4)),
    **{f"{kind}{n}d": ((4, 4, 3), (2, 4, *[8] * n)) for kind in ("Conv", "ConvTranspose") for n in (1, 2, 3)},
    **{f"{kind}{n}d": ((4,), (2, 4, *[8] * n)) for kind in ("BatchNorm", "InstanceNorm") for n in (1, 2, 3)},
    **{f"{kind}Pool{n}d": ((2,), (2, 4, *[8] * n)) for kind in ("Max", "Avg") for n in (1, 2, 3)},
    **{f"AdaptiveAvgPool{n}d": ((1,), (2, 4, *[8] * n)) for n in (1, 2, 3)},
    "LayerNorm": ((4,), (2, 4)), "RMSNorm": ((4,), (2, 4)), "GroupNorm": ((2, 4), (2, 4, 8)),
    "Threshold": ((0.1, 2.0), (2, 4)), "Unflatten": ((1, (2, 2)), (2, 4)),
    "PixelShuffle": ((2,), (2, 4, 8, 8)), "PixelUnshuffle": ((2,), (2, 4, 8, 8)),
    "ChannelShuffle": ((2,), (2, 4, 8, 8)), "Unfold": ((2,), (2, 4, 8, 8)),
    "Fold": (((8, 8), (2, 2)), (2, 16, 49)), "Softmax": ((-1,), (2, 4)), "LogSoftmax": ((-1,), (2, 4)),
    "Embedding": ((3, 4), ()), "EmbeddingBag": ((3, 4), ()),
    **dict.fromkeys(("LSTM", "GRU", "RNN"), ((4, 3), (2, 5, 4))),
    **{f"{kind}Cell": ((4, 3), (2, 4)) for kind in ("LSTM", "GRU", "RNN")},
    **{f"AdaptiveMaxPool{n}d": ((1,), (2, 4, *[8] * n)) for n in (1, 2, 3)},
    **{f"{kind}Pad{n}d": ((1,), (2, 4, *[8] * n))
       for kind in ("Zero", "Reflection", "Replication", "Circular") for n in (1, 2, 3)},
    **{f"ConstantPad{n}d": ((1, 0.0), (2, 4, *[8] * n)) for n in (1, 2, 3)}, "Softmax2d": ((), (2, 4, 8, 8)),
    "UpsamplingNearest2d": ((None, 2), (2, 4, 8, 8)), "UpsamplingBilinear2d": ((None, 2), (2, 4, 8, 8)),
}  # fmt: skip


AROUND = ("aten.zeros", "<built-in function getitem>", "")
"""First states of recurrent modules, and one of several results."""


def every(m: Any, *inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """All modules of the table, each on inputs of its own."""
    return [part(*given) for part, given in zip(m.parts, inputs, strict=True)]


def _inputs(kind: Any) -> tuple[torch.Tensor, ...]:
    if kind is nn.Embedding:
        return (torch.zeros(2, dtype=torch.int64),)
    if kind is nn.EmbeddingBag:
        return torch.zeros(4, dtype=torch.int64), torch.tensor([0, 2])
    given = torch.zeros(_INPUTS.get(kind.__name__, ((), (2, 4)))[1])
    return (given, given) if kind is nn.Bilinear else (given,)


@pytest.mark.filterwarnings("ignore:The tensor attributes .*_flat_weights:UserWarning")
@pytest.mark.filterwarnings("ignore:.*:FutureWarning")
def test_every_module_of_the_table_is_exported_as_its_operator() -> None:
    parts = nn.ModuleList(kind(*_INPUTS.get(kind.__name__, ((), ()))[0]) for kind in MODULES)
    program = export(Model(every, parts=parts), *map(_inputs, MODULES))
    called: dict[str, list[str]] = defaultdict(list)
    for node in (n for n in program.graph.nodes if n.op == "call_function"):
        called[module_path(node)].append(str(node.target).rpartition(".")[0])
    for number, kind in enumerate(MODULES):
        made = [name for name in called[f"parts.{number}"] if name not in AROUND]
        assert made == [MODULES[kind]], kind
