# SPDX-License-Identifier: Apache-2.0
"""Options that several commands share, with what they ask for."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qompose.cli.command import Results
from qompose.errors import BatchError, CalibrationError, ConfigError, UserError, near_names
from qompose.files import destination

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from qompose.cli.calibration_data import Batch, Inputs
    from qompose.quantizer.base import Quantizer
    from qompose.reporting.report_data import Report


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise ArgumentTypeError(f"expected a positive number, got {text!r}")
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
        UserError: it does not exist, or is not what they say.
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


def add_report_form(parser: ArgumentParser) -> None:
    """Add the choice of how a report is printed."""
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--markdown", action="store_true", help="print Markdown")
    parser.add_argument(
        "--html", type=Path, metavar="FILE.html",
        help="write it as a page for browsers too: one file that loads nothing",
    )  # fmt: skip


def check_page(page: Path | None, read: Collection[Path]) -> None:
    """Refuse a page that cannot be written, or would destroy a file that is read, before any work is done."""
    if page is None:
        return
    if page.suffix.lower() != ".html":
        raise UserError(f"--html must name a file that ends in .html, got {page}")
    check_place(page, read)


def check_place(path: Path, read: Collection[Path]) -> None:
    """Refuse a file that cannot be written where it is to be, or that is read."""
    place = destination(path)
    if not place.parent.is_dir():
        raise UserError(f"{path} cannot be written: {place.parent} is not a directory")
    if place in read:
        raise UserError(f"{path} would be overwritten, and is read: choose another --output")


def print_report(found: Report, options: Namespace, results: Results) -> None:
    """Print a report in the form that was asked for."""
    if options.json:
        results.json(found.to_dict())
    else:
        results.text(found.to_markdown() if options.markdown else found.to_text(results.width))
