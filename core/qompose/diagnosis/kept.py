# SPDX-License-Identifier: Apache-2.0
"""What a tuning has found out on the way, in a file, so that one that was stopped does not ask again."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qompose.drafts import destination, draft_of
from qompose.errors import ConfigError, UserError
from qompose.plan import Record
from qompose.quantizer import Quantizer

FORMAT = 1


def key_of(record: Record, quantizer: Quantizer, facts: Mapping[str, Any]) -> str:
    """Return a hash of what scores depend on, as far as data can tell: not of the data and the metric."""
    try:
        written: Any = quantizer.to_dict()
    except ConfigError:  # it is code; what it claims has to do
        written = quantizer.name
    claims = [(c.owner, c.rule, c.anchor, c.nodes, c.config, c.mode) for c in record.plan.claims]
    operators = [operator.to_dict() for operator in record.plan.operators]
    told = [record.fingerprint, written, claims, operators, dict(facts)]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


class Kept:
    """Numbers by name. With a path, each is written as soon as it is known; the file is always whole.

    Raises:
        UserError: the file is none of a tuning, or of another one; it cannot be read or written.
    """

    def __init__(self, path: str | os.PathLike[str] | None, key: str) -> None:
        self._path, self._key = None if path is None else Path(path), key
        self._known: dict[str, Any] = {}
        if self._path is None:
            return
        if not self._path.parent.is_dir():
            raise UserError(f"resume={str(path)!r}: there is no folder {self._path.parent}")
        try:
            if destination(self._path).exists():
                self._known = self._read(self._path)
            self._write()  # a score that took an hour is a bad time to find that it cannot be kept
        except OSError as error:
            raise UserError(f"resume={str(path)!r} cannot be used: {error.strerror}") from error

    def _read(self, path: Path) -> dict[str, Any]:
        try:
            data = json.loads(path.read_text("utf-8"))
            number, key, known = int(data["format"]), data["key"], dict(data["known"])
            if number <= FORMAT and key == self._key:
                _check(known)
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise UserError(f"{path} holds no tuning on the way: {error}") from error
        if number > FORMAT:
            raise UserError(f"{path} was written by a newer release of qompose: upgrade")
        if key != self._key:
            raise UserError(
                f"{path} is of another tuning: of other parameters, or another quantizer, target or limit. "
                "Name another file for this one, or remove it"
            )
        return known

    def get(self, name: str) -> Any:
        """Return what is known under a name, None if nothing."""
        return self._known.get(name)

    def put(self, name: str, value: Any) -> None:
        """Keep JSON data under a name."""
        self._known[name] = value
        self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        data = {"format": FORMAT, "key": self._key, "known": self._known}
        with draft_of(self._path) as draft:
            draft.write_text(json.dumps(data, indent=1) + "\n", "utf-8")


def _check(known: Mapping[str, Any]) -> None:
    """Make sure that what was read has the form of what is written, whoever changed it since.

    Raises:
        ValueError, TypeError, LookupError: it has not.
    """
    for name, value in known.items():
        if name == "notes":
            good = isinstance(value, list) and all(isinstance(note, str) for note in value)
        elif name == "costs":
            good = all(float(cost) >= 0 for cost in dict(value).values())
        elif name == "float":
            good = _is_number(value)
        else:
            good = set(value) == _SIZES and all(_is_number(value[size]) for size in _SIZES)
        if not good:
            raise ValueError(f"{name} is {value!r}")


_SIZES = {"score", "float_macs", "quantized"}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def setting_name(sites: tuple[str, ...]) -> str:
    """Return the name of a setting: which sites are in float."""
    return json.dumps(sorted(sites))
