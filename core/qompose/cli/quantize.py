# SPDX-License-Identifier: Apache-2.0
"""`qompose quantize`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qompose.cli.options import add_data, add_quantizer, chosen_quantizer, read_data, run_data
from qompose.cli.output import Output, say
from qompose.cli.report import add_format, check_page, check_place, print_report
from qompose.errors import CalibrationError, UncalibratedError, UserError
from qompose.files import destination, draft_of

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from qompose.reporting.report_data import Report


SUMMARY = "quantize an exported program and save it"
DESCRIPTION = """\
Quantize a program that torch.export.save wrote, and print what happened to every operator.

A MODEL.pt2 that could run code when it is read (pickles, custom objects, legacy files) is refused.
Calibration files and what this command writes are read without running code.

Calibration files are .safetensors files with a tensor for each input of the program, by its name or as arg0,
arg1, ...; and .pt files of torch.save with a tensor, a dict of tensors by name, or a list of batches, each a
tensor, a tuple of positional arguments or a dict of keyword arguments. The first dimension of a tensor counts
samples, which are cut into batches; lists are taken as they are. Data is needed only where something is
quantized statically."""
EXAMPLES = """\
qompose quantize model.pt2 --backend my_cpu --calibration samples.safetensors
qompose quantize model.pt2 --backend my_chip --backend my_cpu --calibration a.pt b.pt --batches 20
qompose quantize model.pt2 --backend "my_cpu:static per-tensor" --calibration data.pt --output small.qompose
qompose quantize model.pt2 --backend my_chip --calibration data.pt --target my_runtime --lowered model.bin
qompose quantize model.pt2 --config quantizer.json --calibration data.pt --strict --json > report.json"""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    add = parser.add_argument
    add(
        "model",
        type=Path,
        metavar="MODEL.pt2",
        help="what torch.export.save wrote",
    )
    add_quantizer(parser)
    add_data(parser)
    add("--target", default="torch", help="the runtime to lower for (default: %(default)s)")
    add("--output", type=Path, metavar="FILE", help="the saved model (default: MODEL.qompose)")
    add("--lowered", type=Path, metavar="FILE", help="the program file of a target that makes one")
    add("--strict", action="store_true", help="fail where something asked for cannot be done")
    add(
        "--allow-uncalibrated", action="store_true",
        help="leave in float what no sample reaches, rather than fail",
    )  # fmt: skip
    add(
        "--statistics", type=Path, metavar="FILE",
        help="what `qompose calibrate` or Statistics.save wrote, in place of --calibration",
    )  # fmt: skip
    add_format(parser)


def run(options: Namespace, out: Output) -> int:
    """Quantize, write the files and print the report."""
    from qompose.calibration.statistics_data import Statistics
    from qompose.cli.calibration_data import program_inputs
    from qompose.conversion.convert import convert_pt2e
    from qompose.lowering.lower_regions import lower
    from qompose.preparation.prepare import prepare_pt2e
    from qompose.reporting.build_report import report
    from qompose.storage.pt2_archive import load_program

    quantizer = chosen_quantizer(options)
    program = load_program(options.model)
    output = options.output or options.model.with_suffix(".qompose")
    _check_files(options, output)
    inputs = program_inputs(program)
    batches = read_data(options, inputs) if options.statistics is None else []
    prepared = prepare_pt2e(program, quantizer, strict=options.strict)
    run_data(prepared, batches, inputs, options)
    if options.statistics is not None:
        Statistics.load(options.statistics).apply(prepared)
    try:
        converted = convert_pt2e(prepared, allow_uncalibrated=options.allow_uncalibrated)
    except UncalibratedError as error:
        raise _uncalibrated(error, bool(batches)) from error
    lowered = lower(converted, options.target, strict=options.strict)
    found = report(lowered)
    _write(converted, output, lowered, found, options)
    print_report(found, options, out)
    return 0


def _check_files(options: Namespace, output: Path) -> None:
    """Refuse what would fail, or destroy a file, when the work is done."""
    if options.statistics is not None and options.calibration:
        raise UserError("--statistics stands in place of --calibration: give one of the two")
    read = [
        path.resolve()
        for path in (options.model, *options.calibration, options.config, options.statistics)
        if path
    ]
    for path in (output, options.lowered):
        if path is None:
            continue
        check_place(path, read)
    check_page(options.html, read)
    if options.lowered and destination(options.lowered) == destination(output):
        raise UserError(f"--output and --lowered are both {output}")
    if options.html and destination(options.html) in map(destination, [output, *_lowered(options)]):
        raise UserError(f"{options.html} is given for two files: choose another --html")
    if options.lowered and options.target == "torch":
        raise UserError(
            "The target 'torch' runs in process and has no program file: leave out --lowered, or name "
            "another --target. In Python, qompose.lower(qompose.load(FILE)) makes the model that runs."
        )


def _uncalibrated(error: UncalibratedError, calibrated: bool) -> UserError:
    if calibrated:
        return error
    listed = "\n".join(f"  - {tensor}" for tensor in error.tensors)
    return CalibrationError(
        f"{len(error.tensors)} tensors are quantized statically, and there is no data to take their ranges "
        f"from:\n{listed}\nName files of samples with --calibration FILE, or choose a dynamic or weight-only "
        "configuration."
    )


def _lowered(options: Namespace) -> list[Path]:
    return [options.lowered] if options.lowered else []


def _write(
    converted: GraphModule, output: Path, lowered: Any, found: Report, options: Namespace
) -> None:
    """Write all files that are asked for, or none."""
    from qompose.storage.artifact import save

    if options.lowered is not None and not callable(getattr(lowered, "save", None)):
        raise UserError(
            f"This target has no program file ({type(lowered).__name__}): leave out --lowered"
        )
    files = [(output, partial(save, converted)), *((p, lowered.save) for p in _lowered(options))]
    files += [(options.html, found.save)] if options.html else []
    with ExitStack() as drafts:
        for path, write in files:
            write(drafts.enter_context(draft_of(path)))
    for path, _ in files:
        say(f"wrote {path} ({path.stat().st_size:,} bytes)")
