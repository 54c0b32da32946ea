"""Each engine on one rank: what a step does to the weights, what it refuses."""

import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engine_helpers import GOOD, MIXED, POISON, RATE, buffers, check_training, make, same, step, train, weights
from jobs import choices, compose_config

from << cookiecutter.package_name >>.data import ArrayDataset, normalized
from << cookiecutter.package_name >>.engine import Sums, rank_file
from << cookiecutter.package_name >>.errors import UserError
from << cookiecutter.package_name >>.ranks import Communicator, open_communicator
from << cookiecutter.package_name >>.resume import Start, restore
from << cookiecutter.package_name >>.train_state import TrainState


@pytest.fixture
def communicator(engine: str) -> Communicator:
    return open_communicator(engine)


@pytest.mark.parametrize("choice", choices("optimizer"))
def test_every_optimizer_builds(communicator: Communicator, choice: str) -> None:
    engine, _ = make(communicator, f"optimizer={choice}", "model=mlp")
    optimizer = engine.optimizer
    rate = optimizer.param_groups[0]["lr"] if hasattr(optimizer, "param_groups") else float(optimizer.learning_rate)
    assert rate == pytest.approx(compose_config(f"optimizer={choice}").optimizer.lr)


def test_an_engine_makes_of_images_what_their_measurement_does(communicator: Communicator) -> None:
    scaled, _ = make(communicator, "data.normalize={mean: [0.25], std: [0.5]}")
    plain, _ = make(communicator)
    images = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 1)).astype(np.uint8)
    inputs, labels = normalized(images, {"mean": [0.25], "std": [0.5]}), np.zeros(4, np.int64)
    np.testing.assert_allclose(inputs, (images / 255 - 0.25) / 0.5, atol=1e-6)
    losses = [
        engine.evaluate(ArrayDataset(given, labels), [np.arange(4)]).loss
        for engine, given in ((scaled, images), (plain, inputs))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_accumulation_changes_only_where_the_work_is_cut(communicator: Communicator) -> None:
    once, splits = make(communicator, "model=mlp")
    thrice, _ = make(communicator, "model=mlp", "horovod.accumulation=3")
    train(once, splits)
    train(thrice, splits, passes=3)
    np.testing.assert_allclose(weights(once), weights(thrice), rtol=1.3e-6, atol=1e-6)


def test_clipping_bounds_the_gradient(communicator: Communicator) -> None:
    engine, splits = make(communicator, "clip_norm=1e-3", "optimizer.momentum=0.0", "optimizer.nesterov=false")
    before = weights(engine)
    train(engine, splits, steps=1)
    decay = 1e-4 * np.linalg.norm(before)
    assert np.linalg.norm(weights(engine) - before) <= RATE * (1e-3 + decay) * 1.01


def test_a_rank_without_samples_takes_the_step_too(communicator: Communicator) -> None:
    engine, splits = make(communicator, "horovod.accumulation=2")
    before = weights(engine)
    train(engine, splits, steps=1, batch=2, passes=2)
    trained = weights(engine)
    step(engine, GOOD, range(0), range(0))
    assert np.isfinite(weights(engine)).all()
    assert not np.array_equal(weights(engine), before)
    assert not np.array_equal(weights(engine), trained)  # by momentum


@pytest.mark.parametrize("overrides", [[], ["precision=bf16"]])
def test_variants_train(communicator: Communicator, overrides: list[str]) -> None:
    check_training(communicator, *overrides)


def test_label_smoothing_raises_the_training_loss_only(communicator: Communicator) -> None:
    smooth, splits = make(communicator, "label_smoothing=0.2")
    train(smooth, splits, steps=80)
    evaluation = smooth.evaluate(splits.train, [np.arange(1000)])
    smooth.train_sums()
    train(smooth, splits, steps=5)
    sums = smooth.train_sums()
    assert sums.loss / sums.count > evaluation.loss / evaluation.count + 0.3


def test_a_bad_step_is_skipped_or_seen(communicator: Communicator) -> None:
    engine, _ = make(communicator, "on_nan=skip")
    before, statistics = weights(engine), buffers(engine)
    step(engine, POISON, range(4))
    assert np.array_equal(weights(engine), before)
    assert same(buffers(engine), statistics)
    assert engine.train_sums().count == 0
    step(engine, GOOD, range(4))
    assert np.isfinite(weights(engine)).all()
    assert not np.array_equal(weights(engine), before)
    assert engine.train_sums().count == 4


def test_a_bad_first_pass_is_skipped_too(communicator: Communicator) -> None:
    engine, _ = make(communicator, "on_nan=skip", "horovod.accumulation=2")
    before, statistics = weights(engine), buffers(engine)
    step(engine, MIXED, range(4), range(4, 8))
    assert np.array_equal(weights(engine), before)
    assert same(buffers(engine), statistics)
    step(engine, GOOD, range(4), range(4))
    sums = engine.train_sums()
    assert (math.isfinite(sums.loss), sums.count) == (True, 8)


def test_a_poisoned_model_is_never_saved(communicator: Communicator) -> None:
    engine, _ = make(communicator)
    step(engine, POISON, range(4))
    assert math.isnan(engine.train_sums().loss)
    with pytest.raises(UserError, match="not finite and were not saved"):
        engine.shared_state(engine.statistics())


def test_a_rank_reads_its_own_file_alone(communicator: Communicator, tmp_path: Path) -> None:
    engine, _ = make(communicator)
    engine.shared_state(engine.statistics())(tmp_path)
    saved = TrainState(samples=32, global_batch=8, world_size=communicator.size)
    start = Start(tmp_path, saved, saved, finished=False, remarks=[])
    with pytest.raises(UserError, match=r"rank-0.state is not there: .* start from its weights with weights_from"):
        restore(communicator, engine, start)
    step(engine, GOOD, range(4))
    engine.rank_state().tofile(rank_file(tmp_path, 0))
    sums = engine.train_sums()
    rank_file(tmp_path, 1).write_bytes(b"no state")
    restore(communicator, engine, start)
    assert engine.train_sums() == sums
    more = replace(start, saved=replace(saved, world_size=2))
    with pytest.raises(UserError, match=r"rank-1.state"):
        restore(communicator, engine, more)
    shutil.copy(rank_file(tmp_path, 0), rank_file(tmp_path, 1))
    restore(communicator, engine, more)
    assert engine.train_sums() == Sums(2 * sums.loss, count=2 * sums.count)


FIRST = {
    "torch": r"0\.weight with \(4, 1, 3, 3\) .* \(8, 1, 3, 3\)",
    "tensorflow": r"block_0_conv/kernel with \(3, 3, 1, 4\) .* \(3, 3, 1, 8\)",
}


def test_a_checkpoint_of_another_model_is_refused(engine: str, communicator: Communicator, tmp_path: Path) -> None:
    trained, _ = make(communicator)
    trained.shared_state(trained.statistics())(tmp_path)
    other, _ = make(communicator, "model.width=8")
    before = other.fingerprint()
    with pytest.raises(UserError, match=rf"another model: .* {FIRST[engine]}"):
        other.load_shared_state(tmp_path)
    assert other.fingerprint() == before
