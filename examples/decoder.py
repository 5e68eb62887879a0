# SPDX-License-Identifier: Apache-2.0
"""A decoder of `transformers` with few-bit weights and an 8-bit cache, from quantizing to generating.

A prompt and a single token are two methods of one program, which share weights and cache. Weights are
random, since only figures are shown. Prints bytes, SQNR to float over
the float model's own tokens, and tokens per second.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import qompose
import torch
import transformers
from qompose.testing.fixtures import sqnr
from qompose_embedding import EmbeddingQuantizer, get_embedding_quantization_config
from qompose_x86_inductor import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config,
)
from steps import Steps
from torch import Tensor

PROMPT, STEPS = 16, 32
LEAST = {8: 25.0, 4: 5.0}
"""The SQNR, in dB, below which something is wrong, by bits: random weights are hard to round."""
Methods = Mapping[str, Callable[..., Tensor]]


@dataclass(frozen=True)
class Row:
    """What is printed of a model: ``first``, in seconds, is the time of the prompt."""

    name: str
    bytes: int
    tokens_per_second: float
    first: float
    sqnr: float | None = None

    def __str__(self) -> str:
        true = "" if self.sqnr is None else f"  {self.sqnr:5.1f} dB to float"
        return (
            f"{self.name:24} {self.bytes / 1e6:7.2f} MB  {self.tokens_per_second:6.0f} tokens/s  "
            f"prompt {self.first * 1e3:6.1f} ms{true}"
        )


def export(family: str, wide: int, layers: int) -> dict[str, torch.export.ExportedProgram]:
    """Return the methods of a random model with a static cache."""
    config = getattr(transformers, f"{family}Config")(
        vocab_size=2000, hidden_size=wide, num_hidden_layers=layers, intermediate_size=2 * wide,
        num_attention_heads=8, num_key_value_heads=4, head_dim=wide // 8, max_position_embeddings=64,
        attn_implementation="sdpa", pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval().requires_grad_(False)
    return exported(model, PROMPT, PROMPT + STEPS)


def exported(model: Any, length: int, context: int) -> dict[str, torch.export.ExportedProgram]:
    """Return a method for `length` tokens at a time and one for a single one, with room for `context`."""
    from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

    model.generation_config.cache_implementation = "static"
    cached = TorchExportableModuleWithStaticCache(model, batch_size=1, max_cache_len=context).eval()
    zeros = torch.zeros(1, length, dtype=torch.int64)
    return {
        name: torch.export.export(cached, (), arguments(zeros[:, :number]), strict=False)
        for name, number in (("prefill", length), ("decode", 1))
    }


def prompt() -> Tensor:
    return torch.randint(3, 2000, (1, PROMPT), generator=torch.Generator().manual_seed(1))


def arguments(ids: Tensor, first: int = 0) -> dict[str, Tensor]:
    return {"input_ids": ids, "cache_position": torch.arange(first, first + ids.shape[1])}


@torch.no_grad()
def generate(methods: Methods, forced: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return STEPS new tokens (1, STEPS) and their logits (1, STEPS, words).

    Args:
        forced: what to feed back in place of the likeliest tokens, (1, STEPS).
    """
    logits = [methods["prefill"](**arguments(prompt()))[:, -1:]]
    tokens = [logits[0].argmax(-1)]
    for step in range(STEPS - 1):
        last = tokens[-1] if forced is None else forced[:, step : step + 1]
        logits.append(methods["decode"](**arguments(last, PROMPT + step)).clone())
        tokens.append(logits[-1].argmax(-1))
    return torch.cat(tokens, 1), torch.cat(logits, 1)


def measured(name: str, methods: Methods, size: int, wanted: tuple[Tensor, Tensor] | None) -> Row:
    """Generate with a model, twice, and time the second."""
    true = None
    if wanted is not None:
        true = sqnr(wanted[1], generate(methods, wanted[0])[1])
    generate(methods)
    with torch.no_grad():
        begun = time.perf_counter()
        methods["prefill"](**arguments(prompt()))
        first = time.perf_counter() - begun
    begun = time.perf_counter()
    generate(methods)
    rest = time.perf_counter() - begun - first
    return Row(name, size, (STEPS - 1) / max(rest, 1e-9), first, true)


def quantizer(bits: int) -> Any:
    """Compose: the table is read by rows, which the first quantizer does; linears and cache are x86's."""
    words = {"group_size": 32} if bits == 4 else {}
    linears = get_default_x86_inductor_quantization_config(weight_only=True, cache=True, **words)
    return qompose.compose(
        EmbeddingQuantizer().set_global(get_embedding_quantization_config(8)),
        X86InductorQuantizer().set_global(linears),
    )


def quantize(programs: Mapping[str, Any], bits: int) -> Any:
    """Return the converted methods. What was seen of the prompt decides how four bits are rounded."""
    prepared = qompose.prepare_pt2e(programs, quantizer(bits))
    with torch.no_grad():
        prepared["prefill"](**arguments(prompt()))
        prepared["decode"](**arguments(prompt()[:, :1], PROMPT))
    return qompose.convert_pt2e(prepared)


def run(family: str, bits: int, wide: int, layers: int, steps: Steps) -> list[Row]:
    """Return a row of the float model, the loaded one and that compiled."""
    with steps.step("export"):
        programs = export(family, wide, layers)
    floats = {name: program.module() for name, program in programs.items()}
    wanted = generate(floats)
    state = programs["decode"].state_dict.values()
    rows = [
        measured("float", floats, sum(t.nbytes for t in {id(t): t for t in state}.values()), None)
    ]
    with steps.step("quantize"):
        converted = quantize(programs, bits)
    with steps.step("save and load"), TemporaryDirectory() as folder:
        lowered = qompose.lower(converted)
        qompose.save(lowered, Path(folder) / "decoder.qompose")
        loaded = qompose.load(Path(folder) / "decoder.qompose")
    size = qompose.report(loaded["decode"]).bytes_after
    rows.append(measured(f"{bits} bits", loaded, size, wanted))
    with steps.step("compile"):
        compiled = qompose.compile_lowered(loaded)
        rows.append(measured(f"{bits} bits, compiled", compiled, size, wanted))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a row per model; return 1 where it is too far from float."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--family", default="Llama", help="Llama, Qwen2, Gemma, ... (default: %(default)s)"
    )
    parser.add_argument("--bits", type=int, default=4, choices=sorted(LEAST))
    parser.add_argument("--wide", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    given = parser.parse_args(arguments)
    with warnings.catch_warnings(), Steps() as steps:
        warnings.simplefilter("ignore")  # what transformers and torch say of their own code
        rows = run(given.family, given.bits, given.wide, given.layers, steps)
    print(*rows, sep="\n")
    return int(any(row.sqnr is not None and row.sqnr < LEAST[given.bits] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
