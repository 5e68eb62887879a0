# SPDX-License-Identifier: Apache-2.0
"""The C++ that backends bring for their operators: whether it is compiled, and what runs where it is not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from qompose.backend.interface import NATIVE_CODE_VARIABLE, Backend, native_code_wanted
from qompose.errors import UserError, blaming, warn_user
from qompose.lowering.aoti_package import reason_of

_Result = TypeVar("_Result")


def with_or_without(
    compile: Callable[[Mapping[str, Backend]], _Result],
    backends: Mapping[str, Backend],
    native_code: bool | None,
) -> _Result:
    """Return what `compile` returns, with C++ of the backends' own where it is wanted and compiles.

    Whatever goes wrong with it, the program is compiled once more without; a `QomposeWarning` says why.

    Args:
        native_code: whether it is wanted; None: unless the environment says QOMPOSE_NATIVE_CODE=0.

    Raises:
        UserError: `native_code` or the variable has another value.
    """
    plain = _without(backends)
    concerned = [owner for owner, backend in backends.items() if plain[owner] is not backend]
    if not _is_wanted(native_code) or not concerned:
        return compile(plain)
    try:
        return compile(backends)
    except Exception as error:
        result = compile(plain)
        warn_user(
            f"C++ code of {', '.join(concerned)} cannot be compiled, so the program uses "
            f"torch operators instead: {reason_of(error)} To skip this attempt, set "
            f"native_code=False or the environment variable {NATIVE_CODE_VARIABLE}=0."
        )
        return result


def _is_wanted(native_code: bool | None) -> bool:
    if native_code is not None:
        if not isinstance(native_code, bool):
            raise UserError(f"native_code must be None, True or False, got {native_code!r}")
        return native_code
    return native_code_wanted()


def _without(backends: Mapping[str, Backend]) -> dict[str, Backend]:
    found = {}
    for owner, backend in backends.items():
        with blaming(f"backend {owner!r}: without_native_code"):
            found[owner] = backend.without_native_code() or backend
    return found
