# SPDX-License-Identifier: Apache-2.0
"""How the checks of the contract suite fail: what was expected, what was found, and what to do."""

from __future__ import annotations


class ContractError(AssertionError):
    """A backend does not keep a promise of its rule table.

    Args:
        subject: the backend, and the row and configuration where it is about one.
        expected: what the contract says.
        found: what happened.
        remedy: what the author can do.
    """

    def __init__(self, subject: str, *, expected: str, found: str, remedy: str) -> None:
        self.subject, self.expected, self.found, self.remedy = subject, expected, found, remedy
        super().__init__(
            f"{subject}\n  expected: {expected}\n  found:    {found}\n  remedy:   {remedy}"
        )


class NotApplicable(Exception):  # noqa: N818 - it says what the check is
    """A check has nothing to look at, with the reason."""


class Blocked(NotApplicable):
    """A check needs what another one found broken; that one fails, and this one is left out."""

    def __init__(self, check: str, subject: str) -> None:
        super().__init__(f"{check} fails for {subject}: mend that first")
