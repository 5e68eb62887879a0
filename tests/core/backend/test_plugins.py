# SPDX-License-Identifier: Apache-2.0
"""The plugin host, with plugins that exist only here: one fault is one plugin's fault."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import qompose
from importlib_metadata import EntryPoint
from qompose.backend import Finished, Kernel, Target, discovery, hookimpl
from qompose.errors import BackendNotFoundError, PluginError

from tests.core.toy import LINEAR, STATIC, ToyBackend


def point(name: str, module: str, distribution: str = "") -> EntryPoint:
    point = EntryPoint(name, module, "qompose")
    offered = SimpleNamespace(name=distribution or f"dist-{name}", version="1.0")
    vars(point).update(dist=offered)
    return point


def module_of(name: str, backend: Callable[[], Any] | None) -> Any:
    module: Any = ModuleType(name)
    if backend is not None:
        module.qompose_backend = hookimpl(lambda: backend(), specname="qompose_backend")
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
    monkeypatch.setattr(
        discovery, "entry_points", lambda group: list(points) * (group == discovery.GROUP)
    )
    discovery._load.cache_clear()
    yield add
    discovery._load.cache_clear()


def backend(name: str, **facts: Any) -> Callable[[], ToyBackend]:
    return lambda: ToyBackend(name=name, **facts)


RUNTIME = Target("runtime", lambda model, signature: Finished(model))


def raising(error: BaseException) -> Callable[[], Any]:
    def fail(*_: object) -> Any:
        raise error

    return fail


class Outside(BaseException):
    """What `except Exception` lets pass."""


class TestListing:
    """What is installed, from metadata alone."""

    def test_in_order_of_name_whatever_the_order_of_discovery(self, install: Install) -> None:
        lazy = raising(AssertionError("loaded"))
        install(point("broken", "no_such_module"), zebra=lazy, ape=lazy)
        assert [info.name for info in qompose.backends()] == ["ape", "broken", "zebra"]
        info = qompose.backends()[0]
        assert (info.distribution, info.version, info.module) == ("dist-ape", "1.0", "fake_ape")
        assert info.problem is None

    @pytest.mark.parametrize(
        "value", ["", "a-b", "a b", "a:", "a:b c", "a/b"], ids=lambda v: v or "empty"
    )
    def test_a_malformed_entry_point_is_its_package_s_problem(
        self, install: Install, value: str
    ) -> None:
        install(point("bad", value), fine=backend("fine"))
        bad, fine = qompose.backends()
        assert repr(f"bad = {value}") in str(bad.problem)
        assert fine.problem is None
        with pytest.raises(PluginError, match="dist-bad"):
            qompose.backend.load_backend("bad")

    @pytest.mark.parametrize("value", ["a", "a.b_1", "a.b:c", "a : b.c", "a:b [x, y]"], ids=str)
    def test_a_sound_entry_point_is_none_nor_is_one_listed_twice(
        self, install: Install, value: str
    ) -> None:
        """An editable install beside its own egg-info is listed twice by importlib.metadata."""
        install(point("good", value), point("good", value))
        (info,) = qompose.backends()
        assert info.problem is None

    def test_two_offers_of_one_name_are_both_refused(self, install: Install) -> None:
        install(point("twin", "fake_twin", "first"), point("twin", "fake_twin", "second"))
        install(point("pair", "fake_one", "dist"), point("pair", "fake_two", "dist"))
        install(other=backend("other"))
        pair, *same, first, second = (info.problem for info in qompose.backends() if info.problem)
        assert same == [pair] and "more than once" in pair
        assert "second 1.0" in first and "first 1.0" in second
        with pytest.raises(PluginError, match="second"):
            qompose.backend.load_backend("twin")
        assert qompose.backend.load_backend("other").name == "other"


class TestRestriction:
    """QOMPOSE_PLUGINS."""

    @pytest.mark.parametrize(
        ("value", "left", "unknown"),
        [
            (None, ["a", "b"], []), ("a", ["a"], []), (" b , a ", ["a", "b"], []), ("", [], []),
            ("a,ghost, spook", ["a"], ["ghost", "spook"]),
        ],
    )  # fmt: skip
    def test_of_the_list(
        self, install: Install, monkeypatch: pytest.MonkeyPatch, value: Any, left: Any, unknown: Any
    ) -> None:
        install(a=backend("a"), b=backend("b"))
        if value is not None:
            monkeypatch.setenv("QOMPOSE_PLUGINS", value)
        assert [info.name for info in qompose.backends()] == left
        assert discovery.names_nobody_offers() == unknown

    def test_an_excluded_backend_is_not_said_to_be_missing(
        self, install: Install, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        install(a=backend("a"), b=backend("b"))
        monkeypatch.setenv("QOMPOSE_PLUGINS", "b")
        with pytest.raises(qompose.errors.ExcludedBackendError) as caught:
            qompose.compose("a")
        assert caught.value.name == "a" and caught.value.installed == ("a",)
        assert "dist-a 1.0" in str(caught.value) and "QOMPOSE_PLUGINS='b'" in str(caught.value)
        assert isinstance(caught.value, BackendNotFoundError)
        monkeypatch.setenv("QOMPOSE_PLUGINS", "c")
        with pytest.raises(BackendNotFoundError) as missing:
            qompose.backend.load_backend("c")
        assert type(missing.value) is BackendNotFoundError and missing.value.name == "c"


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
        (member,) = qompose.compose("a").members
        assert member.selectors.configs() == [member.backend.configs["static"]]
        with pytest.raises(BackendNotFoundError):
            qompose.quantizer_of("b")

    def test_an_unknown_name_is_an_error_with_near_names(self, install: Install) -> None:
        install(xnnpock=backend("xnnpock"), other=backend("other"))
        with pytest.raises(BackendNotFoundError) as caught:
            qompose.compose("xnnpack")
        assert caught.value.installed == ("other", "xnnpock")
        assert "did you mean 'xnnpock'" in str(caught.value)

    def test_an_attribute_of_a_module_may_have_the_hook(self, install: Install) -> None:
        install(point("a", "fake_b:inner"), b=backend("b"))
        vars(sys.modules["fake_b"])["inner"] = module_of("inner", backend("a"))
        assert qompose.backend.load_backend("a").name == "a"

    def test_an_interrupt_is_the_user_s_and_passes(self, install: Install) -> None:
        install(slow=raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            qompose.backend.load_backend("slow")

    def test_a_plugin_that_asks_for_itself_is_told_so(self, install: Install) -> None:
        install(a=lambda: qompose.backend.load_backend("a"))
        with pytest.raises(PluginError) as caught:
            qompose.backend.load_backend("a")
        assert caught.value.name == "a"


def bad(**facts: Any) -> dict[str, Any]:
    return {"bad": backend("bad", **facts)}


# (the plugin, what the error names)
FAULTS = {
    "a missing module": (
        {"points": [point("bad", "no_such_module_at_all")]}, "'no_such_module_at_all'.*dist-bad"
    ),
    "no attribute": ({"points": [point("bad", "json:nothing")]}, "'nothing'"),
    "no hook": ({"bad": None}, "qompose_backend"),
    "a hook without result": ({"bad": lambda: None}, "None"),
    "another type": ({"bad": lambda: 3}, "int.*qompose.backend.Backend"),
    "the class": ({"bad": lambda: ToyBackend}, r"class ToyBackend.*ToyBackend\(\)"),
    "raises": ({"bad": lambda: 1 / 0}, "ZeroDivisionError"),
    "exits": ({"bad": raising(SystemExit("bye"))}, "SystemExit: bye"),
    "raises outside": ({"bad": raising(Outside("no Exception"))}, "no Exception"),
    "a newer interface": (bad(api_version=99), "version 99 .*upgrade qompose"),
    "an older interface": (bad(api_version=-1), "version -1 .*upgrade dist-bad"),
    "no interface stated": (bad(api_version=0), "api_version must.*got 0"),
    "interface as text": (bad(api_version="1"), "api_version must.*got '1'"),
    "wrong name": ({"bad": backend("good")}, "'good'.*'bad'"),
    "rules of another type": ({"bad": lambda: ToyBackend(["linear"], name="bad")}, "'linear'"),
    "operators as text": (bad(left_in_float={"aten.matmul": "no kernel"}), "'aten.matmul'"),
    "configurations of another type": (bad(configs={"a": 3}), "configs .*3"),
    "a configuration of two names": (bad(configs={"a": STATIC}), "'a'.*'static'"),
    "targets": (bad(targets=7), "targets must be .*got 7"),
    "a target one slip away": (
        bad(targets=(RUNTIME,), rules=(replace(LINEAR, kernels={"runtmie": Kernel("k")}),)),
        "rule linear: .*'runtmie'.*'runtime'",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("broken", "message"), FAULTS.values(), ids=FAULTS)
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
    assert health["fine"] == discovery.Health("usable", kernels_for=("torch",))
    assert health["bad"] == discovery.Health("broken", told[0].reason)


@pytest.mark.parametrize("name", ["qompose_backend", "qompose_unknown"])
def test_a_hook_that_is_not_as_qompose_has_it_is_named_with_what_is(
    install: Install, name: str
) -> None:
    install(bad=None)
    hook = hookimpl(lambda unknown: ToyBackend(name="bad"), specname=name)
    vars(sys.modules["fake_bad"])[name] = hook
    with pytest.raises(PluginError, match="unknown"):
        qompose.backend.load_backend("bad")


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


class TestHealth:
    """Whether what loads can be used here."""

    def health(self, install: Install, **facts: Any) -> discovery.Health:
        install(a=backend("a", **facts))
        (info,) = qompose.backends()
        return discovery.check_backend(info)

    def test_an_unavailable_backend_is_not_broken(self, install: Install) -> None:
        found = self.health(install, availability=lambda: "it needs another processor")
        assert found == discovery.Health(
            "unavailable here", "it needs another processor", {}, ("torch",)
        )
        assert qompose.compose("a").members  # it may still annotate, here for elsewhere

    def test_a_target_that_cannot_be_used_leaves_the_backend_usable(self, install: Install) -> None:
        def finish(*_: Any) -> qompose.backend.Finished:
            return qompose.backend.Finished(None)

        there = qompose.backend.Target("there", finish, lambda: "pip install it")
        found = self.health(install, targets=(qompose.backend.Target("here", finish), there))
        assert found == discovery.Health(
            "usable", None, {"here": None, "there": "pip install it"}, ("torch",)
        )

    @pytest.mark.parametrize(
        ("answer", "reason"), [(lambda: 1 / 0, "ZeroDivisionError"), (lambda: True, "True")]
    )
    def test_an_availability_that_fails_is_a_fault(
        self, install: Install, answer: Callable[[], Any], reason: str
    ) -> None:
        found = self.health(install, availability=answer)
        assert found.status == "broken" and reason in (found.problem or "")


@pytest.mark.parametrize(
    ("value", "traced"),
    [
        ("1", ["a (dist-a 1.0)", "fake_a", "qompose_backend", "b (dist-b 1.0)", "ZeroDivision"]),
        ("0", []),
        ("", []),
    ],
)
def test_a_trace_names_plugin_and_call_on_standard_error(
    install: Install,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    value: str,
    traced: list[str],
) -> None:
    install(a=backend("a"), b=lambda: 1 / 0)
    monkeypatch.setenv("QOMPOSE_TRACE", value)
    qompose.backend.load_backend("a")
    with pytest.raises(PluginError, match="ZeroDivisionError"):
        qompose.backend.load_backend("b")
    out, err = capsys.readouterr()
    assert out == "" and bool(err) is bool(traced)
    assert all(name in err for name in traced)
