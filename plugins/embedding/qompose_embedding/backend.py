# SPDX-License-Identifier: Apache-2.0
"""The embedding backend and its quantizer."""

from __future__ import annotations

from typing import Any

import torch
from qompose import QuantizationConfig, RuleQuantizer
from qompose.backend import Backend, graphs_in
from qompose.errors import ConfigError
from torch.fx import GraphModule, Node

from qompose_embedding.bag_operators import IN_GRAPH, Bags, lookup_in_graph
from qompose_embedding.configs import CONFIGS, get_default_embedding_quantization_config
from qompose_embedding.lookup import UNPACK
from qompose_embedding.rules import RULES
from qompose_embedding.torch_kernels import step_of

aten = torch.ops.aten

FEW_ROWS = 32
"""Below this number of rows, compiled code gathers the bytes faster than it calls a kernel."""


class EmbeddingBackend(Backend):
    """Tables of 8, 4 or 2 bits; a lookup dequantizes the rows it returns and no others."""

    name = "embedding"
    api_version = 1
    rules = RULES
    configs = CONFIGS

    def __init__(self) -> None:
        self.quantizer_class = EmbeddingQuantizer

    def for_compiler(self, graph: GraphModule) -> GraphModule:
        """Replace bags, and lookups of more than a few rows, by functions of torch's own operators."""
        for part in graphs_in(graph):
            for node in list(part.graph.nodes):
                if node.op == "call_function":
                    _bag_in_graph(node)
                    _look_up_as_bags(node)
            part.recompile()
        return graph


def _bag_in_graph(node: Node) -> None:
    """Replace an operator for bags, in place; offsets that the graph makes itself need no check."""
    if node.target in IN_GRAPH:
        arguments: Any = node.args[-len(Bags._fields) :]
        bags = Bags(*arguments)
        known = step_of(bags.indices, bags.offsets, bags.include_last_offset) is not None
        node.target = IN_GRAPH[node.target][0 if known else 1]


def _look_up_as_bags(node: Node) -> None:
    """Replace a gathering of packed rows and their unpacking, in place, where it pays."""
    bits = next((bits for bits, unpack in UNPACK.items() if node.target is unpack), None)
    gathered = node.args[0] if bits is not None else None
    if not isinstance(gathered, Node) or gathered.target is not aten.index_select.default:
        return
    table, _, indices = gathered.args
    assert isinstance(indices, Node)
    number = indices.meta["val"].shape[0]
    if len(gathered.users) == 1 and not (isinstance(number, int) and number < FEW_ROWS):
        node.target, node.args = lookup_in_graph, (table, indices, bits)
        node.graph.erase_node(gathered)


class EmbeddingQuantizer(RuleQuantizer):
    """Quantizes every embedding table, unless selectors say otherwise.

    Args:
        config: for all tables without another from a selector; None: `embedding_byte`, eight bits a value.

    Raises:
        ConfigError: `config` is not a configuration.
    """

    def __init__(self, config: QuantizationConfig | None = None) -> None:
        super().__init__(EmbeddingBackend())
        if config is not None and not isinstance(config, QuantizationConfig):
            raise ConfigError(f"config must be a QuantizationConfig, got {config!r}")
        self.set_global(get_default_embedding_quantization_config() if config is None else config)
