# SPDX-License-Identifier: Apache-2.0
"""What `accuracy.py` judges: a float network, data to calibrate it, and other data to judge it by."""

from __future__ import annotations

import hashlib
import inspect
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples")]

MOST_BATCHES = 64
"""The largest number of batches that anybody calibrates with."""

Inputs = tuple[Tensor, ...]
Figures = dict[str, float]


@dataclass(frozen=True)
class Source:
    """Judged data of one origin, in batches of the shape of the calibration's, and the truth if known."""

    batches: list[Inputs]
    truth: Tensor | None = None


def samples(outputs: Tensor) -> Tensor:
    """A row for each sample."""
    return outputs.flatten(1)


def positions(outputs: Tensor) -> Tensor:
    """A row for each position of each sample."""
    return outputs.flatten(0, -2)


@dataclass(frozen=True)
class Subject:
    """A float network in eval mode, and everything that it takes to judge what others make of it.

    Attributes:
        title: what it is and what it is calibrated and judged by, in a line.
        calibration: batches; an engine that gets fewer of them gets the first.
        judged: by name of the source, none of it from where calibration data come from.
        figures: the task's own measures, of outputs of the float network, outputs to judge, and the truth.
        rows: outputs as `(rows, features)`, each row with a cosine of its own.
        transformer: whether engines that ask are told that it is one.
        tables: whether there are embedding tables for a backend of tables.
    """

    title: str
    module: nn.Module
    calibration: list[Inputs]
    judged: dict[str, Source]
    figures: Callable[[Tensor, Tensor, Tensor | None], Figures]
    rows: Callable[[Tensor], Tensor] = samples
    transformer: bool = False
    tables: bool = False

    def truth(self) -> Tensor | None:
        """The truth of all sources together."""
        known = [source.truth for source in self.judged.values() if source.truth is not None]
        return torch.cat(known) if known else None


@dataclass(frozen=True)
class Settings:
    """Where trained weights are kept, and whether all is for a look only."""

    cache: Path
    quick: bool = False

    def few(self, number: int) -> int:
        """So many, or a tenth of that for a look."""
        return max(1, number // 10) if self.quick else number

    def trained(
        self,
        name: str,
        make: Callable[[], nn.Module],
        loss: Callable[[Any, int], Tensor],
        steps: int,
        rate: float = 3e-3,
    ) -> nn.Module:
        """The network of `make`, trained to the end unless its weights are kept.

        Args:
            loss: of the network at a step, on data that depend on the number of the step alone.
        """
        from digits_task import one_thread

        steps = self.few(steps)
        file = self.cache / f"{name}-{_digest((make, loss), steps, rate)}.pt"
        with torch.random.fork_rng(devices=[]), one_thread():
            torch.manual_seed(0)
            net = make()
            if file.is_file():
                net.load_state_dict(torch.load(file, weights_only=True))
                return net.eval()
            print(f"{name}: {steps} steps of training", file=sys.stderr, flush=True)
            _fit(net, loss, steps, rate)
        self.cache.mkdir(parents=True, exist_ok=True)
        torch.save(net.state_dict(), file)
        return net.eval()


def _digest(parts: Sequence[Any], *numbers: float) -> str:
    """Of everything that weights depend on: the modules of network and loss, these lines, and torch."""
    modules = dict.fromkeys([*map(inspect.getmodule, parts), sys.modules[__name__]])
    sources = [inspect.getsource(module) for module in modules if module is not None]
    text = "\n".join([*sources, *map(str, numbers), torch.__version__])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _fit(net: nn.Module, loss: Callable[[Any, int], Tensor], steps: int, rate: float) -> None:
    optimizer = torch.optim.AdamW(net.parameters(), lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps + 1, pct_start=0.1)
    net.train()
    for step in range(steps):
        optimizer.zero_grad()
        loss(net, step).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            schedule.step()


def drawer(*numbers: int) -> torch.Generator:
    """A generator that equal numbers give equal data."""
    seed = 0
    for number in numbers:
        seed = seed * 100_003 + number + 1
    return torch.Generator().manual_seed(seed)


def share(found: Tensor, wanted: Tensor) -> float:
    """The part of entries that are equal."""
    return float((found == wanted).double().mean())


def classes(expected: Tensor, found: Tensor, truth: Tensor | None) -> Figures:
    """How often the largest logit is the right one, and how often the float network's."""
    assert truth is not None
    chosen = found.argmax(-1)
    return {"accuracy": share(chosen, truth), "as float": share(chosen, expected.argmax(-1))}


def source_of(draw: Callable[[int], tuple[Inputs, Tensor]], batches: int) -> Source:
    """So many batches with their truth, each drawn with its number."""
    drawn = [draw(number) for number in range(batches)]
    return Source([inputs for inputs, _ in drawn], torch.cat([truth for _, truth in drawn]))


def batched(count: int, draw: Callable[[int], Inputs]) -> list[Inputs]:
    """So many batches, each drawn with its number."""
    return [draw(number) for number in range(count)]


def spread(items: Sequence[Any], count: int) -> list[Any]:
    """So many of the items, evenly spread, in an order of chance that is always the same."""
    count = min(count, len(items))
    chosen = [items[index * len(items) // count] for index in range(count)]
    order = torch.randperm(count, generator=drawer(count))
    return [chosen[int(index)] for index in order]
