# SPDX-License-Identifier: Apache-2.0
"""What a target says of operators, and models that become the methods of one program."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import qompose
import torch
from qompose import QomposeWarning, UserError
from qompose.backend import CallSignature, Finished, Kernel, OperatorPattern, Target, stages
from qompose.errors import ConfigError, MemberError, NotLoweredError, StageError, TargetError
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.core.toy import LINEAR, Model, aten, convert, export, randn, rule, seeded, toy

X = randn(6, 3)
ON_DEVICE = rule(
    "linear", *LINEAR.patterns, anchor="op", weight="weight", kernels={"device": Kernel("delegate")}
)


def net(m: Any, x: Tensor) -> Tensor:
    y = nn.functional.scaled_dot_product_attention(x[None], x[None], x[None])[0]
    return m.norm(m.first(y)).sigmoid()


PROGRAM = export(seeded(Model(net, first=nn.Linear(3, 4), norm=nn.LayerNorm(4))), X)


def marked(module: GraphModule) -> set[str]:
    """The operators that a last step finds named in its graph."""
    facts = [node.meta.get("custom", {}).get("qompose", {}) for node in module.graph.nodes]
    return {fact["operator"] for fact in facts if "operator" in fact}


class Remarking:
    """A last step that takes what it is told to, and remarks on the rest."""

    def __init__(self, remarks: Mapping[str, str], took: bool = True) -> None:
        self.remarks, self.took = remarks, took
        self.found: set[str] = set()

    def __call__(self, module: GraphModule, signature: CallSignature) -> Finished:
        self.found = marked(module)
        kernels = {0: "delegate"} if self.took else {}
        return Finished(module, kernels, remarks=self.remarks, notes=("mind the gap",))


def lowered_by(step: Remarking) -> GraphModule:
    quantizer = toy(ON_DEVICE, targets=(Target("device", step),))
    result: GraphModule = qompose.lower(convert(PROGRAM, quantizer, X), "device")
    return result


class TestRemarks:
    def test_they_follow_the_reason_why_an_operator_is_float(self) -> None:
        step = Remarking({"sigmoid": "float in the device's vector unit"})
        report = qompose.report(lowered_by(step))
        rows = {row.name: row for row in report.rows}
        assert rows["sigmoid"].state == "float"
        assert rows["sigmoid"].explanation == (
            "no rule claims it; float in the device's vector unit"
        )
        assert rows["layer_norm"].explanation == "no rule claims it"
        assert rows["linear"].state == "int8 kernel"
        assert "mind the gap" in report.notes
        assert qompose.Report.from_dict(report.to_dict()) == report

    def test_every_operator_of_the_report_is_named_in_the_graph(self) -> None:
        step = Remarking({})
        names = {row.name for row in qompose.report(lowered_by(step)).rows}
        assert names >= {"sigmoid", "layer_norm", "linear"}
        assert step.found == names

    def test_so_are_the_pieces_of_operators_that_were_taken_apart(self) -> None:
        step = Remarking({}, took=False)
        matmul = rule(
            "matmul", OperatorPattern((aten.matmul.default,)), activations=("self", "other"),
            kernels={"device": Kernel("delegate")},
        )  # fmt: skip
        quantizer = toy(matmul, rewrites=("split_attention",), targets=(Target("device", step),))
        converted = convert(PROGRAM, quantizer, X)
        with pytest.warns(QomposeWarning):
            rows = qompose.report(qompose.lower(converted, "device")).rows
        assert sum("/" in row.name for row in rows) > 1
        assert step.found == {row.name for row in rows}

    def test_one_on_a_region_that_was_left_is_its_reason(self) -> None:
        with pytest.warns(QomposeWarning, match="linear .*: float on the device"):
            lowered = lowered_by(Remarking({"linear": "float on the device"}, took=False))
        (row,) = (row for row in qompose.report(lowered).rows if row.name == "linear")
        assert (row.state, row.reason) == ("simulated (Q/DQ)", "float on the device")

    def test_one_on_what_is_no_operator_is_the_targets_fault(self) -> None:
        with pytest.raises(ConfigError, match=r"'device' .*sigmoid_7"):
            lowered_by(Remarking({"sigmoid_7": "float"}))

    def test_the_converted_model_and_its_report_stay_as_they_are(self) -> None:
        quantizer = toy(ON_DEVICE, targets=(Target("device", Remarking({"sigmoid": "float"})),))
        converted = convert(PROGRAM, quantizer, X)
        before = str(qompose.report(converted)), marked(converted)
        qompose.lower(converted, "device")
        assert (str(qompose.report(converted)), marked(converted)) == before
        assert marked(converted) == set()

    def test_they_are_named_in_what_runs_in_the_process_too(self) -> None:
        lowered = qompose.lower(convert(PROGRAM, toy(LINEAR), X))
        assert marked(lowered) >= {"sigmoid", "layer_norm", "linear"}


def together(methods: Any) -> tuple[Any, dict[str, Finished]]:
    """A last step that makes one thing of all methods."""
    parts = {name: SimpleNamespace(graph=module, nbytes=7) for name, (module, _) in methods.items()}
    finished = {
        name: Finished(part, {0: "delegate"}, remarks={"linear": f"of {name}"})
        for name, part in parts.items()
    }
    return SimpleNamespace(
        methods=parts, shapes=[s.args[0].shape for _, s in methods.values()]
    ), finished


def keep(module: GraphModule, signature: CallSignature) -> Finished:
    return Finished(module, {0: "delegate"})


DEVICE = Target("device", keep, finish_methods=together)
SINGLE = Target("device", keep)


@functools.cache
def small_program(rows: int) -> torch.export.ExportedProgram:
    model = Model(lambda m, x: m.linear(x), linear=nn.Linear(3, 4))
    return export(seeded(model), randn(rows, 3))


def small(target: Target = DEVICE, rules: Any = (ON_DEVICE,), rows: int = 6) -> GraphModule:
    return convert(small_program(rows), toy(*rules, targets=(target,)), randn(rows, 3))


class TestMethods:
    def test_in_the_process_they_are_models_by_name(self) -> None:
        parts = {"one": small(rules=(LINEAR,)), "two": small(rules=(LINEAR,), rows=2)}
        lowered = qompose.lower(parts)
        assert list(lowered) == ["one", "two"]
        for name, x in (("one", X), ("two", X[:2])):
            assert torch.equal(lowered[name](x), qompose.lower(parts[name])(x))
            assert qompose.report(lowered[name]).stage == "lowered"

    def test_a_target_gets_all_and_each_has_its_report(self) -> None:
        program = qompose.lower({"one": small(), "two": small(rows=2)}, "device", strict=True)
        assert program.shapes == [(6, 3), (2, 3)]
        for part in program.methods.values():
            report = qompose.report(part)
            assert (report.target, report.bytes_after, report.count("int8 kernel")) == (
                "device", 7, 1,
            )  # fmt: skip

    def test_one_model_under_a_name_is_a_program_of_one_method(self) -> None:
        assert list(qompose.lower({"only": small()}, "device").methods) == ["only"]

    def test_the_program_has_no_report_and_says_which_methods_have(self) -> None:
        program = qompose.lower({"one": small(), "two": small()}, "device")
        for several in (program, {"one": 1, "two": 2}):
            with pytest.raises(StageError, match="one, two"):
                qompose.report(several)

    @pytest.mark.parametrize(
        ("methods", "named"),
        [({}, ""), ({"a b": 1}, "'a b'"), ({"": 1}, "''"), ({3: 1}, "3")],
        ids=["none", "space", "no name", "number"],
    )
    def test_names_are_those_of_methods(self, methods: Any, named: str) -> None:
        with pytest.raises(UserError, match=named or None):
            qompose.lower(methods)

    def test_a_target_without_them_says_so(self) -> None:
        with pytest.raises(TargetError, match=r"'device' .*one, two"):
            qompose.lower({"one": small(SINGLE), "two": small(SINGLE)}, "device")

    def test_one_program_has_one_runtime(self) -> None:
        with pytest.raises(TargetError, match=r"method 'two' .*'device'"):
            qompose.lower({"one": small(), "two": small(SINGLE)}, "device")

    def test_a_target_that_loses_methods_is_named(self) -> None:
        losing = Target("device", keep, finish_methods=lambda methods: (None, {"one": Finished(0)}))
        with pytest.raises(ConfigError, match=r"'device' .*'one'"):
            qompose.lower({"one": small(losing), "two": small(losing)}, "device")


class TestFailures:
    def test_a_model_of_another_stage_is_named(self) -> None:
        with pytest.raises(StageError, match="method 'two': lower"):
            qompose.lower({"one": small(), "two": small_program(6).module()}, "device")

    def test_kernels_that_are_missing_are_named(self) -> None:
        with pytest.raises(TargetError, match="method 'two': "):
            qompose.lower({"one": small(), "two": small(rules=(LINEAR,))}, "device")

    def test_what_fell_back_is_named_and_nothing_has_a_report(self) -> None:
        made: list[Any] = []

        def none(methods: Any) -> tuple[Any, dict[str, Finished]]:
            finished = {name: Finished(SimpleNamespace()) for name in methods}
            finished["one"] = Finished(SimpleNamespace(), {0: "delegate"})
            made.extend(part.model for part in finished.values())
            return None, finished

        target = Target("device", keep, finish_methods=none)
        with pytest.raises(NotLoweredError, match="method 'two': "):
            qompose.lower({"one": small(target), "two": small(target)}, "device", strict=True)
        assert len(made) == 2 and not any(hasattr(model, "meta") for model in made)


def test_stages_of_a_last_step_are_shown_where_somebody_waits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(module: GraphModule, signature: CallSignature) -> Finished:
        with stages(2) as begin:
            begin("one")
            begin("two")
        return Finished(module, {0: "delegate"})

    model = convert(PROGRAM, toy(ON_DEVICE, targets=(Target("device", slow),)), X)
    qompose.lower(model, "device")
    assert capsys.readouterr() == ("", "")
    qompose.lower(model, "device", progress=True)
    printed = capsys.readouterr()
    assert printed.out == "" and "two" in printed.err and "2/2" in printed.err
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    qompose.lower(model, "device")
    assert "2/2" in capsys.readouterr().err
    qompose.lower(model, "device", progress=False)
    assert capsys.readouterr() == ("", "")


def test_a_backend_may_join_what_lies_between_its_regions() -> None:
    asked: list[str] = []

    def join(graph: GraphModule, target: str) -> None:
        asked.append(target)
        (node,) = graph.graph.find_nodes(op="call_function", target=aten.sigmoid.default)
        node.target = aten.tanh.default

    program = export(seeded(Model(lambda m, x: m.first(x).sigmoid(), first=nn.Linear(3, 4))), X)
    plain = qompose.lower(convert(program, toy(LINEAR), X))
    joined = qompose.lower(convert(program, toy(LINEAR, join_regions=join), X))
    assert asked == ["torch"]
    assert torch.allclose(joined(X), torch.logit(plain(X)).tanh(), atol=1e-5)
    assert qompose.report(joined).rows == qompose.report(plain).rows


def test_a_backend_that_fails_to_join_is_named() -> None:
    def fail(graph: GraphModule, target: str) -> None:
        raise RuntimeError("out of ideas")

    model = convert(PROGRAM, toy(LINEAR, join_regions=fail), X)
    with pytest.raises(MemberError, match="join_regions"):
        qompose.lower(model)
