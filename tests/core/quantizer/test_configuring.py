# SPDX-License-Identifier: Apache-2.0
"""Settings as JSON: what is read back selects the same, and nothing unknown is read."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import pytest
import qompose
import torch
import torch.nn.functional as F
from qompose import ComposableQuantizer, QomposeError, RuleQuantizer
from qompose.errors import BackendNotFoundError, ConfigError, PluginError, SelectorError
from qompose.quantizer import quantizer_from_dict, quantizer_from_json
from torch import nn

from tests.core.backend.test_plugins import backend, install
from tests.core.places import CALLS, Caller, configs
from tests.core.toy import (
    DYNAMIC,
    LINEAR,
    PER_TENSOR,
    SIGMOID,
    STATIC,
    WEIGHT_ONLY,
    NullQuantizer,
    ToyBackend,
    plan_of,
    prepare,
    toy,
)

__all__ = ["install"]  # a fixture

aten = torch.ops.aten


def named(config: qompose.QuantizationConfig, name: str) -> qompose.QuantizationConfig:
    return dataclasses.replace(config, name=name)


@pytest.fixture
def installed(install: Any) -> None:
    install(alpha=backend("alpha"), beta=backend("beta"))


def alpha(name: str = "alpha") -> RuleQuantizer:
    return RuleQuantizer(ToyBackend(name=name))


def read(*entries: Any) -> Any:
    return quantizer_from_dict({"backend": "alpha", "selectors": [*entries]})


SETTINGS: dict[str, Callable[[RuleQuantizer], Any]] = {
    "global": lambda q: q.set_global(STATIC),
    "module type": lambda q: q.set_module_type(nn.Linear, DYNAMIC),
    "operator": lambda q: q.set_operator_type(aten.linear.default, WEIGHT_ONLY),
    "packet": lambda q: q.set_operator_type(aten.linear, None),
    "function": lambda q: q.set_operator_type(F.relu, PER_TENSOR),
    "regex": lambda q: q.set_module_name_regex("in.*", DYNAMIC),
    "name": lambda q: q.set_module_name("inner.fc", None),
    "subgraph": lambda q: q.set_subgraph(["linear_3"], ["linear_4"], STATIC),
    "call": lambda q: q.set_module_name_object_type_order("inner", F.linear, 1, None),
    "class of a test": lambda q: q.set_module_type(Caller.Inner, DYNAMIC),
}


@pytest.mark.usefixtures("installed")
class TestRoundTrip:
    """`to_dict`, `to_json`, `quantizer_from_dict`, `quantizer_from_json`."""

    @pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
    def test_each_setting(self, setting: Callable[[RuleQuantizer], Any]) -> None:
        quantizer = alpha()
        setting(quantizer)
        again = quantizer_from_json(quantizer.to_json())
        assert isinstance(again, RuleQuantizer)
        assert again.selectors == quantizer.selectors
        assert again.to_dict() == quantizer.to_dict()

    def test_all_of_them_select_the_same(self) -> None:
        quantizer = alpha()
        for name, setting in SETTINGS.items():
            if name not in ("function", "regex", "packet"):
                setting(quantizer)
        again: Any = quantizer_from_json(quantizer.to_json())
        assert configs(CALLS, again) == configs(CALLS, quantizer)
        assert len(set(configs(CALLS, again).values())) > 2

    def test_compositions(self) -> None:
        inner = qompose.compose(alpha("beta").set_global(None), on_conflict="first")
        composed = qompose.compose(alpha().set_global(STATIC), inner, on_conflict="first")
        again = quantizer_from_json(composed.to_json())
        assert again.to_dict() == composed.to_dict()
        assert [member.name for member in again.members] == ["alpha", "beta"]

    def test_configurations_of_the_backend_are_written_by_name(self) -> None:
        quantizer = alpha().set_global(STATIC).set_module_name("inner", PER_TENSOR)
        static, other = (entry["config"] for entry in quantizer.to_dict()["selectors"])
        assert static == "static"
        assert other["weight"]["qscheme"] == "per_tensor_symmetric"

    def test_the_defaults_of_a_backend_are_replaced(self) -> None:
        assert read().selectors.settings == []


def test_a_backend_that_makes_no_quantizer_is_named(install: Any) -> None:
    install(alpha=backend("alpha", quantizer_class=int))
    with pytest.raises(PluginError) as caught:
        qompose.compose("alpha")
    assert caught.value.name == "alpha" and "got 0" in caught.value.reason


def test_a_quantizer_without_selectors_cannot_be_given_any(install: Any) -> None:
    install(alpha=backend("alpha", quantizer_class=NullQuantizer))
    with pytest.raises(ConfigError, match="'alpha'"):
        read(SELECTOR)
    with pytest.raises(ConfigError):
        alpha().with_selectors([SELECTOR])  # type: ignore[arg-type]


def test_names_as_people_write_them(install: Any) -> None:
    install(alpha=backend("alpha"))
    data = {"select": "object type", "module type": "torch.nn.Linear", "config": "static"}
    assert read(data).selectors == alpha().set_module_type(nn.Linear, STATIC).selectors


SELECTOR = {"select": "module name", "name": "inner", "config": "static"}
GOOD = {"on_conflict": "error", "members": [{"backend": "alpha", "selectors": [SELECTOR]}]}
LEFT_OUT = object()
ENTRY = ("members", 0, "selectors", 0)
BAD: list[tuple[str, tuple[Any, ...], Any, str]] = [
    ("unknown key at the top", ("on_conflicts",), "error", "'on_conflicts'.*'on_conflict'"),
    ("unknown policy", ("on_conflict",), "last", "'last'"),
    ("no list", ("members",), {}, "members"),
    ("no members", ("members",), [], ""),
    ("no object", ("members", 0), 3, "3"),
    ("unknown key of a member", ("members", 0, "target"), "torch", "'target'"),
    ("unknown backend", ("members", 0, "backend"), "alpho", "'alpha'"),
    ("selectors of another kind", ("members", 0, "selectors"), "all", "alpha"),
    ("an entry of another kind", ENTRY, "all", "alpha, selector 0: .*'all'"),
    ("unknown level", (*ENTRY, "select"), "module names", "'module name'"),
    ("unknown key of a setting", (*ENTRY, "recursive"), True, "'recursive'"),
    ("a number for a name", (*ENTRY, "name"), 3, "name .*3"),
    ("a level that is no text", (*ENTRY, "select"), [], "select"),
    ("a backend that is no text", ("members", 0, "backend"), None, "None"),
    ("an empty name", (*ENTRY, "name"), "", "module"),
    ("unknown configuration", (*ENTRY, "config"), "statik", "'static'"),
    ("malformed configuration", (*ENTRY, "config"), {"wait": 1}, "wait"),
    *((f"no {key}", (*ENTRY, key), LEFT_OUT, key) for key in ("select", "name", "config")),
]  # fmt: skip


@pytest.mark.usefixtures("installed")
class TestErrors:
    """What cannot be written, or read."""

    @pytest.mark.parametrize(
        ("path", "value", "message"), [row[1:] for row in BAD], ids=[row[0] for row in BAD]
    )
    def test_bad_data(self, path: tuple[Any, ...], value: Any, message: str) -> None:
        data: Any = copy.deepcopy(GOOD)
        assert quantizer_from_dict(data)
        *parents, last = path
        place = data
        for key in parents:
            place = place[key]
        place[last] = value
        if value is LEFT_OUT:
            del place[last]
        kind = ConfigError if value is LEFT_OUT else QomposeError
        with pytest.raises(kind, match=f"(?s){message}"):
            quantizer_from_dict(data)

    def test_selectors_are_a_list(self) -> None:
        with pytest.raises(ConfigError, match="list"):
            quantizer_from_dict({"backend": "alpha", "selectors": {"select": "global"}})

    @pytest.mark.parametrize(
        ("key", "name", "message"),
        [
            ("operator", "linear", "'linear'"), ("operator", "aten.linaer", "'aten.linaer'"),
            ("operator", "aten.add.Tenser", "aten.add.Tenser"), ("operator", "mylib.op", "mylib"),
            ("operator", ["aten.add", 3], "3"), ("operator", [], ""), ("module type", "Linear", "'Linear'"),
            ("module type", 3, "3"), ("module type", "torch.nn.Linaer", "'Linear'"),
            ("module type", "torch.nn.functional.linear", "torch.nn.functional.linear"),
            ("module type", "torch.onnx.Foo", "torch.onnx.Foo"),
            ("type", "torch.nn.Linear", "'module type'.*'operator'"),
        ],
    )  # fmt: skip
    def test_types_that_are_none(self, key: str, name: Any, message: str) -> None:
        entry = {"select": "object type", key: name, "config": None}
        imported = set(sys.modules)
        with pytest.raises((SelectorError, ConfigError), match=f"(?s){message}"):
            read(entry)
        assert set(sys.modules) == imported, "reading data imports nothing"

    @pytest.mark.parametrize("name", ["model.Block", "some.model.Block"])
    def test_a_class_that_is_not_imported_yet_is_known_by_its_name(self, name: str) -> None:
        entry = {"select": "object type", "module type": name, "config": None}
        again = read(entry)
        assert again.to_dict()["selectors"] == [entry]
        (note,) = plan_of(prepare(CALLS, again.set_global(STATIC))).notes
        assert name in note

    def test_a_subclass_is_code(self) -> None:
        own, composed = (type("Own", (k,), {}) for k in (RuleQuantizer, ComposableQuantizer))
        for quantizer in (own(ToyBackend(name="alpha")), composed([alpha()])):
            with pytest.raises(ConfigError, match="alpha"):
                quantizer.to_dict()

    def test_a_configuration_that_the_backend_cannot_follow(self, install: Any) -> None:
        static = dataclasses.replace(LINEAR, modes=frozenset({"static"}))
        install(gamma=backend("gamma", rules=(static,)))
        data = toy(LINEAR, config=DYNAMIC, name="gamma").to_dict()
        with pytest.raises(ConfigError, match="dynamic"):
            quantizer_from_dict(data)

    @pytest.mark.parametrize(
        ("quantizer", "message"),
        [
            pytest.param(alpha().set_filter(len, STATIC), "filter len", id="filter"),
            pytest.param(alpha().set_filter_function(bool), "filter function", id="narrowed"),
            pytest.param(NullQuantizer(), "NullQuantizer", id="annotating"),
        ],
    )
    def test_code_cannot_be_written(self, quantizer: Any, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            qompose.compose(quantizer).to_json()

    @pytest.mark.parametrize(
        "text",
        ["", "{", "[1]", "null", None, "[" * 100_000, '{"backend": "b", ' + alpha().to_json()[1:]],
    )
    def test_text_that_is_no_configuration(self, text: str) -> None:
        with pytest.raises(ConfigError):
            quantizer_from_json(text)


@pytest.mark.usefixtures("installed")
class TestConfigurationsByName:
    """What a backend calls a configuration stands for it, and a mode for its first one of that mode."""

    PROGRAM = torch.export.export(nn.Linear(3, 4).eval(), (torch.randn(2, 3),))

    @pytest.mark.parametrize(
        ("written", "config"),
        [
            pytest.param("alpha", STATIC, id="the default"),
            pytest.param("alpha:dynamic", DYNAMIC, id="by name"),
            pytest.param("alpha:weight-only", WEIGHT_ONLY, id="with a dash"),
        ],
    )
    def test_of_an_installed_backend(self, written: str, config: Any) -> None:
        (setting,) = qompose.quantizer_of(written).selectors.settings  # type: ignore[attr-defined]
        assert setting.config == config
        for quantizer in (written, [written], qompose.compose(written), qompose.compose([written])):
            (claim,) = plan_of(prepare(self.PROGRAM, quantizer)).claims
            assert (claim.owner, claim.config) == ("alpha", config.name)

    def test_lists_are_in_order_of_priority(self) -> None:
        members = ["beta:dynamic", qompose.quantizer_of("alpha"), ["alpha:weight-only"]]
        for quantizer in (members, tuple(members), qompose.compose(*members)):
            (claim,) = plan_of(prepare(self.PROGRAM, quantizer)).claims
            assert (claim.owner, claim.config) == ("beta", "dynamic")
        assert [m.name for m in qompose.compose(members).members] == ["beta", "alpha", "alpha"]

    def test_each_selector_takes_names(self) -> None:
        quantizer = alpha().set_global("static").set_module_type(nn.Linear, "dynamic")
        quantizer.set_module_name("head", "weight-only").set_filter(bool, "static")
        found = [setting.config for setting in quantizer.selectors.settings]
        assert found == [STATIC, DYNAMIC, WEIGHT_ONLY, STATIC]

    def test_a_mode_is_the_first_configuration_of_it(self) -> None:
        configs = {"per tensor": PER_TENSOR, "static fine": named(STATIC, "static fine")}
        quantizer = RuleQuantizer(ToyBackend(configs=configs))
        assert quantizer.set_global("static").selectors.configs() == [PER_TENSOR]
        with pytest.raises(ConfigError, match="dynamic"):
            quantizer.set_global("dynamic")

    @pytest.mark.parametrize("written", ["alpha:dynamc", "alpha:", "alpha:dynamic:static"])
    def test_one_that_is_not_there(self, written: str) -> None:
        with pytest.raises(ConfigError, match=r"'alpha' .*'dynamic'"):
            qompose.compose(written)
        with pytest.raises(BackendNotFoundError):
            qompose.compose("gamma:dynamic")

    def test_a_quantizer_without_selectors_takes_none(self, install: Any) -> None:
        install(alpha=lambda: ToyBackend(name="alpha", quantizer_class=NullQuantizer))
        with pytest.raises(ConfigError, match="'alpha'"):
            qompose.compose("alpha:static")

    def test_questions_take_names_too(self) -> None:
        answer = qompose.can_quantize(self.PROGRAM, "linear", ["alpha", "beta"], "dynamic")
        assert answer.config == "dynamic"
        refused = qompose.can_quantize(self.PROGRAM, "linear", "alpha", "dynamc")
        assert not refused and "'dynamic'" in refused.reason


class TestInstalledBackendsWithARule:
    """What no member has a rule for, and an installed backend has, is named with that backend."""

    PROGRAM = TestConfigurationsByName.PROGRAM

    @pytest.fixture(autouse=True)
    def others(self, install: Any) -> None:
        broken = backend("other", rules=3)
        sigmoids = backend("sigmoids", rules=(SIGMOID,))
        install(alpha=backend("alpha"), broken=broken, sigmoids=sigmoids)

    def told(self, quantizer: Any) -> list[str]:
        notes = qompose.report(prepare(self.PROGRAM, quantizer)).notes
        return [note for note in notes if "installed" in note]

    def test_reports_name_it(self) -> None:
        (note,) = self.told(toy(SIGMOID, name="mine"))
        assert "linear (aten.linear)" in note and note.endswith(": alpha")

    def test_questions_name_it(self) -> None:
        answer = qompose.can_quantize(self.PROGRAM, "linear", toy(SIGMOID, name="mine"))
        assert [who for who, _ in answer.reasons] == ["mine", "alpha"]

    @pytest.mark.parametrize(
        "quantizer",
        [
            pytest.param("alpha", id="taken"),
            pytest.param(toy(LINEAR).set_operator_type(F.linear, None), id="left in float"),
        ],
    )
    def test_nobody_is_named_for_what_a_member_speaks_of(self, quantizer: Any) -> None:
        assert self.told(quantizer) == []
