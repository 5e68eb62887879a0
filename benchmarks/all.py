# SPDX-License-Identifier: Apache-2.0
"""Write every performance table of this folder, script by script, to one folder of Markdown and JSON.

A finished script is not run again: the same command resumes after an interruption.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import machine

HERE = Path(__file__).resolve().parent
_ENGINES = ("qompose", "torch", "torchao", "executorch")
_ON_X86 = (*_ENGINES, "onnxruntime", "onnx", "onnxscript", "openvino", "nncf")
_SHORT = ("--rounds", "2", "--seconds", "0.05")


@dataclass(frozen=True)
class Benchmark:
    """A script of this folder.

    Attributes:
        name: of the script, without its suffix.
        question: what its tables answer.
        needs: packages that it measures.
        quick: its arguments for a look, whose figures mean nothing.
        options: its arguments in any case; {out} is the folder of the results.
        figures: whether `--json FILE` makes it write every figure.
    """

    name: str
    question: str
    needs: Sequence[str]
    quick: Sequence[str]
    options: Sequence[str] = ()
    figures: bool = True

    @property
    def script(self) -> Path:
        return HERE / f"{self.name}.py"

    def missing(self) -> list[str]:
        """The packages that are not installed."""
        return [name for name in self.needs if machine.release(name) is None]

    def arguments(self, quick: bool, out: Path) -> list[str]:
        """Its command line, behind the name of the script."""
        given = [*self.options, *(self.quick if quick else ())]
        return [argument.replace("{out}", str(out)) for argument in given]


BENCHMARKS = (
    Benchmark(
        "prepare_convert",
        "Are prepare and convert linear in the size of a program, and within the float model's memory?",
        _ENGINES,
        ("--sizes", "16", "32", "--repeats", "1", "--heavy", "4", "256", "512"),
        figures=False,
    ),
    Benchmark(
        "path_of_quantize",
        "How many files of core does one call of quantize pass through?",
        ("qompose",),
        (),
        figures=False,
    ),
    Benchmark(
        "calibration",
        "How long does a batch of calibration take, relative to a float forward?",
        _ENGINES,
        (*_SHORT, "--models", "minilm-16x64"),
    ),
    Benchmark(
        "observers",
        "How accurate is a model with each range=?",
        _ENGINES,
        ("--tasks", "digits", "--seeds", "1"),
        figures=False,
    ),
    Benchmark(
        "accuracy",
        "How accurate are int8 networks on unseen data, compared with every peer?",
        _ON_X86,
        ("--quick", "--tasks", "digits", "recommender", "--batches", "1"),
    ),
    Benchmark(
        "embedding_lookup",
        "How fast and how small are quantized tables?",
        _ENGINES,
        (*_SHORT, "--models", "lookup of 256, 100k rows"),
    ),
    Benchmark(
        "bag_limits",
        "What limits the speed of bags with fewer bits?",
        _ENGINES,
        ("--seconds", "0.05"),
        figures=False,
    ),
    Benchmark(
        "x86_inference",
        "How fast is int8 inference on x86, compared with every other engine?",
        _ON_X86,
        (*_SHORT, "--models", "mlp-1"),
    ),
    Benchmark(
        "onnx_inference",
        "How fast are ONNX files in ONNX Runtime and OpenVINO, compared with other tools' files?",
        _ON_X86,
        (*_SHORT, "--models", "mlp-1"),
    ),
    Benchmark(
        "onnx_accuracy",
        "Are ONNX files as accurate as the converted models, and what does ONNX Runtime fuse?",
        _ON_X86,
        ("--models", "lenet"),
    ),
    Benchmark(
        "decoders",
        "How fast, small and accurate is a decoder with few-bit weights, compared with peers?",
        (*_ON_X86, "transformers"),
        (*_SHORT, "--models", "decode", "--engines", "float"),
    ),
    Benchmark(
        "decoder_profile",
        "Where does a token's time go in a decoder's package?",
        ("qompose", "qompose_embedding", "qompose_x86_inductor", "torch", "transformers"),
        ("--seconds", "1"),
        figures=False,
    ),
    Benchmark(
        "experts",
        "How accurate is each expert of a mixture on its own rows, by form?",
        ("qompose", "qompose_x86_inductor", "torch", "transformers"),
        (),
        figures=False,
    ),
    Benchmark(
        "larger_than_memory",
        "How much memory and time does quantizing a checkpoint on disk take, compared with torchao?",
        ("qompose", "torch", "torchao", "transformers"),
        ("--size", "0.2B", "--engines", "ours"),
        options=("{out}/checkpoint",),
        figures=False,
    ),
    Benchmark(
        "depthwise",
        "How much is equalization worth on depthwise convolutions?",
        ("qompose", "qompose_xnnpack", "torch"),
        ("--steps", "1"),
        figures=False,
    ),
    Benchmark(
        "random_nets",
        "What is the default worth on small networks drawn at random?",
        ("qompose", "qompose_x86_inductor", "qompose_xnnpack", "torch"),
        ("--draws", "1"),
        figures=False,
    ),
    Benchmark(
        "sequential_memory",
        "How much memory does GPTQ take beside the float model, one layer at a time or all at once?",
        ("qompose", "qompose_x86_inductor", "torch"),
        ("--widths", "128", "128"),
        figures=False,
    ),
    Benchmark(
        "xnnpack_runtime",
        "How fast, small and accurate are programs for ExecuTorch's XNNPACK?",
        (*_ENGINES, "transformers"),
        ("--quick", "--models", "mlp", "digits"),
    ),
    Benchmark(
        "zoo",
        "Which models of the zoo work, how much of each, and how well, with each backend and scheme?",
        _ENGINES,
        ("--models", "lenet", "--first", "--schemes", "static", "--peers"),
        options=("--state", "{out}/zoo-state.jsonl"),
    ),
    Benchmark(
        "zoo_accuracy",
        "How accurate are small architectures next to torchao's flows, on the same operators?",
        _ENGINES,
        ("--models", "scan_cell"),
        figures=False,
    ),
)


@dataclass
class Result:
    """What a script printed, and everything it takes to judge that."""

    name: str
    command: list[str]
    quick: bool
    machine: dict[str, Any]
    busy: float | None
    seconds: float
    status: int
    text: str
    figures: Any = field(default=None)

    @classmethod
    def read(cls, file: Path) -> Result | None:
        """What a file has, if it has anything that can be read."""
        try:
            return cls(**json.loads(file.read_text("utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def is_current(self, command: Sequence[str], facts: dict[str, Any]) -> bool:
        """Whether it is what the same command would measure now."""
        return self.status == 0 and self.command == [*command] and self.machine == facts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    present = {benchmark.name: benchmark for benchmark in BENCHMARKS if benchmark.script.is_file()}
    add("--only", nargs="+", choices=[*present], default=[*present], metavar="NAME",
        help=f"any of {', '.join(present)} (default: all)")  # fmt: skip
    add(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="folder for the results (default: benchmark-results, or benchmark-results-quick)",
    )
    add(
        "--quick", action="store_true", help="takes minutes, for a quick look: figures mean nothing"
    )
    add("--again", action="store_true", help="also run finished scripts again")
    add(
        "--busy",
        action="store_true",
        help="measure even if other processes are running, and say so",
    )
    options = parser.parse_args()
    out = options.out or Path(f"benchmark-results{'-quick' if options.quick else ''}")
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    facts = machine.facts(sorted({name for b in present.values() for name in b.needs}))
    say("\n".join(machine.lines(facts)))
    failed = 0
    for name in options.only:
        result = _result(present[name], options, out, facts)
        if result is None:
            return 2
        failed += result.status != 0
        _summarize(out, [present[n] for n in present], facts)
    say(f"written: {out / 'README.md'}, and {len(options.only)} JSON files next to it")
    return int(failed > 0)


def _result(
    benchmark: Benchmark, options: argparse.Namespace, out: Path, facts: dict[str, Any]
) -> Result | None:
    """The result of a script, measured now unless it is there; None where the machine is busy."""
    file = out / f"{benchmark.name}.json"
    arguments = benchmark.arguments(options.quick, out)
    known = Result.read(file)
    if known is not None and known.is_current(arguments, facts) and not options.again:
        say(f"\n{benchmark.name}: kept from an earlier run (--again measures it again)")
        return known
    busy = machine.busy()
    if busy is not None and busy > machine.IDLE:
        found = f"other processes use {busy:.0%} of this machine's cores"
        if not (options.busy or options.quick):
            say(
                f"\n{benchmark.name}: refused, because {found}: times measured meanwhile mean nothing. "
                "Stop them, or pass --busy, which every table then mentions."
            )
            return None
        say(f"\n{benchmark.name}: {found}, so its figures mean nothing")
    result = _run(benchmark, arguments, options.quick, busy, facts)
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps(asdict(result), indent=1) + "\n", "utf-8")
    draft.replace(file)
    return result


def _run(
    benchmark: Benchmark,
    arguments: list[str],
    quick: bool,
    busy: float | None,
    facts: dict[str, Any],
) -> Result:
    """Run a script in a process of its own; what it prints is printed too, as it comes."""
    result = Result(benchmark.name, arguments, quick, facts, busy, 0.0, 1, "")
    say(f"\n== {benchmark.name}: {benchmark.question}")
    missing = benchmark.missing()
    if missing:
        names = ", ".join(missing)
        result.text = f"not run: {names} not installed; `python -m tox run -e benchmarks` has it"
        say(result.text)
        return result
    with machine.scratch() as folder:
        figures = folder / "figures.json"
        extra = ["--json", str(figures)] if benchmark.figures else []
        command = [sys.executable, str(benchmark.script), *arguments, *extra]
        start, lines = time.monotonic(), []
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, cwd=HERE.parent
        ) as process:
            assert process.stdout
            for line in process.stdout:
                print(line, end="", flush=True)
                lines.append(line)
        result.seconds, result.status = time.monotonic() - start, process.returncode
        result.text = "".join(lines).strip("\n")
        if figures.is_file():
            result.figures = json.loads(figures.read_text("utf-8"))
    return result


def _summarize(out: Path, benchmarks: Sequence[Benchmark], facts: dict[str, Any]) -> None:
    """Write the page of all that is measured so far on this machine."""
    page = ["# Measurements", "", *machine.lines(facts), ""]
    for benchmark in benchmarks:
        result = Result.read(out / f"{benchmark.name}.json")
        if result is None:
            continue
        command = " ".join(["python", f"benchmarks/{benchmark.name}.py", *result.command])
        page += [f"## {benchmark.name}.py", "", benchmark.question, ""]
        page += [
            f"`{command}`, {result.seconds:.0f} s",
            "",
            *_doubts(result, facts),
            result.text,
            "",
        ]
    (out / "README.md").write_text("\n".join(page), "utf-8")


def _doubts(result: Result, facts: dict[str, Any]) -> list[str]:
    """What limits the meaning of the figures: a line each, followed by an empty one."""
    doubts = []
    if result.quick:
        doubts.append(
            "**Only a quick look, with few and short rounds. These figures mean nothing.**"
        )
    if result.busy is None:
        doubts.append("**It is unknown whether other processes were running.**")
    elif result.busy > machine.IDLE:
        doubts.append(f"**Other processes used {result.busy:.0%} of the cores.**")
    if result.machine != facts:
        doubts.append(
            "**Measured with other versions or on another machine; the JSON file says which.**"
        )
    if result.status:
        doubts.append(f"**The script failed, with {result.status}.**")
    return [line for doubt in doubts for line in (doubt, "")]


def say(text: str) -> None:
    """Print to standard error, apart from the tables."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
