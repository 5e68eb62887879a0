# SPDX-License-Identifier: Apache-2.0
"""When training turns observers, fake quantizers and batch-norm statistics on and off."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from qompose.errors import ConfigError
from qompose.observers.fake_quantize import FakeQuantize
from qompose.training.train_eval import BatchNorm


def enable_observer(module: nn.Module) -> None:
    """Let a fake-quantizer estimate its range; for `model.apply`, other modules are left alone."""
    if isinstance(module, FakeQuantize):
        module.enable_observer()


def disable_observer(module: nn.Module) -> None:
    """Let a fake-quantizer keep its range; for `model.apply`, other modules are left alone."""
    if isinstance(module, FakeQuantize):
        module.disable_observer()


def enable_fake_quant(module: nn.Module) -> None:
    """Let a fake-quantizer round and clip; for `model.apply`, other modules are left alone."""
    if isinstance(module, FakeQuantize):
        module.enable_fake_quant()


def disable_fake_quant(module: nn.Module) -> None:
    """Let tensors pass a fake-quantizer unchanged; for `model.apply`, other modules are left alone."""
    if isinstance(module, FakeQuantize):
        module.disable_fake_quant()


def freeze_batch_norm(module: nn.Module) -> None:
    """Let a batch norm keep its running statistics and go by them in training too; for `model.apply`."""
    if isinstance(module, BatchNorm):
        module.frozen = True


def unfreeze_batch_norm(module: nn.Module) -> None:
    """Let a batch norm go by its batches in training again; for `model.apply`."""
    if isinstance(module, BatchNorm):
        module.frozen = False


@dataclass(frozen=True)
class QATSchedule:
    """From which step or epoch on what is simulated or kept; None is never.

    Attributes:
        fake_quantize_from: before it, ranges are estimated and nothing is rounded.
        observers_until: from it on, ranges stay what they are.
        batch_norm_until: from it on, batch norms go by running statistics, as the deployed model will.

    Raises:
        ConfigError: a number is negative; observers would stop before anything is simulated.
    """

    fake_quantize_from: int = 0
    observers_until: int | None = None
    batch_norm_until: int | None = None

    def __post_init__(self) -> None:
        for name, number in vars(self).items():
            if number is not None and (isinstance(number, bool) or not number >= 0):
                raise ConfigError(f"{name} must be the number of a step, got {number!r}")
        if self.observers_until == 0:
            raise ConfigError("observers_until=0: without a step there are no ranges to keep")

    def apply(self, model: nn.Module, step: int) -> None:
        """Put a prepared model into the state of a step or epoch, counted from 0, however it came there."""
        simulates = step >= self.fake_quantize_from
        model.apply(enable_fake_quant if simulates else disable_fake_quant)
        model.apply(disable_observer if _past(step, self.observers_until) else enable_observer)
        frozen = _past(step, self.batch_norm_until)
        model.apply(freeze_batch_norm if frozen else unfreeze_batch_norm)


def _past(step: int, limit: int | None) -> bool:
    return limit is not None and step >= limit
