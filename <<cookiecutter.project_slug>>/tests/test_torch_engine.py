"""The PyTorch engine on one rank: what one step does to the weights."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from jobs import RANKS, choices, compose_config, run_ranks

from << cookiecutter.package_name >>.build import open_data
from << cookiecutter.package_name >>.data import Splits
from << cookiecutter.package_name >>.distributed import Communicator, open_communicator
from << cookiecutter.package_name >>.errors import UserError
from << cookiecutter.package_name >>.sampler import Position, Sampler
from << cookiecutter.package_name >>.torch.engine import TorchEngine, build

RATE = 0.1


@pytest.fixture(scope="session")
def communicator() -> Communicator:
    return open_communicator("torch", compose_config().horovod)


SMALL_CNN = ("model=cnn", "model.width=4")


def make(communicator: Communicator, *overrides: str) -> tuple[TorchEngine, Splits]:
    config = compose_config("engine=torch", *(overrides if "model=mlp" in overrides else (*SMALL_CNN, *overrides)))
    return build(config, communicator), open_data(config)


def train(engine: TorchEngine, splits: Splits, steps: int = 3, *, batch: int = 64, passes: int = 1) -> None:
    sampler = Sampler(len(splits.train), global_batch=batch, accumulation=passes)
    batches = engine.train_batches(splits.train, sampler.shares(Position(), epochs=9))
    for _, (share, tensors) in zip(range(steps), batches, strict=False):
        engine.train_step(share, tensors, RATE)


def weights(engine: TorchEngine) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in engine.model.parameters()])


@pytest.mark.parametrize("choice", choices("model"))
def test_every_model_answers_for_every_class(choice: str) -> None:
    config = compose_config(f"model={choice}", "data=synthetic")
    assert instantiate(config.model)(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_large_images_get_the_large_stem() -> None:
    config = compose_config("model=resnet18", "data=image_folder", "data.classes=5", "data.root=.")
    assert instantiate(config.model)(torch.zeros(1, 3, 224, 224)).shape == (1, 5)


@pytest.mark.parametrize("choice", choices("optimizer"))
def test_every_optimizer_builds(communicator: Communicator, choice: str) -> None:
    engine, _ = make(communicator, f"optimizer={choice}")
    assert engine.optimizer.param_groups[0]["lr"] == compose_config(f"optimizer={choice}").optimizer.lr


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("precision=fp16", "precision=fp16 needs a GPU: use bf16 or fp32 on the CPU"),
        ("sync_batch_norm=true", "sync_batch_norm=true needs GPUs"),
        ("device=cuda", "device=cuda but PyTorch sees no GPU"),
    ],
)
def test_what_needs_a_gpu_is_refused_without_one(communicator: Communicator, override: str, sentence: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UserError, match=sentence):
        make(communicator, override)


@pytest.mark.slow
def test_the_usual_recipe_leaves_the_ranks_apart() -> None:
    """The reason why every rank loads a checkpoint itself; when this fails, Horovod has mended it."""
    result = run_ranks(2, str(RANKS / "torch_usual_recipe.py"))
    assert "the ranks differ" in result.stdout, result.stdout + result.stderr


def test_a_step_is_the_plain_optimizers_step(communicator: Communicator) -> None:
    engine, splits = make(communicator)
    plain, _ = make(communicator)
    optimizer = torch.optim.SGD(plain.model.parameters(), lr=RATE, momentum=0.9, nesterov=True, weight_decay=1e-4)
    sampler = Sampler(len(splits.train), global_batch=64)
    for _, share in zip(range(3), sampler.shares(Position(), 1), strict=False):
        inputs, labels = splits.train.fetch(share.passes[0], 0)
        optimizer.zero_grad()
        outputs = plain.model.train()(torch.from_numpy(inputs).permute(0, 3, 1, 2))
        torch.autograd.backward(torch.nn.functional.cross_entropy(outputs, torch.from_numpy(labels)))
        optimizer.step()
    train(engine, splits)
    torch.testing.assert_close(weights(engine), weights(plain))


def test_accumulation_changes_only_where_the_work_is_cut(communicator: Communicator) -> None:
    once, splits = make(communicator, "model=mlp")
    thrice, _ = make(communicator, "model=mlp")
    train(once, splits)
    train(thrice, splits, passes=3)
    torch.testing.assert_close(weights(once), weights(thrice))


def test_clipping_bounds_the_gradient(communicator: Communicator) -> None:
    engine, splits = make(communicator, "clip_norm=1e-3", "optimizer.momentum=0", "optimizer.nesterov=false")
    before = weights(engine)
    train(engine, splits, steps=1)
    decay = 1e-4 * before.norm()
    assert (weights(engine) - before).norm() <= RATE * (1e-3 + decay) * 1.01


def test_a_rank_without_samples_takes_the_step_too(communicator: Communicator) -> None:
    engine, splits = make(communicator)
    before = weights(engine)
    train(engine, splits, steps=1, batch=2, passes=2)
    share = Sampler(len(splits.train), global_batch=2).share(Position())
    empty = (torch.empty(0, 8, 8, 1), torch.empty(0, dtype=torch.int64))
    engine.train_step(share, [empty], RATE)
    assert torch.isfinite(weights(engine)).all()
    assert not torch.equal(weights(engine), before)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["precision=bf16"],
        ["channels_last=true"],
        pytest.param(["compile=true", "model=mlp", "model.hidden=[32]"], marks=pytest.mark.slow),
    ],
)
def test_variants_train(communicator: Communicator, overrides: list[str]) -> None:
    engine, splits = make(communicator, *overrides)
    plan = [torch.arange(359).numpy()]
    train(engine, splits, steps=1)
    first = engine.evaluate(splits.validation, plan).loss
    train(engine, splits, steps=60)
    after = engine.evaluate(splits.validation, plan)
    assert after.loss < 0.5 * first
    assert after.count == 359
    assert after.correct > 250


def test_label_smoothing_raises_the_training_loss_only(communicator: Communicator) -> None:
    smooth, splits = make(communicator, "label_smoothing=0.2")
    train(smooth, splits, steps=80)
    evaluation = smooth.evaluate(splits.train, [torch.arange(1000).numpy()])
    smooth.train_sums()
    train(smooth, splits, steps=5)
    sums = smooth.train_sums()
    assert sums.loss / sums.count > evaluation.loss / evaluation.count + 0.3


@pytest.fixture
def poison() -> Iterator[torch.Tensor]:
    return iter([torch.full((4, 8, 8, 1), math.nan), torch.rand(4, 8, 8, 1)])


def test_a_bad_step_is_skipped_or_seen(communicator: Communicator, poison: Iterator[torch.Tensor]) -> None:
    engine, splits = make(communicator, "on_nan=skip")
    share = Sampler(len(splits.train), global_batch=4).share(Position())
    before = weights(engine)
    labels = torch.arange(4)
    engine.train_step(share, [(next(poison), labels)], RATE)
    assert torch.equal(weights(engine), before)
    assert engine.train_sums().count == 0
    engine.train_step(share, [(next(poison), labels)], RATE)
    assert torch.isfinite(weights(engine)).all()
    assert engine.train_sums().count == 4


def test_a_skipped_step_leaves_batch_norm_as_it_was(communicator: Communicator, poison: Iterator[torch.Tensor]) -> None:
    engine, splits = make(communicator, "on_nan=skip")
    before = [buffer.clone() for buffer in engine.model.buffers()]
    share = Sampler(len(splits.train), global_batch=4).share(Position())
    engine.train_step(share, [(next(poison), torch.arange(4))], RATE)
    assert all(torch.equal(now, then) for now, then in zip(engine.model.buffers(), before, strict=True))


def test_a_poisoned_model_is_never_saved(communicator: Communicator) -> None:
    engine, splits = make(communicator)
    share = Sampler(len(splits.train), global_batch=4).share(Position())
    engine.train_step(share, [(torch.full((4, 8, 8, 1), math.nan), torch.arange(4))], RATE)
    assert math.isnan(engine.train_sums().loss)
    with pytest.raises(UserError, match="not finite and were not saved"):
        engine.snapshot([engine.rank_state()])


def test_the_snapshot_is_of_its_own_moment_and_restores_everything(communicator: Communicator, tmp_path: Path) -> None:
    engine, splits = make(communicator, "optimizer=adamw")
    train(engine, splits)
    write = engine.snapshot([engine.rank_state()])
    saved, random_numbers = engine.fingerprint(), torch.rand(3)
    train(engine, splits)
    write(tmp_path)
    later = engine.fingerprint()
    other, _ = make(communicator, "optimizer=adamw", "seed=5")
    other.restore(tmp_path, rank=0)
    assert other.fingerprint() == saved != later
    assert torch.equal(torch.rand(3), random_numbers)
    train(other, splits)
    assert other.fingerprint() == later
    for mine, theirs in zip(engine.model.buffers(), other.model.buffers(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_checkpoint_of_another_model_is_refused(communicator: Communicator, tmp_path: Path) -> None:
    engine, _ = make(communicator)
    engine.snapshot([engine.rank_state()])(tmp_path)
    other, _ = make(communicator, "model.width=8")
    before = other.fingerprint()
    with pytest.raises(UserError, match=r"another model: .* 0\.weight with \(4, 1, 3, 3\) .* \(8, 1, 3, 3\)"):
        other.restore(tmp_path, rank=0)
    assert other.fingerprint() == before
