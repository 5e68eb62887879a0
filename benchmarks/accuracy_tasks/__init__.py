# SPDX-License-Identifier: Apache-2.0
"""The tasks of `accuracy.py`, by name: each makes a network, what calibrates it and what it is judged by."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from accuracy_tasks.images import digits, unet, vit
from accuracy_tasks.language import gpt
from accuracy_tasks.mobile import mobilenet
from accuracy_tasks.pitch import crepe
from accuracy_tasks.recommending import recommender
from accuracy_tasks.sentences import minilm, minilm_alike, minilm_demo
from accuracy_tasks.speech import conformer
from accuracy_tasks.subject import Settings, Subject

TASKS: dict[str, Callable[[Settings], Subject]] = {
    "minilm": minilm,
    "minilm-alike": minilm_alike,
    "minilm-demo": minilm_demo,
    "crepe-tiny": partial(crepe, "tiny", 32, 4),
    "crepe-full": partial(crepe, "full", 8, 2),
    "digits": digits,
    "vit": vit,
    "mobilenet": mobilenet,
    "unet": unet,
    "gpt": gpt,
    "recommender": recommender,
    "conformer": conformer,
}
