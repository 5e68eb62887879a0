# SPDX-License-Identifier: Apache-2.0
"""The plugin host: finds backends by entry point, loads the one asked for, and keeps faults apart.

Finding reads package metadata alone. Loading imports one module; what goes wrong with it is that
plugin's error and nobody else's.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import pluggy
from importlib_metadata import EntryPoint, entry_points

from qompose import hookspecs
from qompose.errors import BackendNotFoundError, PluginError

if TYPE_CHECKING:
    from qompose.backend import Backend

RESTRICT_VARIABLE = "QOMPOSE_PLUGINS"
TRACE_VARIABLE = "QOMPOSE_TRACE"


@dataclass(frozen=True)
class BackendInfo:
    """An installed backend as its package's metadata tells it, unloaded."""

    name: str
    module: str
    distribution: str
    version: str
    problem: str | None = None

    @property
    def source(self) -> str:
        """Return distribution, version and module in one phrase."""
        return f"{self.distribution} {self.version}, module {self.module}"

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as JSON data."""
        return dict(self.__dict__)


def backends() -> list[BackendInfo]:
    """Return the installed backends in order of name, from package metadata alone.

    Two distributions that offer one name are both listed, each with that as its problem.
    `QOMPOSE_PLUGINS=a,b` restricts the list.
    """
    allowed = _allowed()
    found = sorted(
        {_info(point) for point in entry_points(group=hookspecs.GROUP)},
        key=lambda info: (info.name, info.distribution),
    )
    return [_with_clash(info, found) for info in found if allowed is None or info.name in allowed]


def _allowed() -> frozenset[str] | None:
    listed = os.environ.get(RESTRICT_VARIABLE)
    if listed is None:
        return None
    return frozenset(name.strip() for name in listed.split(",") if name.strip())


def _info(point: EntryPoint) -> BackendInfo:
    distribution = point.dist
    name = distribution.name if distribution else "unknown"
    return BackendInfo(point.name, point.value, name, distribution.version if distribution else "?")


def _with_clash(info: BackendInfo, found: list[BackendInfo]) -> BackendInfo:
    rivals = {f"{o.distribution} {o.version}" for o in found if o.name == info.name and o != info}
    if not rivals:
        return info
    problem = f"{' and '.join(sorted(rivals))} offer the same name; uninstall all but one"
    return BackendInfo(info.name, info.module, info.distribution, info.version, problem)


def load_backend(name: str) -> Backend:
    """Import a backend's plugin, once per process, and return the backend.

    Raises:
        BackendNotFoundError: no installed distribution offers it (or QOMPOSE_PLUGINS excludes it).
        PluginError: its import fails, it lacks a dependency, or it does not keep the contract.
    """
    installed = backends()
    for info in installed:
        if info.name == name:
            return _load(info)
    raise BackendNotFoundError(name, [info.name for info in installed])


@cache
def _load(info: BackendInfo) -> Backend:
    if info.problem is not None:
        raise PluginError(info.name, info.source, info.problem)
    manager = pluggy.PluginManager(hookspecs.GROUP)
    manager.add_hookspecs(hookspecs)
    if os.environ.get(TRACE_VARIABLE):
        manager.trace.root.setwriter(print)
        manager.enable_tracing()
    try:
        module = EntryPoint(info.name, info.module, hookspecs.GROUP).load()
        manager.register(module, info.name)
        manager.check_pending()
        backend = manager.hook.qompose_backend()
    except (Exception, SystemExit) as error:  # a plugin that exits must not end its host
        raise PluginError(info.name, info.source, _reason(error)) from error
    return _checked(info, backend)


def _reason(error: BaseException) -> str:
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, ModuleNotFoundError) and error.name:
        reason += f" (install the package that has the module {error.name!r})"
    return reason


def _checked(info: BackendInfo, backend: object) -> Backend:
    from qompose.backend import Backend

    if backend is None:
        fault = "it does not implement the hook qompose_backend (with @qompose.hookimpl)"
    elif not isinstance(backend, Backend):
        fault = f"qompose_backend returned {type(backend).__qualname__}, not a qompose.Backend"
    elif backend.api_version != hookspecs.API_VERSION:
        fault = (
            f"it was written for version {backend.api_version} of the backend interface and this "
            f"qompose has version {hookspecs.API_VERSION}; install matching releases"
        )
    elif backend.name != info.name:
        fault = f"its backend calls itself {backend.name!r}, and its entry point {info.name!r}"
    else:
        return backend
    raise PluginError(info.name, info.source, fault)


def check_backend(info: BackendInfo) -> str | None:
    """Load a listed backend and return what is wrong with it, None where nothing is."""
    try:
        return _load(info).availability()
    except PluginError as error:
        return error.reason
