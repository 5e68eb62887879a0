# SPDX-License-Identifier: Apache-2.0
"""The reference has every public name once, and their docstrings say shapes and errors."""

from __future__ import annotations

import builtins
import importlib
import inspect
from collections import Counter

import pytest

from docs.building import api, navigation
from tests import docstrings
from tests.docstrings import Documented
from tests.pages import ROOT

PUBLIC = [*docstrings.public()]
NEVER = {  # what is read as an error, and cannot be raised
    "qompose_embedding.get_default_embedding_quantization_config": {"ConfigError"},  # called rightly
    "qompose.load": {"ValueError"},  # of a damaged file, which it catches and raises as ArtefactError
}  # fmt: skip


def _on(page: str) -> list[str]:
    return api.listed((api.PAGES / page).read_text("utf-8"))


def test_every_public_name_is_on_one_page() -> None:
    """Of core, of the contract suite and of each plugin; nothing else is public."""
    pages = [path.name for path in sorted(api.PAGES.glob("*.md"))]
    listed = Counter(name for page in pages for name in _on(page))
    assert {name: listed[name] for name in api.public_names()} == dict.fromkeys(
        api.public_names(), 1
    )
    assert [name for name, times in listed.items() if times > 1] == []


def test_other_names_are_types_that_exist() -> None:
    """What is not public stands on the page for that, or is a base of an observer."""
    others = [name for name in api.documented() if name not in api.public_names()]
    for name in others:
        assert api.entry(name).name == name.rpartition(".")[2]
    bases = {"qompose.observers.min_max.Observer", "qompose.observers.min_max.RangeObserver"}
    bases |= {
        f"qompose.observers.histogram_observers.{n}" for n in ("SearchingObserver", "OfHistogram")
    }
    assert {*others} - {*_on("types.md")} == bases


def test_constants_say_what_they_are() -> None:
    found = [api.entry(path) for path in api.documented()]
    assert [each.path for each in found if each.kind == "data" and not api.data_doc(each)] == []


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


def test_menu_has_every_page_once() -> None:
    pages = Counter(navigation.pages(ROOT))
    assert {*pages.values()} == {1}
    written = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md"), *ROOT.glob("plugins/*/README.md")]
    assert {file.relative_to(ROOT).with_suffix("").as_posix() for file in written} <= {*pages}
