# SPDX-License-Identifier: Apache-2.0
"""The plugin host, with plugins that exist only here: one fault is one plugin's fault."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import qompose
import torch
from importlib_metadata import EntryPoint
from qompose.backend import discovery, hookimpl
from qompose.errors import BackendNotFoundError, PluginError
from torch import nn

from tests.core.toy import LINEAR, STATIC, ToyBackend


def point(name: str, module: str, distribution: str = "", version: str = "1.0") -> EntryPoint:
    return offered_by(
        SimpleNamespace(name=distribution or f"dist-{name}", version=version), name, module
    )


def offered_by(distribution: object, name: str, module: str) -> EntryPoint:
    point = EntryPoint(name, module, "qompose")
    vars(point).update(dist=distribution)
    return point


def module_of(name: str, backend: Callable[[], Any] | None) -> ModuleType:
    module = ModuleType(name)
    if backend is not None:

        @hookimpl
        def qompose_backend() -> Any:
            return backend()

        module.qompose_backend = qompose_backend  # type: ignore[attr-defined]
    return module


Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """`install(good=backend_factory)` for plugins that import; more entry points as they are."""
    points: list[EntryPoint] = []

    def add(*more: EntryPoint, **working: Callable[[], Any] | None) -> None:
        points.extend(more)
        for name, backend in working.items():
            monkeypatch.setitem(sys.modules, f"fake_{name}", module_of(f"fake_{name}", backend))
            points.append(point(name, f"fake_{name}"))

    monkeypatch.delenv("QOMPOSE_PLUGINS", raising=False)
    monkeypatch.delenv("QOMPOSE_TRACE", raising=False)
    monkeypatch.setattr(discovery, "entry_points", lambda group: list(points))
    discovery._load.cache_clear()
    yield add
    discovery._load.cache_clear()


def backend(name: str, **facts: Any) -> Callable[[], ToyBackend]:
    return lambda: ToyBackend(name=name, **facts)


def raising(error: BaseException) -> Callable[[], Any]:
    def fail(*_: object) -> Any:
        raise error

    return fail


class Outside(BaseException):
    """What `except Exception` lets pass."""


class TestListing:
    """What is installed, from metadata alone."""

    def test_in_order_of_name_whatever_the_order_of_discovery(self, install: Install) -> None:
        install(zebra=backend("zebra"), ape=backend("ape"), cat=backend("cat"))
        assert [info.name for info in qompose.backends()] == ["ape", "cat", "zebra"]
        info = qompose.backends()[0]
        assert (info.distribution, info.version, info.module) == ("dist-ape", "1.0", "fake_ape")
        assert info.problem is None

    def test_loads_nothing(self, install: Install) -> None:
        lazy = raising(AssertionError("loaded"))
        install(point("broken", "no_such_module"), lazy=lazy)
        assert [info.name for info in qompose.backends()] == ["broken", "lazy"]

    @pytest.mark.parametrize(
        "value", ["", "a-b", "a b", "a:", "a:b c", "a/b"], ids=lambda v: v or "empty"
    )
    def test_a_malformed_entry_point_is_its_package_s_problem(
        self, install: Install, value: str
    ) -> None:
        install(point("bad", value), fine=backend("fine"))
        bad, fine = qompose.backends()
        assert f"{f'bad = {value}'!r}, not 'name = module'" in str(bad.problem)
        assert fine.problem is None
        with pytest.raises(PluginError, match="the author of dist-bad must repair that"):
            qompose.backend.load_backend("bad")

    @pytest.mark.parametrize(
        "value", ["a", "a.b_1", "a.b:c", "a : b.c", "a:b [x, y]"], ids=lambda v: v
    )
    def test_a_sound_entry_point_is_none(self, install: Install, value: str) -> None:
        install(point("good", value))
        assert qompose.backends()[0].problem is None

    def test_a_package_of_no_version_is_listed(self, install: Install) -> None:
        install(offered_by(SimpleNamespace(name="dist-odd"), "odd", "fake_odd"))
        assert qompose.backends()[0].version == "unknown"

    def test_a_package_found_twice_is_one(self, install: Install) -> None:
        """An editable install beside its own egg-info is listed twice by importlib.metadata."""
        install(point("same", "fake_same", "dist"), point("same", "fake_same", "dist"))
        (info,) = qompose.backends()
        assert info.problem is None

    def test_two_packages_with_one_name_are_both_refused(self, install: Install) -> None:
        install(point("twin", "fake_twin", "first"), point("twin", "fake_twin", "second"))
        install(other=backend("other"))
        problems = [info.problem or "" for info in qompose.backends() if info.name == "twin"]
        assert ["second 1.0" in problems[0], "first 1.0" in problems[1]] == [True, True]
        with pytest.raises(PluginError, match="offers the same name; uninstall all but one"):
            qompose.backend.load_backend("twin")
        assert qompose.backend.load_backend("other").name == "other"

    def test_one_package_with_one_name_twice_is_told_so(self, install: Install) -> None:
        install(point("twin", "fake_one", "dist"), point("twin", "fake_two", "dist"))
        problems = {info.problem for info in qompose.backends()}
        assert problems == {"its own package offers the name more than once"}


class TestRestriction:
    """QOMPOSE_PLUGINS."""

    @pytest.mark.parametrize(
        ("value", "expected"),
        [("a", ["a"]), (" b , a ", ["a", "b"]), ("", []), ("c", [])],
        ids=["one", "two, with spaces", "none", "one that is not there"],
    )
    def test_of_the_list(
        self, install: Install, monkeypatch: pytest.MonkeyPatch, value: str, expected: list[str]
    ) -> None:
        install(a=backend("a"), b=backend("b"))
        monkeypatch.setenv("QOMPOSE_PLUGINS", value)
        assert [info.name for info in qompose.backends()] == expected

    def test_an_excluded_backend_is_not_said_to_be_missing(
        self, install: Install, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        install(a=backend("a"), b=backend("b"))
        monkeypatch.setenv("QOMPOSE_PLUGINS", "b")
        with pytest.raises(qompose.errors.ExcludedBackendError) as caught:
            qompose.compose("a")
        text = str(caught.value)
        assert "'a' is installed (dist-a 1.0, module fake_a)" in text
        assert "QOMPOSE_PLUGINS='b' excludes it" in text
        assert "pip install" not in text
        assert isinstance(caught.value, BackendNotFoundError)

    def test_one_that_is_neither_listed_nor_installed_is_missing(
        self, install: Install, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        install(a=backend("a"))
        monkeypatch.setenv("QOMPOSE_PLUGINS", "b")
        with pytest.raises(BackendNotFoundError, match="No backend named 'b' is installed"):
            qompose.backend.load_backend("b")

    @pytest.mark.parametrize(
        ("value", "expected"),
        [(None, []), ("a", []), ("a,ghost, spook", ["ghost", "spook"])],
        ids=["unset", "all known", "two unknown"],
    )
    def test_names_that_nobody_offers(
        self,
        install: Install,
        monkeypatch: pytest.MonkeyPatch,
        value: str | None,
        expected: list[str],
    ) -> None:
        install(a=backend("a"))
        if value is not None:
            monkeypatch.setenv("QOMPOSE_PLUGINS", value)
        assert discovery.names_nobody_offers() == expected


class TestLoading:
    """By name, once, and on demand."""

    def test_only_when_asked_for(self, install: Install) -> None:
        calls = []

        def make(name: str) -> Callable[[], Any]:
            return lambda: calls.append(name) or ToyBackend(name=name)

        install(a=make("a"), b=make("b"))
        assert qompose.backend.load_backend("a") is qompose.backend.load_backend("a")
        assert calls == ["a"]

    def test_the_quantizer_of_a_backend_by_name(self, install: Install) -> None:
        """It has the default configuration, and every selector."""
        install(a=backend("a"))
        quantizer: Any = qompose.quantizer_of("a")
        assert isinstance(quantizer, qompose.RuleQuantizer)
        assert quantizer.selectors.configs() == [quantizer.backend.configs["static"]]
        assert quantizer.set_module_name("head", None) is quantizer
        with pytest.raises(BackendNotFoundError):
            qompose.quantizer_of("b")

    def test_a_composition_takes_a_name_with_the_default_configuration(
        self, install: Install
    ) -> None:
        install(a=backend("a"))
        (member,) = qompose.compose("a").members
        assert member.selectors.configs() == [member.backend.configs["static"]]

    def test_an_unknown_name_is_an_error_with_near_names(self, install: Install) -> None:
        install(xnnpock=backend("xnnpock"), other=backend("other"))
        with pytest.raises(BackendNotFoundError) as caught:
            qompose.compose("xnnpack")
        text = str(caught.value)
        assert "did you mean 'xnnpock'?" in text
        assert "Installed: other, xnnpock" in text

    def test_without_plugins_the_error_says_so(self, install: Install) -> None:
        install()
        with pytest.raises(BackendNotFoundError, match=r"Installed: none\."):
            qompose.backend.load_backend("x86_inductor")

    def test_an_attribute_of_a_module_may_have_the_hook(self, install: Install) -> None:
        install(point("a", "fake_b:inner"), b=backend("b"))
        sys.modules["fake_b"].inner = module_of("inner", backend("a"))  # type: ignore[attr-defined]
        assert qompose.backend.load_backend("a").name == "a"

    def test_an_interrupt_is_the_user_s_and_passes(self, install: Install) -> None:
        install(slow=raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            qompose.backend.load_backend("slow")

    def test_a_plugin_that_asks_for_itself_is_told_so(self, install: Install) -> None:
        install(a=lambda: qompose.backend.load_backend("a"))
        with pytest.raises(
            PluginError, match="asks for its own backend while it is being imported"
        ):
            qompose.backend.load_backend("a")

    def test_a_backend_may_ask_for_another(self, install: Install) -> None:
        install(
            a=lambda: qompose.backend.load_backend("b") and ToyBackend(name="a"), b=backend("b")
        )
        assert qompose.backend.load_backend("a").name == "a"


FAULTS = [
    pytest.param(
        {"points": [point("bad", "no_such_module_at_all")]},
        "the module 'no_such_module_at_all', which does not exist: reinstall or uninstall dist-bad",
        id="a missing module",
    ),
    pytest.param(
        {"points": [point("bad", "json:nothing")]}, "has no attribute 'nothing'", id="no attribute"
    ),
    pytest.param({"bad": None}, "does not implement the hook qompose_backend", id="no hook"),
    pytest.param(
        {"bad": lambda: None}, "its hook qompose_backend returned None", id="a hook without result"
    ),
    pytest.param(
        {"bad": lambda: 3}, "returned int, not a qompose.backend.Backend", id="another type"
    ),
    pytest.param(
        {"bad": lambda: ToyBackend},
        r"returned the class ToyBackend, not an object of it: ToyBackend\(\)",
        id="the class",
    ),
    pytest.param({"bad": lambda: 1 / 0}, "ZeroDivisionError: division by zero", id="raises"),
    pytest.param({"bad": raising(SystemExit("bye"))}, "SystemExit: bye", id="exits"),
    pytest.param({"bad": raising(Outside("no Exception"))}, "no Exception", id="raises outside"),
    pytest.param(
        {"bad": backend("bad", api_version=99)},
        "version 99 of the backend interface, and this qompose has version 1: upgrade qompose",
        id="a newer interface",
    ),
    pytest.param(
        {"bad": backend("bad", api_version=-1)},
        "version -1 of the backend interface, .* has version 1: upgrade dist-bad",
        id="an older interface",
    ),
    pytest.param(
        {"bad": backend("bad", api_version=0)},
        r"does not say for which version .* \(api_version is 0\); this qompose has version 1",
        id="no interface stated",
    ),
    pytest.param(
        {"bad": backend("bad", api_version="1")}, "api_version is '1'", id="interface as text"
    ),
    pytest.param(
        {"bad": backend("good")},
        "calls itself 'good', but its entry point is 'bad'",
        id="wrong name",
    ),
    pytest.param(
        {"bad": lambda: ToyBackend(["linear"], name="bad")},
        "its rules contain 'linear'; expected a qompose.backend.Rule",
        id="rules of another type",
    ),
    pytest.param(
        {"bad": backend("bad", left_in_float={"aten.matmul": "no kernel"})},
        "its left_in_float has 'aten.matmul': 'no kernel'; expected an operator and a reason",
        id="operators as text",
    ),
    pytest.param(
        {"bad": backend("bad", configs={"a": 3})},
        "its configs contain 3; expected a QuantizationConfig",
        id="configurations of another type",
    ),
    pytest.param(
        {"bad": backend("bad", configs={"a": STATIC})},
        r"its configs list 'a', which calls itself 'static' .*name='a'",
        id="a configuration of two names",
    ),
    pytest.param({"bad": backend("bad", targets=7)}, "'int' object is not iterable", id="targets"),
]


@pytest.mark.parametrize(("broken", "message"), FAULTS)
def test_a_fault_is_told_with_its_source_and_harms_nobody_else(
    install: Install, broken: dict[str, Any], message: str
) -> None:
    install(*broken.get("points", ()), fine=backend("fine"))
    install(**{name: make for name, make in broken.items() if name != "points"})
    told = []
    for _ in range(2):
        with pytest.raises(PluginError, match=message) as caught:
            qompose.backend.load_backend("bad")
        told.append(caught.value)
    assert str(told[0]) == str(told[1])
    assert told[0] is not told[1]  # an exception that is raised twice collects both tracebacks
    assert told[0].name == "bad"
    assert "dist-bad 1.0" in str(told[0])
    assert qompose.backend.load_backend("fine").name == "fine"
    health = {info.name: discovery.check_backend(info) for info in qompose.backends()}
    assert health["fine"] == discovery.Health("usable")
    assert health["bad"] == discovery.Health("broken", told[0].reason)


def test_a_module_that_fails_is_not_imported_again(
    install: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """Its first half has run: a second attempt would meet what that left, and tell something else."""
    (tmp_path / "half_way.py").write_text(
        "import sys\nsys.tries = getattr(sys, 'tries', 0) + 1\n"
        "assert sys.tries == 1, 'again'\nraise RuntimeError('the first time')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "tries", 0, raising=False)
    install(point("half", "half_way"))
    for _ in range(3):
        with pytest.raises(PluginError, match=r"the first time \(.*half_way\.py, line 4\)"):
            qompose.compose("half")
    assert sys.tries == 1  # type: ignore[attr-defined]


class Unavailable(ToyBackend):
    """Loads, and cannot run here."""

    def availability(self) -> str | None:
        return "it needs a processor of the future"


class TestHealth:
    """Whether what loads can be used here."""

    def test_an_unavailable_backend_is_not_broken(self, install: Install) -> None:
        install(future=lambda: Unavailable(name="future"))
        (info,) = qompose.backends()
        assert discovery.check_backend(info) == discovery.Health(
            "unavailable here", "it needs a processor of the future"
        )
        assert qompose.compose("future").members  # it may still annotate, here for elsewhere

    def test_it_is_refused_when_its_kernels_are_wanted(self, install: Install) -> None:
        install(future=lambda: Unavailable([LINEAR], name="future"))
        model, x = nn.Linear(4, 4), torch.randn(2, 4)
        with pytest.raises(
            qompose.errors.TargetError, match=r"'future' cannot be used.*processor of the future"
        ):
            qompose.quantize(model, (x,), backends="future", calibration=[x])

    def test_a_target_that_cannot_be_used_leaves_the_backend_usable(self, install: Install) -> None:
        targets = (
            qompose.backend.Target(
                "here", lambda model, signature: qompose.backend.Finished(model)
            ),
            qompose.backend.Target(
                "there", lambda *_: qompose.backend.Finished(None), lambda: "pip install it"
            ),
        )
        install(a=backend("a", targets=targets))
        (info,) = qompose.backends()
        health = discovery.check_backend(info)
        assert health == discovery.Health("usable", None, {"here": None, "there": "pip install it"})

    @pytest.mark.parametrize(
        ("answer", "reason"),
        [
            pytest.param(lambda: 1 / 0, "it raised ZeroDivisionError", id="raises"),
            pytest.param(lambda: True, "returned True; expected a string or None", id="no text"),
        ],
    )
    def test_an_availability_that_fails_is_a_fault(
        self, install: Install, answer: Callable[[], Any], reason: str
    ) -> None:
        install(a=backend("a", availability=answer))
        (info,) = qompose.backends()
        health = discovery.check_backend(info)
        assert health.status == "broken"
        assert reason in (health.problem or "")


class TestTrace:
    """QOMPOSE_TRACE."""

    def test_names_plugin_and_call_on_standard_error(
        self, install: Install, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        install(a=backend("a"), b=lambda: 1 / 0)
        monkeypatch.setenv("QOMPOSE_TRACE", "1")
        qompose.backend.load_backend("a")
        with pytest.raises(PluginError):
            qompose.backend.load_backend("b")
        printed = capsys.readouterr()
        assert printed.out == ""
        for line in (
            "qompose: a (dist-a 1.0): import fake_a: done in",
            "qompose: a (dist-a 1.0): call qompose_backend: done in",
            "qompose: b (dist-b 1.0): call qompose_backend: raised ZeroDivisionError in",
        ):
            assert line in printed.err

    @pytest.mark.parametrize("value", ["", "0"])
    def test_can_be_off(
        self,
        install: Install,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        value: str,
    ) -> None:
        install(a=backend("a"))
        monkeypatch.setenv("QOMPOSE_TRACE", value)
        qompose.backend.load_backend("a")
        assert capsys.readouterr() == ("", "")
