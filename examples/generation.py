# SPDX-License-Identifier: Apache-2.0
"""Tokens from a decoder that was lowered, saved and loaded: by a loop, and by transformers' `generate`.

The model is that of decoder.py, with random weights. Prints the tokens of both as they
come.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import qompose
import torch
from decoder import PROMPT, STEPS, export, prompt, quantize
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

STOP = 2


class ContextError(ValueError):
    """More tokens than the cache of a decoder holds."""


class SequenceError(ValueError):
    """A decoder for one sequence was given several, or padding."""


@dataclass
class Decoder:
    """The methods of a decoder for one sequence, and what its cache holds.

    Attributes:
        methods: "prefill", of `width` tokens at a time, and "decode", of one; of an ExecuTorch program, the
            `run` of each.
        context: how many tokens the cache has room for.
        held: the tokens that are in it.
    """

    methods: Mapping[str, Callable[..., Tensor]]
    width: int
    context: int
    held: list[int] = field(default_factory=list)

    @torch.no_grad()
    def read(self, tokens: Sequence[int]) -> Tensor:
        """Return the logits of what follows tokens, (words,). Those that the cache begins with are there.

        Raises:
            ContextError: there are none, or too many for the cache.
        """
        if not 0 < len(tokens) <= self.context:
            raise ContextError(f"{len(tokens)} tokens, and the cache holds 1 to {self.context}")
        same = itertools.takewhile(
            lambda pair: pair[0] == pair[1], zip(self.held, tokens, strict=False)
        )
        at = min(len([*same]), len(tokens) - 1)
        while at < len(tokens):
            name, size = (
                ("prefill", self.width) if len(tokens) - at >= self.width else ("decode", 1)
            )
            self.held = [*tokens[:at]]
            positions = torch.arange(at, at + size)
            ids = torch.tensor([tokens[at : at + size]])
            logits = self.methods[name](input_ids=ids, cache_position=positions)
            at += size
        self.held = [*tokens]
        return logits[0, -1].clone()


def choose(
    logits: Tensor, temperature: float, top_p: float, generator: torch.Generator | None
) -> int:
    """Return a token: the likeliest at temperature 0, else one of the likeliest that sum up to `top_p`."""
    if temperature == 0:
        return int(logits.argmax())
    ranked, tokens = (logits.float() / temperature).softmax(0).sort(descending=True)
    kept = ranked * (ranked.cumsum(0) - ranked < top_p)
    return int(tokens[torch.multinomial(kept, 1, generator=generator)])


def stream(
    decoder: Decoder,
    given: Sequence[int],
    most: int,
    *,
    stop: Collection[int] = (),
    temperature: float = 0.0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> Iterator[int]:
    """Yield at most `most` tokens that follow those given, each once it is known, up to one of `stop`.

    Raises:
        ContextError: the cache is too small; before the first token.
    """
    if len(given) + most - 1 > decoder.context:
        raise ContextError(f"{len(given)} + {most} tokens, and the cache holds {decoder.context}")
    tokens = [*given]
    for _ in range(most):
        token = choose(decoder.read(tokens), temperature, top_p, generator)
        if token in stop:
            return
        yield token
        tokens.append(token)


class ForGenerate(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """A decoder as transformers' `generate` takes it: one sequence, without padding, and its own cache."""

    main_input_name = "input_ids"
    device, dtype = torch.device("cpu"), torch.float32
    _supports_sdpa = True  # whatever attention a configuration asks for: the program has its own

    def __init__(self, decoder: Decoder, config: Any) -> None:
        super().__init__(config)
        self.decoder = decoder
        self.generation_config = GenerationConfig.from_model_config(config)
        self.generation_config.use_cache = False

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any
    ) -> dict[str, Any]:
        """Return all tokens: the decoder knows which of them its cache holds."""
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any
    ) -> CausalLMOutput:
        padded = attention_mask is not None and not bool(attention_mask.all())
        if len(input_ids) != 1 or padded:
            raise SequenceError("it reads one sequence without padding: no batches, no beams")
        return CausalLMOutput(logits=self.decoder.read(input_ids[0].tolist())[None, None])


class Printer:
    """A streamer of `generate` that prints tokens; transformers' `TextStreamer` prints text."""

    def put(self, tokens: Tensor) -> None:
        """Print new tokens, and not the prompt, which comes first."""
        if tokens.numel() == 1:
            print(int(tokens), end=" ", flush=True)

    def end(self) -> None:
        """End the line."""
        print()


def main(arguments: Sequence[str] | None = None) -> int:
    """Write tokens both ways; return 1 where the likeliest ones differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", default="Llama")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--top-p", type=float, default=0.9)
    given = parser.parse_args(arguments)
    with warnings.catch_warnings(), TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")  # what transformers and torch say of their own code
        lowered = qompose.lower(quantize(export(given.family, 256, 2), 4))
        qompose.save(lowered, Path(folder) / "decoder.qompose")
        decoder = Decoder(qompose.load(Path(folder) / "decoder.qompose"), PROMPT, PROMPT + STEPS)
    ids = prompt()[0].tolist()
    choices = {"temperature": given.temperature, "top_p": given.top_p}
    for token in stream(decoder, ids, STEPS, stop={STOP}, **choices):
        print(token, end=" ", flush=True)
    print()
    likeliest = [*stream(decoder, ids, STEPS, stop={STOP})]
    model = ForGenerate(decoder, PretrainedConfig(eos_token_id=STOP, pad_token_id=0))
    made = model.generate(prompt(), max_new_tokens=STEPS, do_sample=False, streamer=Printer())
    return int([t for t in made[0, PROMPT:].tolist() if t != STOP] != likeliest)


if __name__ == "__main__":
    sys.exit(main())
