# SPDX-License-Identifier: Apache-2.0
"""Quantization-aware training: the trained form of a program, its modes and its schedule."""

from qompose.training.train_eval import (
    QATSchedule,
    allow_exported_model_train_eval,
    disable_fake_quant,
    disable_observer,
    disable_range_learning,
    enable_fake_quant,
    enable_observer,
    enable_range_learning,
    freeze_batch_norm,
    move_exported_model_to_eval,
    move_exported_model_to_train,
    unfreeze_batch_norm,
)

__all__ = [
    "QATSchedule",
    "allow_exported_model_train_eval",
    "disable_fake_quant",
    "disable_observer",
    "disable_range_learning",
    "enable_fake_quant",
    "enable_observer",
    "enable_range_learning",
    "freeze_batch_norm",
    "move_exported_model_to_eval",
    "move_exported_model_to_train",
    "unfreeze_batch_norm",
]
