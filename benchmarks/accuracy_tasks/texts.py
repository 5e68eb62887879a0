# SPDX-License-Identifier: Apache-2.0
"""Texts that a machine with these packages has: docstrings, licences, source code, prose, other languages."""

from __future__ import annotations

import gettext
import importlib.util
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

from accuracy_tasks import subject  # noqa: F401  # finds the examples

# isort: split
import sentence_task

LONGEST, SHORTEST = sentence_task.MAX_CHARACTERS, sentence_task.MIN_CHARACTERS
PACKAGES = (
    "torch", "numpy", "scikit-learn", "scipy", "transformers", "tokenizers", "pluggy", "jinja2",
    "sympy", "rich", "networkx", "torchao", "executorch", "nncf", "onnx", "safetensors",
)  # fmt: skip
LANGUAGES = ("de", "fr", "es", "it", "ru", "ja", "zh_CN", "ko", "ar", "hi", "tr", "pl")
CODE = ("argparse", "ast", "asyncio", "csv", "email", "http", "inspect", "json", "logging",
        "pathlib", "pickle", "socket", "tarfile", "threading", "typing", "zipfile")  # fmt: skip
_SKLEARN = tuple(
    f"sklearn.{name}" for name in
    ("calibration", "cluster", "compose", "datasets", "decomposition", "ensemble", "feature_extraction",
     "gaussian_process", "inspection", "linear_model", "manifold", "metrics", "mixture", "naive_bayes",
     "neighbors", "neural_network", "pipeline", "preprocessing", "svm", "tree")
)  # fmt: skip


def _prose() -> list[str]:
    """What packages say of themselves, and descriptions of scikit-learn's data.

    Where importlib_metadata is imported, packages say nothing: it has no payloads. Figures on file are
    without it or with it, as the script was run, so this stays.
    """
    said = [str(found.metadata.get_payload()) for found in sentence_task.installed(PACKAGES)]
    return sentence_task.paragraphs([*said, *sentence_task.descriptions_of_data()])


def _code() -> list[str]:
    return sentence_task.paragraphs(sources(CODE))


def sources(modules: Iterable[str]) -> Iterator[str]:
    """The source of each module, and of each one directly in it."""
    for name in modules:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            continue
        file = Path(spec.origin)
        files = sorted(file.parent.glob("*.py")) if file.name == "__init__.py" else [file]
        for one in files:
            yield one.read_text("utf-8")


def _languages() -> list[str]:
    """Sphinx's messages, a few joined."""
    locales = sentence_task.package_folder("sphinx") / "locale"
    found: set[str] = set()
    for language in LANGUAGES:
        file = locales / language / "LC_MESSAGES" / "sphinx.mo"
        with file.open("rb") as stream:
            catalogue = gettext.GNUTranslations(stream)._catalog  # type: ignore[attr-defined]
        said = [text for key, text in sorted(catalogue.items(), key=str) if key and text]
        joined = (" ".join(map(str, said[i : i + 3])) for i in range(0, len(said), 3))
        found |= {text[:LONGEST].strip() for text in joined if len(text) >= SHORTEST}
    return sorted(found)


_SOURCES: dict[str, Callable[[], list[str]]] = {
    "torch": lambda: sentence_task.texts(sentence_task.TORCH),
    "numpy": lambda: sentence_task.texts(sentence_task.NUMPY),
    "scikit-learn": lambda: sentence_task.texts(_SKLEARN),
    "stdlib": sentence_task.texts,
    "licences": lambda: sentence_task.licences(PACKAGES),
    "code": _code,
    "prose": _prose,
    "other languages": _languages,
}


@cache
def texts(*names: str) -> tuple[str, ...]:
    """Sorted distinct texts of the named sources."""
    return tuple(sorted({text for name in names for text in _SOURCES[name]()}))
