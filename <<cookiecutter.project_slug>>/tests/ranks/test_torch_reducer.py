"""What the reducer promises, checked on every rank."""

from typing import Any

import pytest
import torch
from jobs import compose_config
from torch import nn

from << cookiecutter.package_name >>.errors import UserError
from << cookiecutter.package_name >>.ranks import Communicator
from << cookiecutter.package_name >>.torch.engine import build
from << cookiecutter.package_name >>.torch.powersgd import PowerSGD
from << cookiecutter.package_name >>.torch.reducer import Reducer, averaged, broadcast_model


def gradients(model: nn.Module, inputs: torch.Tensor) -> None:
    if len(inputs):
        (model(inputs).square().sum() / 5).backward()


@pytest.mark.parametrize(
    ("groups", "compression"), [(None, "none"), (3, "none"), (1, "fp16"), (None, {"_target_": "torch_halves.Halves"})]
)
def test_the_gradient_is_that_of_all_samples(ranks: Communicator, groups: int | None, compression: Any) -> None:
    """5 samples, 3 on rank 0 and 2 or none on rank 1, give the gradient of all of them."""
    torch.manual_seed(ranks.rank)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    broadcast_model(model, ranks)
    reducer = Reducer(model, ranks, groups=groups, compression=compression, predivide_factor=2.0)
    torch.manual_seed(0)
    inputs = torch.randn(5, 4)
    for cut in (3, 5):
        mine = (inputs[:cut], inputs[cut:])[ranks.rank]
        reducer.clear()
        passes = [mine[:1], mine[1:]]
        for index, part in enumerate(passes):
            reducer.start(last=index == 1)
            gradients(model, part)
        reducer.finish()
        reduced = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        expected = torch.autograd.grad(model(inputs).square().sum() / 5, list(model.parameters()))
        tolerance = 1e-6 if compression == "none" else 1e-2
        for got, wanted in zip(reduced, expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


def test_large_gradients(ranks: Communicator) -> None:
    """Gradients that fp16 can hold only when they are divided first, and their sum not even then but after."""
    for compression, value in (("none", 40_000.0), ("fp16", 40_000.0), ("fp16", 80_000.0)):
        model = nn.Linear(1, 1, bias=False)
        reducer = Reducer(model, ranks, compression=compression, predivide_factor=4.0)
        reducer.start(last=True)
        (model(torch.ones(1, 1)) * value).sum().backward()
        reducer.finish()
        assert [p.grad.item() for p in model.parameters() if p.grad is not None] == [2 * value], compression


def test_powersgd(ranks: Communicator) -> None:
    """Exact for gradients of few samples; else what is lost in a step stays with the ranks, to the last bit of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 40))
    for rank, samples in ((8, 5), (1, 30)):
        reducer = Reducer(model, ranks, compression="powersgd", rank=rank)
        assert isinstance(reducer.compressor, PowerSGD)
        assert reducer.compressor.numbers < 0.4 * sum(p.numel() for p in model.parameters())
        inputs = torch.randn(samples, 64)
        exact = torch.autograd.grad(model(inputs).square().sum() / 5, list(model.parameters()))
        reducer.start(last=True)
        gradients(model, torch.tensor_split(inputs, 2)[ranks.rank])
        reducer.finish()
        lost = [one.clone() for one in reducer.compressor.state()["errors"]][::-1]
        for index, one in enumerate(lost):
            ranks.hvd.allreduce_(one, op=ranks.hvd.Sum, name=f"lost.{index}")
        got = [p.grad for p in model.parameters() if p.grad is not None]
        for index, (mine, wanted) in enumerate(zip(got, exact, strict=True)):
            whole = mine if samples == 5 or index % 2 else mine + lost[index // 2]
            torch.testing.assert_close(whole, wanted, rtol=1e-4, atol=1e-4)
        if samples == 30:
            assert float(lost[0].norm()) > 0.1 * float(exact[0].norm())
        reducer.clear()


def test_ranks_start_equal(ranks: Communicator) -> None:
    """Engines start equal on all ranks; one disturbed bit on one rank is noticed and named."""
    engine = build(compose_config("data.batch_size=8"), ranks)
    ranks.check_equal(engine.fingerprint(), "the weights")
    if ranks.rank == 1:
        parameter = next(engine.model.parameters()).data
        parameter.view(-1)[0] = torch.nextafter(parameter.view(-1)[0], torch.tensor(9.0))
    with pytest.raises(RuntimeError, match="the weights of rank 1 differ"):
        ranks.check_equal(engine.fingerprint(), "the weights")


def test_adasum_needs_mpi(ranks: Communicator) -> None:
    if ranks.hvd.mpi_enabled():
        Reducer(nn.Linear(1, 1), ranks, op="adasum")
        return
    with pytest.raises(UserError, match="adasum needs MPI"):
        Reducer(nn.Linear(1, 1), ranks, op="adasum")


def test_means(ranks: Communicator) -> None:
    mean = averaged([torch.full((2,), float(ranks.rank)), torch.tensor(7)], ranks, "mean")
    assert (mean[0].tolist(), mean[1].item()) == ([0.5, 0.5], 7)
