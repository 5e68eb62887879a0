# SPDX-License-Identifier: Apache-2.0
"""MiniLM, a pretrained sentence encoder: calibrated with docstrings, judged on other kinds of text."""

from __future__ import annotations

from torch import Tensor

from accuracy_tasks.subject import MOST_BATCHES, Figures, Settings, Source, Subject, spread
from accuracy_tasks.texts import texts

ROWS = 16
CALIBRATED = ("torch", "numpy")
JUDGED = ("scikit-learn", "stdlib", "licences", "code", "prose", "other languages")
OF_EACH = 128
ALIKE, ALIKE_JUDGED = ("torch", "numpy", "scikit-learn"), 768


def minilm(settings: Settings) -> Subject:
    """Docstrings of torch and numpy to calibrate with; judged on 128 texts of each other source."""
    import sentence_task

    calibration = spread(texts(*CALIBRATED), ROWS * settings.few(MOST_BATCHES))
    judged = {name: _source(spread(texts(name), settings.few(OF_EACH))) for name in JUDGED}
    title = (
        "MiniLM, 16 x 64 tokens: calibrated with docstrings of torch and numpy; judged on "
        f"{', '.join(JUDGED)}"
    )
    return _subject(title, sentence_task.batches(calibration), judged)


def minilm_alike(settings: Settings) -> Subject:
    """Calibration and judgement from the same three packages, other docstrings."""
    import sentence_task

    every = spread(texts(*ALIKE), ALIKE_JUDGED + ROWS * MOST_BATCHES)
    judged = {"docstrings": _source(every[: settings.few(ALIKE_JUDGED)])}
    title = (
        "MiniLM, 16 x 64 tokens: calibrated with docstrings of torch, numpy and scikit-learn, judged on "
        f"{settings.few(ALIKE_JUDGED)} others of them"
    )
    count = ROWS * settings.few(MOST_BATCHES)
    calibration = sentence_task.batches(every[ALIKE_JUDGED : ALIKE_JUDGED + count])
    return _subject(title, calibration, judged)


def minilm_demo(settings: Settings) -> Subject:
    """The texts of examples/sentence_encoder.py; it calibrates with eight batches, and there are no more."""
    import sentence_task

    batches = sentence_task.batches(sentence_task.calibration_texts())
    found = sentence_task.judged_texts(settings.few(sentence_task.JUDGED_OF_EACH))
    judged = {kind: _source(of_kind) for kind, of_kind in found.items()}
    title = (
        f"MiniLM, 16 x 64 tokens: calibrated with {sentence_task.CALIBRATED}; judged on "
        f"{', '.join(found)} of other packages"
    )
    return _subject(title, batches[: settings.few(len(batches))], judged)


def _subject(
    title: str, calibration: list[tuple[Tensor, Tensor]], judged: dict[str, Source]
) -> Subject:
    import sentence_task

    return Subject(
        title,
        sentence_task.load(),
        [*calibration],
        judged,
        _figures,
        transformer=True,
        tables=True,
    )


def _source(found: list[str]) -> Source:
    """Full batches: every engine is exported with one shape."""
    import sentence_task

    full = len(found) // ROWS * ROWS or ROWS
    return Source([*sentence_task.batches([*found, *found[:ROWS]][:full])])


def _figures(expected: Tensor, found: Tensor, truth: Tensor | None) -> Figures:
    from sentence_task import same_nearest_neighbour

    return {"same neighbour": same_nearest_neighbour(expected, found)}
