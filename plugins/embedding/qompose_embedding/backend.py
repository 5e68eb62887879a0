# SPDX-License-Identifier: Apache-2.0
"""The embedding backend and its quantizer."""

from __future__ import annotations

from qompose import Backend, ConfigError, QuantizationConfig, RuleQuantizer
from torch.fx import GraphModule

from qompose_embedding.configs import CONFIGS, get_default_embedding_quantization_config
from qompose_embedding.ops import IN_GRAPH
from qompose_embedding.rules import RULES


class EmbeddingBackend(Backend):
    """Tables of 8, 4 or 2 bits; a lookup dequantizes the rows it returns and no others."""

    name = "embedding"
    api_version = 1
    rules = RULES
    configs = CONFIGS

    def __init__(self) -> None:
        self.quantizer_class = EmbeddingQuantizer

    def for_compiler(self, graph: GraphModule) -> GraphModule:
        """Put functions of torch's own operators for bags."""
        for part in graph.modules():  # with the branches of control flow
            if isinstance(part, GraphModule):
                for node in part.graph.nodes:
                    if node.op == "call_function":
                        node.target = IN_GRAPH.get(node.target, node.target)
                part.recompile()
        return graph


class EmbeddingQuantizer(RuleQuantizer):
    """Quantizes every embedding table, unless selectors say otherwise.

    Args:
        config: for all tables that no selector gives another; None: `embedding_byte`, eight bits a value.
    """

    def __init__(self, config: QuantizationConfig | None = None) -> None:
        super().__init__(EmbeddingBackend())
        if config is not None and not isinstance(config, QuantizationConfig):
            raise ConfigError(f"{config!r} is no QuantizationConfig")
        self.set_global(get_default_embedding_quantization_config() if config is None else config)
