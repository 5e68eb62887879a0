# SPDX-License-Identifier: Apache-2.0
"""Stages ask whatever algorithm a configuration names, and follow what it decides."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import pytest
import qompose
import torch
from qompose.algorithms import (
    Operands,
    change_products,
    load_algorithm,
    set_integers,
    set_scales,
    weight_group,
    weight_of,
)
from qompose.algorithms.calibrated import Calibrated
from qompose.algorithms.channel_factors import Factors
from qompose.algorithms.interface import (
    Algorithm,
    Rewritten,
    Watched,
    check_algorithm,
    check_qparams,
)
from qompose.backend.discovery import algorithms
from qompose.cli.inspection import check_apart
from qompose.cli.main import main
from qompose.errors import CalibrationError, ConfigError, MemberError, PluginError
from qompose.observers import config_from_json, config_to_json
from qompose.observers.channel_ranges import INPUT, Balance
from qompose.plan.plan import Group, Rewrite
from qompose.program.graph import get_attribute
from qompose.spec.claim import Claim
from qompose.spec.qdq import QParams
from torch import nn
from torch.fx import GraphModule, Node

from tests.core.toy import LINEAR, STATIC, WEIGHT, Model, export, nodes_calling, prepare, toy

LINEAR_OP = torch.ops.aten.linear.default


class Fifth(Algorithm):
    """Takes part in every step: halves inputs, and adds one to biases."""

    word = "fifth"

    def rewrite(self, model: GraphModule, claims: Sequence[Claim]) -> Rewritten:
        (claim,) = claims
        return Rewritten(
            (Rewrite("fifth", claim.nodes, ()),), ("fifth was not applied to another",)
        )

    def watch_channels(
        self, model: GraphModule, claims: Sequence[Claim], groups: Sequence[Group]
    ) -> Watched:
        (number,) = (
            n for n, g in enumerate(groups) if g.points[0].user and g.points[0].source == "x"
        )
        return Watched({number: Balance(INPUT, 1, ("layer_weight",), ("",), self.word)})

    def watch_means(
        self, claims: Sequence[Claim], nodes: Mapping[str, Node]
    ) -> Iterator[tuple[Node, int, bool]]:
        yield nodes["x"], 1, True

    def choose_factors(self, found: Calibrated, number: int, balance: Balance) -> None:
        two = torch.full((4,), 2.0)
        found.take(number, balance, Factors(two, torch.tensor(0.5), torch.tensor(0), 1.0))
        found.made.append("fifth halved")

    def correct(self, found: Calibrated) -> None:
        assert found.qparams
        (name,) = (n for n in found.nodes if n.endswith("bias"))
        found.parameters[name] = found.factors.constant(name) + 1
        found.refused.append("fifth left the rest")


def test_every_step_of_an_algorithm_is_followed() -> None:
    layer, x = nn.Linear(4, 3), torch.linspace(-1, 1, 40).view(10, 4)
    quantizer = toy(LINEAR, config=replace(STATIC, algorithms=(Fifth(),)))
    prepared = prepare(export(Model(lambda m, x: m.layer(x), layer=layer), x), quantizer)
    prepared(x)
    converted = qompose.convert_pt2e(prepared)
    report = qompose.report(converted)
    assert [text for text in report.rewrites if "fifth" in text][-1] == "fifth halved"
    assert "fifth was not applied to another" in report.notes
    assert "fifth left the rest" in report.notes
    (quantize, *_) = nodes_calling(converted, "quantize_per_tensor")
    assert quantize.args[1] == 0.5
    state = converted.state_dict()
    assert torch.equal(state["x_factors"].flatten(), torch.full((4,), 0.5))
    assert torch.equal(state["layer.bias"], layer.bias + 1)
    weight = state["layer.weight_q"] * state["layer.weight_scale"].unsqueeze(1)
    torch.testing.assert_close(weight, 2 * layer.weight, atol=0.01, rtol=0.0)


@dataclass(frozen=True)
class Constant(Algorithm):
    """Gives weights one integer everywhere."""

    word: ClassVar[str] = "constant"
    value: int = 3
    dtype: torch.dtype = torch.int8

    def correct(self, found: Calibrated) -> None:
        def change(product: Operands, claim: Claim) -> str:
            shape = found.factors.constant(product.weight.name).shape
            set_integers(found, product, torch.full(shape, self.value, dtype=self.dtype))
            return f"all {self.value}"

        change_products(found, self, change)


def linears() -> tuple[nn.Sequential, torch.Tensor]:
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).eval(), torch.linspace(-1, 1, 40).view(
        10, 4
    )


def converted(*algorithms: Any, **of_modules: Any) -> GraphModule:
    model, x = linears()
    quantizer = toy(LINEAR, config=replace(STATIC, algorithms=algorithms))
    for path, chosen in of_modules.items():
        quantizer.set_module_name(path[1:], replace(STATIC, algorithms=chosen))
    prepared = prepare(export(model, x), quantizer)
    prepared(x)
    return qompose.convert_pt2e(prepared)


@pytest.mark.parametrize(
    "other",
    [lambda q: 3, lambda q: replace(q, scale=q.scale * torch.nan), lambda q: replace(q, scale=-q.scale),
     lambda q: replace(q, scale=q.scale.repeat(2)), lambda q: replace(q, zero_point=q.zero_point[:1]),
     lambda q: replace(q, zero_point=q.zero_point + 1), lambda q: replace(q, low=q.low - 1),
     lambda q: replace(q, high=q.high + 1), lambda q: replace(q, dtype=torch.int16),
     lambda q: replace(q, axis=1), lambda q: replace(q, axis=None, blocks=True)],
)  # fmt: skip
def test_parameters_that_cannot_be_are_the_algorithms_fault(other: Any) -> None:
    class Wrong(Algorithm):
        word = "wrong"

        def choose_qparams(self, found: Calibrated, number: int, q: Any) -> Any:
            return other(q)

    with pytest.raises(MemberError, match=r"algorithm wrong .*choose"):
        converted(Wrong())


def wrong(step: str, action: Any) -> Algorithm:
    """An algorithm whose one step goes wrong; what is said of it names both."""
    given: dict[str, Any] = {"word": "wrong", step: lambda self, *read: action(*read)}
    if step == "learn":
        given["learns"] = lambda self, claim: "product"
    return type("Wrong", (Algorithm,), given)()


def blamed(step: str, action: Any) -> str:
    """What is said of a wrong step in calibration or conversion."""
    model, x = linears()
    with pytest.raises(MemberError, match=r"algorithm wrong \(step '") as raised:
        config = replace(STATIC, algorithms=(wrong(step, action),))
        prepared = prepare(export(model, x), toy(LINEAR, config=config))
        qompose.convert_pt2e(qompose.calibrate(prepared, [x, -x]))
    return str(raised.value)


def first(found: Calibrated) -> tuple[Operands, int, Any]:
    """The first product, with the group of its weight and its parameters."""
    product = Operands.of(next(n for n in found.nodes.values() if n.target is LINEAR_OP))
    return product, *weight_group(found, product)


def bias(found: Calibrated) -> tuple[str, torch.Tensor]:
    name = next(n for n in found.nodes if n.endswith("bias"))
    return name, found.factors.constant(name)


@pytest.mark.parametrize(
    ("step", "value"),
    [("correct", lambda b: b * torch.nan), ("learn", lambda b: b / 0), ("correct", lambda b: b[:1]),
     ("scale_inputs", lambda b: b[:1]), ("choose_qparams", lambda b: b * torch.nan),
     ("correct", lambda b: b.double()), ("learn", lambda b: b.tolist()), ("correct", lambda b: None),
     ("learn", lambda b: b + 1)],
)  # fmt: skip
def test_parameters_that_cannot_take_the_place_of_others_are_named(step: str, value: Any) -> None:
    def put(found: Calibrated, *_: Any) -> None:
        name, old = bias(found)
        found.parameters[name] = value(old)

    assert "_0_bias" in blamed(step, put)


@pytest.mark.parametrize("name", ["nonsense", "linear", "_0_biass"])
def test_parameters_that_a_program_does_not_have_are_named(name: str) -> None:
    def put(found: Calibrated) -> None:
        found.parameters[name] = torch.zeros(3)

    assert repr(name) in blamed("correct", put)


@pytest.mark.parametrize("directly", [False, True])
@pytest.mark.parametrize(
    ("step", "other"),
    [("learn", lambda s: s * 0), ("correct", lambda s: s * torch.nan),
     ("learn", lambda s: torch.ones_like(s, dtype=torch.int64)),
     ("correct", lambda s: torch.full_like(s, 1e-44)),
     ("correct", lambda s: torch.full_like(s, 1e-44, dtype=torch.float64)),
     ("correct", lambda s: s.tolist())],
)  # fmt: skip
def test_scales_that_cannot_be_are_named(step: str, other: Any, directly: bool) -> None:
    def put(found: Calibrated, *_: Any) -> None:
        product, number, q = first(found)
        if directly:
            found.qparams[number] = replace(q, scale=other(q.scale))
        else:
            set_scales(found, product, other(q.scale), q.zero_point)

    said = blamed(step, put)
    assert "scale" in said and "linear (aten.linear in 0)" in said


@pytest.mark.parametrize(
    ("step", "other"),
    [("learn", lambda i: i[:1]), ("correct", lambda i: i.float()), ("correct", lambda i: i.tolist()),
     ("learn", lambda i: i.fill_(-128))],
)  # fmt: skip
def test_integers_that_cannot_be_are_named(step: str, other: Any) -> None:
    def put(found: Calibrated, *_: Any) -> None:
        product, number, q = first(found)
        shape = found.factors.constant(product.weight.name).shape
        found.integers[number] = other(torch.zeros(shape, dtype=q.dtype))

    assert "_0_weight" in blamed(step, put)


def test_scales_that_are_written_in_place_are_checked() -> None:
    with pytest.raises(CalibrationError, match="_0_weight"):
        converted(wrong("correct", lambda found: first(found)[2].scale.zero_()))


@pytest.mark.parametrize("step", ["learn", "correct"])
def test_parameters_of_a_weight_cannot_be_taken_away(step: str) -> None:
    assert "_0_weight" in blamed(step, lambda found, *_: found.qparams.clear())


def test_zero_points_are_integers_that_a_weight_can_have() -> None:
    given = QParams(torch.ones(2), torch.tensor([0, 3]), -8, 7, torch.int8, 0)
    spec = replace(WEIGHT, qscheme=torch.per_channel_affine)
    check_qparams(replace(given, zero_point=torch.tensor([-8, 7])), given, spec)
    for other in (torch.tensor([8, 0]), torch.tensor([0, -9])):
        with pytest.raises(ValueError, match=r"zero.point"):
            check_qparams(replace(given, zero_point=other), given, spec)
    floats = replace(given, zero_point=torch.zeros(2))
    with pytest.raises(ValueError, match=r"zero.point"):
        check_qparams(replace(floats, zero_point=torch.tensor([0.5, torch.nan])), floats, spec)


def test_parameters_that_were_set_are_a_copy() -> None:
    kept = []

    def put(found: Calibrated) -> None:
        name, old = bias(found)
        found.parameters[name] = old + 1
        kept.append((str(found.nodes[name].target), found.parameters[name]))

    model = converted(wrong("correct", put))
    [(path, given)] = kept
    given.zero_()
    assert bool(get_attribute(model, path).any())


def test_a_corrected_parameter_stays_one() -> None:
    found = converted("bias_correction")
    assert any("bias_correction on" in line for line in qompose.report(found).rewrites)
    assert {name for name, _ in found.named_parameters()} >= {"0.bias", "1.bias"}


def test_integers_that_were_set_are_a_copy() -> None:
    def put(found: Calibrated) -> None:
        product, _, q = first(found)
        own = torch.full(found.factors.constant(product.weight.name).shape, 3, dtype=q.dtype)
        set_integers(found, product, own)
        own.zero_()

    assert integers(converted(wrong("correct", put)), "0") == [3]


@pytest.mark.parametrize("part", ["layer", True, 1, ["block"]])
def test_what_is_learned_together_is_a_word_that_is_known(part: Any) -> None:
    assert "'block'" in blamed("learns", lambda claim: part)


@pytest.mark.parametrize(
    ("step", "returned"),
    [("rewrite", None), ("rewrite", ()), ("watch_channels", None), ("watch_channels", {}),
     ("watch_means", None), ("watch_means", [1]), ("watch_means", [(1, 2, True)]),
     ("watch_moments", None), ("watch_moments", [1]), ("watch_moments", [(1, 2, 3)])],
)  # fmt: skip
def test_what_a_step_may_not_return_is_named(step: str, returned: Any) -> None:
    blamed(step, lambda *read: returned)


def integers(model: GraphModule, path: str) -> list[int]:
    return model.get_buffer(f"{path}.weight_q").unique().tolist()


def test_objects_with_other_options_change_the_products_that_ask_for_them() -> None:
    found = converted(Constant(), _1=(Constant(5),))
    assert integers(found, "0") == [3] and integers(found, "1") == [5]
    lines = [line for line in qompose.report(found).rewrites if line.startswith("constant")]
    assert len(lines) == 2


def test_of_two_that_choose_integers_the_later_one_is_refused() -> None:
    class Other(Constant):
        word = "other"

    found = converted(Other(7), Constant())
    assert integers(found, "0") == [7]
    assert sum("constant was not applied" in note for note in qompose.report(found).notes) == 2


def test_the_order_is_that_of_each_configuration() -> None:
    """What only a later layer asks for was the last everywhere."""

    class First(Constant):
        word = "first"

    class Other(Constant):
        word = "other"

    found = converted(First(7), Constant(), _1=(Other(5), Constant()))
    assert integers(found, "0") == [7] and integers(found, "1") == [5]


@dataclass(frozen=True)
class Scaling(Algorithm):
    """Writes to the weights that it is given, doubles scales and moves zero points, perhaps too late."""

    word: ClassVar[str] = "scaling"
    zero_point: int = 0
    late: bool = False

    def correct(self, found: Calibrated) -> None:
        def change(product: Operands, claim: Claim) -> str:
            weight, (_, q) = weight_of(found, product), weight_group(found, product)
            weight.mul_(2)
            if self.late:
                set_integers(found, product, torch.zeros_like(weight, dtype=q.dtype))
            set_scales(found, product, q.scale * 2, q.zero_point + self.zero_point)
            return "doubled"

        change_products(found, self, change)


def test_weights_are_copies_that_an_algorithm_may_write_to() -> None:
    model, x = linears()
    before = [p.detach().clone() for p in model.parameters()]
    prepared = prepare(
        export(model, x), toy(LINEAR, config=replace(STATIC, algorithms=(Scaling(),)))
    )
    prepared(x)
    found = qompose.convert_pt2e(prepared)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    plain, doubled = (m.get_buffer("0.weight_q").abs().max() for m in (converted(), found))
    assert int(doubled) in (int(plain) // 2, int(plain) // 2 + 1)


def test_zero_points_of_symmetric_weights_stay() -> None:
    with pytest.raises(MemberError, match="scaling"):
        converted(Scaling(zero_point=3))


def test_scales_are_not_changed_under_integers_that_were_chosen() -> None:
    notes = qompose.report(converted(Scaling(late=True))).notes
    assert sum("scaling with late True was not applied" in note for note in notes) == 2


@pytest.mark.parametrize("said", [None, "", 3])
def test_a_change_that_says_nothing_is_an_error(said: Any) -> None:
    def correct(found: Calibrated) -> None:
        change_products(found, algorithm, lambda product, claim: said)

    algorithm = type("Wrong", (Algorithm,), {"word": "wrong", "correct": lambda _, f: correct(f)})()
    with pytest.raises(MemberError, match=repr(said)):
        converted(algorithm)


def test_an_algorithm_that_reports_nothing_is_named() -> None:
    silent = type("Silent", (Algorithm,), {"word": "silent"})()
    assert [n for n in qompose.report(converted(silent)).notes if n.startswith("silent")]
    assert not [n for n in qompose.report(converted(Scaling())).notes if n.startswith("scaling")]


@pytest.mark.parametrize("wrong", [Constant(128), Constant(3, torch.int32)], ids=str)
def test_an_error_says_whose_algorithm_it_is(wrong: Constant) -> None:
    with pytest.raises(MemberError, match="constant"):
        converted(wrong)


@pytest.mark.parametrize(
    "wrong",
    [Constant, 3, *(type("Mine", (Constant,), {"word": word})() for word in ("gptq", "", 5))],
    ids=str,
)
def test_what_is_no_algorithm_of_its_own(wrong: Any) -> None:
    with pytest.raises(ConfigError):
        replace(STATIC, algorithms=(wrong,))


def test_an_object_has_no_name_in_data_but_its_word_in_saved_models(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        config_to_json(replace(STATIC, algorithms=(Constant(),)))
    found = converted(Constant())
    qompose.save(found, tmp_path / "model.qompose")
    loaded = qompose.load(tmp_path / "model.qompose")
    assert qompose.report(loaded).rewrites == qompose.report(found).rewrites


PACKAGE = """
from dataclasses import dataclass
from typing import ClassVar

import torch
from qompose.algorithms import Algorithm, change_products, set_integers, weight_of

class Zeros(Algorithm):
    word = "zeros"

    def correct(self, found):
        def change(product, claim):
            set_integers(found, product, torch.zeros_like(weight_of(found, product), dtype=torch.int8))
            return "all zero"
        change_products(found, self, change)

class Needy(Zeros):
    def __init__(self, bits): ...

@dataclass(frozen=True)
class Level(Algorithm):
    word: ClassVar[str] = "level"
    value: int = 0
    shares: tuple[float, ...] = ()
    dtype: torch.dtype | None = None

    def __post_init__(self):
        if self.value > 7:
            raise ValueError("at most 7")

    def correct(self, found):
        def change(product, claim):
            full = torch.full_like(weight_of(found, product), self.value, dtype=torch.int8)
            set_integers(found, product, full)
            return f"all {self.value}"
        change_products(found, self, change)

@dataclass(frozen=True)
class Odd(Level):
    word: ClassVar[str] = "odd"
    model: torch.nn.Module | None = None
"""
OFFERED = "\n".join(
    f"{word} = {value}"
    for word, value in {
        "zeros": "acme_zeros:Zeros", "level": "acme_zeros:Level", "odd": "acme_zeros:Odd",
        "alias": "acme_zeros:Zeros", "gptq": "acme_zeros:Zeros", "needy": "acme_zeros:Needy",
        "torch": "acme_zeros:torch", "gone": "acme_gone:X",
    }.items()
)  # fmt: skip


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that offers algorithms of which one is right."""
    (tmp_path / "acme_zeros.py").write_text(PACKAGE)
    info = tmp_path / "acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[qompose.algorithms]\n{OFFERED}")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("acme")
def test_another_package_offers_one_by_its_word() -> None:
    found = converted("zeros")
    assert integers(found, "0") == [0] and integers(found, "1") == [0]
    with pytest.raises(ConfigError, match="'zeros'"):
        replace(STATIC, algorithms=("zeroes",))
    assert config_from_json(config_to_json(replace(STATIC, algorithms=("zeros",))))
    statuses = {info.name: check_algorithm(info).status for info in algorithms()}
    assert {statuses.pop(word) for word in ("zeros", "level", "odd")} == {"usable"} and {
        *statuses.values()
    } == {"broken"}
    for word in statuses:
        with pytest.raises(PluginError) as error:
            load_algorithm(word)
        assert (error.value.name, error.value.kind) == (word, "algorithm")


@pytest.mark.usefixtures("acme")
def test_objects_of_packages_keep_their_options_in_data() -> None:
    module = import_module("acme_zeros")
    config = replace(STATIC, algorithms=(module.Level(3, (0.5, 2.0), torch.int8),))
    data = config_to_json(config)
    assert data["algorithms"] == [{"level": {"value": 3, "shares": [0.5, 2.0], "dtype": "int8"}}]
    read = config_from_json(json.loads(json.dumps(data)))
    assert read == config
    assert integers(converted(*read.algorithms), "0") == [3]
    assert config_to_json(replace(STATIC, algorithms=(module.Level(),)))["algorithms"] == [
        {"level": {}}
    ]


@pytest.mark.usefixtures("acme")
@pytest.mark.parametrize(
    "data, named",
    [
        ({"level": {"valu": 3}}, "did you mean.*value"), ({"level": {"value": "3"}}, "level.value"),
        ({"level": {"value": 8}}, "at most 7"), ({"level": 3}, "level"), ({"levle": {}}, "'level'"),
        ({"level": {}, "zeros": {}}, "m name"), ({"zeros": {}}, "not a dataclass"), ({"odd": {}}, "Odd"),
        ({"gone": {}}, "acme_gone"), ({"gptq": {"dampin": 0.1}}, "damping"),
        ({"smooth_quant": {"alpah": 0.5}}, "alpha"), ({}, "m name"), (["level"], "a string"),
    ],
)  # fmt: skip
def test_options_that_data_gets_wrong_are_named(data: Any, named: str) -> None:
    whole = {**config_to_json(STATIC), "algorithms": [data]}
    with pytest.raises(ConfigError, match=named) as error:
        config_from_json(whole)
    assert "algorithms[0]" in str(error.value)


@pytest.mark.usefixtures("acme")
def test_an_object_that_its_package_does_not_offer_is_no_data() -> None:
    class Mine(Constant):
        word = "level"

    for wrong in (Mine(), import_module("acme_zeros").Odd(model=nn.Linear(1, 1))):
        with pytest.raises(ConfigError):
            config_to_json(replace(STATIC, algorithms=(wrong,)))


def test_none_is_offered() -> None:
    with pytest.raises(ConfigError):
        load_algorithm("zeros")


@pytest.mark.usefixtures("acme")
def test_they_are_listed_with_the_backends(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["backends", "--json"]) == 0
    rows = {row["name"]: row["kind"] for row in json.loads(capsys.readouterr().out)["backends"]}
    assert rows["zeros"] == "algorithm"
    (info,) = (info for info in algorithms() if info.name == "zeros")
    (health,) = check_apart([info], 100)
    assert health.status == "usable"
