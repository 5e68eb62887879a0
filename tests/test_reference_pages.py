# SPDX-License-Identifier: Apache-2.0
"""The reference has every public name once, and their docstrings say shapes and errors."""

from __future__ import annotations

import builtins
import importlib
import inspect
import re

import pytest

from docs.constants import text_after
from tests import docstrings
from tests.docstrings import Documented
from tests.pages import ROOT

PUBLIC = [*docstrings.public()]
NEVER = {  # what is read as an error, and cannot be raised
    "qompose_embedding.get_default_embedding_quantization_config": {"ConfigError"},  # called rightly
    "qompose.load": {"ValueError"},  # of a damaged file, which it catches and raises as ArtefactError
}  # fmt: skip


def _directives() -> list[tuple[str, str]]:
    """The directives of autodoc on the reference pages, with what each is about."""
    pages = "".join(page.read_text("utf-8") for page in ROOT.glob("docs/reference/*.rst"))
    return re.findall(r"^\.\. auto(\w+):: (\S+)$", pages, re.MULTILINE)


def test_the_reference_has_every_package_once() -> None:
    """With all its public functions and classes; constants, which autodoc passes over, are listed."""
    found = _directives()
    assert sorted(path for kind, path in found if kind == "module") == sorted(docstrings.packages())
    listed = {path for kind, path in found if kind == "data"}
    constants = {
        p for p, value in docstrings.public_names().items() if docstrings.is_data(p, value)
    }
    assert constants <= listed
    assert len({*found}) == len(found)


def test_constants_say_what_they_are() -> None:
    data = [path for kind, path in _directives() if kind == "data"]
    assert [path for path in data if not text_after(*path.rsplit(".", 1))] == []


@pytest.mark.parametrize("each", PUBLIC, ids=lambda each: each.path)
def test_docstring(each: Documented) -> None:
    """It is there, says shapes where there are tensors, and names what is raised."""
    assert each.text
    assert docstrings.unreadable_entries(each.text) == []
    assert not docstrings.takes_tensors(each.function) or docstrings.says_shapes(each.text)
    module = importlib.import_module(inspect.unwrap(each.function).__module__)
    raised = sorted(docstrings.raised(each.function) - NEVER.get(each.path, set()))
    errors = [getattr(module, name, None) or getattr(builtins, name) for name in raised]
    assert [error.__name__ for error in errors if not docstrings.says(each.text, error)] == []
