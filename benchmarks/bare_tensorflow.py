"""One rank of a hand-written TensorFlow loop, for step_time.py: python bare_tensorflow.py PACKAGE MODEL KIND."""

import json
import os
import sys
from importlib import import_module
from typing import Any

import bare
import numpy as np
import tensorflow as tf

PORTS = (23571, 23572)  # of the strategy's workers on this host


def main() -> None:
    """Kind single, horovod, or strategy, which is tf.distribute's MultiWorkerMirroredStrategy."""
    package, model_name, kind = sys.argv[1:]
    rank, size, strategy = 0, 1, None
    if kind == "horovod":
        hvd = import_module("horovod.tensorflow")
        hvd.init()
        rank, size = hvd.rank(), hvd.size()
    if kind == "strategy":
        rank, size = int(os.environ["RANK"]), len(PORTS)
        workers = [f"localhost:{port}" for port in PORTS]
        task = {"type": "worker", "index": rank}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
    tf.config.threading.set_intra_op_parallelism_threads(max(1, (os.cpu_count() or 1) // size))
    if kind == "strategy":
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    milliseconds = loop(package, model_name, kind, rank, size, strategy)
    if rank == 0:
        print(f"milliseconds={milliseconds}", flush=True)


def loop(package: str, model_name: str, kind: str, rank: int, size: int, strategy: Any) -> float:
    """Nothing but the step, in one graph."""
    keras = import_module("keras")
    shape = bare.SHAPES[model_name]
    models = import_module(f"{package}.tensorflow.models")
    scope = strategy or tf.distribute.get_strategy()
    with scope.scope():
        keras.utils.set_random_seed(0)
        model = bare.make_model(models, model_name)
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)
        optimizer.build(model.trainable_variables)
    generator = np.random.default_rng(0)
    inputs = generator.standard_normal((bare.SAMPLES, *shape), np.float32)
    labels = generator.integers(0, 10, bare.SAMPLES)

    def work(images: tf.Tensor, answers: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(answers, model(images, training=True))
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
        if kind == "horovod":
            gradients = import_module("horovod.tensorflow").grouped_allreduce(gradients, name="gradients")
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    @tf.function(jit_compile=False)  # type: ignore[untyped-decorator]
    def whole(images: tf.Tensor, answers: tf.Tensor) -> tf.Tensor:
        return scope.run(work, (images, answers)) if strategy else work(images, answers)

    plan = bare.plan(rank, size)
    loss = tf.zeros(())

    def step() -> None:
        nonlocal loss
        rows = next(plan)
        loss = whole(tf.convert_to_tensor(inputs[rows]), tf.convert_to_tensor(labels[rows]))

    return bare.measure(step, lambda: float(loss.numpy()))


if __name__ == "__main__":
    main()
