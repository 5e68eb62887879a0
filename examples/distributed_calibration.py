# SPDX-License-Identifier: Apache-2.0
"""Calibrate a digit classifier with several processes, each with its share of the images.

    torchrun --nproc-per-node 4 examples/distributed_calibration.py seen.safetensors

The file equals, bit for bit, what one process writes:

    python examples/distributed_calibration.py seen.safetensors
"""

from __future__ import annotations

import argparse
import os

import digits_task as task
import qompose
import torch
import torch.distributed as dist


def main() -> None:
    """Start the process group where torchrun says so, calibrate, and write the statistics once."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("output", help="file for the statistics, .safetensors or .json")
    output = parser.parse_args().output
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    training, _ = task.load()
    torch.manual_seed(task.SEED)  # the same model everywhere; training it makes no difference here
    model, images = task.DigitsNet().eval(), training.images
    batch = torch.export.Dim("batch", min=2, max=512)
    exported = torch.export.export(model, (images[:8],), dynamic_shapes=({0: batch},))
    prepared = qompose.prepare_pt2e(exported, qompose.compose("xnnpack"))
    qompose.calibrate(prepared, images.split(32))
    if not dist.is_initialized() or dist.get_rank() == 0:
        found = qompose.statistics(prepared)
        found.save(output)
        print(f"{len(found)} tensors, {len(images)} images: {output}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
