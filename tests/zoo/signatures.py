# SPDX-License-Identifier: Apache-2.0
"""What goes in, what comes out and in which type: structures, constants, integers, half precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .attention import grouped_query_attention
from .convolutional import classifier, conv_bn
from .entry import ZooModel, floats, group, ids, keep_mask, mapping, net, zoo_model
from .sequence import mlp

WIDTH = 6
WORDS = 20


@net(
    embedding=lambda: nn.Embedding(WORDS, WIDTH),
    left=lambda: nn.Linear(WIDTH, WIDTH),
    right=lambda: nn.Linear(WIDTH, 2),
)
def nested_inputs(
    m: Any, features: dict[str, Tensor], pair: tuple[Tensor, Tensor]
) -> dict[str, Any]:
    """A dictionary and a tuple as arguments, and a nested structure as the result."""
    x = m.left(m.embedding(features["words"]) + features["numbers"])
    scaled = m.right(F.relu(x)) * pair[0]
    return {"logits": scaled, "states": [x, (pair[1], features["words"])]}


@net(linear=lambda: nn.Linear(WIDTH, WIDTH))
def optional_outputs(m: Any, x: Tensor) -> tuple[Any, ...]:
    """None, numbers and an input among the outputs, as models with options return."""
    y = m.linear(x)
    return None, y, 3, (x, None), {"loss": None, "scale": 0.5}


@net(linear=lambda: nn.Linear(WIDTH, WIDTH))
def constants(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Tensors made in `forward`: from lists, ranges and fills; one is also an output."""
    weights = torch.tensor([[0.5, -1.0, 2.0, 0.0, 1.0, -0.5]])
    steps = torch.arange(WIDTH, dtype=x.dtype) / WIDTH
    y = F.relu(m.linear(x * weights)) + torch.linspace(0, 1, WIDTH)
    order = torch.tensor([5, 4, 3, 2, 1, 0])
    return F.linear(y.index_select(1, order), torch.eye(WIDTH)) - steps, weights


@net()
def parameterless(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """A similarity without any parameter or buffer."""
    return F.softmax(F.layer_norm(x, [WIDTH]) @ F.relu(y).t(), dim=-1)


@net(salt=lambda: nn.Buffer(torch.tensor([7, 11, 13])))
def integers_only(m: Any, words: Tensor) -> tuple[Tensor, Tensor]:
    """Hashing of identifiers: integer and boolean arithmetic, nothing to quantize."""
    hashed = (words.unsqueeze(-1) * m.salt + 3) % 17
    hashed = torch.bitwise_xor(hashed, hashed >> 1).cumsum(dim=-1)
    known = (words > 2) & (words != 5) | ~(hashed[..., 0] < 4)
    return torch.where(known.unsqueeze(-1), hashed, 0), known


@net(
    before=lambda: nn.Sequential(nn.Identity(), nn.Sequential(), nn.Dropout(0.3)),
    linear=lambda: nn.Linear(WIDTH, WIDTH),
    branches=lambda: nn.ModuleList([nn.Sequential(), nn.Linear(WIDTH, WIDTH), nn.Identity()]),
    nothing=lambda: nn.ModuleDict(),
)
def empty_parts(m: Any, x: Tensor) -> Tensor:
    """Identities, empty containers and dropout between and instead of layers."""
    x = m.linear(m.before(x))
    return sum((branch(x) for branch in m.branches), start=x.detach())


@net(first=lambda: nn.Linear(WIDTH, WIDTH), second=lambda: nn.Linear(WIDTH, WIDTH))
def views(m: Any, x: Tensor) -> Tensor:
    """Writes through views, masks and slices into activations that are read again."""
    y = m.first(x)
    y[:, :2] = 0.0
    y[:, 2:4].mul_(2.0).add_(1.0)
    y.view(-1, 2, WIDTH // 2).transpose(1, 2).clamp_(-1.5, 1.5)
    z = y.clone()
    z[z > 1.0] = 0.25
    z.masked_fill_(z < -1.0, -0.25)
    return m.second(z).add_(y)


@net(rows=lambda: nn.Linear(WIDTH, WIDTH), all=lambda: nn.Linear(WIDTH, 2))
def masked_rows(m: Any, x: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """Rows picked by a mask: how many there are is known only at run time."""
    picked = m.rows(x[keep])
    return picked, m.all(x.masked_scatter(keep.unsqueeze(-1), picked))


@net(
    mean=lambda: nn.Buffer(torch.rand(3, 1, 1)),
    net=lambda: nn.Sequential(conv_bn(3, 8, stride=2), classifier(8)),
)
def pixels(m: Any, image: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes in, normalised, classified; the class comes out as an integer, and a flag with it."""
    scores = m.net((image.float() / 255 - m.mean) / 0.25)
    best = scores.softmax(dim=-1).max(dim=-1)
    return best.indices.to(torch.int32), best.values > 0.11


def half_mlp() -> nn.Module:
    """float16 throughout, with a layer norm."""
    return nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)).half()


def double_net() -> nn.Module:
    """float64 throughout."""
    return nn.Sequential(conv_bn(3, 8), conv_bn(8, 8, groups=2), classifier(8)).double()


def bfloat16_net() -> nn.Module:
    """Convolutions and batch norms in bfloat16."""
    return nn.Sequential(conv_bn(3, 8), classifier(8)).bfloat16()


_ROWS = floats(4, WIDTH)
_HALF, _DOUBLE, _BFLOAT = torch.float16, torch.float64, torch.bfloat16

MODELS: tuple[ZooModel, ...] = (
    zoo_model(
        "nested_inputs", nested_inputs,
        mapping(words=ids(WORDS, 4), numbers=floats(4, WIDTH)), group(floats(4, 1), floats(4, 3)),
        tags={"signature", "linear", "embedding", "multi_output"},
    ),
    zoo_model("optional_outputs", optional_outputs, _ROWS,
              tags={"signature", "linear", "multi_output"}),
    zoo_model("constants", constants, _ROWS, tags={"signature", "linear", "multi_output"}),
    zoo_model("parameterless", parameterless, _ROWS, _ROWS, tags={"signature", "matmul"}),
    zoo_model("integers_only", integers_only, ids(WORDS, 4, 3),
              tags={"signature", "integer", "multi_output"}),
    zoo_model("empty_parts", empty_parts, _ROWS, tags={"signature", "linear", "residual"}),
    zoo_model("views", views, _ROWS, tags={"signature", "linear", "inplace"}),
    zoo_model("masked_rows", masked_rows, floats(2, 5, WIDTH), keep_mask(2, 5),
              tags={"signature", "linear", "multi_output"}),
    zoo_model("pixels", pixels, ids(256, 2, 3, 8, 8, dtype=torch.uint8),
              tags={"signature", "conv", "bn", "integer", "multi_output"}),
    zoo_model("half_mlp", half_mlp, floats(4, 12, dtype=_HALF), tags={"data_type", "linear"}),
    zoo_model("half_attention", lambda: grouped_query_attention().half(),
              floats(2, 8, 16, dtype=_HALF), tags={"data_type", "attention", "matmul"}),
    zoo_model("bfloat16_mlp", lambda: mlp().bfloat16(), floats(4, 12, dtype=_BFLOAT),
              tags={"data_type", "linear"}),
    zoo_model("bfloat16_conv_bn", bfloat16_net, floats(2, 3, 8, 8, dtype=_BFLOAT),
              tags={"data_type", "conv", "bn"}),
    zoo_model("double_conv_bn", double_net, floats(2, 3, 8, 8, dtype=_DOUBLE),
              tags={"data_type", "conv", "bn"}),
)  # fmt: skip
