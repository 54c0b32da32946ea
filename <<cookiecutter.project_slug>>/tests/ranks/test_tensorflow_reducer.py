"""What the reducer promises, checked on every rank."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from jobs import compose_config

from << cookiecutter.package_name >>.errors import UserError
from << cookiecutter.package_name >>.ranks import Communicator
from << cookiecutter.package_name >>.tensorflow.engine import build
from << cookiecutter.package_name >>.tensorflow.optimizer import distribute
from << cookiecutter.package_name >>.tensorflow.reducer import Reducer, averaged, broadcast_variables


@pytest.mark.parametrize(("groups", "compression"), [(None, "none"), (3, "none"), (1, "fp16")])
def test_the_gradient_is_that_of_all_samples(ranks: Communicator, groups: int | None, compression: str) -> None:
    """5 samples, 3 on rank 0 and 2 or none on rank 1, give the gradient of all of them."""
    keras.utils.set_random_seed(ranks.rank)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(2)])
    broadcast_variables(model.weights)
    reducer = Reducer(groups=groups, compression=compression, predivide_factor=2.0)
    inputs = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)

    def gradients(part: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(model(part))) / 5
        result: list[tf.Tensor] = tape.gradient(loss, [v.value for v in model.trainable_variables])
        return result

    for cut in (3, 5):
        mine = (inputs[:cut], inputs[cut:])[ranks.rank]
        reduced = tf.function(lambda part: reducer(gradients(part)), jit_compile=False)(mine)
        tolerance = 1e-6 if compression == "none" else 1e-2
        for got, wanted in zip(reduced, gradients(inputs), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)


def test_large_gradients(ranks: Communicator) -> None:
    """Gradients that fp16 can hold only when they are divided first, and their sum not even then but after."""
    for op, factor in (("sum", 2), ("average", 1)):
        for compression, value in (("none", 40_000.0), ("fp16", 40_000.0), ("fp16", 80_000.0)):
            optimizer = distribute(keras.optimizers.SGD(1.0), op=op, compression=compression, predivide_factor=4.0)
            weight = keras.Variable(np.zeros(1, np.float32))
            optimizer.apply([tf.constant([value])], [weight])
            assert weight.numpy().tolist() == [-factor * value], (op, compression)


def test_ranks_start_equal(ranks: Communicator) -> None:
    """Engines start equal on all ranks; one disturbed bit on one rank is noticed and named."""
    engine = build(compose_config("data.batch_size=8"), ranks)
    ranks.check_equal(engine.fingerprint(), "the weights")
    if ranks.rank == 1:
        variable = engine.model.trainable_variables[0]
        value = variable.numpy()
        value.flat[0] = np.nextafter(value.flat[0], np.float32(9))
        variable.assign(value)
    with pytest.raises(RuntimeError, match="the weights of rank 1 differ"):
        ranks.check_equal(engine.fingerprint(), "the weights")


def test_adasum_needs_mpi(ranks: Communicator) -> None:
    if ranks.hvd.mpi_enabled():
        Reducer(op="adasum")
        return
    with pytest.raises(UserError, match="adasum needs MPI"):
        Reducer(op="adasum")


def test_means(ranks: Communicator) -> None:
    mean = averaged([tf.fill((2,), float(ranks.rank)), tf.constant(7)], "mean")
    assert (mean[0].numpy().tolist(), int(mean[1])) == ([0.5, 0.5], 7)
