# SPDX-License-Identifier: Apache-2.0
"""Why a plugin could not be imported: the error, where it was raised, and the remedy."""

from __future__ import annotations

import importlib
import os
import re
import traceback
from pathlib import Path

import importlib_metadata
import pluggy
from importlib_metadata import PackageNotFoundError, requires

_HOST = tuple(
    f"{Path(file).parent}{os.sep}"
    for file in (__file__, importlib.__file__, importlib_metadata.__file__, pluggy.__file__)
)


def told(error: BaseException) -> str:
    """Return an error's type and message, and the line of code that raised it."""
    if isinstance(error, SyntaxError) and error.filename:
        return (
            f"{type(error).__name__}: {error.msg} ({_short(error.filename)}, line {error.lineno})"
        )
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _is_plugin(frame.filename)]
    return f"{text} ({_short(own[-1].filename)}, line {own[-1].lineno})" if own else text


def _is_plugin(filename: str) -> bool:
    """Whether a file belongs neither to the host nor to what it imports plugins with."""
    return not filename.startswith(("<frozen ", *_HOST))


def _short(filename: str) -> str:
    return "/".join(Path(filename).parts[-2:])


def import_fault(error: BaseException, module: str, distribution: str) -> str:
    """Return why importing `module` of `distribution` failed, with the remedy where it is known."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return told(error)
    missing = error.name
    home = module.partition(":")[0].strip()
    if home == missing or home.startswith(f"{missing}."):
        return (
            f"its package says that it has a module {missing!r}, and there is none: reinstall or "
            f"uninstall {distribution}"
        )
    return f"{told(error)}: {_remedy(missing, distribution)}"


def _remedy(missing: str, distribution: str) -> str:
    """Say what to install; by the name that the plugin itself requires, where that is recognisable."""
    top = missing.partition(".")[0]
    try:
        wanted = requires(distribution) or []
    except (PackageNotFoundError, ValueError):
        wanted = []
    for requirement in wanted:
        specifier = requirement.partition(";")[0].strip()
        name = re.split(r"[^\w.-]", specifier, maxsplit=1)[0]
        if re.sub(r"[-_.]+", "_", name).lower() == top.lower():
            return f'pip install "{specifier}"'
    return f"install the package that has the module {top!r}"
