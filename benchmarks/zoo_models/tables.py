# SPDX-License-Identifier: Apache-2.0
"""More networks of series, graphs and tables."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.entry import ZooModel, floats, ids, zoo_model

WIDTH = 16
WORDS = 40
LENGTH = 8


class BlockForecast(nn.Module):
    """N-BEATS: blocks that each explain a part of a series and forecast from it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 30)
            )
            for _ in range(3)
        )

    def forward(self, series: Tensor) -> Tensor:
        forecast = series.new_zeros(series.shape[0], 6)
        for block in self.blocks:
            past, future = block(series).split([24, 6], dim=-1)
            series, forecast = series - past, forecast + future
        return forecast


class Decomposed(nn.Module):
    """DLinear: a moving average and what is left of it, a linear layer for each."""

    def __init__(self) -> None:
        super().__init__()
        self.trend, self.rest = nn.Linear(24, 6), nn.Linear(24, 6)

    def forward(self, series: Tensor) -> Tensor:
        padded = F.pad(series, (2, 2), mode="replicate")
        trend = F.avg_pool1d(padded, 5, 1)
        return self.trend(trend) + self.rest(series - trend)


class PatchSeries(nn.Module):
    """PatchTST: a series normalised by its own mean and deviation, cut into overlapping patches."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, WIDTH)
        self.body = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True)
        self.head = nn.Linear(5 * WIDTH, 6)

    def forward(self, series: Tensor) -> Tensor:
        mean, deviation = series.mean(-1, keepdim=True), series.std(-1, keepdim=True) + 1e-5
        patches = ((series - mean) / deviation).unfold(-1, 8, 4).flatten(0, 1)
        y = self.head(self.body(self.embed(patches)).flatten(1))
        return y.view(*series.shape[:2], 6) * deviation + mean


class GraphAttention(nn.Module):
    """Attention along edges: a softmax over those into each node, by scatters."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.score, self.out = nn.Linear(6, 8), nn.Linear(16, 1), nn.Linear(8, 3)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        x, (source, target) = self.project(nodes), edges.unbind(0)
        logits = F.leaky_relu(self.score(torch.cat([x[source], x[target]], dim=-1)), 0.2)
        weight = (logits - logits.max()).exp()
        total = x.new_zeros(x.shape[0], 1).index_add(0, target, weight) + 1e-6
        seen = torch.zeros_like(x).index_add(0, target, weight * x[source]) / total
        return self.out(F.elu(seen))


class Sage(nn.Module):
    """Means over neighbours by `scatter_reduce`, joined with the node's own features; a sum over graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.near, self.out = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, nodes: Tensor, edges: Tensor, graph: Tensor) -> Tensor:
        source, target = edges.unbind(0)
        index = target[:, None].expand(-1, nodes.shape[1])
        mean = torch.zeros_like(nodes).scatter_reduce(
            0, index, nodes[source], "mean", include_self=False
        )
        y = F.relu(self.own(nodes) + self.near(mean))
        pooled = y.new_zeros(2, 8).scatter_add(0, graph[:, None].expand_as(y), y)
        return self.out(pooled)


class Messages(nn.Module):
    """Messages from both ends of an edge and its features, summed, a GRU cell at each node, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.message = nn.Sequential(nn.Linear(14, 16), nn.ReLU(), nn.Linear(16, 6))
        self.cell, self.out = nn.GRUCell(6, 6), nn.Linear(6, 1)

    def forward(self, nodes: Tensor, edges: Tensor, features: Tensor) -> Tensor:
        source, target = edges.unbind(0)
        for _ in range(2):
            sent = self.message(torch.cat([nodes[source], nodes[target], features], dim=-1))
            nodes = self.cell(torch.zeros_like(nodes).index_add(0, target, sent), nodes)
        return self.out(nodes).sum(0)


class Dlrm(nn.Module):
    """Bags of categories and a network of numbers, all pairs multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(WORDS, 8, mode="sum") for _ in range(3))
        self.bottom = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(14, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())
        self.register_buffer("pairs", torch.tril_indices(4, 4, -1))

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        x = self.bottom(numbers)
        parts = [bag(categories[:, n]) for n, bag in enumerate(self.bags)]
        rows = torch.stack([x, *parts], dim=1)
        products = torch.bmm(rows, rows.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([x, products], dim=-1))


class DeepFm(nn.Module):
    """Factorisation by the square of sums less the sum of squares, beside a deep network."""

    def __init__(self) -> None:
        super().__init__()
        self.weights, self.factors = nn.Embedding(WORDS, 1), nn.Embedding(WORDS, 8)
        self.deep = nn.Sequential(
            nn.Linear(32, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1)
        )

    def forward(self, fields: Tensor) -> Tensor:
        x = self.factors(fields)
        pairs = 0.5 * (x.sum(1).square() - x.square().sum(1)).sum(-1, keepdim=True)
        return (self.weights(fields).sum(1) + pairs + self.deep(x.flatten(1))).sigmoid()


class CrossNet(nn.Module):
    """Deep and cross, its second form: products with the input at every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, 6), nn.Linear(24, 1)
        self.crosses = nn.ModuleList(nn.Linear(24, 24) for _ in range(2))

    def forward(self, fields: Tensor) -> Tensor:
        x = first = self.table(fields).flatten(1)
        for cross in self.crosses:
            x = first * cross(x) + x
        return self.head(x)


class Interest(nn.Module):
    """DIN: how much each item of a history matters for a candidate, by a small network."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(WORDS, 8, padding_idx=0)
        self.score = nn.Sequential(nn.Linear(32, 16), nn.PReLU(), nn.Linear(16, 1))
        self.head = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, history: Tensor, item: Tensor) -> Tensor:
        past, wanted = self.items(history), self.items(item)
        other = wanted[:, None].expand_as(past)
        score = self.score(torch.cat([past, other, past - other, past * other], dim=-1))
        seen = (score * (history != 0)[..., None] * past).sum(1)
        return self.head(torch.cat([seen, wanted], dim=-1)).sigmoid()


class TabularTransformer(nn.Module):
    """A token for each number and category, and one that answers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.randn(5, WIDTH)),
            nn.Parameter(torch.randn(5, WIDTH)),
        )
        self.table, self.answer = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.randn(1, 1, WIDTH))
        self.body = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True, norm_first=True)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        tokens = numbers[..., None] * self.weight + self.bias
        first = self.answer.expand(numbers.shape[0], -1, -1)
        return self.head(self.body(torch.cat([first, tokens, self.table(categories)], dim=1))[:, 0])


class Coupling(nn.Module):
    """A normalising flow: halves that scale and shift one another, and the density."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 6)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        total = x.new_zeros(x.shape[0])
        for net in self.nets:
            kept, moved = x.chunk(2, dim=-1)
            scale, shift = net(kept).chunk(2, dim=-1)
            x = torch.cat([moved * scale.tanh().exp() + shift, kept], dim=-1)
            total = total + scale.tanh().sum(-1)
        return x, total


class Dueling(nn.Module):
    """A value and an advantage of each action; the best action."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 32), nn.ReLU())
        self.value, self.advantage = nn.Linear(32, 1), nn.Linear(32, 4)

    def forward(self, state: Tensor) -> dict[str, Tensor]:
        y = self.body(state)
        advantage = self.advantage(y)
        values = self.value(y) + advantage - advantage.mean(-1, keepdim=True)
        return {"values": values, "action": values.argmax(-1)}


class Actor(nn.Module):
    """A policy's mean and deviation, and a critic of state and action."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 32), nn.ELU(), nn.Linear(32, 4))
        self.critic = nn.Sequential(nn.Linear(8, 32), nn.Mish(), nn.Linear(32, 1))

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, deviation = self.actor(state).chunk(2, dim=-1)
        action = mean.tanh()
        return action, deviation.clamp(-5, 2).exp(), self.critic(torch.cat([state, action], dim=-1))


class Mixture(nn.Module):
    """A mixture of Gaussians as the answer; `nn.Bilinear` joins two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.join, self.head = nn.Bilinear(4, 5, 16), nn.Linear(16, 9)

    def forward(self, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        share, mean, deviation = self.head(self.join(one, other).tanh()).chunk(3, dim=-1)
        return share.softmax(-1), mean, F.softplus(deviation)


class Splines(nn.Module):
    """A Kolmogorov-Arnold layer: learnt sums of radial bumps on every edge."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centres", torch.linspace(-2, 2, 8))
        self.bumps, self.base, self.head = nn.Linear(6 * 8, 12), nn.Linear(6, 12), nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        bumps = torch.exp(-((x[..., None] - self.centres) * 2).square()).flatten(-2)
        return self.head(self.bumps(bumps) + self.base(F.silu(x)))


class Memory(nn.Module):
    """Content addressing: a read of a learnt memory and an erase-and-add write to it."""

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.keys = nn.Parameter(torch.randn(1, 6, 8)), nn.Linear(8, 8)
        self.erase, self.add = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        share = (
            F.cosine_similarity(self.keys(x)[:, None], self.memory, dim=-1)
            .mul(5)
            .softmax(-1)[..., None]
        )
        memory = (
            self.memory * (1 - share * self.erase(x).sigmoid()[:, None])
            + share * self.add(x)[:, None]
        )
        return (share * memory).sum(1)


_SERIES = floats(2, 3, 24)
_EDGES = ids(7, 2, 12)


def _model(name: str, make: object, *draws: object, dynamic: bool = True) -> ZooModel:
    return zoo_model(name, make, *draws, tags={"further", "linear"}, dynamic=dynamic)  # type: ignore[arg-type]


MODELS: tuple[ZooModel, ...] = (
    _model("block_forecast", BlockForecast, floats(2, 24)), _model("decomposed_series", Decomposed, _SERIES),
    _model("patch_series", PatchSeries, _SERIES),
    _model("graph_attention", GraphAttention, floats(7, 6), _EDGES, dynamic=False),
    _model("graph_sage", Sage, floats(7, 6), _EDGES, ids(2, 7), dynamic=False),
    _model("message_passing", Messages, floats(7, 6), _EDGES, floats(12, 2), dynamic=False),
    _model("dlrm", Dlrm, floats(4, 5), ids(WORDS, 4, 3, 2)), _model("deep_fm", DeepFm, ids(WORDS, 4, 4)),
    _model("cross_network", CrossNet, ids(WORDS, 4, 4)),
    _model("interest", Interest, ids(WORDS, 2, 6), ids(WORDS, 2)),
    _model("tabular_transformer", TabularTransformer, floats(4, 5), ids(WORDS, 4, 3)),
    _model("coupling_flow", Coupling, floats(4, 6)), _model("dueling", Dueling, floats(4, 6)),
    _model("actor_critic", Actor, floats(4, 6)), _model("mixture", Mixture, floats(4, 4), floats(4, 5)),
    _model("splines", Splines, floats(4, 6)), _model("memory", Memory, floats(4, 8)),
)  # fmt: skip
