"""Gradients summed over the ranks, by named and grouped allreduces within the step's graph.

The loss is weighted by 1 / (samples of all ranks), so the sum of gradients is the exact mean even where ranks have
unequal numbers of samples, and a rank without any takes part with zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from ..errors import UserError
from ..gradient_groups import group_gradients
from ..ranks import check_adasum


class Reducer:
    """Combines the gradients of all ranks.

    Adasum (Maleki et al. 2020, arXiv:2006.02924) combines each variable's gradient by itself; each rank's gradient
    must then be its own mean.

    Args:
        op: sum | average | adasum.
        compression: none | fp16, what travels on the wire.
        predivide_factor: Divides before the sum, multiplies after it; for fp16 before it is fp16, and after.
        groups: Into how many allreduces the gradients are grouped; None: one for each 25 MB.
    """

    def __init__(
        self,
        *,
        op: str = "sum",
        compression: str = "none",
        predivide_factor: float = 1.0,
        groups: int | None = None,
    ) -> None:
        if op == "adasum" and hvd.size() > 1:
            check_adasum(hvd, hvd.size())
        self._op = {"sum": hvd.Sum, "average": hvd.Average, "adasum": hvd.Adasum}[op]
        if compression not in ("none", "fp16"):
            raise UserError(f"horovod.compression={compression} is not there for tensorflow models: use fp16 or none")
        self._halves = compression == "fp16"
        self._factor = predivide_factor
        self._groups = groups

    def __call__(self, gradients: Sequence[Any]) -> list[Any]:
        """The combined gradients; None stays None. To be called at the same place of the graph on every rank."""
        if hvd.size() == 1:
            return list(gradients)
        result = list(gradients)
        # The gradients of embeddings are sparse: a dense sum is exact and costs no second kind of collective.
        dense = {index: tf.convert_to_tensor(one) for index, one in enumerate(gradients) if one is not None}
        order = list(dense)[::-1]  # backward computes the last layer's first
        sizes = [dense[index].shape.num_elements() * dense[index].dtype.size for index in order]
        groups = group_gradients(sizes, [dense[index].dtype for index in order], self._groups)
        for number, group in enumerate(groups):
            members = [order[position] for position in group]
            combined = self._combine([dense[index] for index in members], f"gradients_{number}")
            for index, gradient in zip(members, combined, strict=True):
                result[index] = gradient
        return result

    def _combine(self, tensors: list[tf.Tensor], name: str) -> list[tf.Tensor]:
        if not self._halves:
            return self._reduce(tensors, name, self._factor)
        # Scaled in their own range: Horovod would do it in fp16.
        halves = [tf.cast(one * tf.cast(1 / self._factor, one.dtype), tf.float16) for one in tensors]
        reduced = zip(tensors, self._reduce(halves, name, 1.0), strict=True)
        return [tf.cast(half, one.dtype) * tf.cast(self._factor, one.dtype) for one, half in reduced]

    def _reduce(self, tensors: list[tf.Tensor], name: str, factor: float) -> list[tf.Tensor]:
        options = {"op": self._op, "ignore_name_scope": True}
        if self._op == hvd.Adasum:  # its grouped form is broken in Horovod 0.28.1
            return [hvd.allreduce(one, name=f"{name}_{index}", **options) for index, one in enumerate(tensors)]
        scales = {"prescale_factor": 1 / factor, "postscale_factor": factor}
        return list(hvd.grouped_allreduce(tensors, name=name, **options, **scales))


def broadcast_variables(variables: Iterable[Any]) -> None:
    """Give every rank rank 0's values of Keras variables; hvd.broadcast_variables() does not take those."""
    for index, variable in enumerate(variables):
        variable.assign(hvd.broadcast(tf.convert_to_tensor(variable.value), root_rank=0, name=f"broadcast.{index}"))


def averaged(values: Sequence[Any], name: str) -> list[tf.Tensor]:
    """The means over ranks of floating-point values; others are this rank's own."""
    tensors = [tf.convert_to_tensor(value) for value in values]
    real = [index for index, tensor in enumerate(tensors) if tensor.dtype.is_floating]
    if hvd.size() > 1 and real:
        means = hvd.grouped_allreduce([tensors[index] for index in real], op=hvd.Average, name=name)
        for index, mean in zip(real, means, strict=True):
            tensors[index] = mean
    return tensors
