# SPDX-License-Identifier: Apache-2.0
"""What can be read of a public docstring: the errors that it names, and whether it says shapes."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import qompose
from qompose.errors import InternalError

from tests.pages import PLUGINS

_SHAPE = re.compile(r"shape|`\(|dimension|per tensor|scalar|any size|elements")


@dataclass(frozen=True)
class Documented:
    """A public function or method, with its docstring, or that of a base or of its class."""

    path: str
    function: Callable[..., Any]
    text: str


def packages() -> tuple[str, ...]:
    """Return the packages of this repository with public names: core's, and that of each plugin."""
    submodules = sorted(f"qompose.{name}" for name in qompose._submodules)
    plugins = (f"qompose_{name}" for name in PLUGINS)
    return ("qompose", *submodules, "qompose.backend.kit", "qompose.testing", *plugins)


def public_names() -> dict[str, Any]:
    """Return every public value by its path; if two packages have it, by that of the first."""
    found: dict[int, tuple[str, Any]] = {}
    for package in packages():
        module = importlib.import_module(package)
        for name in module.__all__:
            value = getattr(module, name)
            if not inspect.ismodule(value):
                found.setdefault(id(value), (f"{package}.{name}", value))
    return dict(found.values())


def is_data(path: str, value: Any) -> bool:
    """Tell whether a public name is a constant or a name of a type, which has no docstring."""
    return getattr(value, "__name__", "") != path.rpartition(".")[2]


def public() -> Iterator[Documented]:
    """Yield what is called of the public names, each once."""
    for path, value in sorted(public_names().items()):
        if is_data(path, value):
            continue
        if inspect.isroutine(value):
            yield Documented(path, value, inspect.getdoc(value) or "")
        elif inspect.isclass(value):
            yield from _methods(path, value)


def _methods(path: str, cls: type) -> Iterator[Documented]:
    for name, member in vars(cls).items():
        function = _function(member)
        if function is None or function.__module__ != cls.__module__:
            continue  # what dataclasses write has no source
        if name in getattr(cls, "__dataclass_fields__", {}):
            continue  # a field whose default is a function; the class tells what it is
        if name in ("__init__", "__post_init__", "__new__"):
            yield Documented(path, function, inspect.getdoc(cls) or "")
        elif not name.startswith("_"):
            yield Documented(
                f"{path}.{name}", function, inspect.getdoc(member) or _inherited(cls, name)
            )


def _inherited(cls: type, name: str) -> str:
    texts = (inspect.getdoc(vars(base)[name]) for base in cls.__mro__ if name in vars(base))
    return next((text for text in texts if text), "")


def _function(member: Any) -> Callable[..., Any] | None:
    if isinstance(member, property):
        member = member.fget
    if isinstance(member, (staticmethod, classmethod)):
        member = member.__func__
    return (
        member
        if inspect.isfunction(member) and "<string>" not in member.__code__.co_filename
        else None
    )


def raised(function: Callable[..., Any]) -> set[str]:
    """Return the names of the errors that a function raises itself, or by a helper of its module."""
    return _raised(inspect.unwrap(function), set())


def _raised(function: Callable[..., Any], seen: set[object]) -> set[str]:
    if function in seen:
        return set()
    seen.add(function)
    module = importlib.import_module(function.__module__)
    names = set()
    for node in _own_nodes(function):
        if isinstance(node, ast.Raise) and node.exc is not None:
            error = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            names.add(ast.unparse(error).rpartition(".")[2])
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            helper = getattr(module, node.func.id, None)
            if inspect.isfunction(helper) and helper.__module__ == module.__name__:
                names |= _raised(inspect.unwrap(helper), seen)
    return {name for name in names if _is_error(module, name)}


def _own_nodes(function: Callable[..., Any]) -> Iterator[ast.AST]:
    """Yield the nodes of a function's body, without those within `try` whose errors it may catch."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        yield node
        children = ast.iter_child_nodes(node)
        if isinstance(node, ast.Try) and node.handlers:
            children = iter([*node.handlers, *node.orelse, *node.finalbody])
        todo += children


def _is_error(module: Any, name: str) -> bool:
    found = getattr(module, name, None) or getattr(builtins, name, None)
    bug = (
        InternalError,
        NotImplementedError,
    )  # what should never be seen, and what a subclass has to write
    return (
        inspect.isclass(found) and issubclass(found, BaseException) and not issubclass(found, bug)
    )


def says(text: str, error: type[BaseException]) -> bool:
    """Tell whether the "Raises:" of a docstring names an error, or a kind of it that is no base of all."""
    section = re.search(r"^Raises:\n((?:[ ]+.*\n?|\n)*)", text, re.MULTILINE)
    named = re.findall(r"\w+(?:Error|Lowerable)|Not\w+", section[1]) if section else []
    return any(cls.__name__ in named for cls in error.__mro__)


def unreadable_entries(text: str) -> list[str]:
    """Return the entries of a docstring's sections that do not have their names and a colon on one line."""
    sections = re.findall(r"^(?:Args|Attributes|Raises):\n((?:[ ]+.*\n?|\n)*)", text, re.MULTILINE)
    lines = [line for section in sections for line in section.splitlines()]
    entries = [line.strip() for line in lines if re.match(r" {4}\S", line)]
    return [entry for entry in entries if not re.match(r"[\w*]+(, [\w*]+)*: ", entry)]


def takes_tensors(function: Callable[..., Any]) -> bool:
    """Tell whether a function takes or returns tensors, by its annotations."""
    return any(re.search(r"\bTensor\b", str(each)) for each in function.__annotations__.values())


def says_shapes(text: str) -> bool:
    """Tell whether a docstring says anything of shapes."""
    return _SHAPE.search(text) is not None
