"""The PyTorch engine on one rank, as far as it differs from others."""

from pathlib import Path

import numpy as np
import pytest
import torch
from engine_helpers import RATE, check_states, check_training, make, train, weights
from hydra.utils import instantiate
from jobs import choices, compose_config

from << cookiecutter.package_name >>.errors import UserError
from << cookiecutter.package_name >>.ranks import Communicator, open_communicator
from << cookiecutter.package_name >>.sampler import Position, Sampler


@pytest.fixture
def communicator(monkeypatch: pytest.MonkeyPatch) -> Communicator:
    monkeypatch.setenv("TESTED_ENGINE", "torch")
    return open_communicator("torch")


@pytest.mark.parametrize("choice", choices("model"))
def test_every_model_answers_for_every_class(choice: str) -> None:
    config = compose_config("engine=torch", f"model={choice}", "data=synthetic")
    assert instantiate(config.model)(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_large_images_get_the_large_stem() -> None:
    config = compose_config("engine=torch", "model=resnet18", "data=image_folder", "data.classes=5", "data.root=.")
    assert instantiate(config.model)(torch.zeros(1, 3, 224, 224)).shape == (1, 5)


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
    np.testing.assert_allclose(weights(engine), weights(plain), rtol=1.3e-6, atol=1e-5)


@pytest.mark.parametrize(
    "overrides",
    [
        ["channels_last=true"],
        pytest.param(["compile=true", "model=mlp", "model.hidden=[32]"], marks=pytest.mark.slow),
    ],
)
def test_variants_train(communicator: Communicator, overrides: list[str]) -> None:
    check_training(communicator, *overrides)


def test_the_states_are_of_their_own_moment_and_hold_everything(communicator: Communicator, tmp_path: Path) -> None:
    check_states(communicator, tmp_path, lambda: torch.rand(3))
