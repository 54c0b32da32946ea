"""Run by test_tensorflow_fit.py: plain model.fit on this rank's part of each global batch.

    python tensorflow_fit.py FOLDER [horovods | stopped | resumed]

Horovod's own optimizer stands for ours with `horovods`; `stopped` ends after half of the epochs.
"""

import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np

from << cookiecutter.package_name >>.checkpoints.store import Store
from << cookiecutter.package_name >>.data import digits
from << cookiecutter.package_name >>.ranks import Communicator, open_communicator
from << cookiecutter.package_name >>.schedule import Schedule
from << cookiecutter.package_name >>.tensorflow.callbacks import (
    AverageMetrics,
    ScheduledRate,
    StoreCheckpoint,
    Synchronize,
    restore,
)
from << cookiecutter.package_name >>.tensorflow.optimizer import distribute
from << cookiecutter.package_name >>.weights import hash_arrays

BATCH, BATCHES, EPOCHS = 64, 20, 4


def open_model(ranks: Communicator, mode: str) -> keras.Model:
    """Each rank starts with weights of its own."""
    keras.utils.set_random_seed(ranks.rank)
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(10)])
    plain = keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=1.0)
    optimizer = horovods(plain) if mode == "horovods" else distribute(plain)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False)
    return model


def horovods(plain: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    import horovod.tensorflow.keras as hvd

    return hvd.DistributedOptimizer(plain)


def my_part(ranks: Communicator) -> tuple[Any, Any]:
    """This rank's slice of every global batch, in the order of the batches."""
    inputs, labels = digits().train.fetch(np.arange(BATCH * BATCHES), 0)
    slices = np.arange(len(labels)).reshape(BATCHES, ranks.size, -1)[:, ranks.rank].ravel()
    return inputs.reshape(-1, 64)[slices], labels[slices]


def main() -> None:
    folder, mode = Path(sys.argv[1]), [*sys.argv, ""][2]
    ranks = open_communicator("tensorflow", {"stall_shutdown_s": 60})
    model, store = open_model(ranks, mode), Store(folder / "checkpoints")
    start = restore(model, store, ranks) if mode != "horovods" else 0
    schedule = Schedule(base=0.05, peak=0.1, epochs=EPOCHS, decay="cosine", warmup_epochs=1)
    callbacks: list[keras.callbacks.Callback] = []
    if mode != "horovods":
        callbacks = [Synchronize(), AverageMetrics(), ScheduledRate(schedule, BATCHES), StoreCheckpoint(store, ranks)]
    epochs = EPOCHS // 2 if mode == "stopped" else EPOCHS
    options = {"batch_size": BATCH // ranks.size, "shuffle": False, "verbose": 0, "callbacks": callbacks}
    history = model.fit(*my_part(ranks), initial_epoch=start, epochs=epochs, **options)
    hashes = ranks.gather(hash_arrays(variable.numpy() for variable in model.weights), "hashes")
    if ranks.writes:
        np.savez(folder / "weights.npz", *model.get_weights())
        if mode != "horovods":  # a model with Horovod's optimizer cannot even be saved
            model.save(folder / "model.keras")
        measured = {name: values[-1] for name, values in history.history.items()}
        print(f"the ranks {'agree' if len(set(hashes)) == 1 else 'differ'} from epoch {start}: {measured}")


if __name__ == "__main__":
    main()
