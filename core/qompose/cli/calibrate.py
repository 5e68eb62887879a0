# SPDX-License-Identifier: Apache-2.0
"""`qompose calibrate`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from qompose.cli.options import add_data, add_quantizer, chosen_quantizer, read_data, run_data
from qompose.cli.output import Output, say
from qompose.errors import UserError
from qompose.files import destination

if TYPE_CHECKING:
    from torch.fx import GraphModule


SUMMARY = "collect the statistics of a program, or merge those of several jobs"
DESCRIPTION = """\
Run calibration data through a program that torch.export.save wrote, and write what was seen of each tensor;
or merge what several jobs wrote, exactly, in any order. `qompose quantize --statistics FILE` goes by it,
for any backend and bit-width, without data.

The file is of the kind that its name says: .safetensors, or .json, which an editor can change.
A MODEL.pt2 that could run code when it is read (pickles, custom objects, legacy files) is refused."""
EXAMPLES = """\
qompose calibrate model.pt2 --backend my_cpu --calibration samples.safetensors --output seen.safetensors
qompose calibrate --merge job1.safetensors job2.safetensors --output seen.safetensors
qompose calibrate --merge seen.safetensors --output seen.json"""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    add = parser.add_argument
    add("model", type=Path, nargs="?", metavar="MODEL.pt2", help="what torch.export.save wrote")
    add_quantizer(parser, required=False)
    add_data(parser)
    add(
        "--merge", type=Path, nargs="+", action="extend", default=[], metavar="FILE",
        help="files of statistics, in place of a program",
    )  # fmt: skip
    add("--output", type=Path, required=True, metavar="FILE", help="the statistics")


def run(options: Namespace, out: Output) -> int:
    """Calibrate or merge, and write the file."""
    from qompose.calibration.statistics_data import Statistics, statistics

    output: Path = options.output
    if not destination(output).parent.is_dir():
        raise UserError(f"{output} cannot be written: {output.parent} is no directory")
    if options.merge:
        if options.model or options.backend or options.config or options.calibration:
            raise UserError("--merge takes files of statistics alone: no program, backend or data")
        first, *others = map(Statistics.load, options.merge)
        found = first.merged(*others)
    else:
        found = statistics(_calibrated(options))
    found.save(output)
    for name in found.left_out:
        say(f"warning: no statistics of {name}, whose observer is of another package")
    say(f"wrote {output} ({len(found)} tensors, {output.stat().st_size:,} bytes)")
    return 0


def _calibrated(options: Namespace) -> GraphModule:
    from qompose.cli.calibration_data import program_inputs
    from qompose.preparation.prepare import prepare_pt2e
    from qompose.storage.pt2_archive import load_program

    if options.model is None or not (options.backend or options.config):
        raise UserError("name a program and --backend or --config; or files to --merge")
    if not options.calibration:
        raise UserError("name files of samples with --calibration")
    quantizer = chosen_quantizer(options)
    program = load_program(options.model)
    inputs = program_inputs(program)
    batches = read_data(options, inputs)
    prepared = prepare_pt2e(program, quantizer)
    run_data(prepared, batches, inputs, options)
    return prepared
