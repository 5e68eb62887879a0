# SPDX-License-Identifier: Apache-2.0
"""What tuning found: the selectors, what each leaves in float, and every setting that was tried."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qompose.composing import quantizer_from_dict
from qompose.configuring import selectors_from_data, selectors_to_data
from qompose.diagnosis.exclusion import excluding
from qompose.drafts import draft_of
from qompose.errors import ConfigError, UserError
from qompose.interop import adapt
from qompose.quantizer import Quantizer
from qompose.rendering import Block, Printable, Table
from qompose.selectors import Selectors, Setting

FORMAT = 1


@dataclass(frozen=True)
class Excluded:
    """A site that stays in float.

    Attributes:
        name, operator, module, macs: as in the ranking.
        cost: what its quantization alone costs (`qompose.sensitivity`).
        settings: the selectors that leave it in float.
        others: operators that are quantized otherwise, and stay in float because this one does.
    """

    name: str
    operator: str
    module: str
    macs: int
    cost: float
    settings: tuple[Setting, ...]
    others: tuple[str, ...] = ()

    @property
    def selectors(self) -> tuple[str, ...]:
        """Return the selectors as reports call them."""
        return tuple(setting.label for setting in self.settings)


@dataclass(frozen=True)
class Attempt:
    """A setting that was tried: the sites in float, the score, and how far that is below the float one.

    `float_macs` are the multiply-accumulates in float then, `quantized` counts the sites that are not.
    """

    excluded: tuple[str, ...]
    score: float
    drop: float
    float_macs: int
    quantized: int
    met: bool


@dataclass(frozen=True)
class Tuning(Printable):
    """A configuration that meets a target, as selectors for any quantizer.

    Attributes:
        excluded: the sites that stay in float, those with the most multiply-accumulates first.
        score: of the model with these in float.
        float_score, quantized_score: of the float model, and with nothing left in float.
        max_drop: what was asked for.
        float_macs, macs: multiply-accumulates in float, whoever left them there, and of the whole model.
        attempts: all settings that were tried, in order.
        notes: what else there is to say.
        written: the quantizer with the selectors set as data; None where it cannot be written.
    """

    excluded: tuple[Excluded, ...]
    score: float
    float_score: float
    quantized_score: float
    max_drop: float
    float_macs: int
    macs: int
    attempts: tuple[Attempt, ...]
    notes: tuple[str, ...] = ()
    written: Mapping[str, Any] | None = None
    _quantizer: Quantizer | None = field(default=None, compare=False, repr=False)

    @property
    def quantizer(self) -> Quantizer:
        """Return the quantizer with the selectors set; of a file, one that is made of its data.

        Raises:
            ConfigError: it could not be written; `apply` sets the selectors on yours.
            BackendNotFoundError, PluginError: a backend of its cannot be had.
        """
        if self._quantizer is not None:
            return self._quantizer
        if self.written is None:
            raise ConfigError(
                "the quantizer that was tuned is code and not in the file: make it anew, and let apply() set "
                "the selectors on it"
            )
        return quantizer_from_dict(self.written)

    @property
    def selectors(self) -> tuple[Setting, ...]:
        """Return the settings of all sites, each once."""
        return tuple(dict.fromkeys(s for site in self.excluded for s in site.settings))

    def apply(self, quantizer: Quantizer) -> Quantizer:
        """Return a quantizer with the selectors set, on each member of a composition; it is left as it is.

        A member without selectors, of another engine or code, is not heard where they say float.
        """
        return excluding(adapt(quantizer), self.selectors)

    def to_dict(self) -> dict[str, Any]:
        """Return the tuning as JSON data; a score that is infinite is a text."""
        data = {
            "format": FORMAT,
            "excluded": [_excluded_to_data(site) for site in self.excluded],
            "attempts": [
                {**_to_data(vars(a), _SCORES), "excluded": list(a.excluded)} for a in self.attempts
            ],
            "notes": list(self.notes),
            "quantizer": self.written,
            **_to_data({name: getattr(self, name) for name in _NUMBERS}, _NUMBERS),
        }
        copied: dict[str, Any] = json.loads(json.dumps(data, allow_nan=False))
        return copied

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON file, which `load` reads, and people too.

        Raises:
            OSError: it cannot be written.
        """
        with draft_of(Path(path)) as draft:
            draft.write_text(json.dumps(self.to_dict(), indent=2) + "\n", "utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Tuning:
        """Read what `save` wrote.

        Raises:
            UserError: it is no such file, or of a newer version.
            OSError: it cannot be read.
        """
        try:
            data = json.loads(Path(path).read_text("utf-8"))
            if data["format"] > FORMAT:
                raise UserError(f"{path} was written by a newer release of qompose: upgrade")
            return cls(
                excluded=tuple(_excluded_from_data(site) for site in data["excluded"]),
                attempts=tuple(
                    Attempt(**{**_from_data(a, _SCORES), "excluded": tuple(a["excluded"])})
                    for a in data["attempts"]
                ),
                notes=tuple(data["notes"]),
                written=data["quantizer"],
                **_from_data({name: data[name] for name in _NUMBERS}, _NUMBERS),
            )
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise UserError(f"{path} holds no tuning: {type(error).__name__}: {error}") from error

    def _blocks(self) -> list[Block]:
        share = self.float_macs / self.macs if self.macs else 0.0
        drop = self.float_score - self.score
        below = f"{drop:.3g} below float" if math.isfinite(drop) else "without bound below float"
        head = (
            f"score {self.score:.6g}, {below} ({self.float_score:.6g}), with {share:.1%} of the "
            f"multiply-accumulates in float; all quantized: {self.quantized_score:.6g}"
        )
        return [head, *self._tables(), *(f"- {note}" for note in self.notes)]

    def _tables(self) -> Iterator[Block]:
        if self.excluded:
            header = ("in float", "selectors", "MACs", "cost", "with it")
            yield Table(header, tuple(map(_cells, self.excluded)))
        tried = ("tried: in float", "score", "below float", "MACs in float")
        rows = tuple(
            (named_or_nothing(a.excluded), f"{a.score:.6g}", f"{a.drop:.3g}", a.float_macs)
            for a in self.attempts
        )
        yield Table(tried, rows)


_NUMBERS = ("score", "float_score", "quantized_score", "max_drop", "float_macs", "macs")
_SCORES = ("score", "drop")


def _to_data(numbers: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return data in which those of some numbers that JSON cannot hold are texts."""
    told = {n: v if math.isfinite(v) else str(v) for n, v in numbers.items() if n in names}
    return {**numbers, **told}


def _from_data(data: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    told = {n: float(v) for n, v in data.items() if n in names and isinstance(v, str)}
    return {**data, **told}


def named_or_nothing(sites: Sequence[str]) -> str:
    """Return the names of sites in a row, or a word for that there are none."""
    return ", ".join(sites) or "nothing"


def _cells(site: Excluded) -> tuple[object, ...]:
    where = f"{site.name} ({site.operator}{f' in {site.module}' if site.module else ''})"
    others = ", ".join(site.others)
    return (where, "; ".join(site.selectors), site.macs, f"{site.cost:.3g}", others)


def _excluded_to_data(site: Excluded) -> dict[str, Any]:
    settings = selectors_to_data(Selectors(list(site.settings)), {})
    cost = site.cost if site.cost != float("inf") else "inf"
    return {**vars(site), "settings": settings, "others": list(site.others), "cost": cost}


def _excluded_from_data(data: Mapping[str, Any]) -> Excluded:
    settings = selectors_from_data(data["settings"], {}, data["name"]).settings
    cost, others = float(data["cost"]), tuple(data["others"])
    return Excluded(**{**data, "settings": tuple(settings), "others": others, "cost": cost})
