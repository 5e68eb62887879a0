# SPDX-License-Identifier: Apache-2.0
"""The embedding backend: one rule, one configuration, a kernel per target."""

from __future__ import annotations

import torch
from qompose import (
    Backend,
    Kernel,
    OperatorPattern,
    PerChannelMinMaxObserver,
    QuantizationConfig,
    QuantizationSpec,
    Rule,
    RuleQuantizer,
    TensorConstraint,
)

from qompose_embedding.kernels import embedding_byte, gather_rows

EPS = torch.finfo(torch.float32).eps

ROWS = TensorConstraint(
    dtypes=frozenset({torch.uint8, torch.int8}),
    qschemes=frozenset(
        {
            torch.per_channel_affine_float_qparams,
            torch.per_channel_affine,
            torch.per_channel_symmetric,
        }
    ),
    ch_axis=0,
)


def get_default_embedding_quantization_config() -> QuantizationConfig:
    """Return uint8 rows, each with a float scale and a float zero point; indices stay as they are.

    A scale below the observer's eps becomes 1, which wipes a row out. The 2**-12 of other recipes does
    that to rows of small random values; here only rows that are constant up to rounding are affected.
    """
    weight = QuantizationSpec(
        dtype=torch.uint8,
        observer_or_fake_quant_ctr=PerChannelMinMaxObserver.with_args(eps=EPS),
        qscheme=torch.per_channel_affine_float_qparams,
        ch_axis=0,
    )
    return QuantizationConfig(None, None, weight, None, name="uint8 rows")


RULES = (
    Rule(
        name="embedding",
        drawing="embedding",
        patterns=(
            OperatorPattern(
                (torch.ops.aten.embedding.default,),
                shapes=((8, 4), lambda: torch.randint(8, (2, 3))),
            ),
        ),
        activations=(),
        weight="weight",
        output=False,
        modes=frozenset({"weight-only"}),
        accepts={"weight": ROWS},
        kernels={
            "torch": Kernel("gather rows, dequantize", gather_rows, float_output=True),
            "executorch": Kernel(
                "quantized_decomposed.embedding_byte", embedding_byte, float_output=True
            ),
        },
    ),
)


class EmbeddingBackend(Backend):
    """Tables of eight-bit rows; a lookup dequantizes the rows it returns and no others."""

    name = "embedding"
    api_version = 1
    rules = RULES

    def __init__(self) -> None:
        config = get_default_embedding_quantization_config()
        self.configs = {config.name: config}
        self.quantizer_class = EmbeddingQuantizer


class EmbeddingQuantizer(RuleQuantizer):
    """Quantizes every embedding table, unless selectors say otherwise."""

    def __init__(self) -> None:
        super().__init__(EmbeddingBackend())
        self.set_global(get_default_embedding_quantization_config())
