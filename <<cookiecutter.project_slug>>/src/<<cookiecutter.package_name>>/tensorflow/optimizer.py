"""Keras optimizers that train data-parallel, in our loop's engine and in plain model.fit.

Horovod's own DistributedOptimizer overrides methods that Keras 3 never calls: its replicas drift apart silently.
"""

from __future__ import annotations

from typing import Any, TypeVar

import keras
import tensorflow as tf

from ..errors import UserError
from .reducer import Reducer

Optimizer = TypeVar("Optimizer", bound=keras.optimizers.Optimizer)


def distribute(
    optimizer: Optimizer,
    *,
    op: str = "average",
    compression: str = "none",
    predivide_factor: float = 1.0,
    groups: int | None = None,
) -> Optimizer:
    """Make an optimizer combine the gradients of all ranks before it applies them; changes and returns it.

    Its apply() runs the allreduce first, so that clipping, weight decay and loss scaling see the combined gradients.
    A file saved with it names the plain optimizer and loads without this package: distribute it again after loading.
    Horovod must be initialised; compile the model with `jit_compile=False`, since XLA has no Horovod operations.

    Args:
        optimizer: Any Keras 3 optimizer, built or not; a LossScaleOptimizer is wrapped as a whole.
        op: average | sum | adasum.
        compression: none | fp16, what travels on the wire.
        predivide_factor: Divides before the sum, multiplies after it; for fp16 before it is fp16, and after.
        groups: Into how many allreduces the gradients are grouped; None: one for each 25 MB.

    Raises:
        UserError: if it is no Keras 3 optimizer, or is distributed already.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise UserError(f"{type(optimizer).__name__} is no Keras 3 optimizer: pass one of keras.optimizers")
    if hasattr(optimizer, "distributed"):
        raise UserError(f"{type(optimizer).__name__} is distributed already: pass the plain optimizer")
    reducer = Reducer(op=op, compression=compression, predivide_factor=predivide_factor, groups=groups)
    optimizer.__class__ = _distributed(type(optimizer), reducer)
    return optimizer


def _distributed(plain: type[Any], reducer: Reducer) -> type[Any]:
    def apply(self: Any, gradients: Any, trainable_variables: Any = None) -> Any:
        return plain.apply(self, reducer(list(gradients)), trainable_variables)

    known = plain.__module__.startswith("keras.")
    # Keras writes these two names into a file; with them it finds the plain class again.
    names = {"__module__": "keras.optimizers" if known else plain.__module__, "__qualname__": plain.__qualname__}
    return type(plain.__name__, (plain,), {**names, "apply": apply, "distributed": True})


class SteadySGD(keras.optimizers.SGD):  # type: ignore[misc]
    """SGD whose velocity does not have the learning rate in it, so that a change of the rate acts at once.

    Keras' own velocity does (equations 9 and 10 of Goyal et al. 2017), which would let old rates act on for some steps.
    """

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Keras calls this for each variable."""
        if not self.momentum:
            super().update_step(gradient, variable, learning_rate)
            return
        gradient = tf.cast(gradient, variable.dtype)
        velocity = self.momentums[self._get_variable_index(variable)]
        self.assign(velocity, velocity * self.momentum - gradient)
        step = velocity * self.momentum - gradient if self.nesterov else velocity
        self.assign_add(variable, tf.cast(learning_rate, variable.dtype) * step)


def keep_momentum(optimizer: keras.optimizers.Optimizer, rate: tf.Tensor) -> None:
    """Set the learning rate of a plain optimizer, and scale the velocity of SGD with it: the same as SteadySGD does."""
    if isinstance(optimizer, keras.optimizers.SGD) and optimizer.momentum:
        ratio = rate / tf.convert_to_tensor(optimizer.learning_rate)
        for velocity in optimizer.momentums:
            velocity.assign(velocity.value * tf.cast(ratio, velocity.dtype))
    optimizer.learning_rate.assign(rate)
