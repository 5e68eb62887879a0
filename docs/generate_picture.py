# SPDX-License-Identifier: Apache-2.0
"""Write docs/figures/report.png: the report page of a small transformer, as Chromium shows it.

python -m docs.generate_picture              # `chromium`, or the browser that is named as an argument
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import qompose
import torch
from torch import Tensor, nn

PICTURE = Path(__file__).parent / "figures" / "report.png"
SIZE = (900, 860)
"""Pixels: the head, the coverage and the upper part of the errors."""


class Classifier(nn.Module):
    """Token ids to one of eight classes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(1000, 64)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, activation="gelu")
            for _ in range(2)
        )
        self.classes = nn.Linear(64, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        found: Tensor = self.classes(x.mean(dim=1))
        return found


def write_page(page: Path) -> None:
    """Quantize the model, and write its report with the error of each operator."""
    torch.manual_seed(0)
    model = Classifier().eval()
    batches = [(torch.randint(1000, (8, 32)),) for _ in range(4)]
    backends = ["embedding", "x86_inductor"]
    result = qompose.quantize(
        model, batches[0], backends=backends, calibration=batches, progress=False
    )
    result.report.save(page, comparison=qompose.compare(result.exported, result.model, batches))


def main() -> None:
    """Take the picture."""
    browser = sys.argv[1] if len(sys.argv) > 1 else "chromium"
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        write_page(page)
        width, height = SIZE
        options = (
            "--headless",
            "--no-sandbox",
            "--hide-scrollbars",
            f"--window-size={width},{height}",
        )
        where = (f"--screenshot={PICTURE}", f"--user-data-dir={folder}/profile", page.as_uri())
        subprocess.run([browser, *options, *where], check=True)
    print(f"{PICTURE.relative_to(Path.cwd())} is written: look at it")


if __name__ == "__main__":
    main()
