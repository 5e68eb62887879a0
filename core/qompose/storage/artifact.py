# SPDX-License-Identifier: Apache-2.0
"""`save` and `load`: quantized models as one file, which runs no code when it is read.

A lowered model is stored as the converted program that it was made of with the target, and is lowered again
by `load`: what kernels need of memory and layout belongs to the machine on which they run. A manifest has
with what the model was made: versions, owners and their packages, operators, schemes, processor.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from importlib_metadata import version
from torch import Tensor
from torch.fx import GraphModule

from qompose.backend.discovery import backends as installed_backends, load_backend
from qompose.backend.interface import Backend
from qompose.console import staging
from qompose.errors import (
    ArtefactError,
    BackendNotFoundError,
    ConfigError,
    ExcludedBackendError,
    MissingBackendError,
    PluginError,
    RequirementError,
    StageError,
    UserError,
    warn_user,
)
from qompose.files import destination
from qompose.json_codec import of_type, optional
from qompose.lowering.lower_regions import attach_records, lower, with_kernels
from qompose.plan.methods import (
    ONLY,
    check_methods,
    in_method,
    share_constants,
    share_state,
    states_of,
)
from qompose.plan.operator_ids import QUANTIZED_BEFORE
from qompose.plan.plan import Plan, Record, attach, objections, record_of, warn
from qompose.program.disk import unpacked
from qompose.program.graph import copies_of, copy_graph_module
from qompose.program.meta import META_KEY
from qompose.reporting.build_report import count_nodes, report
from qompose.reporting.report_data import Counts
from qompose.storage.artifact_file import (
    pack,
    pack_bits,
    read as read_file,
    unpack,
    unpack_bits,
    write as write_file,
)
from qompose.storage.json_values import NotStorable, UnknownType
from qompose.storage.program_json import (
    ProgramReader,
    ProgramWriter,
    UnknownOperator,
    changes_of,
    decode_record,
    encode_record,
    with_changes,
)


def save(model: Any, path: str | os.PathLike[str]) -> None:
    """Write a model to a file from which `load` restores it in another process.

    Buffers that the program writes to are saved with their exported values. An existing file is replaced
    atomically, and kept if saving fails; a symbolic link is followed.

    Args:
        model: what `convert_pt2e` or `lower` returned, a dict of several of one kind, or a program of
            several methods. What they share is stored once.

    Raises:
        StageError: the model was neither converted nor lowered, or was lowered in another process.
        UserError: `path` is not a path, or is a directory, a pipe or a device; or a name is not valid for a
            method.
        ArtefactError: the model contains something that cannot be stored; the message names it.
        OSError: the file cannot be written.
    """
    path = _as_path(path, "save")
    methods = _methods(model)
    converted, lowered = {}, {}
    for name, method in methods.items():
        with in_method(name):
            converted[name], lowered[name] = _parts(method)
    counts = {
        name: _COUNTS.write(
            count_nodes(method) if isinstance(method, GraphModule) else None, "counts"
        )
        for name, method in methods.items()
    }
    if len(converted) > 1:
        converted = _sharing(converted)
    targets = {record.target if record else "" for record in lowered.values()}
    if len(targets) != 1:
        got = ", ".join(sorted(target or "none" for target in targets))
        raise UserError(f"save expects one target for all methods, or none; got {got}")
    destination(path)  # refused before any work is done
    try:
        body, blocks = _described(converted, lowered, counts)
    except (NotStorable, ConfigError) as reason:
        raise ArtefactError(f"The model cannot be saved: {reason}.") from reason
    write_file({**body, "target": targets.pop()}, blocks, path)


def _as_path(path: object, function: str) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        raise UserError(f"{function} expects a file path, got {path!r}")
    return Path(path)


def _methods(model: Any) -> Mapping[str, Any]:
    """Return the methods of a model by name: of several in a mapping, or as an attribute of a program."""
    if META_KEY in (getattr(model, "meta", None) or {}):
        return {ONLY: model}
    methods = model if isinstance(model, Mapping) else getattr(model, "methods", None)
    if not isinstance(methods, Mapping):
        return {ONLY: model}
    check_methods(methods, "save")
    return methods


def _parts(model: Any) -> tuple[GraphModule, Record | None]:
    """Return the converted form of a model, and its record if it is lowered."""
    inner = getattr(model, "converted", None)  # of what quantize returns
    remedy = "Call convert_pt2e first."
    if isinstance(inner, GraphModule):
        remedy = "Save its .model, which is lowered, or its .converted."
    stages = ("converted", "reference", "lowered")
    record = record_of(model, stages=stages, function="save", remedy=remedy)
    if record.stage != "lowered":
        return model, None
    if record.source is None:
        raise StageError(
            "This lowered model has no converted model, which save requires: it came from load or pickle, "
            "or from lower with keep_converted=False. Save the converted model, copy the file, or save the "
            "result of load(path, as_converted=True)."
        )
    return record.source, record


def _sharing(models: Mapping[str, GraphModule]) -> dict[str, GraphModule]:
    """Return copies of models that have one tensor for what is the same in several."""
    copies = {name: copy_graph_module(model) for name, model in models.items()}
    states = share_state(copies, states_of(models))
    share_constants(copies, states)
    for name, model in models.items():
        record = replace(model.meta[META_KEY], state=states[name])
        copies[name].meta = {**model.meta, META_KEY: record}
    return copies


def _described(
    converted: Mapping[str, GraphModule],
    lowered: Mapping[str, Record | None],
    counts: Mapping[str, Mapping[str, int] | None],
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return what a file says of models, and their blocks of memory.

    Raises:
        NotStorable: they hold what has no such form.
    """
    records: dict[str, Record] = {name: model.meta[META_KEY] for name, model in converted.items()}
    methods: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    operators: set[str] = set()
    for name, model in converted.items():
        writer, encoded, now = ProgramWriter(), encode_record(records[name]), lowered[name]
        methods[name] = {
            "program": writer.program(model),
            "record": encoded,
            "lowered": None if now is None else changes_of(encoded, encode_record(now)),
            "counts": counts[name],
            "state": sorted(records[name].state),
        }
        operators |= writer.operators
        held = {**writer.tensors, **records[name].state}
        tensors |= {f"{_prefix(name)}{path}": tensor for path, tensor in held.items()}
    views, blocks = pack(tensors)
    packed, stored = pack_bits(blocks)
    body = {"manifest": manifest_of(records, operators), "methods": methods}
    return {**body, "tensors": views, "packed": packed}, stored


def task_of(record: Record, source: Any) -> str:
    """Return a hash of what is to become of a prepared model: its plan, weights, versions, and `source`.

    Raises:
        ConfigError: a specification of a class that core does not know, of which no file can tell.
    """
    made_with = [version("qompose"), torch.__version__]
    text = json.dumps([encode_record(record), made_with, source], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _prefix(method: str) -> str:
    return "" if method == ONLY else f"{method}/"


@dataclass(frozen=True)
class _Stored:
    """What a file holds: converted models, what was recorded when they were lowered, and for which target."""

    path: Path
    models: dict[str, GraphModule]
    lowered: dict[str, Record]
    counts: dict[str, Counts | None]
    target: str

    def of(self, parts: Mapping[str, Any]) -> Any:
        """Return the one of `parts`, or all of them by name."""
        return parts[ONLY] if set(parts) == {ONLY} else dict(parts)


def load(
    path: str | os.PathLike[str],
    *,
    allow_mismatch: bool = False,
    as_converted: bool = False,
    target: str | None = None,
) -> Any:
    """Return the model that `save` wrote: it runs, and can be reported and lowered.

    Nothing is unpickled and no code of the file is run. Backends are imported if the model is lowered, here
    or by `lower`, and if they recorded requirements. Weights of few bits of what is lowered stay pages of the
    file until kernels pack them, all before `load` returns: till then nobody may write into the file. It may
    be replaced or deleted.

    Args:
        allow_mismatch: load a model that was made for another machine, with a warning. It computes the
            same, but not with the kernels that it was made for.
        as_converted: do not lower a model that was saved lowered; this needs no backend.
        target: lower for it what was saved converted, as `lower(..., keep_converted=False)` does.

    Returns:
        a GraphModule, or a dict of several; for a model lowered for another target, what `lower` returns
        for that target. A QomposeWarning names kernels that differ from those it was saved with.

    Raises:
        RequirementError: a backend's requirements are not met here; the message has the remedies.
        UserError: `path` is not a path; `target` is not the one for which the model was lowered, or is
            given with `as_converted`; or what `lower` raises.
        ArtefactError: the file is damaged, of another kind or of a newer qompose, or needs operators,
            types or devices that this process does not have.
        OSError: it cannot be read.
    """
    if target is not None and as_converted:
        raise UserError(
            f"load cannot lower for target={target!r} and keep a model as_converted=True"
        )
    stored = _stored(_as_path(path, "load"), target, as_converted=as_converted)
    if target is not None and stored.target not in ("", target):
        raise UserError(
            f"{stored.path} was lowered for {stored.target!r}, not for {target!r}. Use "
            "lower(load(path, as_converted=True), target)."
        )
    found = _objections(stored, as_converted)
    if found and not allow_mismatch:
        lines = "".join(f"\n  - {line}" for line in found)
        raise RequirementError(
            f"{stored.path} was made for a different machine:{lines}\n"
            "Pass allow_mismatch=True to load it without the kernels it was made for."
        )
    warn(found)
    if target is not None and not stored.lowered:
        return lower(stored.of(stored.models), target, keep_converted=False)
    if not stored.lowered or as_converted:
        return stored.of(stored.models)
    try:
        with staging(None):
            result, parts = with_kernels(stored.of(stored.models), stored.target)
    except UserError as error:
        remedy = (
            "Use load(path, as_converted=True) to get the converted model, which runs "
            "without kernels."
        )
        error.args = (f"{stored.path} cannot be lowered again: {error}\n{remedy}",)
        raise
    except Exception as error:  # whatever a forged program makes of it
        reason = f"{type(error).__name__}: {error}"
        raise ArtefactError(f"{stored.path} cannot be lowered again: {reason}") from error
    attach_records(parts)  # without sources: the file has the converted model
    if changed := "".join(
        f"\n  - {line}"
        for name, (_, record) in parts.items()
        for line in _changes(name, stored.lowered[name], record)
    ):
        message = (
            f"{path} was lowered again, with different kernels than when it was saved:{changed}"
        )
        warn_user(message)
    return result


def _objections(stored: _Stored, as_converted: bool) -> tuple[str, ...]:
    """Return why the models cannot run here as they were made to.

    Programs of other runtimes may be for another machine.
    """
    if stored.target not in ("", "torch") and not as_converted:
        return ()
    found = [line for model in stored.models.values() for line in objections(model.meta[META_KEY])]
    return tuple(dict.fromkeys(found))


def _changes(method: str, before: Record, now: Record) -> Iterator[str]:
    """Yield a line for each region whose kernel is another one, or is gone, or is new."""
    for number, claim in enumerate(now.plan.claims):
        was, has = (record.kernels.get(number, "no kernel") for record in (before, now))
        if was != has:
            why = now.fallbacks.get(number)
            where = f"{method}: {claim.anchor}" if method != ONLY else claim.anchor
            yield (
                f"{where} ({claim.owner}, rule {claim.rule}): {was} before, {has} "
                f"now{f' ({why})' if why else ''}"
            )


def read(path: str | os.PathLike[str]) -> Any:
    """Return what `report` takes for a file: what is recorded of the model, whatever it asks of the machine.

    Of a converted model it is the model. Of a lowered one it is something that has its record alone, since
    no kernel is needed to tell of them; several are in a dict.
    """
    stored = _stored(_as_path(path, "load"), None, as_converted=True)
    recorded = {
        name: SimpleNamespace(meta={META_KEY: record}, counts=stored.counts[name])
        for name, record in stored.lowered.items()
    }
    return stored.of(recorded or stored.models)


def _stored(path: Path, target: str | None, *, as_converted: bool) -> _Stored:
    body, blocks = read_file(path)
    try:
        later = not as_converted and bool(body["target"] or target)
        return _models(path, body, unpack_bits(body["packed"], blocks, later=later))
    except (UnknownOperator, UnknownType) as missing:
        made = body["manifest"]
        packages = missing_packages(checked_owners(made))
        raise ArtefactError(
            f"{path} cannot be loaded: {missing.args[0]}."
            f"{packages} The file was written with torch {made['torch']}; this is torch "
            f"{torch.__version__}."
        ) from missing
    except ArtefactError as error:
        raise ArtefactError(f"{path} cannot be loaded: {error}") from error
    except Exception as error:  # whatever a forged file makes the readers stumble on
        reason = f"{type(error).__name__}: {error}"
        raise ArtefactError(f"{path} is not a valid model file: {reason}") from error


def _models(path: Path, body: Mapping[str, Any], blocks: Mapping[str, Tensor]) -> _Stored:
    owners = checked_owners(body["manifest"])
    tensors = dict(unpack(body["tensors"], blocks))
    plain: dict[int, Tensor] = {}
    for name, part in body["methods"].items():
        for place in part["state"]:  # it is written to
            value = tensors[f"{_prefix(name)}{place}"]
            if id(value) not in plain:
                plain[id(value)] = unpacked(value)
    tensors = {place: plain.get(id(value), value) for place, value in tensors.items()}
    models, lowered, counts = {}, {}, {}
    target, methods = body["target"], body["methods"]
    if set(methods) != {ONLY}:
        check_methods(methods, "load")
    for name, part in methods.items():
        prefix = _prefix(name)
        own = {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}
        record = decode_record(part["record"])
        module = _program(part["program"], own, owners)
        state = copies_of({path: own[path] for path in part["state"]})
        backends = StoredBackends(owners, record.plan)
        models[name] = attach(module, replace(record, backends=backends, state=state))
        report(module)  # where the parts of a forged record do not fit, this does not work
        if target:
            lowered[name] = decode_record(
                with_changes(part["record"], part["lowered"]), stages=("lowered",)
            )
            counts[name] = _COUNTS.read(part["counts"], "counts")
            if lowered[name].target != target:
                raise ValueError(f"a model for {lowered[name].target!r} in a file for {target!r}")
    return _Stored(path, models, lowered, counts, target)


_COUNTS = optional(of_type(Counts, {}))


def _program(
    data: Mapping[str, Any], tensors: Mapping[str, Tensor], owners: Mapping[str, Any]
) -> GraphModule:
    try:
        return ProgramReader(data, tensors).program()
    except UnknownOperator:  # backends may register it
        for facts in owners.values():
            with contextlib.suppress(BackendNotFoundError, PluginError):
                load_backend(facts["backend"])
        return ProgramReader(data, tensors).program()


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
            raise ValueError(f"the package of {label!r} has an invalid name or version")
    if not all(isinstance(manifest[key], str) for key in ("qompose", "torch")):
        raise ValueError("versions must be strings")
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
            if claim.rule != QUANTIZED_BEFORE:  # whose rule is not known any more, and not needed
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
            reason = (
                f"it does not have the rules {', '.join(lacking)}, which the model "
                f"needs{_made_with(facts)}"
            )
            sources = (i.source for i in installed_backends() if i.name == backend.name)
            raise PluginError(backend.name, next(sources, "of an unknown package"), reason)
        return backend

    def __contains__(self, owner: object) -> bool:
        return owner in self._owners

    def __iter__(self) -> Iterator[str]:
        return iter(self._owners)

    def __len__(self) -> int:
        return len(self._owners)


def _made_with(facts: Mapping[str, Any]) -> str:
    if not facts["distribution"]:
        return ". The model was quantized with a backend that did not come from a package"
    made = f"{facts['distribution']} {facts['version']}"
    return f'. The model was quantized with {made}: pip install "{made.replace(" ", "==")}"'


def _is_installed(name: str) -> bool:
    return any(info.name == name for info in installed_backends())


def missing_packages(owners: Mapping[str, Any]) -> str:
    """Return a sentence that names the packages of a model that are not installed, "" where all are."""
    missing = {
        f"{facts['distribution']}=={facts['version']}"
        for facts in owners.values()
        if facts["distribution"] and not _is_installed(facts["backend"])
    }
    remedies = " ".join(f'"{name}"' for name in sorted(missing))
    return (
        f" Some of its backends are not installed; run pip install {remedies}." if missing else ""
    )
