# SPDX-License-Identifier: Apache-2.0
"""Images: a convolutional network and a small ViT on digits of other styles, a U-Net on photographs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accuracy_tasks.subject import (
    MOST_BATCHES,
    Figures,
    Inputs,
    Settings,
    Source,
    Subject,
    batched,
    classes,
    drawer,
)

ROWS = 32
PIXELS, PATCH, WIDTH, HEADS, DEPTH = 24, 4, 64, 4, 4
SCENE, PHOTO_BATCHES = 32, 4
SIGMA_CALIBRATED, SIGMAS_JUDGED = 0.1, {"little noise": 0.05, "loud noise": 0.2}


def _shifted(images: Tensor, generator: torch.Generator) -> Tensor:
    """By up to an eighth of the width, each batch in one direction."""
    most = images.shape[-1] // 8
    down, right = torch.randint(-most, most + 1, (2,), generator=generator).tolist()
    return torch.roll(images, (down, right), (2, 3))


def _thick(images: Tensor, generator: torch.Generator) -> Tensor:
    size = images.shape[-1] // 8 * 2 + 1
    return 0.5 * images + 0.5 * F.max_pool2d(images, size, 1, size // 2)


def _noisy(images: Tensor, generator: torch.Generator) -> Tensor:
    return (images + 0.2 * torch.randn(images.shape, generator=generator)).clamp(0, 1)


def _faint(images: Tensor, generator: torch.Generator) -> Tensor:
    return 0.5 * images + 0.15


STYLES: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "shifted": _shifted, "thick": _thick, "noisy": _noisy, "faint": _faint
}  # fmt: skip


def styled(images: Tensor, labels: Tensor, settings: Settings) -> dict[str, Source]:
    """Test images in each style, in full batches."""
    judged = {}
    for style, change in STYLES.items():
        full = settings.few(len(images) // ROWS)
        parts = images[: full * ROWS].split(ROWS)
        batches: list[Inputs] = [(change(p, drawer(5, n)),) for n, p in enumerate(parts)]
        judged[style] = Source(batches, labels[: full * ROWS])
    return judged


def calibration(images: Tensor) -> list[Inputs]:
    """Full batches, as many as there are."""
    full = len(images) // ROWS * ROWS
    return [(part,) for part in images[:full].split(ROWS)][:MOST_BATCHES]


def digits(settings: Settings) -> Subject:
    """The residual network of the demo, on handwriting as it was not trained."""
    import digits_task

    training, test = digits_task.load()

    net = digits_task.train(training, epochs=settings.few(digits_task.EPOCHS))
    judged = styled(test.images, test.labels, settings)
    title = f"Digits, residual network: calibrated with plain images; judged on {', '.join(STYLES)}"
    return Subject(title, net, calibration(training.images), judged, classes)


class EncoderBlock(nn.Module):
    """Attention and two linears, each behind a layer norm and around a sum."""

    def __init__(self, width: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, c = x.shape
        qkv = self.qkv(self.norm1(x)).view(n, t, 3, self.heads, c // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ViT(nn.Module):
    """Patches and a class token with positions, pre-norm blocks, a head on the class token."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, PATCH, PATCH)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.position = nn.Parameter(0.02 * torch.randn(1, (PIXELS // PATCH) ** 2 + 1, WIDTH))
        self.blocks = nn.Sequential(*(EncoderBlock(WIDTH, HEADS) for _ in range(DEPTH)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.position
        return self.head(self.norm(self.blocks(x))[:, 0])


@cache
def large_digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and labels, then those of the test."""
    import digits_task

    training, test = digits_task.load()
    return (_enlarged(training.images), training.labels, _enlarged(test.images), test.labels)


def _enlarged(images: Tensor) -> Tensor:
    return F.interpolate(images, size=PIXELS, mode="bilinear")


def loss_on_styles(net: nn.Module, step: int) -> Tensor:
    """On training images in all styles, which calibration then has none of."""
    images, labels, _, _ = large_digits()
    chosen = torch.randint(len(labels), (64,), generator=drawer(6, step))
    style = [*STYLES, None][step % (len(STYLES) + 1)]
    batch = STYLES[style](images[chosen], drawer(7, step)) if style else images[chosen]
    return F.cross_entropy(net(batch), labels[chosen])


def vit(settings: Settings) -> Subject:
    """A ViT that is trained on every style, calibrated with the plain one, and judged on the others."""
    images, _, test, labels = large_digits()
    net = settings.trained("vit", ViT, loss_on_styles, steps=900, rate=2e-3)
    judged = styled(test, labels, settings)
    title = f"ViT, 37 tokens of digits: calibrated with plain images; judged on {', '.join(STYLES)}"
    return Subject(title, net, calibration(images), judged, classes, transformer=True)


class Doubled(nn.Sequential):
    """Two convolutions of 3 x 3, each with batch norm and relu."""

    def __init__(self, inputs: int, outputs: int) -> None:
        pairs = [(inputs, outputs), (outputs, outputs)]
        super().__init__(
            *(
                layer
                for i, o in pairs
                for layer in (
                    nn.Conv2d(i, o, 3, padding=1, bias=False),
                    nn.BatchNorm2d(o),
                    nn.ReLU(),
                )
            )
        )


class UNet(nn.Module):
    """Two levels down and up, with skips; gives the noise that it takes from the image."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        w = width
        self.down1, self.down2, self.bottom = (
            Doubled(1, w),
            Doubled(w, 2 * w),
            Doubled(2 * w, 4 * w),
        )
        self.up2, self.up1 = (
            nn.ConvTranspose2d(4 * w, 2 * w, 2, 2),
            nn.ConvTranspose2d(2 * w, w, 2, 2),
        )
        self.join2, self.join1 = Doubled(4 * w, 2 * w), Doubled(2 * w, w)
        self.last = nn.Conv2d(w, 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        one = self.down1(images)
        two = self.down2(F.max_pool2d(one, 2))
        x = self.up2(self.bottom(F.max_pool2d(two, 2)))
        x = self.up1(self.join2(torch.cat([x, two], 1)))
        return images - self.last(self.join1(torch.cat([x, one], 1)))


def _scenes(count: int, generator: torch.Generator) -> Tensor:
    """Stripes with discs on them, `(count, 1, 32, 32)` in [0, 1]."""
    line = torch.linspace(-1, 1, SCENE)
    y, x = torch.meshgrid(line, line, indexing="ij")
    draw = torch.rand(count, 12, 1, 1, generator=generator)
    wave = torch.sin(12 * (draw[:, 0] * x + (draw[:, 1] - 0.5) * y) + 6 * draw[:, 2])
    scene = 0.5 + 0.3 * draw[:, 3] * wave
    for k in (4, 8):
        distance = (x - 2 * draw[:, k] + 1) ** 2 + (y - 2 * draw[:, k + 1] + 1) ** 2
        scene = torch.where(distance < 0.4 * draw[:, k + 2], draw[:, k + 3], scene)
    return scene.unsqueeze(1)


def _with_noise(images: Tensor, sigma: float, generator: torch.Generator) -> Tensor:
    return images + sigma * torch.randn(images.shape, generator=generator)


def _unet_loss(net: nn.Module, step: int) -> Tensor:
    """On scenes with noise of many levels."""
    generator = drawer(8, step)
    scenes = _scenes(16, generator)
    sigma = 0.02 + 0.25 * float(torch.rand(1, generator=generator))
    return F.mse_loss(net(_with_noise(scenes, sigma, generator)), scenes)


@cache
def _photographs() -> Tensor:
    """Grey pieces of the two photographs of scikit-learn, `(N, 1, 32, 32)` in [0, 1]."""
    from sklearn.datasets import load_sample_images

    pieces = []
    for photo in load_sample_images().images:
        grey = torch.tensor(photo, dtype=torch.float32).mean(-1) / 255
        tiles = grey.unfold(0, SCENE, SCENE).unfold(1, SCENE, SCENE)
        pieces.append(tiles.reshape(-1, 1, SCENE, SCENE))
    every = torch.cat(pieces)
    return every[torch.randperm(len(every), generator=drawer(9))]


def _psnr(expected: Tensor, found: Tensor, truth: Tensor | None) -> Figures:
    """Over the clean images, in decibels."""
    assert truth is not None
    return {"PSNR, dB": float(-10 * torch.log10((found - truth).double().square().mean()))}


def unet(settings: Settings) -> Subject:
    """Takes noise away: calibrated with stripes and discs at one level, judged on photographs at others."""
    net = settings.trained("unet", UNet, _unet_loss, steps=500)

    def draw(number: int) -> Inputs:
        generator = drawer(10, number)
        return (_with_noise(_scenes(ROWS, generator), SIGMA_CALIBRATED, generator),)

    judged, count = {}, settings.few(PHOTO_BATCHES)
    for place, (name, sigma) in enumerate(SIGMAS_JUDGED.items()):
        clean = _photographs()[place * count * ROWS : (place + 1) * count * ROWS]
        noisy = _with_noise(clean, sigma, drawer(11, place))
        judged[f"photographs, {name}"] = Source([(part,) for part in noisy.split(ROWS)], clean)
    calibrated = batched(settings.few(MOST_BATCHES), draw)
    title = (
        f"U-Net that takes noise away: calibrated with scenes made here, noise of {SIGMA_CALIBRATED}; "
        f"judged on {', '.join(judged)}"
    )
    return Subject(title, net, calibrated, judged, _psnr)
