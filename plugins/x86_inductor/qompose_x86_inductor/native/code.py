# SPDX-License-Identifier: Apache-2.0
"""The texts by which C++ of our own gets into what torch compiles."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from qompose_x86_inductor.native.processor import Isa

HEADERS: Final = Path(__file__).parent

HANDLE: Final = "AtenTensorHandle"
OPTIONAL: Final = "AtenTensorHandle*"
INTEGERS: Final = "const int64_t*, int64_t"
NUMBERS: Final = "const double*, int64_t"
"""The types of arguments of operators in C, in torch's order: lists are followed by their lengths."""


def declaration(name: str, *arguments: str, results: int = 1) -> str:
    """Return the declaration of an operator in C, against which the calls that torch writes are checked."""
    types = ", ".join([*arguments, *[f"{HANDLE}*"] * results])
    return f"AOTITorchError aoti_torch_cpu_{name}({types})"


def with_code(declared: str, header: str, isa: Isa | None) -> str:
    """Return a declaration with the C++ behind it, a header of this folder.

    The result is valid after "extern" or without it, with a semicolon behind it or none, in a block of C or
    of C++. torch's caches of compiled code depend on the text, not on what that includes: hence the digest.

    Args:
        isa: what lanes.h is compiled for; None where the header does not include it.
    """
    return f'{declared};\nextern "C++" {{\n{included(header, isa)}\n}}'


def included(header: str, isa: Isa | None = None) -> str:
    """Return the lines that include a header."""
    chosen = "" if isa is None else f"#define {macro(isa)} 1\n"
    path = (HEADERS / header).as_posix()
    return f'// {digest(HEADERS)}\n{chosen}#include "{path}"'


def macro(isa: Isa) -> str:
    """Return the name by which lanes.h knows a set."""
    return f"QOMPOSE_{isa.name.upper()}"


def digest(folder: Path) -> str:
    """Return a hash of the C++ headers of a folder."""
    contents = (path.read_bytes() for path in sorted(folder.glob("*.h")))
    return hashlib.sha256(b"".join(contents)).hexdigest()[:16]


def uncompiled(reference: Callable[..., Any]) -> Callable[..., Any]:
    """Return what computes an operator in a graph that was not compiled, or compiled without the C++."""

    def compute(*arguments: Any) -> Any:
        warn_uncompiled()
        return reference(*arguments)

    return compute


def warn_uncompiled() -> None:
    """Warn of an operator that runs in a graph that was not compiled, or compiled without the C++."""
    warnings.warn(
        "An operator in compiled code falls back to torch operators, exact but slow. Do not "
        "change the compiler option cpp_wrapper, which qompose.compile_lowered sets",
        stacklevel=3,
    )
