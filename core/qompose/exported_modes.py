# SPDX-License-Identifier: Apache-2.0
"""Train and eval under the names that torchao has for them, for scripts that were written with those.

Prepared models have `train()` and `eval()` of their own. torchao's functions look for patterns in the graph
that are not in qompose's, and change nothing.
"""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule

from qompose.errors import StageError
from qompose.evaluation import MODE_KEY, evaluation_form
from qompose.nested import nodes_in
from qompose.plan import META_KEY

_PREPARED = "prepare_qat_pt2e takes programs that were exported in either mode."


def move_exported_model_to_eval(model: GraphModule) -> GraphModule:
    """Put a model of any stage into evaluation, in place, or an exported one that is not prepared yet.

    Returns:
        `model`.

    Raises:
        StageError: `model` is neither.
    """
    if _stage(model) is not None:
        return model.eval()
    if not (isinstance(model, GraphModule) and any("val" in n.meta for n in model.graph.nodes)):
        raise StageError(
            "move_exported_model_to_eval takes the GraphModule of an exported program, or of a later "
            f"stage, and got {type(model).__name__!r}. Export it in evaluation: "
            "torch.export.export(model.eval(), ...)"
        )
    evaluation_form(model)
    for node in nodes_in(model):
        node.meta.pop(MODE_KEY, None)  # it is not going to be trained again
    for module in model.modules():
        if isinstance(module, GraphModule):
            module.recompile()
    return model


def move_exported_model_to_train(model: GraphModule) -> GraphModule:
    """Put a prepared model into training, in place.

    Returns:
        `model`.

    Raises:
        StageError: `model` was not prepared, or was converted.
    """
    if _stage(model) == "prepared":
        return model.train()
    raise StageError(
        f"move_exported_model_to_train takes a prepared model, and got {_said(model)}. {_PREPARED}"
    )


def allow_exported_model_train_eval(model: GraphModule) -> GraphModule:
    """Return `model`, which is prepared, converted or lowered: `train()` and `eval()` work without this.

    Raises:
        StageError: `model` was not prepared: it stays in the mode of its export.
    """
    if _stage(model) is not None:
        return model
    raise StageError(
        f"allow_exported_model_train_eval takes a prepared model, and got {_said(model)}, which stays in "
        f"the mode of its export. {_PREPARED}"
    )


def _stage(model: Any) -> Any:
    """Return the stage that a model of qompose's is of, None of any other."""
    return getattr(getattr(model, "meta", {}).get(META_KEY), "stage", None)


def _said(model: Any) -> str:
    stage = _stage(model)
    return f"a {stage} one" if stage else f"{type(model).__name__!r}"
