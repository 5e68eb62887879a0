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
from qompose import BackendNotFoundError, PluginError, hookimpl, plugins
from torch import nn

from tests.core.toy import LINEAR, ToyBackend


class Distribution(SimpleNamespace):
    """The part of a distribution that the host reads."""


def point(name: str, module: str, distribution: str = "", version: str = "1.0") -> EntryPoint:
    found = EntryPoint(name, module, "qompose")
    vars(found).update(dist=Distribution(name=distribution or f"dist-{name}", version=version))
    return found


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
    monkeypatch.setattr(plugins, "entry_points", lambda group: list(points))
    plugins._load.cache_clear()
    yield add
    plugins._load.cache_clear()


def backend(name: str, **facts: Any) -> Callable[[], ToyBackend]:
    return lambda: ToyBackend(name=name, **facts)


def test_backends_are_listed_by_name_whatever_the_order_of_discovery(install: Install) -> None:
    install(zebra=backend("zebra"), ape=backend("ape"), cat=backend("cat"))
    assert [info.name for info in qompose.backends()] == ["ape", "cat", "zebra"]
    info = qompose.backends()[0]
    assert (info.distribution, info.version, info.module) == ("dist-ape", "1.0", "fake_ape")
    assert info.problem is None


def test_listing_loads_nothing(install: Install) -> None:
    def fail() -> Any:
        raise AssertionError("loaded")

    install(point("broken", "no_such_module"), lazy=fail)
    assert [info.name for info in qompose.backends()] == ["broken", "lazy"]


def test_a_backend_is_loaded_once_and_only_when_asked_for(install: Install) -> None:
    calls = []

    def make(name: str) -> Callable[[], Any]:
        return lambda: calls.append(name) or ToyBackend(name=name)

    install(a=make("a"), b=make("b"))
    assert qompose.load_backend("a") is qompose.load_backend("a")
    assert calls == ["a"]


def test_a_composition_takes_a_name_with_the_default_configuration(install: Install) -> None:
    install(a=backend("a"))
    (member,) = qompose.compose("a").members
    assert member._selectors.everything is member.backend.configs["static"]  # type: ignore[attr-defined]


def test_an_unknown_name_is_an_error_with_near_names(install: Install) -> None:
    install(xnnpock=backend("xnnpock"), other=backend("other"))
    with pytest.raises(BackendNotFoundError) as caught:
        qompose.compose("xnnpack")
    text = str(caught.value)
    assert "did you mean 'xnnpock'?" in text
    assert "Installed: other, xnnpock" in text


def test_without_plugins_the_error_says_so(install: Install) -> None:
    install()
    with pytest.raises(BackendNotFoundError, match=r"Installed: none\."):
        qompose.load_backend("x86_inductor")


FAULTS = [
    pytest.param(
        {"points": [point("bad", "no_such_module_at_all")]},
        r"ModuleNotFoundError.*install the package that has the module 'no_such_module_at_all'",
        id="a missing module",
    ),
    pytest.param({"bad": None}, "does not implement the hook qompose_backend", id="no hook"),
    pytest.param({"bad": lambda: None}, "does not implement the hook", id="a hook without result"),
    pytest.param({"bad": lambda: 3}, "returned int, not a qompose.Backend", id="another type"),
    pytest.param({"bad": lambda: 1 / 0}, "ZeroDivisionError: division by zero", id="raises"),
    pytest.param(
        {"bad": backend("bad", api_version=99)},
        "version 99 .* this qompose has version 1; install matching releases",
        id="another version of the interface",
    ),
    pytest.param(
        {"bad": backend("good")}, "calls itself 'good', and its entry point 'bad'", id="wrong name"
    ),
]


@pytest.mark.parametrize(("broken", "message"), FAULTS)
def test_a_fault_is_told_with_its_source_and_harms_nobody_else(
    install: Install, broken: dict[str, Any], message: str
) -> None:
    install(*broken.pop("points", ()), **broken, fine=backend("fine"))
    for _ in range(2):
        with pytest.raises(PluginError, match=message) as caught:
            qompose.load_backend("bad")
    assert caught.value.name == "bad"
    assert "dist-bad 1.0" in str(caught.value)
    assert qompose.load_backend("fine").name == "fine"
    problems = {info.name: plugins.check_backend(info) for info in qompose.backends()}
    assert problems["fine"] is None
    assert problems["bad"]


def test_two_distributions_with_one_name_are_both_refused(install: Install) -> None:
    install(point("twin", "fake_twin", "first"), point("twin", "fake_twin", "second"))
    install(other=backend("other"))
    problems = [info.problem or "" for info in qompose.backends() if info.name == "twin"]
    assert ["second 1.0" in problems[0], "first 1.0" in problems[1]] == [True, True]
    with pytest.raises(PluginError, match="offer the same name; uninstall all but one"):
        qompose.load_backend("twin")
    assert qompose.load_backend("other").name == "other"


def test_one_distribution_found_twice_is_one(install: Install) -> None:
    """An editable install beside its own egg-info is listed twice by importlib.metadata."""
    install(point("same", "fake_same", "dist"), point("same", "fake_same", "dist"))
    (info,) = qompose.backends()
    assert info.problem is None


@pytest.mark.parametrize(
    ("value", "expected"),
    [("a", ["a"]), (" b , a ", ["a", "b"]), ("", []), ("c", [])],
    ids=["one", "two, with spaces", "none", "one that is not there"],
)
def test_the_environment_restricts_the_list(
    install: Install, monkeypatch: pytest.MonkeyPatch, value: str, expected: list[str]
) -> None:
    install(a=backend("a"), b=backend("b"))
    monkeypatch.setenv("QOMPOSE_PLUGINS", value)
    assert [info.name for info in qompose.backends()] == expected
    if "a" not in expected:
        with pytest.raises(BackendNotFoundError):
            qompose.load_backend("a")


def test_an_unavailable_backend_says_why(install: Install) -> None:
    class Unavailable(ToyBackend):
        def availability(self) -> str | None:
            return "it needs a processor of the future"

    install(future=lambda: Unavailable(name="future"))
    (info,) = qompose.backends()
    assert plugins.check_backend(info) == "it needs a processor of the future"


def test_an_unavailable_backend_is_refused_when_its_kernels_are_wanted(install: Install) -> None:
    class Unavailable(ToyBackend):
        def availability(self) -> str | None:
            return "it needs a processor of the future"

    install(future=lambda: Unavailable([LINEAR], name="future"))
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    with pytest.raises(
        qompose.TargetError, match=r"'future' cannot be used.*processor of the future"
    ):
        qompose.quantize(model, (x,), backends="future", calibration=[x])


def test_hook_calls_can_be_traced(
    install: Install, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(a=backend("a"))
    monkeypatch.setenv("QOMPOSE_TRACE", "1")
    qompose.load_backend("a")
    assert "qompose_backend" in capsys.readouterr().out
