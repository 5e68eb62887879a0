# SPDX-License-Identifier: Apache-2.0
"""More networks of images: classifiers, generators."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.convolutional import classifier, conv_bn
from tests.zoo.entry import ZooModel, floats, zoo_model

WIDTH = 8


class Ghost(nn.Module):
    """GhostNet: half of the features come from the other half by cheap depthwise convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.primary = conv_bn(3, WIDTH, stride=2), conv_bn(WIDTH, WIDTH)
        self.cheap = conv_bn(WIDTH, WIDTH, groups=WIDTH)
        self.head = classifier(2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.primary(self.stem(x))
        return self.head(torch.cat([y, self.cheap(y)], dim=1))


class Fire(nn.Module):
    """SqueezeNet: a narrow layer, two wide ones side by side, a convolution as the classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(3, 4, 1)
        self.narrow, self.wide = nn.Conv2d(4, WIDTH, 1), nn.Conv2d(4, WIDTH, 3, padding=1)
        self.head = nn.Sequential(nn.Dropout(), nn.Conv2d(2 * WIDTH, 4, 1), nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.squeeze(x))
        y = torch.cat([F.relu(self.narrow(y)), F.relu(self.wide(y))], dim=1)
        return F.adaptive_avg_pool2d(self.head(F.max_pool2d(y, 3, 2, ceil_mode=True)), 1).flatten(1)


def alexnet() -> nn.Module:
    """Large kernels, local response norms, overlapping pools."""
    return nn.Sequential(
        nn.Conv2d(3, WIDTH, 7, 2, 3), nn.ReLU(), nn.LocalResponseNorm(5), nn.MaxPool2d(3, 2),
        nn.Conv2d(WIDTH, 16, 5, padding=2, groups=2), nn.ReLU(), nn.LocalResponseNorm(5),
        nn.MaxPool2d(3, 2), nn.Flatten(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4),
    )  # fmt: skip


def vgg() -> nn.Module:
    return nn.Sequential(
        conv_bn(3, WIDTH), conv_bn(WIDTH, WIDTH), nn.MaxPool2d(2), conv_bn(WIDTH, 16),
        nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 32), nn.ReLU(True),
        nn.Dropout(), nn.Linear(32, 4),
    )  # fmt: skip


class Res2Net(nn.Module):
    """Groups of channels in a cascade: each adds the result of the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_bn(3, 16)
        self.steps = nn.ModuleList(conv_bn(4, 4) for _ in range(3))
        self.out = nn.Conv2d(16, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        first, *rest = y.chunk(4, dim=1)
        parts = [first]
        for part, step in zip(rest, self.steps, strict=True):
            parts.append(step(part + parts[-1]))
        return F.relu(self.out(torch.cat(parts, dim=1)) + y)


class Cbam(nn.Module):
    """Attention over channels (means and maxima through one network), then over places."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_bn(3, WIDTH)
        self.channels = nn.Sequential(nn.Linear(WIDTH, 4), nn.ReLU(), nn.Linear(4, WIDTH))
        self.places = nn.Conv2d(2, 1, 7, padding=3)
        self.head = classifier(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        gate = self.channels(y.mean(dim=(2, 3))) + self.channels(y.amax(dim=(2, 3)))
        y = y * gate.sigmoid()[:, :, None, None]
        maps = torch.cat([y.mean(1, keepdim=True), y.max(1, keepdim=True).values], dim=1)
        return self.head(y * self.places(maps).sigmoid())


class SelectiveKernel(nn.Module):
    """Two receptive fields, mixed by a softmax over the branches."""

    def __init__(self) -> None:
        super().__init__()
        self.near = conv_bn(3, WIDTH)
        self.far = nn.Conv2d(3, WIDTH, 3, padding=2, dilation=2)
        self.mix = nn.Linear(WIDTH, 2 * WIDTH)
        self.head = classifier(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        branches = torch.stack([self.near(x), F.relu(self.far(x))], dim=1)
        weights = self.mix(branches.sum(1).mean(dim=(2, 3))).view(-1, 2, WIDTH).softmax(dim=1)
        return self.head((branches * weights[..., None, None]).sum(dim=1))


class Hourglass(nn.Module):
    """Down and up with a skip, heat maps, and where each has its centre."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.skip, self.low = (
            conv_bn(3, WIDTH),
            conv_bn(WIDTH, WIDTH),
            conv_bn(WIDTH, WIDTH),
        )
        self.maps = nn.Conv2d(WIDTH, 2, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.stem(x)
        up = F.interpolate(self.low(F.max_pool2d(y, 2)), scale_factor=2, mode="nearest")
        maps = self.maps(self.skip(y) + up)
        share = maps.flatten(2).softmax(-1).view_as(maps)
        steps = torch.linspace(-1, 1, maps.shape[-1], device=x.device)
        across, down = (share.sum(2) * steps).sum(-1), (share.sum(3) * steps).sum(-1)
        return maps, torch.stack([across, down], dim=-1)


class PyramidPool(nn.Module):
    """PSPNet: pools of several sizes, brought back by bilinear interpolation."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_bn(3, WIDTH)
        self.levels = nn.ModuleList(nn.Conv2d(WIDTH, 4, 1) for _ in range(3))
        self.head = nn.Conv2d(WIDTH + 12, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        pooled = [
            F.interpolate(conv(F.adaptive_avg_pool2d(y, n)), y.shape[2:], mode="bilinear")
            for n, conv in zip((1, 2, 4), self.levels, strict=True)
        ]
        return self.head(torch.cat([y, *pooled], dim=1))


class AttentionGate(nn.Module):
    """The gate of an attention U-Net on a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = conv_bn(3, WIDTH), conv_bn(WIDTH, 16, stride=2)
        self.key, self.query = nn.Conv2d(WIDTH, 4, 1), nn.Conv2d(16, 4, 1)
        self.gate, self.up = nn.Conv2d(4, 1, 1), nn.ConvTranspose2d(16, WIDTH, 2, 2)
        self.head = nn.Conv2d(2 * WIDTH, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        deep = self.deep(skip)
        query = F.interpolate(
            self.query(deep), scale_factor=2, mode="bilinear", align_corners=False
        )
        gated = skip * self.gate(F.relu(self.key(skip) + query)).sigmoid()
        return self.head(torch.cat([gated, self.up(deep)], dim=1))


class DiffusionUnet(nn.Module):
    """Noise prediction: a sinusoid of the time, scale and shift, group norms, SiLU, self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 32))
        self.stem, self.down = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, 2, 1)
        self.norm, self.mixed = nn.GroupNorm(4, 16), nn.Conv2d(16, 16, 3, padding=1)
        self.attend, self.project = nn.Conv2d(16, 48, 1), nn.Conv2d(16, 16, 1)
        self.up, self.out = nn.Conv2d(32, 16, 3, padding=1), nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        steps = torch.exp(-torch.arange(8, device=x.device) * 0.5)
        angles = time[:, None].float() * steps
        scale, shift = self.time(torch.cat([angles.sin(), angles.cos()], dim=-1)).chunk(2, dim=-1)
        skip = self.stem(x)
        y = self.down(skip)
        y = self.norm(y) * (1 + scale[..., None, None]) + shift[..., None, None]
        y = y + self.mixed(F.silu(y))
        query, key, value = self.attend(y).flatten(2).transpose(1, 2).chunk(3, dim=-1)
        seen = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).view_as(y)
        y = F.interpolate(y + self.project(seen), scale_factor=2.0)
        return self.out(F.silu(self.up(torch.cat([y, skip], dim=1))))


def dcgan() -> nn.Module:
    """A generator: transposed convolutions under batch norms, tanh."""
    return nn.Sequential(
        nn.ConvTranspose2d(12, 16, 4, 1, 0, bias=False), nn.BatchNorm2d(16), nn.ReLU(True),
        nn.ConvTranspose2d(16, 8, 4, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(True),
        nn.ConvTranspose2d(8, 3, 4, 2, 1, bias=False), nn.Tanh(),
    )  # fmt: skip


def patch_discriminator() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 4, 2, 1), nn.LeakyReLU(0.2, True), nn.Conv2d(8, 16, 4, 2, 1),
        nn.InstanceNorm2d(16), nn.LeakyReLU(0.2, True), nn.Conv2d(16, 1, 4, 1, 1),
    )  # fmt: skip


class Modulated(nn.Module):
    """StyleGAN 2: the weights of a convolution are scaled by each sample's style, in one grouped call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 4, 3, 3))
        self.style, self.rgb = nn.Linear(6, 4), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor, latent: Tensor) -> Tensor:
        weight = self.weight[None] * (self.style(latent) + 1)[:, None, :, None, None]
        weight = weight * (weight.square().sum(dim=(2, 3, 4), keepdim=True) + 1e-8).rsqrt()
        y = F.conv2d(
            x.reshape(1, -1, *x.shape[2:]), weight.flatten(0, 1), padding=1, groups=x.shape[0]
        )
        return self.rgb(F.leaky_relu(y.view(x.shape[0], 8, *x.shape[2:]), 0.2))


class Vae(nn.Module):
    """A variational autoencoder; noise is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 16)
        )
        self.widen = nn.Linear(8, 512)
        self.decode = nn.Sequential(nn.ConvTranspose2d(8, 3, 3, 2, 1, 1), nn.Sigmoid())

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encode(x).chunk(2, dim=-1)
        latent = mean + noise * (0.5 * log_variance).exp()
        return self.decode(F.relu(self.widen(latent)).view(-1, 8, 8, 8)), mean, log_variance


class VqVae(nn.Module):
    """The nearest of a table of codes, looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.codes = nn.Conv2d(3, 8, 4, 4), nn.Embedding(16, 8)
        self.decode = nn.ConvTranspose2d(8, 3, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.encode(x).permute(0, 2, 3, 1)
        nearest = torch.cdist(y.flatten(1, 2), self.codes.weight[None]).argmin(dim=-1)
        return self.decode(self.codes(nearest).view_as(y).permute(0, 3, 1, 2))


class DenseBlocks(nn.Module):
    """ESRGAN: dense connections, a scaled residual, pixel shuffle."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.steps = nn.ModuleList(nn.Conv2d(8 + 4 * n, 4, 3, padding=1) for n in range(3))
        self.fuse, self.up = nn.Conv2d(20, 8, 1), nn.Conv2d(8, 12, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        parts = [y]
        for step in self.steps:
            parts.append(F.leaky_relu(step(torch.cat(parts, 1)), 0.2))
        y = y + 0.2 * self.fuse(torch.cat(parts, 1))
        return F.pixel_shuffle(self.up(y), 2)


_IMAGE = floats(2, 3, 16, 16)


def _image(name: str, make: object, *tags: str) -> ZooModel:
    return zoo_model(name, make, _IMAGE, tags={"further", "conv", *tags})  # type: ignore[arg-type]


MODELS: tuple[ZooModel, ...] = (
    _image("ghostnet", Ghost), _image("squeezenet", Fire), _image("alexnet", alexnet),
    _image("vgg", vgg), _image("res2net", Res2Net), _image("cbam", Cbam),
    _image("selective_kernel", SelectiveKernel), _image("hourglass", Hourglass),
    _image("pyramid_pool", PyramidPool), _image("attention_unet", AttentionGate),
    zoo_model("diffusion_unet", DiffusionUnet, floats(2, 3, 16, 16),
              lambda g: torch.randint(1000, (2,), generator=g), tags={"further", "conv", "attention"}),
    zoo_model("dcgan", dcgan, floats(2, 12, 1, 1), tags={"further", "conv", "transposed"}),
    _image("patch_discriminator", patch_discriminator),
    zoo_model("modulated_conv", Modulated, floats(2, 4, 8, 8), floats(2, 6), tags={"further", "conv"}),
    zoo_model("vae", Vae, _IMAGE, floats(2, 8), tags={"further", "conv", "transposed"}),
    _image("vq_vae", VqVae, "embedding"), _image("esrgan", DenseBlocks),
)  # fmt: skip
