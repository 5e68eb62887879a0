# SPDX-License-Identifier: Apache-2.0
"""With what a saved model was made: versions, owners and their packages, operators, schemes, processor."""

from __future__ import annotations

import platform
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from importlib_metadata import version

from qompose.backend import Backend
from qompose.errors import (
    BackendNotFoundError,
    ExcludedBackendError,
    MissingBackendError,
    PluginError,
)
from qompose.plan import Plan, Record
from qompose.plugins import backends as installed_backends
from qompose.plugins import load_backend

_PLAIN = re.compile(r"[\w.+!-]*")


def manifest_of(records: Mapping[str, Record], operators: Iterable[str]) -> dict[str, Any]:
    """Return with what models were made, for whoever reads the file, and for `StoredBackends`.

    Args:
        records: of converted models, by the names of the methods.
        operators: the names of all operators that they call, `namespace::name.overload`.
    """
    known = {info.name: info for info in installed_backends()}
    owners = {}
    for record in records.values():
        for label, backend in record.backends.items():
            info = known.get(backend.name)
            owners[label] = {
                "backend": backend.name,
                "distribution": info.distribution if info else "",
                "version": info.version if info else "",
                "api_version": backend.api_version,
            }
    return {
        "qompose": version("qompose"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": {
            "architecture": platform.machine(),
            "cpu": torch.backends.cpu.get_cpu_capability(),
        },
        "owners": owners,
        "namespaces": sorted({name.partition("::")[0] for name in operators if "::" in name}),
        "schemes": _schemes(records.values()),
    }


def checked_owners(manifest: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Return the owners in a manifest; their names and versions, which messages repeat, are plain ones.

    Raises:
        ValueError, TypeError, LookupError: they are not.
    """
    owners: Mapping[str, Mapping[str, Any]] = manifest["owners"]
    for label, facts in owners.items():
        texts = [facts[key] for key in ("backend", "distribution", "version")]
        if not all(isinstance(text, str) and _PLAIN.fullmatch(text) for text in texts):
            raise ValueError(f"the package of {label!r} has no plain name and version")
    if not all(isinstance(manifest[key], str) for key in ("qompose", "torch")):
        raise ValueError("its versions are no text")
    return owners


def _schemes(records: Iterable[Record]) -> dict[str, list[str]]:
    """Return by owner the modes and configurations of the claims that were followed."""
    found: dict[str, set[str]] = defaultdict(set)
    for record in records:
        for number, claim in enumerate(record.plan.claims):
            if number not in record.dropped:
                found[claim.owner].add(f"{claim.mode}: {claim.config or 'as annotated'}")
    return {owner: sorted(schemes) for owner, schemes in sorted(found.items())}


class StoredBackends(Mapping[str, Backend]):
    """The backends of a stored model, by owner, each loaded when it is asked for.

    One that owns no claims and is not installed is left out: nothing is missing without it.

    Asking for one raises MissingBackendError where it is not installed, and PluginError where what is
    installed cannot be used with the model; both name the package, and the version it was made with.
    """

    def __init__(self, owners: Mapping[str, Any], plan: Plan) -> None:
        self._rules: dict[str, set[str]] = defaultdict(set)
        for claim in plan.claims:
            self._rules[claim.owner].add(claim.rule)
        self._owners = {
            label: dict(facts)
            for label, facts in owners.items()
            if label in self._rules or _is_installed(facts["backend"])
        }

    def __getitem__(self, owner: str) -> Backend:
        facts = self._owners[owner]
        try:
            backend = load_backend(facts["backend"])
        except ExcludedBackendError:
            raise
        except BackendNotFoundError:
            installed = [info.name for info in installed_backends()]
            raise MissingBackendError(facts, installed) from None
        except PluginError as error:
            raise PluginError(
                error.name, error.source, f"{error.reason}{_made_with(facts)}"
            ) from error
        lacking = sorted(self._rules[owner] - {rule.name for rule in backend.rules})
        if lacking:
            reason = f"it has no rule {', '.join(lacking)} any more, or not yet{_made_with(facts)}"
            raise PluginError(backend.name, _source(backend.name), reason)
        return backend

    def __contains__(self, owner: object) -> bool:
        return owner in self._owners

    def __iter__(self) -> Iterator[str]:
        return iter(self._owners)

    def __len__(self) -> int:
        return len(self._owners)


def _made_with(facts: Mapping[str, Any]) -> str:
    if not facts["distribution"]:
        return ". The model was made with a backend of no package"
    made = f"{facts['distribution']} {facts['version']}"
    return f'. The model was made with {made}: pip install "{made.replace(" ", "==")}"'


def _is_installed(name: str) -> bool:
    return any(info.name == name for info in installed_backends())


def _source(name: str) -> str:
    return next((i.source for i in installed_backends() if i.name == name), "of no package")


def missing_packages(owners: Mapping[str, Any]) -> str:
    """Return a sentence that names the packages of a model that are not installed, "" where all are."""
    missing = {
        f"{facts['distribution']}=={facts['version']}"
        for facts in owners.values()
        if facts["distribution"] and not _is_installed(facts["backend"])
    }
    remedies = " ".join(f'"{name}"' for name in sorted(missing))
    return f" Its backends are not all installed: pip install {remedies}." if missing else ""
