# SPDX-License-Identifier: Apache-2.0
"""Options that several commands share."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qompose.errors import BatchError, CalibrationError, ConfigError, UserError, near_names

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from qompose.cli.calibration_data import Batch, Inputs
    from qompose.quantizer.base import Quantizer


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise ArgumentTypeError(f"{text!r} is no positive number")
    return int(text)


def add_quantizer(parser: ArgumentParser, required: bool = True) -> None:
    """Add the options that `chosen_quantizer` reads."""
    how = parser.add_mutually_exclusive_group(required=required)
    how.add_argument(
        "--backend", action="append", metavar="NAME[:CONFIG]",
        help="an installed backend, and one of its configurations (the first, if none is named); several, in "
        "order of priority; `qompose capabilities` lists both",
    )  # fmt: skip
    how.add_argument(
        "--config", type=Path, metavar="FILE.json", help="the quantizer, as Quantizer.to_dict describes it"
    )  # fmt: skip
    parser.add_argument(
        "--on-conflict", choices=("error", "first"),
        help="with --backend: what to do where one changes the annotation of another (default: error)",
    )  # fmt: skip


def add_data(parser: ArgumentParser) -> None:
    """Add the options that `read_data` and `run_data` read."""
    add = parser.add_argument
    add(
        "--calibration", type=Path, nargs="+", action="extend", default=[], metavar="FILE",
        help="samples: .safetensors or .pt",
    )  # fmt: skip
    add(
        "--batch-size",
        type=_positive,
        metavar="N",
        help="samples in a batch (default: as exported)",
    )
    add("--batches", type=_positive, metavar="N", help="use the first N batches alone")
    add("--no-progress", action="store_true", help="no progress bar; it shows only on a terminal")


def chosen_quantizer(options: Namespace) -> Quantizer:
    """Return the quantizer of the options.

    Raises:
        UserError: there is none, or it is not as they say.
    """
    if options.config is None:
        from qompose.quantizer.composition import compose

        return compose(*map(_member, options.backend), on_conflict=options.on_conflict or "error")
    from qompose.quantizer.composition import quantizer_from_json

    if options.on_conflict:
        raise UserError("--on-conflict goes with --backend; a configuration says it itself")
    try:
        return quantizer_from_json(options.config.read_text(encoding="utf-8-sig"))
    except (UserError, UnicodeDecodeError) as error:
        raise ConfigError(f"{options.config}: {error}") from error


def _member(text: str) -> Any:
    """Return a backend's name, or its quantizer with the configuration that is named behind a colon."""
    name, colon, chosen = text.partition(":")
    if not colon:
        return name
    from qompose.backend.discovery import load_backend
    from qompose.quantizer.composition import compose
    from qompose.quantizer.rule_quantizer import RuleQuantizer

    configs = load_backend(name).configs
    if chosen not in configs:
        raise ConfigError(
            f"Backend {name!r} has no configuration {chosen!r}{near_names(chosen, configs)}; "
            f"it has {', '.join(configs) or 'none'}"
        )
    (member,) = compose(name).members
    if not isinstance(member, RuleQuantizer):
        raise ConfigError(
            f"the quantizer of {name!r} takes no configuration: leave out {text[len(name) :]!r}"
        )
    return member.set_global(configs[chosen])


def read_data(options: Namespace, inputs: Inputs) -> list[Batch]:
    """Return the batches of the options; one of no tensors where the program takes none."""
    from qompose.cli.calibration_data import Batch, read_batches

    if not options.calibration:
        # What takes no tensors computes the same each time.
        return [] if inputs.tensors else [Batch(options.model, 1, list(inputs.leaves))]
    return read_batches(options.calibration, inputs, options.batch_size, options.batches)


def run_data(
    prepared: GraphModule, batches: Sequence[Batch], inputs: Inputs, options: Namespace
) -> None:
    """Calibrate with batches, if there are any.

    Raises:
        CalibrationError: one does not fit the model; the message names its file.
    """
    if not batches:
        return
    from qompose.calibration.calibrator import calibrate

    running: list[Batch] = []

    def arguments(batch: Batch) -> dict[str, Any]:
        running[:] = [batch]
        return inputs.call(batch.leaves)

    try:
        calibrate(
            prepared, batches, transform=arguments, progress=False if options.no_progress else None
        )
    except BatchError as error:
        (batch,) = running
        raise CalibrationError(f"{batch.file}, batch {batch.number} {error.reason}") from error
