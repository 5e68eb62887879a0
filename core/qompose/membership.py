# SPDX-License-Identifier: Apache-2.0
"""What a composition's members came to: of each that took nothing, why; of two alike, which is which."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from qompose.arbitration import is_loss, most_telling
from qompose.claims import Composition
from qompose.errors import ConfigError
from qompose.quantizer import Quantizer, labelled
from qompose.rule_quantizer import RuleQuantizer


def notes_on_members(quantizer: Quantizer, composition: Composition) -> list[str]:
    """Describe the members of a composition that have no claim.

    Of a quantizer with rules that is alone, the operators of the report say all that there is to say.
    """
    members = dict(zip((label for label, _ in labelled(quantizer)), quantizer.members, strict=True))
    if len(members) == 1 and isinstance(quantizer.members[0], RuleQuantizer):
        return []
    claiming = {claim.owner for claim in composition.chosen}
    return [
        f"{label} claims nothing: {_why(label, members, composition)}"
        for label in members
        if label not in claiming
    ]


def _why(label: str, members: dict[str, Quantizer], composition: Composition) -> str:
    reasons = [*_losses(label, composition), *_refusals(label, composition)]
    twin = _twin(label, members)
    if twin is not None:
        reasons.append(f"its settings are those of {twin}, which comes first, so it can never win")
    if reasons:
        return "; ".join(reasons)
    if isinstance(members[label], RuleQuantizer):
        return "no operator of its rules occurs in the program"
    return "it annotates nothing in this program"


def _losses(label: str, composition: Composition) -> Iterator[str]:
    """Say to whom the regions went that a member wanted."""
    wanted = {(r.rule, r.nodes) for r in composition.rejections if r.owner == label and is_loss(r)}
    if wanted:
        winners = dict.fromkeys(c.winner for c in composition.conflicts if c.loser == label)
        regions = "the only region" if len(wanted) == 1 else f"all {len(wanted)} regions"
        yield f"{regions} that it wanted went to {', '.join(winners)}"


def _refusals(label: str, composition: Composition) -> Iterator[str]:
    """Say why regions that a member's rules match became no claims, the commonest reason first."""
    reasons = Counter(
        r.reason
        for r in dict.fromkeys(most_telling(composition.rejections))
        if r.owner == label and not is_loss(r)
    )
    for reason, number in reasons.most_common(_MOST):
        yield f"of {number} region{'s' * (number > 1)}: {reason}"
    if len(reasons) > _MOST:
        yield f"and {len(reasons) - _MOST} other reasons, at the operators"


_MOST = 3


def _twin(label: str, members: dict[str, Quantizer]) -> str | None:
    """Return an earlier member with the same rules and settings, None where there is none."""
    for earlier, other in members.items():
        if earlier == label:
            return None
        if _settings(other) is not None and _settings(other) == _settings(members[label]):
            return earlier
    return None


def _settings(member: Quantizer) -> object | None:
    """Return what a member is set to as data, None where it cannot be compared."""
    if not isinstance(member, RuleQuantizer):
        return None
    try:
        return member.to_dict()
    except ConfigError:  # a function decides, and functions cannot be compared
        return None
