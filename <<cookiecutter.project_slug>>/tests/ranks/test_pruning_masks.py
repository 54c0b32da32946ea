"""One rank whose mask differs in a single bit is caught on all ranks, and named."""

from typing import Any

import pytest
from jobs import compose_config, current_engine
from omegaconf import OmegaConf

from << cookiecutter.package_name >>.compress.pruning import Pruning
from << cookiecutter.package_name >>.compress.wing import wing_of
from << cookiecutter.package_name >>.engine import open_engine
from << cookiecutter.package_name >>.ranks import Communicator


def test_a_mask_that_differs_on_one_rank_is_caught(ranks: Communicator) -> None:
    engine: Any = open_engine(compose_config("model=cnn", "model.width=4"), ranks)
    options = OmegaConf.create({"pattern": "free", "sparsity": 0.5, "scope": "global", "schedule": "one_shot"})
    prunable = wing_of(current_engine()).PrunableWeights(engine.model, ["*"], [])
    pruning = Pruning(prunable, ranks, options, samples=100, epochs=1)
    pruning.begin()
    assert all(0 < mask.mean() < 1 for mask in pruning.masks.values())
    ranks.check_equal(engine.fingerprint(), "the weights")
    masks = {name: mask.copy() for name, mask in pruning.masks.items()}
    pruning.hold(masks)
    if ranks.rank == 1:
        masks[[*masks][-1]].flat[-1] ^= True
    with pytest.raises(RuntimeError, match="the masks of rank 1 differ from rank 0's"):
        pruning.hold(masks)
