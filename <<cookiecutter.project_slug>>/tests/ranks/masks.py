"""One rank whose mask differs in a single bit is caught on all ranks, and named."""

import sys

from jobs import compose_config, current_engine
from omegaconf import OmegaConf

from << cookiecutter.package_name >>.compress.pruning import Pruning
from << cookiecutter.package_name >>.compress.wing import wing_of
from << cookiecutter.package_name >>.engine import open_engine
from << cookiecutter.package_name >>.ranks import open_communicator

config = compose_config("model=cnn", "model.width=4")
engine = open_engine(config, open_communicator(current_engine()))
communicator = open_communicator(current_engine())
options = OmegaConf.create({"pattern": "free", "sparsity": 0.5, "scope": "global", "schedule": "one_shot"})
prunable = wing_of(current_engine()).PrunableWeights(engine.model, ["*"], [])
pruning = Pruning(prunable, communicator, options, samples=100, epochs=1)
pruning.begin()
assert all(0 < mask.mean() < 1 for mask in pruning.masks.values())
communicator.check_equal(engine.fingerprint(), "the weights")

masks = {name: mask.copy() for name, mask in pruning.masks.items()}
pruning.hold(masks)
if communicator.rank == 1:
    last = [*masks][-1]
    masks[last].flat[-1] ^= True
try:
    pruning.hold(masks)
except RuntimeError as error:
    assert "the masks of rank 1 differ from rank 0's" in str(error)
    print(f"rank {communicator.rank} passed")
    sys.stdout.flush()
