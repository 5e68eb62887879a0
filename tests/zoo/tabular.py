# SPDX-License-Identifier: Apache-2.0
"""Rows, sets and graphs: mixtures of experts, recommenders, message passing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .entry import ZooModel, floats, ids, net, zoo_model

WIDTH = 8
EXPERTS = 3
WORDS = 40


@net(
    router=lambda: nn.Linear(WIDTH, EXPERTS),
    experts=lambda: nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS)),
)
def one_hot_experts(m: Any, x: Tensor) -> Tensor:
    """Every expert runs on every row; a one-hot matrix of the best router score picks one."""
    picked = F.one_hot(m.router(x).argmax(dim=-1), EXPERTS).to(x.dtype)
    outputs = torch.stack([F.relu(expert(x)) for expert in m.experts], dim=-1)
    return torch.einsum("nwe,ne->nw", outputs, picked)


@net(
    router=lambda: nn.Linear(WIDTH, EXPERTS),
    experts=lambda: nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS)),
)
def where_experts(m: Any, x: Tensor) -> Tensor:
    """Experts merged one after the other by `where` on the router's integers."""
    choice = m.router(x).argmax(dim=-1, keepdim=True)
    y = torch.zeros_like(x)
    for index, expert in enumerate(m.experts):
        y = torch.where(choice == index, expert(x), y)
    return x + y


@net(
    router=lambda: nn.Linear(WIDTH, EXPERTS, bias=False),
    weights=lambda: nn.Parameter(0.3 * torch.randn(EXPERTS, WIDTH, WIDTH)),
)
def top_experts(m: Any, x: Tensor) -> Tensor:
    """The two best experts' weights gathered per row from one stacked parameter, and `bmm`."""
    scores, chosen = torch.topk(m.router(x).softmax(dim=-1), 2, dim=-1)
    scores = scores / scores.sum(dim=-1, keepdim=True)
    weights = m.weights[chosen.flatten()]
    outputs = torch.bmm(x.repeat_interleave(2, dim=0).unsqueeze(1), weights)
    return (outputs.view(-1, 2, WIDTH) * scores.unsqueeze(-1)).sum(dim=1)


@net(
    bag=lambda: nn.EmbeddingBag(WORDS, WIDTH, mode="mean", include_last_offset=True),
    head=lambda: nn.Linear(WIDTH, 3),
)
def bag_classifier(m: Any, words: Tensor) -> Tensor:
    """An embedding bag over a flat list of words cut by offsets, then a linear layer."""
    offsets = torch.arange(0, words.numel() + 1, words.shape[1])
    return m.head(m.bag(words.flatten(), offsets))


@net(
    rows=lambda: nn.Embedding(WORDS, 4),
    wide=lambda: nn.Embedding(WORDS, 1),
    deep=lambda: nn.Sequential(
        nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1)
    ),
)
def wide_and_deep(m: Any, columns: Tensor) -> Tensor:
    """Factorised interactions of one table's rows beside a deep part on the same rows."""
    rows = m.rows(columns)
    interactions = rows.sum(dim=1).square() - rows.square().sum(dim=1)
    total = m.wide(columns).sum(dim=1) + 0.5 * interactions.sum(dim=1, keepdim=True)
    return torch.sigmoid(total + m.deep(rows.flatten(1))).squeeze(-1)


@net(
    users=lambda: nn.Embedding(WORDS, WIDTH),
    items=lambda: nn.Linear(5, WIDTH),
    tower=lambda: nn.Linear(WIDTH, WIDTH),
)
def two_towers(m: Any, users: Tensor, items: Tensor) -> Tensor:
    """Users and items of different towers, compared by normalised products of all pairs."""
    left = F.normalize(m.tower(F.relu(m.users(users))), dim=-1)
    right = F.normalize(m.tower(F.relu(m.items(items))), dim=-1)
    return left @ right.t()


@net(message=lambda: nn.Linear(WIDTH, WIDTH), update=lambda: nn.Linear(2 * WIDTH, WIDTH))
def graph_convolution(m: Any, nodes: Tensor, edges: Tensor) -> Tensor:
    """Messages along edges by `gather` and `index_add`, degrees by `scatter_add`."""
    sources, targets = edges.unbind(0)
    messages = m.message(nodes)[sources]
    sums = torch.zeros_like(nodes).index_add(0, targets, messages)
    ones = torch.ones_like(targets, dtype=nodes.dtype)
    degrees = torch.zeros_like(nodes[:, 0]).scatter_add(0, targets, ones).clamp(min=1)
    return m.update(torch.cat([nodes, sums / degrees.unsqueeze(1)], dim=1)).relu()


@net(
    packed=lambda: nn.Linear(WIDTH, 2 * WIDTH),
    value=lambda: nn.Linear(WIDTH, WIDTH),
    gate=lambda: nn.Linear(WIDTH, WIDTH),
    transform=lambda: nn.Bilinear(WIDTH, WIDTH, WIDTH),
)
def highway(m: Any, x: Tensor) -> Tensor:
    """Gated linear units of every form: `glu`, a sigmoid gate, a carry gate `1 - t`."""
    x = F.glu(m.packed(x), dim=-1)
    gate = torch.sigmoid(m.gate(x))
    x = gate * F.mish(m.value(x)) + (1 - gate) * x
    return F.softplus(m.transform(x, x))


@net(field=lambda: nn.Sequential(nn.Linear(WIDTH + 1, 16), nn.Tanh(), nn.Linear(16, WIDTH)))
def euler_steps(m: Any, x: Tensor) -> Tensor:
    """A vector field integrated in five steps: one small network, five calls."""
    for step in range(5):
        time = x.new_full((x.shape[0], 1), step / 5)
        x = x + 0.2 * m.field(torch.cat([x, time], dim=1))
    return x


_ROWS = floats(4, WIDTH)

MODELS: tuple[ZooModel, ...] = (
    zoo_model("experts_one_hot", one_hot_experts, _ROWS, tags={"linear", "matmul", "integer"}),
    zoo_model("experts_where", where_experts, _ROWS, tags={"linear", "integer", "residual"}),
    zoo_model("experts_top_two", top_experts, _ROWS, tags={"linear", "matmul", "integer"}),
    zoo_model("bag_classifier", bag_classifier, ids(WORDS, 4, 5), tags={"linear", "bag"}),
    zoo_model("wide_and_deep", wide_and_deep, ids(WORDS, 4, 3),
              tags={"linear", "embedding", "bn"}),
    zoo_model("two_towers", two_towers, ids(WORDS, 4), floats(4, 5),
              tags={"linear", "embedding", "matmul", "shared"}),
    zoo_model("graph_convolution", graph_convolution, floats(6, WIDTH), ids(6, 2, 9),
              tags={"linear", "cat", "integer"}, dynamic=False),
    zoo_model("highway", highway, _ROWS, tags={"linear"}),
    zoo_model("euler_steps", euler_steps, _ROWS, tags={"linear", "shared", "residual", "cat"}),
)  # fmt: skip
