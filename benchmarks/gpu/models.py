"""What GPU clients train. Importing this imports no torch."""

from __future__ import annotations

from typing import Any

_CHANNELS, _CLASSES = 3, 10


def resnet18() -> Any:
    from torchvision.models import resnet18

    return resnet18(num_classes=_CLASSES)


def small_resnet18() -> Any:
    """Return ResNet-18 as it is used for images of 32 x 32: without the early reductions."""
    from torch import nn

    model = resnet18()
    model.conv1 = nn.Conv2d(_CHANNELS, 64, kernel_size=3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


def elementwise() -> Any:
    """Return a model without convolutions and matrix products: it needs neither cuDNN nor cuBLAS."""
    import torch
    from torch import nn

    class MeanColour(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(_CLASSES, _CHANNELS))

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return (images.mean((2, 3))[:, None] * self.weight).sum(-1)

    return MeanColour()


#: By name, for large images and for those of 32 x 32. A stand-in for CUDA can train the last one only, which
#: learns nothing there.
MODELS = {"resnet18": (resnet18, small_resnet18), "elementwise": (elementwise, elementwise)}
