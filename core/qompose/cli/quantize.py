# SPDX-License-Identifier: Apache-2.0
"""The commands that run data through an exported program: `qompose quantize`, `qompose calibrate`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qompose.cli.command import (
    Command,
    Results,
    add_data,
    add_quantizer,
    add_report_form,
    check_page,
    check_place,
    chosen_quantizer,
    print_report,
    read_data,
    run_data,
    say,
)
from qompose.errors import CalibrationError, UncalibratedError, UserError
from qompose.files import destination, draft_of

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from qompose.reporting.report_data import Report


def _add_quantize_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "model",
        type=Path,
        metavar="MODEL.pt2",
        help="a program saved by torch.export.save",
    )
    add_quantizer(parser)
    add_data(parser)
    add("--target", default="torch", help="runtime to lower for (default: %(default)s)")
    add(
        "--output",
        type=Path,
        metavar="FILE",
        help="where to save the quantized model (default: MODEL.qompose)",
    )
    add(
        "--lowered",
        type=Path,
        metavar="FILE",
        help="where to write the program file of the target, if it has one",
    )
    add("--strict", action="store_true", help="fail if something that was requested cannot be done")
    unseen = parser.add_mutually_exclusive_group()
    unseen.add_argument(
        "--allow-uncalibrated", action="store_true",
        help="leave regions in float that no sample reaches, instead of failing",
    )  # fmt: skip
    unseen.add_argument(
        "--unit-scale", action="store_const", const="unit_scale", dest="allow_uncalibrated",
        help="quantize them with a scale of 1, to look at kernels: what they compute means nothing",
    )  # fmt: skip
    add(
        "--fold-batch-norms", action="store_true",
        help="fold batch norms into the layers before them in float, too",
    )  # fmt: skip
    add(
        "--statistics", type=Path, metavar="FILE",
        help="statistics saved by `qompose calibrate` or Statistics.save, instead of --calibration",
    )  # fmt: skip
    add_report_form(parser)


def _quantize(options: Namespace, results: Results) -> int:
    """Quantize, write the files and print the report."""
    from qompose.calibration.statistics_data import Statistics
    from qompose.cli.calibration_data import program_inputs
    from qompose.conversion.convert import convert_pt2e
    from qompose.lowering.lower_regions import check_target, lower
    from qompose.preparation.prepare import prepare_pt2e
    from qompose.reporting.build_report import report
    from qompose.storage.pt2_archive import load_program

    quantizer = chosen_quantizer(options)
    program = load_program(options.model)
    output = options.output or options.model.with_suffix(".qompose")
    _check_files(options, output)
    inputs = program_inputs(program)
    batches = read_data(options, inputs) if options.statistics is None else []
    prepared = prepare_pt2e(
        program, quantizer, strict=options.strict, fold_batch_norms=options.fold_batch_norms
    )
    check_target(prepared, options.target, strict=options.strict)
    run_data(prepared, batches, inputs, options)
    if options.statistics is not None:
        Statistics.load(options.statistics).apply(prepared)
    try:
        converted = convert_pt2e(prepared, allow_uncalibrated=options.allow_uncalibrated)
    except UncalibratedError as error:
        raise _uncalibrated(error, bool(batches)) from error
    shown = False if options.no_progress else None
    lowered = lower(converted, options.target, strict=options.strict, progress=shown)
    found = report(lowered)
    _write(converted, output, lowered, found, options)
    print_report(found, options, results)
    return 0


def _check_files(options: Namespace, output: Path) -> None:
    """Refuse what would fail, or destroy a file, when the work is done."""
    if options.statistics is not None and options.calibration:
        raise UserError("--statistics and --calibration cannot be combined")
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
        raise UserError(f"the output and --lowered are the same file, {output}")
    if options.html and destination(options.html) in map(destination, [output, *_lowered(options)]):
        raise UserError(f"--html and another option name the same file, {options.html}")
    if options.lowered and options.target == "torch":
        raise UserError(
            "the target 'torch' runs in process and has no program file. Remove --lowered or "
            "choose another --target. In Python, qompose.lower(qompose.load(FILE)) returns the "
            "model to run."
        )


def _uncalibrated(error: UncalibratedError, calibrated: bool) -> UserError:
    if calibrated:
        return error
    listed = "\n".join(f"  - {tensor}" for tensor in error.tensors)
    return CalibrationError(
        f"{len(error.tensors)} tensors are quantized statically, but no calibration data is given:\n"
        f"{listed}\nPass samples with --calibration FILE, or choose a dynamic or weight-only "
        "configuration. --unit-scale shows the kernels without data."
    )


def _lowered(options: Namespace) -> list[Path]:
    return [options.lowered] if options.lowered else []


def _write(
    converted: GraphModule, output: Path, lowered: Any, found: Report, options: Namespace
) -> None:
    """Write all files that are asked for, with those that a program has beside it, or none."""
    from qompose.storage.artifact import save

    if options.lowered is not None and not callable(getattr(lowered, "save", None)):
        raise UserError(f"the target {options.target!r} writes no program file; remove --lowered")
    files = [(output, partial(save, converted)), *((p, lowered.save) for p in _lowered(options))]
    files += [(options.html, found.save)] if options.html else []
    written = []
    with ExitStack() as drafts:
        for path, write in files:
            draft = drafts.enter_context(draft_of(path))
            write(draft)
            beside = sorted(other.name for other in draft.parent.iterdir() if other != draft)
            place = destination(path) if path.is_symlink() else path
            written += [path, *map(place.with_name, beside)]
    for path in written:
        say(f"wrote {path} ({path.stat().st_size:,} bytes)")


QUANTIZE = Command(
    summary="quantize an exported program and save it",
    description="""\
Quantize a program saved by torch.export.save, and print what happened to every operator.

A MODEL.pt2 that could run code when loaded (pickles, custom objects, legacy files) is rejected. Reading
calibration files and the files that this command writes never runs code.

Calibration files are .safetensors files with one tensor per program input, named after the input or arg0,
arg1, ...; or .pt files saved by torch.save that contain a tensor, a dict of tensors by name, or a list of
batches, each a tensor, a tuple of positional arguments or a dict of keyword arguments. The first dimension of
a tensor counts samples, which are cut into batches; batches in a list are used unchanged. Data is required
only for static quantization.""",
    examples="""\
qompose quantize model.pt2 --backend my_cpu --calibration samples.safetensors
qompose quantize model.pt2 --backend my_chip --backend my_cpu --calibration a.pt b.pt --batches 20
qompose quantize model.pt2 --backend "my_cpu:static per-tensor" --calibration data.pt --output small.qompose
qompose quantize model.pt2 --backend my_chip --calibration data.pt --target my_runtime --lowered model.bin
qompose quantize model.pt2 --config quantizer.json --calibration data.pt --strict --json > report.json""",
    add_arguments=_add_quantize_arguments,
    run=_quantize,
)


def _add_calibrate_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "model",
        type=Path,
        nargs="?",
        metavar="MODEL.pt2",
        help="a program saved by torch.export.save",
    )
    add_quantizer(parser, required=False)
    add_data(parser)
    add(
        "--merge", type=Path, nargs="+", action="extend", default=[], metavar="FILE",
        help="statistics files to merge, instead of a program",
    )  # fmt: skip
    add("--output", type=Path, required=True, metavar="FILE", help="where to write the statistics")


def _calibrate(options: Namespace, results: Results) -> int:
    """Calibrate or merge, and write the file."""
    from qompose.calibration.statistics_data import Statistics, statistics

    output: Path = options.output
    check_place(output, [p.resolve() for p in (options.model, *options.calibration) if p])
    if options.merge:
        if options.model or options.backend or options.config or options.calibration:
            raise UserError(
                "--merge accepts only statistics files; it cannot be combined with a program, "
                "--backend, --config or --calibration"
            )
        first, *others = map(Statistics.load, options.merge)
        found = first.merged(*others)
    else:
        found = statistics(_calibrated(options))
    found.save(output)
    for name in found.left_out:
        say(f"warning: no statistics for {name}: its observer comes from another package")
    say(f"wrote {output} ({len(found)} tensors, {output.stat().st_size:,} bytes)")
    return 0


def _calibrated(options: Namespace) -> GraphModule:
    from qompose.cli.calibration_data import program_inputs
    from qompose.preparation.prepare import prepare_pt2e
    from qompose.storage.pt2_archive import load_program

    if options.model is None or not (options.backend or options.config):
        raise UserError("pass a program with --backend or --config, or statistics with --merge")
    if not options.calibration:
        raise UserError("--calibration FILE is required")
    quantizer = chosen_quantizer(options)
    program = load_program(options.model)
    inputs = program_inputs(program)
    batches = read_data(options, inputs)
    prepared = prepare_pt2e(program, quantizer)
    run_data(prepared, batches, inputs, options)
    return prepared


CALIBRATE = Command(
    summary="record calibration statistics of a program, or merge those of several jobs",
    description="""\
Run calibration data through a program saved by torch.export.save and write the statistics of each tensor; or
merge the statistics of several jobs, exactly and in any order. `qompose quantize --statistics FILE` uses them
instead of data, with any backend and bit width.

The suffix of the file determines its format: .safetensors, or .json, which can be edited by hand.
A MODEL.pt2 that could run code when loaded (pickles, custom objects, legacy files) is rejected.""",
    examples="""\
qompose calibrate model.pt2 --backend my_cpu --calibration samples.safetensors --output seen.safetensors
qompose calibrate --merge job1.safetensors job2.safetensors --output seen.safetensors
qompose calibrate --merge seen.safetensors --output seen.json""",
    add_arguments=_add_calibrate_arguments,
    run=_calibrate,
)
