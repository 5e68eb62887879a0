# SPDX-License-Identifier: Apache-2.0
"""What the toy quantizers have in common, and how one becomes torchao's: by other imports."""

from __future__ import annotations

import ast
import importlib
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.passes.utils.source_matcher_utils import SourcePartition, get_source_partitions

KEY = "quantization_annotation"


def partitions_of(
    model: GraphModule, sources: list[Any], filter_fn: Callable[[Node], bool] | None = None
) -> list[SourcePartition]:
    found = get_source_partitions(model.graph, sources, filter_fn)
    return list(itertools.chain.from_iterable(found.values()))


def is_taken(nodes: Iterable[Node]) -> bool:
    return any(KEY in node.meta and node.meta[KEY]._annotated for node in nodes)


TORCHAO = ("torchao.quantization.pt2e", "torchao.quantization.pt2e.quantizer")


def with_names_of_torchao(module: ModuleType) -> Any:
    """A module's source with torchao's names imported where it imports qompose's, else as it is."""
    source = Path(str(module.__file__))
    tree = ast.parse(source.read_text(encoding="utf-8"))
    modules = [importlib.import_module(name) for name in TORCHAO]
    names: dict[str, Any] = {}
    for statement in list(tree.body):
        if isinstance(statement, ast.ImportFrom) and statement.module == "qompose":
            tree.body.remove(statement)
            for alias in statement.names:
                home = next(module for module in modules if hasattr(module, alias.name))
                names[alias.name] = getattr(home, alias.name)
    twin = ModuleType(f"{module.__name__}_of_torchao")
    vars(twin).update(names, __file__=str(source))
    exec(compile(tree, str(source), "exec"), vars(twin))
    return twin
