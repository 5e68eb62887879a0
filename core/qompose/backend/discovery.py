# SPDX-License-Identifier: Apache-2.0
"""Installed backends: found by entry point, loaded by name, each fault kept apart; imports no torch.

A plugin is a distribution with an entry point in the group `qompose`::

    [project.entry-points.qompose]
    mybackend = "qompose_mybackend"

whose module implements the hook `qompose_backend`. Finding plugins reads package metadata alone. Loading one
imports one module; what goes wrong with it is that plugin's error and nobody else's, and is the same error
each time: a second attempt in one process would meet what the first left behind (half-imported packages,
operators registered twice).
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import traceback
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from threading import RLock
from time import perf_counter
from typing import TYPE_CHECKING, Any

import importlib_metadata
import pluggy
from importlib_metadata import EntryPoint, PackageNotFoundError, requires

from qompose import errors
from qompose.entry_points import ALGORITHM_GROUP, entry_points, offers
from qompose.errors import (
    BackendNotFoundError,
    ExcludedBackendError,
    MemberError,
    PluginError,
    brief,
    is_kind,
)

if TYPE_CHECKING:
    from qompose.backend.interface import Backend, Target


GROUP = "qompose"
"""The entry-point group, and pluggy's project name."""
API_VERSION = 1
"""Version of the interface between core and backends. A backend of another version is not loaded."""
hookspec = pluggy.HookspecMarker(GROUP)
hookimpl = pluggy.HookimplMarker(GROUP)
"""Marks a package's function `qompose_backend`, which takes nothing and returns its `Backend`."""
RESTRICT_VARIABLE = "QOMPOSE_PLUGINS"
TRACE_VARIABLE = "QOMPOSE_TRACE"
USABLE, BROKEN, UNAVAILABLE = "usable", "broken", "unavailable here"


@hookspec(firstresult=True)
def qompose_backend() -> Backend:  # type: ignore[empty-body]
    """Return the backend of this plugin.

    Called once per process, when the backend is first asked for by name or by one of its quantizers.
    The hook is called on the one plugin that was asked for; the order of discovery decides nothing.

    Returns:
        an object of a subclass of `qompose.backend.Backend`, whose `name` is the entry point's name.
    """


@dataclass(frozen=True)
class BackendInfo:
    """An installed backend, or another plugin, as its package's metadata describes it, not loaded."""

    name: str
    module: str
    distribution: str
    version: str
    problem: str | None = None
    kind: str = "backend"

    @property
    def source(self) -> str:
        """Return distribution, version and module in one phrase."""
        return f"{self.distribution} {self.version}, module {self.module}"

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as JSON data."""
        return asdict(self)


@dataclass(frozen=True)
class Health:
    """What loading a backend shows: whether it is usable, broken or unavailable here, and why.

    `targets` has the runtimes that it brings, each with why it cannot be used here, or None; `kernels_for`
    has the targets that its kernels are for, whoever brings them.
    """

    status: str
    problem: str | None = None
    targets: Mapping[str, str | None] = field(default_factory=dict)
    kernels_for: Sequence[str] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as JSON data."""
        return {
            **self.__dict__, "targets": dict(self.targets), "kernels_for": list(self.kernels_for)
        }  # fmt: skip


def backends() -> list[BackendInfo]:
    """Return the installed backends in order of name, from package metadata alone.

    Two distributions that offer one name are both listed, each with that as its problem.
    `QOMPOSE_PLUGINS=a,b` restricts the list.
    """
    allowed = _allowed()
    return [info for info in installed() if allowed is None or info.name in allowed]


def algorithms() -> list[BackendInfo]:
    """Return other packages' algorithms in order of their words, from package metadata alone."""
    return installed(ALGORITHM_GROUP, "algorithm")


def names_nobody_offers() -> list[str]:
    """Return the names in QOMPOSE_PLUGINS that no installed distribution offers."""
    return sorted((_allowed() or frozenset()) - {info.name for info in installed()})


def why_none() -> str:
    """Return what to tell where no backend can be listed: none is installed, or QOMPOSE_PLUGINS hides all."""
    hidden = sorted({info.name for info in installed()})
    if not hidden:
        return "No backend is installed. Backends are pip packages, such as qompose-NAME."
    listed = os.environ.get(RESTRICT_VARIABLE, "")
    return (
        f"{RESTRICT_VARIABLE}={listed!r} excludes all installed backends ({', '.join(hidden)}). "
        "Unset it to use them."
    )


def _allowed() -> frozenset[str] | None:
    listed = os.environ.get(RESTRICT_VARIABLE)
    if listed is None:
        return None
    return frozenset(name.strip() for name in listed.split(",") if name.strip())


def installed(group: str = GROUP, kind: str = "backend") -> list[BackendInfo]:
    """Return what is installed of an entry-point group, whatever QOMPOSE_PLUGINS says."""
    found = sorted(
        {_info(point, kind) for point in entry_points(group=group)},
        key=lambda info: (info.name, info.distribution, info.module),
    )
    return [_with_clash(info, found) for info in found]


def damaged_packages() -> list[str]:
    """Return the folders of packages whose entry points cannot be read."""
    damaged = (distribution for distribution, points in offers(GROUP) if points is None)
    # Its metadata may be gone too, and then only the folder says which package it is.
    return sorted(str(getattr(d, "_path", d.locate_file(""))) for d in damaged)


def metadata_field(distribution: object, name: str) -> str:
    """Return the `name` or `version` of a package, "unknown" where its metadata lack it."""
    try:
        return str(getattr(distribution, name) or "unknown")
    except Exception:  # metadata may be missing, undecodable or half removed, each in its own way
        return "unknown"


def _info(point: EntryPoint, kind: str) -> BackendInfo:
    name, version = (metadata_field(point.dist, name) for name in ("name", "version"))
    problem = None
    if not point.pattern.match(point.value):
        problem = (
            f"its entry point is {f'{point.name} = {point.value}'!r}, not 'name = module'; report "
            f"this to the author of {name}"
        )
    return BackendInfo(point.name, point.value, name, version, problem, kind)


def _with_clash(info: BackendInfo, found: list[BackendInfo]) -> BackendInfo:
    rivals = [other for other in found if other.name == info.name and other != info]
    others = sorted({f"{o.distribution} {o.version}" for o in rivals} - {_release(info)})
    if not rivals:
        return info
    if not others:
        return replace(info, problem="its package declares the name more than once")
    offer = "offers" if len(others) == 1 else "offer"
    problem = f"{' and '.join(others)} {offer} the same name; uninstall all but one"
    return replace(info, problem=problem)


def _release(info: BackendInfo) -> str:
    return f"{info.distribution} {info.version}"


def load_backend(name: str) -> Backend:
    """Import a backend's plugin, once per process, and return the backend.

    Raises:
        BackendNotFoundError: no installed distribution offers it.
        ExcludedBackendError: QOMPOSE_PLUGINS excludes it.
        PluginError: its import fails, it lacks a dependency, or it does not keep the contract.
    """
    known = installed()
    for info in known:
        if info.name == name:
            allowed = _allowed()
            if allowed is not None and name not in allowed:
                raise ExcludedBackendError(name, info.source, RESTRICT_VARIABLE, allowed)
            return _loaded(info)
    raise BackendNotFoundError(name, [info.name for info in known])


def loadable_backends(but: Collection[str] = ()) -> list[Backend]:
    """Import the plugins of all installed backends but those named; return those that can be, by name.

    `qompose backends --check` says what is wrong with the others. Packages are looked through once, where
    `load_backend` does it for each name.
    """
    found = []
    for info in backends():
        if info.name not in but:
            with suppress(PluginError):
                found.append(_loaded(info))
    return found


_lock = RLock()
_loading: set[BackendInfo] = set()


def _loaded(info: BackendInfo) -> Backend:
    with _lock:
        if info in _loading:
            reason = "its module requests its own backend while it is being imported"
            raise PluginError(info.name, info.source, reason)
        outcome = _load(info)
    if isinstance(outcome, PluginError):  # an error of its own for each, with the one cause
        raise PluginError(info.name, info.source, outcome.reason) from outcome.__cause__
    return outcome


@cache
def _load(info: BackendInfo) -> Backend | PluginError:
    """Load a backend, once; the outcome may be an error."""
    if info.problem is not None:
        return PluginError(info.name, info.source, info.problem)
    _loading.add(info)
    try:
        return _checked(info, _call(info))
    except PluginError as error:
        return error
    finally:
        _loading.discard(info)


_NO_HOOK = object()


def _call(info: BackendInfo) -> object:
    """Import a plugin's module and return what its hook returns, or _NO_HOOK.

    Raises:
        PluginError: either fails. A plugin that exits must not end its host, so only an interrupt passes.
    """
    # Not load_setuptools_entrypoints: that looks through all packages, and one malformed line stops it.
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(sys.modules[__name__])
    try:
        with _traced(info, f"import {info.module}"):
            plugin = EntryPoint(info.name, info.module, GROUP).load()
        manager.register(plugin, info.name)
        manager.check_pending()
        if not manager.hook.qompose_backend.get_hookimpls():
            return _NO_HOOK
        with _traced(info, "call qompose_backend"):
            return manager.hook.qompose_backend()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        reason = import_fault(error, info.module, info.distribution)
        raise PluginError(info.name, info.source, reason) from error


@contextmanager
def _traced(info: BackendInfo, step: str) -> Iterator[None]:
    """Report a step with a plugin, its result and its time on standard error, if QOMPOSE_TRACE is set."""
    if os.environ.get(TRACE_VARIABLE, "0") in ("", "0"):
        yield
        return
    text = f"qompose: {info.name} ({_release(info)}): {step}"
    start, outcome = perf_counter(), "done"
    print(text, file=sys.stderr)
    try:
        yield
    except BaseException as error:
        outcome = f"raised {type(error).__name__}"
        raise
    finally:
        print(f"{text}: {outcome} in {perf_counter() - start:.3f} s", file=sys.stderr)


def _checked(info: BackendInfo, backend: Any) -> Backend:
    """Return what a hook returned if it is a backend of this interface.

    Raises:
        PluginError: it is not.
    """
    try:
        fault = _fault(info, backend)
    except Exception as error:  # a property of the backend
        raise PluginError(info.name, info.source, describe_error(error)) from error
    if fault is not None:
        raise PluginError(info.name, info.source, fault)
    checked: Backend = backend
    return checked


def _fault(info: BackendInfo, backend: Any) -> str | None:
    from qompose.backend.interface import Backend

    if backend is _NO_HOOK:
        return (
            f"its entry point is {info.module}, which must be a module that implements the hook "
            "qompose_backend (with @qompose.backend.hookimpl)"
        )
    if backend is None:
        return "its hook qompose_backend returned None, not a qompose.backend.Backend"
    if isinstance(backend, type) and issubclass(backend, Backend):
        name = backend.__qualname__
        return f"qompose_backend returned the class {name}, not an instance; return {name}()"
    if not isinstance(backend, Backend):
        return (
            f"qompose_backend returned {type(backend).__qualname__}, not a qompose.backend.Backend"
        )
    fault = backend_fault(backend, info.distribution)
    if fault is None and backend.name != info.name:
        return f"its backend is named {backend.name!r}, but its entry point is named {info.name!r}"
    return fault


def backend_fault(backend: Backend, package: str) -> str | None:
    """Return what is wrong with a backend of a package, None where nothing is.

    One of another interface may have anything in its tables.
    """
    return _version_fault(backend.api_version, package) or _table_fault(backend)


def _version_fault(written_for: Any, package: str) -> str | None:
    """Return who must upgrade where a backend of a package is of another interface, None where it is not."""
    here = API_VERSION
    if written_for == here:
        return None
    if written_for == 0 or not is_kind(written_for, int):
        return (
            "api_version must be the version of the backend interface it was written for, got "
            f"{written_for!r}; this qompose has version {here}"
        )
    old = written_for < here
    remedy = f"upgrade {package}" if old else "upgrade qompose"
    return (
        f"it was written for version {written_for} of the backend interface, but this qompose has "
        f"version {here}; {remedy}"
    )


def _table_fault(backend: Backend) -> str | None:
    """Return what is wrong with the types of a backend's tables, None where nothing is."""
    from torch._ops import OpOverload

    from qompose.backend.capabilities import naming_fault
    from qompose.backend.interface import Target
    from qompose.backend.rule import Rule
    from qompose.spec.quantization_spec import QuantizationConfig

    configs: Any = backend.configs
    for fault in _field_faults(backend.name, backend.rewrites, configs):
        return fault
    tables: tuple[tuple[str, Any, type, str], ...] = (
        ("rules", backend.rules, Rule, "qompose.backend.Rule"),
        ("configs", tuple(configs.values()), QuantizationConfig, "QuantizationConfig"),
        ("targets", backend.targets, Target, "qompose.backend.Target"),
    )
    for name, table, kind, expected in tables:
        if wrong := _sequence_fault(name, table, expected):
            return wrong
        for entry in table:
            if not isinstance(entry, kind):
                return f"{name} must contain only {expected} objects, got {brief(entry)}"
    for fault in _rule_faults(backend):
        return fault
    in_float: Any = backend.left_in_float
    if not isinstance(in_float, Mapping):
        return f"left_in_float must map operators to reasons, got {brief(in_float)}"
    for operator, reason in in_float.items():
        if not isinstance(operator, OpOverload) or not isinstance(reason, str):
            return f"left_in_float must map operators to reasons, got {operator!r}: {reason!r}"
    return naming_fault(backend.configs)


def _rule_faults(backend: Backend) -> Iterator[str]:
    """Yield what is wrong with the names of rules and of the targets of their kernels."""
    from qompose.backend.rule import TORCH, target_faults

    counts = Counter(rule.name for rule in backend.rules)
    yield from (f"{n} rules are named {name!r}; rename them" for name, n in counts.items() if n > 1)
    known = (TORCH, *(target.name for target in backend.targets))
    for rule in backend.rules:
        yield from (f"rule {rule.name}: {slip}" for slip in target_faults(rule.kernels, known))


def _field_faults(name: object, rewrites: Any, configs: object) -> Iterator[str]:
    from qompose.program.rewrites import unknown_rewrite

    if not isinstance(name, str) or not name:
        yield f"name must be a non-empty string, got {name!r}"
    if fault := _sequence_fault("rewrites", rewrites, "names"):
        yield fault
        return
    for unknown in filter(None, map(unknown_rewrite, rewrites)):
        yield f"rewrites has an {unknown}"
    if not isinstance(configs, Mapping):
        yield f"configs must be a dict by name, got {brief(configs)}"


def _sequence_fault(name: str, given: object, expected: str) -> str | None:
    """Return why a table is none that has an order and can be read again; None if it is one."""
    if isinstance(given, (tuple, list)):
        return None
    several = isinstance(given, Iterable) and not isinstance(given, str)
    remedy = f": write {name} = tuple(...)" if several else ""
    return f"{name} must be a tuple of {expected}, got {brief(given)}{remedy}"


def check_backend(info: BackendInfo) -> Health:
    """Load a listed backend and return whether it can be used here."""
    try:
        backend = _loaded(info)
        problem = obstacle(backend, info.name)
        targets = {t.name: obstacle(t, f"{info.name}, target {t.name}") for t in backend.targets}
    except PluginError as error:
        return Health(BROKEN, error.reason)
    except MemberError as error:
        return Health(BROKEN, str(error))
    kernels_for = tuple(dict.fromkeys(t for rule in backend.rules for t in rule.kernels))
    return Health(UNAVAILABLE if problem else USABLE, problem, targets, kernels_for)


def obstacle(subject: Backend | Target, who: str) -> str | None:
    """Return why a backend or a target cannot be used here, or None: what its `availability` says.

    Raises:
        MemberError: it raises, exits, or returns neither a text nor None; `who` is named.
    """
    try:
        answer: object = subject.availability()
    except (Exception, SystemExit) as error:  # exiting must not end the host
        raise MemberError(f"{who}: availability() raised {describe_error(error)}") from error
    if answer is None or isinstance(answer, str):
        return answer or None
    raise MemberError(f"{who}: availability() must return a string or None, got {answer!r}")


_HOST = tuple(
    f"{Path(file).parent}{os.sep}"
    for file in (errors.__file__, importlib.__file__, importlib_metadata.__file__, pluggy.__file__)
)


def describe_error(error: BaseException) -> str:
    """Return an error's type and message, and the line of code that raised it."""
    if isinstance(error, SyntaxError) and error.filename:
        return (
            f"{type(error).__name__}: {error.msg} ({_short(error.filename)}, line {error.lineno})"
        )
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(("<frozen ", *_HOST))]
    return f"{text} ({_short(own[-1].filename)}, line {own[-1].lineno})" if own else text


def _short(filename: str) -> str:
    return "/".join(Path(filename).parts[-2:])


def import_fault(error: BaseException, module: str, distribution: str) -> str:
    """Return why importing `module` of `distribution` failed, with the remedy where it is known."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return describe_error(error)
    missing = error.name
    home = module.partition(":")[0].strip()
    if home == missing or home.startswith(f"{missing}."):
        return (
            f"its package declares the module {missing!r}, which does not exist; reinstall or "
            f"uninstall {distribution}"
        )
    return f"{describe_error(error)}: {_remedy(missing, distribution)}"


def _remedy(missing: str, distribution: str) -> str:
    """Say what to install; by the name that the plugin itself requires, where that is recognisable."""
    top = missing.partition(".")[0]
    try:
        requirements = requires(distribution) or []
    except (PackageNotFoundError, ValueError):
        requirements = []
    for requirement in requirements:
        specifier = requirement.partition(";")[0].strip()
        name = re.split(r"[^\w.-]", specifier, maxsplit=1)[0]
        if re.sub(r"[-_.]+", "_", name).lower() == top.lower():
            return f'pip install "{specifier}"'
    return f"install the package that provides the module {top!r}"
