# SPDX-License-Identifier: Apache-2.0
"""What scripts for torchao call besides prepare and convert, with the import changed or left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import qompose
from qompose import QomposeWarning
from qompose_x86_inductor import X86InductorQuantizer, get_default_x86_inductor_quantization_config
from torch import nn
from torch.nn import functional as F

from tests.core.qat import batch_for, prepared_for, product_model
from tests.core.toy import export, randn, seeded
from tests.interop.peers import THEIR_WARNINGS

pytestmark = pytest.mark.filterwarnings(*THEIR_WARNINGS)


@pytest.mark.parametrize(
    "name",
    [
        "move_exported_model_to_eval",
        "move_exported_model_to_train",
        "allow_exported_model_train_eval",
    ],
)
def test_their_train_and_eval_are_known_to_do_nothing(name: str) -> None:
    import torchao.quantization.pt2e as torchao_pt2e  # by now without the warnings about itself

    prepared = prepared_for(product_model("linear", "relu", bias=True).train(), batch_for("linear"))
    prepared(batch_for("linear"))
    getattr(torchao_pt2e, name)(prepared)
    prepared.eval()  # which torchao may have replaced
    prepared.train()
    with pytest.warns(QomposeWarning):
        qompose.convert_pt2e(prepared)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (lambda q: q.set_module_name_qconfig("0", None), lambda q: q.set_module_name("0", None)),
        (
            lambda q: q.set_module_type_qconfig(nn.Linear, None),
            lambda q: q.set_module_type(nn.Linear, None),
        ),
        (
            lambda q: q.set_function_type_qconfig(F.linear, None),
            lambda q: q.set_operator_type(F.linear, None),
        ),
    ],
    ids=["module name", "module type", "function type"],
)
def test_x86_has_the_names_of_torchaos_selectors(
    theirs: Callable[[Any], Any], ours: Callable[[Any], Any]
) -> None:
    model = seeded(nn.Sequential(nn.Linear(4, 4), nn.Conv1d(2, 2, 1)))
    program = export(model, randn(2, 2, 4))

    def states(select: Callable[[Any], Any]) -> list[str]:
        config = get_default_x86_inductor_quantization_config()
        quantizer = X86InductorQuantizer().set_global(config)
        assert select(quantizer) is quantizer
        return [str(row) for row in qompose.report(qompose.prepare_pt2e(program, quantizer)).rows]

    assert states(theirs) == states(ours)
    assert "left in float" in states(theirs)[0]
