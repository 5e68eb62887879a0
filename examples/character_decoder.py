# SPDX-License-Identifier: Apache-2.0
"""A language model of characters, trained here on Python's reference manual, with 4-bit weights.

A prompt and a single character are two methods, which share weights and a cache. GPTQ rounds the weights. On
x86 the cache has 8 bits; it runs as it is, compiled, and as a package. ExecuTorch runs another program, with
inputs quantized at run time and a float cache. Prints perplexity per character of text not trained on,
bytes and characters per second, beside float, and continues a sentence.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics  # in every Python: half a million characters of English
from tempfile import TemporaryDirectory
from typing import Any

import qompose
import torch
import transformers
from decoder import Methods, arguments, exported
from generation import Decoder, stream
from qompose_embedding import EmbeddingQuantizer, get_embedding_quantization_config
from qompose_x86_inductor import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config,
)
from qompose_xnnpack import (
    ExecutorchProgram,
    XNNPACKQuantizer,
    get_symmetric_quantization_config,
)
from steps import Steps
from torch import Tensor

WORDS, CONTEXT, PROMPT = 128, 128, 32
START = "The following sections describe "[:PROMPT]


@dataclass(frozen=True)
class Row:
    """What is printed of a model, and what it writes."""

    name: str
    bytes: int
    perplexity: float
    per_second: float
    text: str

    def __str__(self) -> str:
        return (
            f"{self.name:22} {self.bytes / 1e6:6.2f} MB  perplexity {self.perplexity:5.2f}  "
            f"{self.per_second:6.0f} characters/s  {self.text!r}"
        )


def characters() -> tuple[Tensor, Tensor]:
    """Return text to train on and text that is held out, as codes of ASCII."""
    text = "\n".join(topics[name] for name in sorted(topics))
    codes = torch.tensor(list(text.encode("ascii", "ignore")))
    return codes[: -len(codes) // 10], codes[-len(codes) // 10 :]


def windows(text: Tensor, number: int, seed: int) -> Tensor:
    """Return pieces of text, (number, CONTEXT + 1)."""
    random = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - CONTEXT - 1, (number, 1), generator=random)
    return text[starts + torch.arange(CONTEXT + 1)]


def trained(text: Tensor, steps: int, wide: int, progress: Any) -> Any:
    """Return a Llama of characters, trained for a number of steps."""
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=wide, num_hidden_layers=2, intermediate_size=2 * wide,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=CONTEXT,
        attn_implementation="sdpa", pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=max(steps, 2))
    for step in progress(range(steps)):
        ids = windows(text, 16, step)
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.eval().requires_grad_(False)


def logits_of(methods: Methods, ids: Tensor) -> Iterator[Tensor]:
    """Yield logits (1, PROMPT, words) of one piece, by prompts one behind the other."""
    for first in range(0, CONTEXT, PROMPT):
        yield methods["prefill"](**arguments(ids[:, first : first + PROMPT], first)).clone()


@torch.no_grad()
def measured(name: str, methods: Methods, size: int, held_out: Tensor) -> Row:
    losses = [
        torch.nn.functional.cross_entropy(torch.cat([*logits_of(methods, ids[None, :-1])], 1)[0], ids[1:])
        for ids in windows(held_out, 32, 0)
    ]  # fmt: skip
    begun, given = time.perf_counter(), list(START.encode())
    made = [*stream(Decoder(methods, PROMPT, CONTEXT), given, CONTEXT - PROMPT)]
    seconds = time.perf_counter() - begun
    perplexity = math.exp(sum(float(loss) for loss in losses) / len(losses))
    text = bytes(given + made[:40]).decode("ascii")
    return Row(name, size, perplexity, len(made) / seconds, text)


@torch.no_grad()
def quantized(programs: Mapping[str, Any], linears: Any, text: Tensor) -> Any:
    """Return the converted methods. What is seen of the text decides how four bits are rounded."""
    table = EmbeddingQuantizer().set_global(get_embedding_quantization_config(8))
    prepared = qompose.prepare_pt2e(programs, qompose.compose(table, linears))
    for ids in windows(text, 16, -1 % 2**31):
        [*logits_of(prepared, ids[None, :-1])]
        for place in range(0, CONTEXT, 8):
            prepared["decode"](**arguments(ids[None, place : place + 1], place))
    return qompose.convert_pt2e(prepared)


def run(steps: Steps, training: int, wide: int, folder: Path) -> Iterator[Row]:
    """Yield a row of the float model, and of each form of the quantized one."""
    text, held_out = characters()
    with steps.step("train") as track:
        model = trained(text, training, wide, track)
    programs = exported(model, PROMPT, CONTEXT)
    floats = {name: program.module() for name, program in programs.items()}
    size = sum(parameter.nbytes for parameter in model.parameters())
    yield measured("float", floats, size, held_out)
    with steps.step("quantize for x86"):
        config = get_default_x86_inductor_quantization_config(
            weight_only=True, group_size=32, algorithms=("gptq",), cache=True
        )
        converted = quantized(programs, X86InductorQuantizer().set_global(config), text)
        qompose.save(qompose.lower(converted), folder / "decoder.qompose")
        lowered = qompose.load(folder / "decoder.qompose")
    size = qompose.report(lowered["decode"]).bytes_after
    yield measured("x86 4 bits, cache 8", lowered, size, held_out)
    with steps.step("compile"):
        compiled = qompose.compile_lowered(lowered)
    yield measured("the same, compiled", compiled, size, held_out)
    with steps.step("package"):
        package = qompose.compile_lowered(lowered, "package", path=folder / "decoder.pt2")
    yield measured(
        "the same, as a package", package, (folder / "decoder.pt2").stat().st_size, held_out
    )
    with steps.step("quantize and lower for ExecuTorch"):
        words: dict[str, Any] = {
            "is_per_channel": True,
            "is_dynamic": True,
            "group_size": 32,
            "algorithms": ("gptq",),
        }
        linears = XNNPACKQuantizer().set_global(get_symmetric_quantization_config(**words))
        program = qompose.lower(quantized(programs, linears, text), target="executorch")
        program.save(folder / "decoder.pte")
        read = ExecutorchProgram.read(folder / "decoder.pte")
    yield measured("ExecuTorch 8 x 4 bits", read.methods, read.nbytes, held_out)


def main(words: Sequence[str] | None = None) -> int:
    """Print a row per model; return 1 where one is much worse than float."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600, help="of training (default: %(default)s)")
    parser.add_argument("--wide", type=int, default=128, help="(default: %(default)s)")
    given = parser.parse_args(words)
    with warnings.catch_warnings(), TemporaryDirectory() as folder, Steps() as steps:
        warnings.simplefilter("ignore")  # what transformers and torch say of their own code
        rows = [*run(steps, given.steps, given.wide, Path(folder))]
    print(*rows, sep="\n")
    return int(any(row.perplexity > 1.1 * rows[0].perplexity for row in rows))


if __name__ == "__main__":
    sys.exit(main())
