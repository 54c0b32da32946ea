"""Gradients summed over the ranks while backward still runs.

Gradients live in a few flat buffers. When backward has filled one, its allreduce starts at once and runs beside
the rest of backward; Horovod reduces a whole buffer in place, with no copy into a fusion buffer. The loss is
weighted by 1 / (samples of all ranks), so the sum of gradients is the exact mean even where ranks have unequal
numbers of samples, and a rank without any takes part with zeros.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..gradient_groups import group_gradients
from ..ranks import Communicator, check_adasum
from .compressor import open_compressor


class Reducer:
    """Sums the gradients of a model over all ranks.

    Use per step: `start(last=...)` before each backward, `finish()` after the last one; then every gradient
    is the sum over ranks. `clear()` sets them to zero. Adasum (Maleki et al. 2020, arXiv:2006.02924)
    combines each parameter's gradient by itself; each rank's gradient must then be its own mean.

    Args:
        model: Its parameters that want a gradient are reduced; their `.grad` becomes a view of a buffer.
        communicator: The ranks.
        compression: What travels on the wire: see open_compressor().
        rank: Of powersgd's matrices.
        op: average | adasum.
        predivide_factor: Divides before the sum, multiplies after it; for fp16 before it is fp16, and after.
        groups: Into how many buffers the gradients are split; None: one for each 25 MB.
    """

    def __init__(
        self,
        model: nn.Module,
        communicator: Communicator,
        *,
        compression: Any = "none",
        op: str = "average",
        predivide_factor: float = 1.0,
        groups: int | None = None,
        rank: int = 4,
    ) -> None:
        """Lay out the buffers and hook into backward."""
        hvd = communicator.hvd
        if op == "adasum" and communicator.size > 1:
            check_adasum(hvd, communicator.size)
        self._hvd = hvd
        self._adasum = op == "adasum"
        self._factor = predivide_factor
        self._halves = compression == "fp16"
        self._alone = communicator.size == 1
        self._armed = False
        # Backward fills gradients from the last layer to the first.
        parameters = [p for p in model.parameters() if p.requires_grad][::-1]
        self.compressor = open_compressor(compression, parameters, communicator, rank)
        self._made_by = [str(compression), rank]
        if op == "adasum" and self.compressor is not None:
            raise UserError(f"horovod.compression={compression} adds gradients up: use it with horovod.op=average")
        kinds = [(p.dtype, p.device) for p in parameters]
        grouped = group_gradients([p.nbytes for p in parameters], kinds, groups)
        self._groups = [_Group(index, [parameters[i] for i in group]) for index, group in enumerate(grouped)]
        for group in self._groups:
            for parameter in group.parameters:
                parameter.register_post_accumulate_grad_hook(self._hook(group))  # type: ignore[no-untyped-call]

    def _hook(self, group: _Group) -> Any:
        def filled(parameter: Tensor) -> None:
            if not self._armed:
                return
            group.waiting -= 1
            if group.waiting == 0:
                self._launch(group)

        return filled

    def start(self, last: bool) -> None:
        """Call before a backward; gradients travel only in the `last` one of a step."""
        self._armed = last and not self._alone and self.compressor is None

    def finish(self) -> None:
        """Wait until every gradient is the sum over ranks; reduces what backward did not reach as zeros."""
        self._armed = False
        if self._alone:
            return
        if self.compressor is not None:
            self.compressor.reduce()
            return
        for group in self._groups:
            if not group.flights:
                self._launch(group)
        for group in self._groups:
            self._land(group)

    def state(self) -> dict[str, Any]:
        """What differs between ranks and a resumed run needs."""
        return {"made_by": self._made_by, "own": self.compressor.state()} if self.compressor is not None else {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what state() gave; with another compression, or rank, than gave it: begin anew."""
        if self.compressor is not None and state.get("made_by") == self._made_by:
            self.compressor.load_state(state["own"])

    def clear(self) -> None:
        """Set all gradients to zero."""
        for group in self._groups:
            group.buffer.zero_()

    def _launch(self, group: _Group) -> None:
        tensors = group.parts if self._adasum else [group.buffer]
        op = self._hvd.Adasum if self._adasum else self._hvd.Sum
        whole = {"prescale_factor": 1 / self._factor, "postscale_factor": self._factor}
        scales = {} if self._adasum or self._halves else whole
        for index, tensor in enumerate(tensors):
            wire = self._halved(tensor) if self._halves else tensor
            handle = self._hvd.allreduce_async_(wire, name=f"gradients.{group.index}.{index}", op=op, **scales)
            group.flights.append((handle, tensor))

    def _halved(self, tensor: Tensor) -> Tensor:
        """Divided while it still has its own range: Horovod would do it in fp16, and multiply there."""
        return torch.mul(tensor, 1 / self._factor, out=torch.empty_like(tensor, dtype=torch.float16))

    def _land(self, group: _Group) -> None:
        for handle, tensor in group.flights:
            result = self._hvd.synchronize(handle)
            if self._halves:
                tensor.copy_(result).mul_(self._factor)
        group.flights.clear()
        group.waiting = len(group.parameters)


class _Group:
    """Parameters whose gradients are views of one buffer and travel together."""

    def __init__(self, index: int, parameters: list[nn.Parameter]) -> None:
        self.index = index
        self.parameters = parameters
        self.waiting = len(parameters)
        self.flights: list[tuple[int, Tensor]] = []
        first = parameters[0]
        self.buffer = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
        self.parts = []  # of the buffer, one for each parameter
        offset = 0
        for parameter in parameters:
            # The parameter's own strides, so that channels-last gradients are not reordered in every step.
            parameter.grad = self.buffer.as_strided(parameter.size(), parameter.stride(), offset)
            self.parts.append(self.buffer[offset : offset + parameter.numel()])
            offset += parameter.numel()


def broadcast_model(model: nn.Module, communicator: Communicator) -> None:
    """Give every rank rank 0's parameters and buffers."""
    if communicator.size > 1:
        communicator.hvd.broadcast_parameters(model.state_dict(), root_rank=0)


def averaged(tensors: Iterable[Tensor], communicator: Communicator, name: str) -> list[Tensor]:
    """The means over ranks of floating-point tensors, as new tensors; others are copied."""
    copies = [tensor.detach().clone() for tensor in tensors]
    real = [copy for copy in copies if copy.is_floating_point()]
    if communicator.size > 1 and real:
        communicator.hvd.grouped_allreduce_(real, op=communicator.hvd.Average, name=name)
    return copies
