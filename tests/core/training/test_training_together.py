# SPDX-License-Identifier: Apache-2.0
"""Two processes that train on half of each batch end with what one process has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.core.calibration.test_ranks import together

BODY = """
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from tests.core.qat import batch_for, product_model, product_quantizer

LEARNED = [qompose.QuantizationSpec(
    torch.int8, qompose.observers.LearnableFakeQuantize.with_args(
        observer=qompose.observers.HistogramObserver, use_grad_scaling=False
    ), -128, 127, torch.per_tensor_affine,
)]

def train(model, share):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(4):
        x = batch_for("conv2d", step)
        half = x if share is None else x[share::count]
        optimizer.zero_grad()
        out = model(half)
        F.mse_loss(out, half.mean(dim=1, keepdim=True).expand_as(out)).backward()
        optimizer.step()

def made(mode):
    torch.manual_seed(0)
    model = product_model("conv2d", "relu", bias=True)
    if mode == "synchronized":
        model.insert(len(model), torch.nn.BatchNorm2d(4, momentum=0.2))  # one that cannot be folded
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    dims = ({0: torch.export.Dim("batch", min=2)},)
    # Among processes torch takes a SyncBatchNorm on a CPU in evaluation alone.
    program = torch.export.export(model.eval(), (batch_for("conv2d"),), dynamic_shapes=dims)
    quantizer = product_quantizer(*LEARNED if mode == "learned" else ())
    prepared = qompose.prepare_qat_pt2e(program, quantizer).train()
    if mode != "synchronized":  # batch statistics are each process's own, as torch's are
        prepared.apply(qompose.training.freeze_batch_norm)
    return prepared

for mode in MODES:
    prepared = made(mode)
    train(DistributedDataParallel(prepared), rank)
    torch.save(prepared.state_dict(), f"{out}/{mode}.{rank}.pt")
    if rank == 0:  # which may look at test data alone: nobody else is asked
        prepared.eval()(batch_for("conv2d", 9))
    dist.barrier()
dist.destroy_process_group()
for mode in MODES if rank == 0 else ():
    alone = made(mode)
    train(alone, None)
    torch.save(alone.state_dict(), f"{out}/{mode}.alone.pt")
"""
MODES = ("synchronized", "learned")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two processes left what they had trained, and the first of them what it trained alone."""
    path = tmp_path_factory.mktemp("together")
    done = together(path, f"MODES = {MODES}\n{BODY}", 2)
    assert [d.returncode for d in done] == [0, 0], done[0].stderr + done[1].stderr
    return path


@pytest.mark.parametrize("mode", MODES)
def test_two_give_what_one_gives(trained: Path, mode: str) -> None:
    """With batch norms that were `SyncBatchNorm` before, or are frozen, and then with learned scales."""
    first, second, alone = (torch.load(trained / f"{mode}.{n}.pt") for n in ("0", "1", "alone"))
    assert first.keys() == alone.keys()
    for name, value in alone.items():
        if name.endswith("counts"):  # how many values were seen, by each process itself
            continue
        torch.testing.assert_close(first[name], second[name], rtol=0, atol=0)
        times = 10 if mode == "learned" else 1  # steps that end on the other side of a rounding
        torch.testing.assert_close(first[name], value, rtol=times * 1e-4, atol=times * 1e-5)
