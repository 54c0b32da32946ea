"""The models that come with the project; any other is named by model._target_ and takes (n, channels, h, w)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


def mlp(shape: Sequence[int], classes: int, hidden: Sequence[int] = (256, 256), dropout: float = 0.0) -> nn.Sequential:
    """Dense layers with ReLU and dropout over inputs of any shape."""
    widths = [math.prod(shape), *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(widths[-1], classes))


def cnn(shape: Sequence[int], classes: int, width: int = 32) -> nn.Sequential:
    """Three blocks of convolution, batch-norm and ReLU, then an average over the image and one dense layer."""
    channels = [shape[-1], width, 2 * width, 4 * width]
    layers: list[nn.Module] = []
    for index, (inputs, outputs) in enumerate(pairwise(channels)):
        layers += [*_convolution(inputs, outputs, 3, stride=2 if index else 1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], classes))


def resnet18(shape: Sequence[int], classes: int) -> nn.Sequential:
    """ResNet-18 (He et al. 2015, arXiv:1512.03385); inputs under 64 pixels get a 3 x 3 stem without pooling."""
    return _resnet(shape, classes, (2, 2, 2, 2), BasicBlock)


def resnet50(shape: Sequence[int], classes: int) -> nn.Sequential:
    """ResNet-50 v1.5 (stride in the 3 x 3 convolution); inputs under 64 pixels as for ResNet-18."""
    return _resnet(shape, classes, (3, 4, 6, 3), Bottleneck)


class Residual(nn.Module):
    """y = relu(body(x) + shortcut(x)), where the shortcut is a 1 x 1 convolution if the shape changes."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.body = self._make_body(inputs, width, stride)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Sequential(*_convolution(inputs, outputs, 1, stride))
        # Each block starts as the identity (Goyal et al. 2017, section 5.1).
        last: nn.BatchNorm2d = self.body[-1]  # type: ignore[assignment]
        nn.init.zeros_(last.weight)

    @staticmethod
    def _make_body(inputs: int, width: int, stride: int) -> nn.Sequential:
        """The layers beside the shortcut, ending in batch-norm."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """(n, inputs, h, w) -> (n, width x expansion, h / stride, w / stride)."""
        result: Tensor = torch.relu(self.body(x) + self.shortcut(x))
        return result


class BasicBlock(Residual):
    """Two 3 x 3 convolutions."""

    @staticmethod
    def _make_body(inputs: int, width: int, stride: int) -> nn.Sequential:
        return nn.Sequential(*_convolution(inputs, width, 3, stride), nn.ReLU(), *_convolution(width, width, 3))


class Bottleneck(Residual):
    """1 x 1, 3 x 3, 1 x 1 convolutions with a fourfold width at the end."""

    expansion = 4

    @staticmethod
    def _make_body(inputs: int, width: int, stride: int) -> nn.Sequential:
        first, second = _convolution(inputs, width, 1), _convolution(width, width, 3, stride)
        return nn.Sequential(*first, nn.ReLU(), *second, nn.ReLU(), *_convolution(width, 4 * width, 1))


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return convolution, nn.BatchNorm2d(outputs)


def _resnet(shape: Sequence[int], classes: int, depths: Sequence[int], block: type[Residual]) -> nn.Sequential:
    small = shape[0] < 64
    stem: list[nn.Module] = [*_convolution(shape[-1], 64, 3 if small else 7, 1 if small else 2), nn.ReLU()]
    if not small:
        stem.append(nn.MaxPool2d(3, stride=2, padding=1))
    stages: list[nn.Module] = []
    inputs = 64
    for stage, depth in enumerate(depths):
        for index in range(depth):
            width, stride = 64 * 2**stage, 2 if stage and index == 0 else 1
            stages.append(block(inputs, width, stride))
            inputs = width * block.expansion
    return nn.Sequential(*stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))
