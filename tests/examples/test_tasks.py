# SPDX-License-Identifier: Apache-2.0
"""The example tasks measure what they say: data are fixed, metrics obey their laws."""

from __future__ import annotations

import logging
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor


@pytest.fixture(scope="module")
def sentence(example: Any) -> ModuleType:
    return example("sentence_task")


@pytest.fixture(scope="module")
def digits(example: Any) -> ModuleType:
    return example("digits_task", "sklearn")


@pytest.fixture(scope="module")
def texts(sentence: ModuleType) -> list[str]:
    return sentence.texts()


def _directions(*degrees: float) -> Tensor:
    angles = torch.deg2rad(torch.tensor(degrees, dtype=torch.float64))
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def test_split_is_a_partition(sentence: ModuleType, texts: list[str]) -> None:
    inside, outside = sentence.split(texts)
    assert len(inside) == sentence.CALIBRATION_BATCHES * sentence.BATCH_SIZE
    assert sorted(inside + outside) == texts


def test_demo_judges_by_texts_of_other_sources_than_it_calibrates_with(example: Any) -> None:
    sentence = example("sentence_task", "sklearn")
    calibration, judged = sentence.calibration_texts(), sentence.judged_texts()
    assert len(calibration) == sentence.CALIBRATION_BATCHES * sentence.BATCH_SIZE
    assert {*calibration} <= {*sentence.texts((*sentence.TORCH, *sentence.NUMPY))}
    assert len(judged) == 3
    every = [text for of_kind in judged.values() for text in of_kind]
    assert len({*every}) == len(every) > 2.5 * sentence.JUDGED_OF_EACH
    assert not {*every} & {*sentence.texts((*sentence.TORCH, *sentence.NUMPY))}
    assert [len(few) for few in sentence.judged_texts(7).values()] == [7] * 3


def test_what_others_add_to_a_class_is_no_docstring_of_it(
    sentence: ModuleType, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers gives loggers methods; texts must not depend on what is imported."""

    def added(self: logging.Logger) -> None:
        """Say what is never said otherwise, in so many words that it would be one of the texts."""

    monkeypatch.setattr(logging.Logger, "added", added, raising=False)
    assert sentence.texts() == texts


def test_paragraphs_are_distinct_cut_and_sorted(sentence: ModuleType) -> None:
    long, other = "word " * 200, "another paragraph " * 4
    found = sentence.paragraphs([f"{long}\n\ntoo short\n \n{other}", other])
    assert found == [other.strip(), long[: sentence.MAX_CHARACTERS].strip()]


def test_prose_and_licences_skip_what_is_not_installed(example: Any) -> None:
    sentence = example("sentence_task", "sklearn")
    assert sentence.licences(["no-such-package"]) == []
    assert sentence.prose(["no-such-package"]) == sentence.prose([])
    assert len(sentence.prose(["torch"])) > len(sentence.prose([]))


def test_signal_to_noise(sentence: ModuleType) -> None:
    a = torch.tensor([[3.0, 4.0]])
    assert sentence.signal_to_noise(a, a * 1.1) == pytest.approx(20.0, abs=1e-5)
    assert sentence.signal_to_noise(a, a) == float("inf")


@pytest.mark.parametrize("metric", ["mean_cosine", "same_nearest_neighbour"])
def test_metrics(sentence: ModuleType, metric: str) -> None:
    """Of equal vectors one, whatever the length of rows; of rows in another order much less."""
    vectors = torch.randn(40, 12, generator=torch.Generator().manual_seed(1))
    lengths = torch.linspace(0.1, 9.0, len(vectors)).unsqueeze(1)
    measure = getattr(sentence, metric)
    assert measure(vectors, vectors * lengths) == pytest.approx(1.0, abs=1e-6)
    assert measure(vectors, vectors.roll(1, dims=0)) < 0.5


def test_nearest_neighbour_is_never_the_row_itself(sentence: ModuleType) -> None:
    """Row 3 moves from row 2 to row 1: rows 0 and 2 keep their nearest, rows 1 and 3 do not."""
    a, b = (_directions(0, 10, 90, 100), _directions(0, 10, 90, 15))
    assert sentence.same_nearest_neighbour(a, b) == pytest.approx(0.5)


def test_sentence_encoder_ignores_padding(sentence: ModuleType) -> None:
    """What stands at masked positions does not reach the pooled vector."""

    class Table(torch.nn.Embedding):
        def forward(self, input_ids: Tensor, **_: object) -> tuple[Tensor]:
            return (super().forward(input_ids),)

    encoder = sentence.SentenceEncoder(Table(9, 4))
    mask = torch.tensor([[1, 1, 0]])
    first, second = (encoder(torch.tensor([[3, 5, pad]]), mask) for pad in (0, 8))
    assert torch.equal(first, second)
    assert first.norm().item() == pytest.approx(1.0)


def test_digits_split_is_fixed_disjoint_and_complete(digits: ModuleType) -> None:
    train, test = digits.load()
    again, _ = digits.load()
    assert (len(train), len(test)) == (1347, 450)
    assert torch.equal(train.images, again.images)
    assert test.labels.bincount().min() >= 30
    assert train.images.shape[1:] == (1, 8, 8)
    assert (train.images.min(), train.images.max()) == (0.0, 1.0)
