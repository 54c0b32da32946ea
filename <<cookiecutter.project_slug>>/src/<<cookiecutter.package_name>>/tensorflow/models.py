"""The models that come with the project; any other is named by model._target_ and takes channels-last inputs.

They answer with logits. A model from elsewhere must do so too, as keras.applications with classifier_activation=null.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras import layers

from ..errors import UserError


def keras_file(path: str) -> keras.Model:
    """The model in a .keras file, without its optimizer.

    Keras reads it in its safe mode, which is no wall against a file made to do harm: take files from people you trust.

    Raises:
        UserError: if the file is missing, of Keras 2, or holds code or classes that Keras does not know.
    """
    try:
        return keras.saving.load_model(path, compile=False, safe_mode=True)
    except (ValueError, TypeError, OSError, KeyError) as error:
        raise UserError(f"{path} cannot be loaded: {_reason(str(error))}") from error


def _reason(text: str) -> str:
    if "lambda" in text.lower():
        return "it holds Python code in a Lambda layer; write that layer as a class of yours and save it again"
    if "does not look like" in text or "File format not supported" in text or "not found" in text:
        return "it is no .keras file of Keras 3; save it with model.save('name.keras') of Keras 3"
    return f"{' '.join(text.split())[:200]}; it must be a .keras file of Keras 3 whose classes can be imported"


def mlp(shape: Sequence[int], classes: int, hidden: Sequence[int] = (256, 256), dropout: float = 0.0) -> keras.Model:
    """Dense layers with ReLU and dropout over inputs of any shape."""
    inputs = keras.Input(tuple(shape))
    x = layers.Flatten(name="flatten")(inputs)
    for index, width in enumerate(hidden):
        x = layers.Dense(width, activation="relu", name=f"dense_{index}")(x)
        if dropout:
            x = layers.Dropout(dropout, name=f"dropout_{index}")(x)
    return keras.Model(inputs, layers.Dense(classes, dtype="float32", name="logits")(x), name="mlp")


def cnn(shape: Sequence[int], classes: int, width: int = 32) -> keras.Model:
    """Three blocks of convolution, batch-norm and ReLU, then an average over the image and one dense layer."""
    inputs = keras.Input(tuple(shape))
    x = inputs
    for index, channels in enumerate((width, 2 * width, 4 * width)):
        x = _convolution(x, channels, 3, stride=2 if index else 1, name=f"block_{index}")
        x = layers.ReLU(name=f"relu_{index}")(x)
    return _classify(inputs, x, classes, "cnn")


def resnet18(shape: Sequence[int], classes: int) -> keras.Model:
    """ResNet-18 (He et al. 2015, arXiv:1512.03385); inputs under 64 pixels get a 3 x 3 stem without pooling."""
    return _resnet(shape, classes, (2, 2, 2, 2), bottleneck=False, name="resnet18")


def resnet50(shape: Sequence[int], classes: int) -> keras.Model:
    """ResNet-50 v1.5 (stride in the 3 x 3 convolution); inputs under 64 pixels as for ResNet-18."""
    return _resnet(shape, classes, (3, 4, 6, 3), bottleneck=True, name="resnet50")


def _resnet(shape: Sequence[int], classes: int, depths: Sequence[int], bottleneck: bool, name: str) -> keras.Model:
    small = shape[0] < 64
    inputs = keras.Input(tuple(shape))
    x = _convolution(inputs, 64, 3 if small else 7, stride=1 if small else 2, name="stem")
    x = layers.ReLU(name="stem_relu")(x)
    if not small:
        x = layers.MaxPooling2D(3, 2, padding="same", name="stem_pool")(x)
    for stage, depth in enumerate(depths):
        for index in range(depth):
            stride = 2 if stage and index == 0 else 1
            x = _residual(x, 64 * 2**stage, stride, bottleneck, f"stage_{stage}_{index}")
    return _classify(inputs, x, classes, name)


def _residual(x: Any, width: int, stride: int, bottleneck: bool, name: str) -> Any:
    """Y = relu(body(x) + shortcut(x)), where the shortcut is a 1 x 1 convolution if the shape changes."""
    outputs = 4 * width if bottleneck else width
    plan = [(width, 1, 1), (width, 3, stride), (outputs, 1, 1)] if bottleneck else [(width, 3, stride), (width, 3, 1)]
    body = x
    for index, (channels, kernel, step) in enumerate(plan):
        if index:
            body = layers.ReLU(name=f"{name}_relu_{index}")(body)
        # Each block starts as the identity (Goyal et al. 2017, section 5.1).
        gamma = "zeros" if index == len(plan) - 1 else "ones"
        body = _convolution(body, channels, kernel, step, f"{name}_{index}", gamma)
    if stride != 1 or x.shape[-1] != outputs:
        x = _convolution(x, outputs, 1, stride, f"{name}_shortcut")
    return layers.ReLU(name=f"{name}_relu")(layers.Add(name=f"{name}_add")([body, x]))


def _convolution(x: Any, channels: int, kernel: int, stride: int, name: str, gamma: str = "ones") -> Any:
    """Convolution and batch-norm; zeros around the image on both sides alike, as other frameworks do."""
    if kernel > 1:
        x = layers.ZeroPadding2D(kernel // 2, name=f"{name}_pad")(x)
    initializer = keras.initializers.VarianceScaling(2.0, "fan_out", "untruncated_normal")
    x = layers.Conv2D(channels, kernel, stride, use_bias=False, kernel_initializer=initializer, name=f"{name}_conv")(x)
    return layers.BatchNormalization(momentum=0.9, epsilon=1e-5, gamma_initializer=gamma, name=f"{name}_norm")(x)


def _classify(inputs: Any, x: Any, classes: int, name: str) -> keras.Model:
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(inputs, layers.Dense(classes, dtype="float32", name="logits")(x), name=name)
