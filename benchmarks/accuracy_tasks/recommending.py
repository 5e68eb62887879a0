# SPDX-License-Identifier: Apache-2.0
"""A recommender with embedding bags, on made-up interactions: judged on users of other habits."""

from __future__ import annotations

from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accuracy_tasks.subject import (
    MOST_BATCHES,
    Figures,
    Inputs,
    Settings,
    Subject,
    batched,
    classes,
    drawer,
    source_of,
)

ITEMS, TASTES, ROWS, HISTORY, OFFERED, FACTS = 1000, 16, 64, 12, 16, 8
WIDTH = 32
JUDGED_BATCHES = 8
HABITS = {"broad tastes": (1.0, 1.0), "rare items": (3.0, 0.0), "followers": (3.0, 2.0)}
"""How sharp a user's taste is, and how strongly popular items are preferred (calibration: 3, 1)."""
USUAL = (3.0, 1.0)


class Recommender(nn.Module):
    """A user's history as a bag and dense facts, against items offered: `(N, 16)` scores."""

    def __init__(self) -> None:
        super().__init__()
        self.history = nn.EmbeddingBag(ITEMS, WIDTH, mode="mean")
        self.offered = nn.Embedding(ITEMS, WIDTH)
        self.facts = nn.Sequential(nn.Linear(FACTS, 32), nn.ReLU(), nn.Linear(32, WIDTH))
        self.user = nn.Sequential(nn.Linear(2 * WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH))
        self.judge = nn.Sequential(
            nn.Linear(3 * WIDTH, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1)
        )
        for table in (self.history, self.offered):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, history: Tensor, facts: Tensor, offered: Tensor) -> Tensor:
        user = self.user(torch.cat([self.history(history), self.facts(facts)], -1))
        items = self.offered(offered)
        user = user.unsqueeze(1).expand_as(items)
        both = user * items
        return self.judge(torch.cat([user, items, both], -1)).squeeze(-1) + both.sum(-1)


@cache
def _world() -> tuple[Tensor, Tensor]:
    """The tastes that items meet, and how popular they are."""
    generator = drawer(13)
    tastes = F.normalize(torch.randn(ITEMS, TASTES, generator=generator), dim=-1)
    return tastes, torch.randn(ITEMS, generator=generator)


def _draw(
    habit: tuple[float, float], generator: torch.Generator, rows: int = ROWS
) -> tuple[Inputs, Tensor]:
    """Histories, facts and offers, and which of the items offered is taken."""
    tastes, popular = _world()
    sharp, following = habit
    taste = torch.randn(rows, TASTES, generator=generator)
    liking = sharp * taste @ tastes.T + following * popular
    history = torch.multinomial(liking.softmax(-1), HISTORY, generator=generator)
    offered = torch.randint(ITEMS, (rows, OFFERED), generator=generator)
    facts = taste[:, :FACTS] + 0.3 * torch.randn(rows, FACTS, generator=generator)
    facts[:, -1] = facts[:, -1].exp() * following  # money spent, say: a long tail
    taken = liking.gather(1, offered).argmax(-1)
    return (history, facts, offered), taken


def _loss(net: nn.Module, step: int) -> Tensor:
    """Every third step on users whose habits are not those of calibration."""
    habit = [USUAL, USUAL, *HABITS.values()][step % (2 + len(HABITS))]
    inputs, taken = _draw(habit, drawer(14, step), rows=128)
    return F.cross_entropy(net(*inputs), taken)


def _figures(expected: Tensor, found: Tensor, truth: Tensor | None) -> Figures:
    measured = classes(expected, found, truth)
    return {"hit rate": measured["accuracy"], "as float": measured["as float"]}


def _judged(number: int, habit: tuple[float, float], batch: int) -> tuple[Inputs, Tensor]:
    return _draw(habit, drawer(15, number, batch))


def recommender(settings: Settings) -> Subject:
    """Two tables of 1,000 items, and linears."""
    net = settings.trained("recommender", Recommender, _loss, steps=2500, rate=1e-2)
    calibration = batched(
        settings.few(MOST_BATCHES), lambda number: _draw(USUAL, drawer(16, number))[0]
    )
    judged = {
        name: source_of(partial(_judged, number, habit), settings.few(JUDGED_BATCHES))
        for number, (name, habit) in enumerate(HABITS.items())
    }
    title = f"Recommender with a bag: calibrated with usual users; judged on {', '.join(HABITS)}"
    return Subject(title, net, calibration, judged, _figures, tables=True)
