# SPDX-License-Identifier: Apache-2.0
"""Texts that a machine with these packages has: docstrings, licences, source code, prose, other languages."""

from __future__ import annotations

import gettext
import importlib.util
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from accuracy_tasks import subject  # noqa: F401  # finds the examples

LONGEST, SHORTEST = 400, 50
"""Characters of a text."""
PACKAGES = (
    "torch", "numpy", "scikit-learn", "scipy", "transformers", "tokenizers", "pluggy", "jinja2",
    "sympy", "rich", "networkx", "torchao", "executorch", "nncf", "onnx", "safetensors",
)  # fmt: skip
LANGUAGES = ("de", "fr", "es", "it", "ru", "ja", "zh_CN", "ko", "ar", "hi", "tr", "pl")
CODE = ("argparse", "ast", "asyncio", "csv", "email", "http", "inspect", "json", "logging",
        "pathlib", "pickle", "socket", "tarfile", "threading", "typing", "zipfile")  # fmt: skip
_TORCH = ("torch", "torch.nn", "torch.nn.functional", "torch.linalg", "torch.optim", "torch.fft",
          "torch.special", "torch.distributions", "torch.utils.data")  # fmt: skip
_NUMPY = ("numpy", "numpy.linalg", "numpy.fft", "numpy.random", "numpy.ma", "numpy.testing",
          "numpy.polynomial")  # fmt: skip
_SKLEARN = tuple(
    f"sklearn.{name}" for name in
    ("calibration", "cluster", "compose", "datasets", "decomposition", "ensemble", "feature_extraction",
     "gaussian_process", "inspection", "linear_model", "manifold", "metrics", "mixture", "naive_bayes",
     "neighbors", "neural_network", "pipeline", "preprocessing", "svm", "tree")
)  # fmt: skip


def _docstrings(*modules: str) -> list[str]:
    from sentence_task import texts

    return texts(modules)


def _stdlib() -> list[str]:
    from sentence_task import texts

    return texts()


def _cut(text: str) -> Iterator[str]:
    """The paragraphs of a text that are long enough."""
    for part in re.split(r"\n\s*\n", text):
        short = part.strip()[:LONGEST].strip()
        if len(short) >= SHORTEST:
            yield short


def _paragraphs(texts: Iterable[str]) -> list[str]:
    return sorted({part for text in texts for part in _cut(text)})


def _licences() -> list[str]:
    found = []
    for name in PACKAGES:
        try:
            files = distribution(name).files or []
        except PackageNotFoundError:
            continue
        wanted = [f for f in files if re.match(r"(?i)(licen|notice|copying)", f.name)]
        found += [Path(str(f.locate())).read_text("utf-8", "replace") for f in wanted]
    return _paragraphs(found)


def _prose() -> list[str]:
    """What packages say of themselves, and descriptions of scikit-learn's data."""
    found = []
    for name in PACKAGES:
        try:
            found.append(distribution(name).metadata.get_payload())
        except PackageNotFoundError:
            continue
    folder = _folder("sklearn") / "datasets" / "descr"
    found += [file.read_text("utf-8") for file in sorted(folder.glob("*.rst"))]
    return _paragraphs(map(str, found))


def _code() -> list[str]:
    return _paragraphs(sources(CODE))


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
    found: set[str] = set()
    for language in LANGUAGES:
        file = _folder("sphinx") / "locale" / language / "LC_MESSAGES" / "sphinx.mo"
        with file.open("rb") as stream:
            catalogue = gettext.GNUTranslations(stream)._catalog  # type: ignore[attr-defined]
        said = [text for key, text in sorted(catalogue.items(), key=str) if key and text]
        joined = (" ".join(map(str, said[i : i + 3])) for i in range(0, len(said), 3))
        found |= {text[:LONGEST].strip() for text in joined if len(text) >= SHORTEST}
    return sorted(found)


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"texts of {package} need: pip install {package}")
    return Path(spec.submodule_search_locations[0])


_SOURCES: dict[str, Callable[[], list[str]]] = {
    "torch": lambda: _docstrings(*_TORCH),
    "numpy": lambda: _docstrings(*_NUMPY),
    "scikit-learn": lambda: _docstrings(*_SKLEARN),
    "stdlib": _stdlib,
    "licences": _licences,
    "code": _code,
    "prose": _prose,
    "other languages": _languages,
}


@cache
def texts(*names: str) -> tuple[str, ...]:
    """Sorted distinct texts of the named sources."""
    return tuple(sorted({text for name in names for text in _SOURCES[name]()}))
