# SPDX-License-Identifier: Apache-2.0
"""The texts by which C++ of our own gets into what torch compiles."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from qompose.backend import native_code_wanted
from qompose.errors import QomposeWarning

from qompose_x86_inductor.native.processor import Isa

HEADERS: Final = Path(__file__).parent

HANDLE: Final = "AtenTensorHandle"
OPTIONAL: Final = "AtenTensorHandle*"
OPTIONALS: Final = "const AtenTensorHandle**, int64_t"
INTEGERS: Final = "const int64_t*, int64_t"
NUMBERS: Final = "const double*, int64_t"
"""The types of arguments of operators in C, in torch's order: lists are followed by their lengths."""


def declaration(name: str, *arguments: str, results: int = 1) -> str:
    """Return the declaration of an operator in C, against which the calls that torch writes are checked."""
    types = ", ".join([*arguments, *[f"{HANDLE}*"] * results])
    return f"AOTITorchError aoti_torch_cpu_{name}({types})"


def with_code(declared: str, header: str, isa: Isa | None, *defines: str) -> str:
    """Return a declaration with the C++ behind it, a header of this folder.

    The result is valid after "extern" or without it, with a semicolon behind it or none, in a block of C or
    of C++. torch's caches of compiled code depend on the text, not on what that includes: hence the digest.

    Args:
        isa: what lanes.h is compiled for; None where the header does not include it.
        defines: macros and their values, as "NAME 1".
    """
    return f'{declared};\nextern "C++" {{\n{included(header, isa, *defines)}\n}}'


def included(header: str, isa: Isa | None = None, *defines: str) -> str:
    """Return the lines that include a header."""
    chosen = () if isa is None else (f"{macro(isa)} 1",)
    lines = "".join(f"#define {each}\n" for each in (*chosen, *defines))
    path = (HEADERS / header).as_posix()
    return f'// {digest(HEADERS)}\n{lines}#include "{path}"'


def macro(isa: Isa) -> str:
    """Return the name by which lanes.h knows a set."""
    return f"QOMPOSE_{isa.name.upper()}"


def digest(folder: Path) -> str:
    """Return a hash of the C++ headers of a folder."""
    contents = (path.read_bytes() for path in sorted(folder.glob("*.h")))
    return hashlib.sha256(b"".join(contents)).hexdigest()[:16]


def loaded(text: str, name: str, purpose: str) -> Callable[..., int] | None:
    """Return a function of C++ for this process; None where QOMPOSE_NATIVE_CODE=0, or it does not compile.

    torch's compiler for C++ compiles it, some seconds, and keeps the result in its cache on disk. A warning
    says that it does not compile, and for what it would have been.

    Raises:
        UserError: the variable is neither 0 nor 1.
    """
    if not native_code_wanted():
        return None
    from torch._inductor.codecache import CppCodeCache

    try:
        function: Callable[..., int] = getattr(CppCodeCache.load(text, needs_vec_isa=True), name)
    except Exception as error:  # whatever a compiler, or its absence, raises
        warnings.warn(
            f"The C++ kernel of x86_inductor for {purpose} cannot be compiled, so slower "
            f"torch operators are used instead: {type(error).__name__}: {str(error)[:200]}",
            QomposeWarning,
            stacklevel=3,
        )
        return None
    return function


def uncompiled(reference: Callable[..., Any]) -> Callable[..., Any]:
    """Return what computes an operator in a graph that was not compiled, or compiled without the C++."""

    def compute(*arguments: Any) -> Any:
        warn_uncompiled()
        return reference(*arguments)

    return compute


def warn_uncompiled() -> None:
    """Warn of an operator that runs in a graph that was not compiled, or compiled without the C++."""
    warnings.warn(
        "An operator in compiled code falls back to torch operators, exact but slow: torch stopped "
        "compiling the program for new kinds of inputs (torch._dynamo.config.recompile_limit), or "
        "options= changed cpp_wrapper, which qompose.compile_lowered sets",
        stacklevel=3,
    )
