# SPDX-License-Identifier: Apache-2.0
"""llm-compressor's weights of four bits, for any network: `oneshot` is given it as one of transformers."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import torch
from accuracy_tasks.subject import Inputs
from torch import nn
from torch.utils.data import DataLoader
from transformers import BertConfig, PreTrainedModel


class Hosted(PreTrainedModel):
    """A network as a model of transformers; inputs go by position."""

    config_class = BertConfig

    def __init__(self, config: BertConfig, net: nn.Module) -> None:
        super().__init__(config)
        self.net = net

    def forward(self, **inputs: torch.Tensor) -> Any:
        """Call the network."""
        return self.net(*inputs.values())


class _Processor:
    """`oneshot` asks for one wherever there is data, and uses none for data that are tensors already."""

    def save_pretrained(self, *args: Any, **options: Any) -> None:
        """Save nothing."""


def compressed(net: nn.Module, batches: list[Inputs], group_size: int, *, gptq: bool) -> Hosted:
    """A copy whose linears have weights of four bits, rounded to nearest or by GPTQ.

    Groups have zero points; a `group_size` of -1 is one scale per output channel, without.
    """
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier

    grouped = {"strategy": "channel"}
    if group_size > 0:
        grouped = {"strategy": "group", "group_size": group_size}  # type: ignore[dict-item]
    weights = QuantizationArgs(num_bits=4, symmetric=group_size < 0, **grouped)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    modifier = GPTQModifier if gptq else QuantizationModifier
    with tempfile.TemporaryDirectory() as folder:  # it reads a configuration from there
        config = BertConfig()
        config.save_pretrained(folder)
        config._name_or_path = folder
        model = Hosted(config, copy.deepcopy(net)).eval()
        rows = [{str(place): x for place, x in enumerate(inputs)} for inputs in batches]
        data = DataLoader(rows, batch_size=None)
        oneshot(
            model=model,
            processor=_Processor(),
            dataset=data,
            pipeline="basic",
            recipe=modifier(config_groups={"all": scheme}),
        )
    return model


def run(model: Hosted, *inputs: torch.Tensor) -> Any:
    """Call it with inputs by position."""
    return model(**{str(place): x for place, x in enumerate(inputs)})
