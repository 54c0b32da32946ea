"""Horovod's usual recipe for a resume leaves the ranks apart: the reason why every rank loads a checkpoint itself.

Rank 0 alone loads the checkpoint, then parameters and optimizer state are broadcast. The other ranks' optimizers are
empty, so the broadcast lets them take a step with zero gradients first, and weight decay moves their weights.
"""

import hashlib

import horovod.torch as hvd
import torch
from torch import nn

from << cookiecutter.package_name >>.ranks import Communicator


def fingerprint(model: nn.Module) -> str:
    """A hash of a model's parameters."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def test_the_usual_recipe_leaves_the_ranks_apart(ranks: Communicator) -> None:
    """When this fails, Horovod has mended it."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    if ranks.rank == 0:  # a step stands for the state that was loaded
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert len(set(ranks.gather(fingerprint(model), "hashes"))) == 2
