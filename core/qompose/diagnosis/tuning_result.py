# SPDX-License-Identifier: Apache-2.0
"""What tuning found: the settings of sites, what was tried, as data, and quantizers that have them."""

from __future__ import annotations

import copy
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qompose.console import Block, Printable, Table
from qompose.errors import ConfigError, UserError
from qompose.files import draft_of
from qompose.json_codec import FLOAT, Codec, codecs_of, record
from qompose.quantizer.base import Quantizer
from qompose.quantizer.composition import (
    ComposableQuantizer,
    QuantizerLike,
    as_quantizer,
    quantizer_from_dict,
)
from qompose.quantizer.restriction import Restricted
from qompose.quantizer.rule_quantizer import RuleQuantizer, selectors_from_data, selectors_to_data
from qompose.spec.selectors import (
    Selectors,
    Setting,
)

FORMAT = 1
AS_IT_IS = "as it is"
"""The choice of a site that stays as the quantizer says."""


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
class Assigned:
    """A site and the choice it was given.

    Attributes:
        name, operator, module, macs: as in the ranking.
        owner: label of the member that quantizes it.
        choice: name of the choice; `AS_IT_IS` for what the quantizer says itself.
        bytes: of its parameters in a file that `qompose.save` writes.
        cost: what its quantization alone costs (`qompose.sensitivity`).
        settings: the selectors that give it the choice.
    """

    name: str
    operator: str
    module: str
    macs: int
    owner: str
    choice: str
    bytes: int
    cost: float
    settings: tuple[Setting, ...]


@dataclass(frozen=True)
class Attempt:
    """A setting that was tried.

    Attributes:
        excluded: the sites in float.
        score, drop: what the metric says, and how far that is below the float score.
        float_macs: the multiply-accumulates in float.
        quantized: how many sites are quantized.
        met: whether it meets the target.
        assigned: sites and the names of the choices they were given.
        bytes: of all parameters and buffers in a file; 0 where there were no choices.
    """

    excluded: tuple[str, ...]
    score: float
    drop: float
    float_macs: int
    quantized: int
    met: bool
    assigned: tuple[tuple[str, str], ...] = ()
    bytes: int = 0


@dataclass(frozen=True)
class Tuning(Printable):
    """A configuration that meets a target, as selectors for any quantizer.

    Attributes:
        excluded: the sites that stay in float, those with the most multiply-accumulates first.
        score: of the model with these settings.
        float_score, quantized_score: of the float model, and of the quantizer as it was.
        max_drop: how far below the float score it may be; None where `max_bytes` was asked for.
        float_macs, macs: multiply-accumulates in float, whoever left them there, and of the whole model.
        attempts: all settings that were tried, in order.
        notes: what else there is to say.
        written: the quantizer with the selectors set as data; None where it cannot be written.
        assigned: with `choices`, every site that has parameters, those with the most bytes first.
        bytes: with `choices`, of all parameters and buffers in a file.
        max_bytes: how many that may be; None where `max_drop` was asked for.
    """

    excluded: tuple[Excluded, ...]
    score: float
    float_score: float
    quantized_score: float
    max_drop: float | None
    float_macs: int
    macs: int
    attempts: tuple[Attempt, ...]
    notes: tuple[str, ...] = ()
    written: Mapping[str, Any] | None = None
    assigned: tuple[Assigned, ...] = ()
    bytes: int = 0
    max_bytes: int | None = None
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
                "the tuned quantizer is defined in code and was not saved; create it again "
                "and pass it to Tuning.apply() to set its selectors"
            )
        return quantizer_from_dict(self.written)

    @property
    def selectors(self) -> tuple[Setting, ...]:
        """Return the settings of all sites, each once."""
        sites: tuple[Excluded | Assigned, ...] = (*self.excluded, *self.assigned)
        return once(s for site in sites for s in site.settings)

    def apply(self, quantizer: QuantizerLike) -> Quantizer:
        """Return a quantizer with the selectors set; it is left as it is.

        Those that say float are set on each member of a composition, and one without selectors, of another
        engine or code, is not heard there. Those that give a configuration are set on the members whose
        sites they are for.

        Raises:
            UserError: the quantizer has no such member.
            ConfigError: its backend does not support a configuration.
        """
        quantizer = as_quantizer(quantizer)
        return with_settings(quantizer, settings_by_member(quantizer, self.assigned, self.excluded))

    def to_dict(self) -> dict[str, Any]:
        """Return the tuning as JSON data; a score that is infinite is a text."""
        data = _tuning().write(self, "tuning")
        return {"format": FORMAT, "quantizer": data.pop("written"), **data}

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
            UserError: it is not such a file, or of a newer version.
            OSError: it cannot be read.
        """
        try:
            data = json.loads(Path(path).read_text("utf-8"))
            if data["format"] > FORMAT:
                raise UserError(
                    f"{path} was written by a newer version of qompose; upgrade qompose"
                )
            del data["format"]
            tuning: Tuning = _tuning().read({"written": data.pop("quantizer"), **data}, "tuning")
            return tuning
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise UserError(
                f"{path} is not a valid tuning result: {type(error).__name__}: {error}"
            ) from error

    def _blocks(self) -> list[Block]:
        share = self.float_macs / self.macs if self.macs else 0.0
        drop = self.float_score - self.score
        below = f"{drop:.3g} below float" if math.isfinite(drop) else "unboundedly below float"
        before = "originally" if self.assigned else "all quantized"
        head = (
            f"score {self.score:.6g}, {below} ({self.float_score:.6g}), with {share:.1%} of "
            f"the multiply-accumulates in float; {before}: {self.quantized_score:.6g}"
        )
        if self.assigned:
            head += f"; {self.bytes:,} bytes, originally {self.attempts[0].bytes:,}"
        return [head, *self._tables(), *(f"- {note}" for note in self.notes)]

    def _tables(self) -> Iterator[Block]:
        if self.excluded:
            header = ("in float", "selectors", "MACs", "cost", "with it")
            yield Table(header, tuple(map(_cells, self.excluded)))
        if self.assigned:
            given = ("site", "choice", "bytes", "cost", "MACs")
            yield Table(given, tuple(map(_cells_of_choice, self.assigned)))
            tried = ("tried: choices", "score", "below float", "bytes")
        else:
            tried = ("tried: in float", "score", "below float", "MACs in float")
        rows = tuple(
            (
                named_choices(a.assigned) if self.assigned else named_or_nothing(a.excluded),
                f"{a.score:.6g}",
                f"{a.drop:.3g}",
                a.bytes if self.assigned else a.float_macs,
            )
            for a in self.attempts
        )
        yield Table(tried, rows)


def _tuning() -> Codec:
    """Return how a tuning is written as data."""
    setting = Codec(
        lambda value, path: selectors_to_data(Selectors([value]), {})[0],
        lambda data, path: selectors_from_data([data], {}, path).settings[0],
    )
    quantizer = Codec(lambda value, path: value, lambda data, path: data)
    types = {float: FLOAT, Setting: setting, Mapping[str, Any]: quantizer}
    codecs = codecs_of(Tuning, types, leave_out=("_quantizer",), defaults=True)
    return record(Tuning, codecs, defaults=True)


def named_or_nothing(sites: Sequence[str]) -> str:
    """Return the names of sites in a row, or a word for that there are none."""
    return ", ".join(sites) or "nothing"


def named_choices(assigned: Iterable[tuple[str, str]]) -> str:
    """Return how many sites have which choice."""
    counts = Counter(choice for _, choice in assigned)
    return "; ".join(f"{choice}: {count}" for choice, count in counts.items()) or AS_IT_IS


def _cells(site: Excluded) -> tuple[object, ...]:
    others = ", ".join(site.others)
    return (_where(site), "; ".join(site.selectors), site.macs, f"{site.cost:.3g}", others)


def _cells_of_choice(site: Assigned) -> tuple[object, ...]:
    return (_where(site), site.choice, site.bytes, f"{site.cost:.3g}", site.macs)


def _where(site: Excluded | Assigned) -> str:
    return f"{site.name} ({site.operator}{f' in {site.module}' if site.module else ''})"


def once(settings: Iterable[Setting]) -> tuple[Setting, ...]:
    """Return settings without those that are there already; their configurations may not be hashable."""
    found: list[Setting] = []
    for setting in settings:
        if setting not in found:
            found.append(setting)
    return tuple(found)


def excluding(quantizer: Quantizer, settings: Iterable[Setting]) -> Quantizer:
    """Return a quantizer with settings that say float, set on every member; the quantizer stays as it is.

    All members get them: what one leaves in float, the next would take. One that has no selectors, because
    it is code or of another engine, is restricted (`qompose.quantizer.restriction`).
    """
    listed = list(settings)
    return with_settings(quantizer, {label: listed for label, _ in quantizer.labelled_members})


def with_settings(quantizer: Quantizer, by_member: Mapping[str, Sequence[Setting]]) -> Quantizer:
    """Return a quantizer with more settings, by the labels of the members; it stays as it is.

    Those for a member without selectors have to say float.

    Raises:
        ConfigError: a member's backend does not support the configuration of one of them.
    """
    labels = iter([label for label, _ in quantizer.labelled_members])
    return _with_settings(quantizer, labels, by_member)


def _with_settings(
    quantizer: Quantizer, labels: Iterator[str], by_member: Mapping[str, Sequence[Setting]]
) -> Quantizer:
    if isinstance(quantizer, ComposableQuantizer):
        composed, parts = copy.copy(quantizer), quantizer.quantizers
        composed.quantizers = tuple(_with_settings(part, labels, by_member) for part in parts)
        return composed
    listed = by_member.get(next(labels), ())
    if not listed:
        return quantizer
    if isinstance(quantizer, Restricted):
        return quantizer.without(listed)
    if not isinstance(quantizer, RuleQuantizer):
        return Restricted(quantizer, listed)
    selectors = quantizer.selectors
    for setting in listed:
        selectors.set(setting)
    return quantizer.with_selectors(selectors)


def settings_by_member(
    quantizer: Quantizer, assigned: Iterable[Assigned], excluded: Iterable[Excluded] = ()
) -> dict[str, list[Setting]]:
    """Return the settings of sites by the labels of the members that get them: those that say float, all.

    Raises:
        UserError: the member that quantizes a site is not one of a quantizer's, or has no selectors.
    """
    members = dict(quantizer.labelled_members)
    found: dict[str, list[Setting]] = {label: [] for label in members}
    for setting in (s for site in excluded for s in site.settings):
        for listed in found.values():
            listed.append(setting)
    for site in assigned:
        for setting in site.settings:
            if setting.config is None:
                for listed in found.values():
                    listed.append(setting)
            elif isinstance(members.get(site.owner), RuleQuantizer):
                found[site.owner].append(setting)
            else:
                raise UserError(
                    f"{site.name}: a selector of {site.owner} sets {site.choice!r}, but no "
                    f"member of that name accepts selectors. Members: {', '.join(members)}"
                )
    return {label: [*once(listed)] for label, listed in found.items()}


def written_or_noted(quantizer: Quantizer, notes: list[str]) -> dict[str, Any] | None:
    """Return a quantizer as data; where it cannot be written, None and one more note."""
    try:
        return quantizer.to_dict()
    except ConfigError as error:
        notes.append(f"the quantizer cannot be saved with this result: {error}")
        return None
