# SPDX-License-Identifier: Apache-2.0
"""Rows, sets and graphs: mixtures of experts, recommenders, message passing."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .entry import ZooModel, floats, ids, zoo_model

WIDTH = 8
EXPERTS = 3
WORDS = 40


class OneHotExperts(nn.Module):
    """Every expert runs on every row; a one-hot matrix of the best router score picks one."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        picked = F.one_hot(self.router(x).argmax(dim=-1), EXPERTS).to(x.dtype)
        outputs = torch.stack([F.relu(expert(x)) for expert in self.experts], dim=-1)
        return torch.einsum("nwe,ne->nw", outputs, picked)


class WhereExperts(nn.Module):
    """Experts merged one after the other by `where` on the router's integers."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        choice = self.router(x).argmax(dim=-1, keepdim=True)
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            y = torch.where(choice == index, expert(x), y)
        return x + y


class TopExperts(nn.Module):
    """The two best experts' weights gathered per row from one stacked parameter, and `bmm`."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.weights = nn.Parameter(0.3 * torch.randn(EXPERTS, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = torch.topk(self.router(x).softmax(dim=-1), 2, dim=-1)
        scores = scores / scores.sum(dim=-1, keepdim=True)
        weights = self.weights[chosen.flatten()]
        outputs = torch.bmm(x.repeat_interleave(2, dim=0).unsqueeze(1), weights)
        return (outputs.view(-1, 2, WIDTH) * scores.unsqueeze(-1)).sum(dim=1)


class BagClassifier(nn.Module):
    """An embedding bag over a flat list of words cut by offsets, then a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(WORDS, WIDTH, mode="mean", include_last_offset=True)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, words: Tensor) -> Tensor:
        offsets = torch.arange(0, words.numel() + 1, words.shape[1])
        return self.head(self.bag(words.flatten(), offsets))


class WideAndDeep(nn.Module):
    """Factorised interactions of one table's rows beside a deep part on the same rows."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.wide = nn.Embedding(WORDS, 4), nn.Embedding(WORDS, 1)
        self.deep = nn.Sequential(
            nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1)
        )

    def forward(self, columns: Tensor) -> Tensor:
        rows = self.rows(columns)
        interactions = rows.sum(dim=1).square() - rows.square().sum(dim=1)
        total = self.wide(columns).sum(dim=1) + 0.5 * interactions.sum(dim=1, keepdim=True)
        return torch.sigmoid(total + self.deep(rows.flatten(1))).squeeze(-1)


class TwoTowers(nn.Module):
    """Users and items of different towers, compared by normalised products of all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(WORDS, WIDTH), nn.Linear(5, WIDTH)
        self.tower = nn.Linear(WIDTH, WIDTH)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        left = F.normalize(self.tower(F.relu(self.users(users))), dim=-1)
        right = F.normalize(self.tower(F.relu(self.items(items))), dim=-1)
        return left @ right.t()


class GraphConvolution(nn.Module):
    """Messages along edges by `gather` and `index_add`, degrees by `scatter_add`."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        sources, targets = edges.unbind(0)
        messages = self.message(nodes)[sources]
        sums = torch.zeros_like(nodes).index_add(0, targets, messages)
        ones = torch.ones_like(targets, dtype=nodes.dtype)
        degrees = torch.zeros_like(nodes[:, 0]).scatter_add(0, targets, ones).clamp(min=1)
        return self.update(torch.cat([nodes, sums / degrees.unsqueeze(1)], dim=1)).relu()


class Highway(nn.Module):
    """Gated linear units of every form: `glu`, a sigmoid gate, a carry gate `1 - t`."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Linear(WIDTH, 2 * WIDTH)
        self.value, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.transform = nn.Bilinear(WIDTH, WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = F.glu(self.packed(x), dim=-1)
        gate = torch.sigmoid(self.gate(x))
        x = gate * F.mish(self.value(x)) + (1 - gate) * x
        return F.softplus(self.transform(x, x))


class EulerSteps(nn.Module):
    """A vector field integrated in five steps: one small network, five calls."""

    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(WIDTH + 1, 16), nn.Tanh(), nn.Linear(16, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for step in range(5):
            time = x.new_full((x.shape[0], 1), step / 5)
            x = x + 0.2 * self.field(torch.cat([x, time], dim=1))
        return x


_ROWS = floats(4, WIDTH)

MODELS: tuple[ZooModel, ...] = (
    zoo_model("experts_one_hot", OneHotExperts, _ROWS, tags={"linear", "matmul", "integer"}),
    zoo_model("experts_where", WhereExperts, _ROWS, tags={"linear", "integer", "residual"}),
    zoo_model("experts_top_two", TopExperts, _ROWS, tags={"linear", "matmul", "integer"}),
    zoo_model("bag_classifier", BagClassifier, ids(WORDS, 4, 5), tags={"linear", "bag"}),
    zoo_model("wide_and_deep", WideAndDeep, ids(WORDS, 4, 3),
              tags={"linear", "embedding", "bn"}),
    zoo_model("two_towers", TwoTowers, ids(WORDS, 4), floats(4, 5),
              tags={"linear", "embedding", "matmul", "shared"}),
    zoo_model("graph_convolution", GraphConvolution, floats(6, WIDTH), ids(6, 2, 9),
              tags={"linear", "cat", "integer"}, dynamic=False),
    zoo_model("highway", Highway, _ROWS, tags={"linear"}),
    zoo_model("euler_steps", EulerSteps, _ROWS, tags={"linear", "shared", "residual", "cat"}),
)  # fmt: skip
