"""One rank of a hand-written PyTorch loop, for step_time.py: python bare_torch.py PACKAGE MODEL KIND."""

import os
import sys
from importlib import import_module

import bare
import torch
from torch import nn


def main() -> None:
    """Kind single, horovod, or ddp, which is torch's DDP over Gloo."""
    package, model_name, kind = sys.argv[1:]
    rank, size = 0, 1
    if kind == "ddp":
        torch.distributed.init_process_group("gloo")
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if kind == "horovod":
        hvd = import_module("horovod.torch")
        hvd.init()
        rank, size = hvd.rank(), hvd.size()
    milliseconds = loop(package, model_name, kind, rank, size)
    if rank == 0:
        print(f"milliseconds={milliseconds}")


def loop(package: str, model_name: str, kind: str, rank: int, size: int) -> float:
    """Nothing but the step."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    torch.manual_seed(0)
    shape = bare.SHAPES[model_name]
    model: nn.Module = bare.make_model(import_module(f"{package}.torch.models"), model_name)
    inputs, labels = torch.randn(bare.SAMPLES, shape[2], *shape[:2]), torch.randint(10, (bare.SAMPLES,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    if kind == "horovod":
        hvd = import_module("horovod.torch")
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    plan = bare.plan(rank, size)
    loss = torch.zeros(())

    def step() -> None:
        nonlocal loss
        rows = torch.tensor(next(plan))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs[rows]), labels[rows])
        torch.autograd.backward(loss)
        optimizer.step()

    return bare.measure(step, lambda: float(loss.item()))


if __name__ == "__main__":
    main()
