"""Run on 2 ranks by test_two_ranks.py: what the reducer promises, checked on every rank."""

import torch
from jobs import compose_config
from talk import expect
from torch import nn

from << cookiecutter.package_name >>.distributed import Communicator, open_communicator
from << cookiecutter.package_name >>.errors import UserError
from << cookiecutter.package_name >>.torch.engine import build
from << cookiecutter.package_name >>.torch.reducer import Reducer, averaged, broadcast_model


def gradients(model: nn.Module, inputs: torch.Tensor) -> None:
    if len(inputs):
        (model(inputs).square().sum() / 5).backward()


def check_reducer(ranks: Communicator, groups: int | None, compression: str) -> None:
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


def check_weights(ranks: Communicator) -> None:
    """Engines start equal on all ranks; one disturbed bit on one rank is noticed and named."""
    engine = build(compose_config("data.batch_size=8"), ranks)
    ranks.check_equal(engine.fingerprint(), "the weights")
    if ranks.rank == 1:
        parameter = next(engine.model.parameters()).data
        parameter.view(-1)[0] = torch.nextafter(parameter.view(-1)[0], torch.tensor(9.0))
    expect(RuntimeError, lambda: ranks.check_equal(engine.fingerprint(), "the weights"), "the weights of rank 1 differ")


def main() -> None:
    ranks = open_communicator("torch", {"stall_shutdown_s": 60})
    check_weights(ranks)
    for groups, compression in ((None, "none"), (3, "none"), (1, "fp16")):
        check_reducer(ranks, groups, compression)
    if not ranks.hvd.mpi_enabled():
        expect(UserError, lambda: Reducer(nn.Linear(1, 1), ranks, op="adasum"), "adasum needs MPI")
    mean = averaged([torch.full((2,), float(ranks.rank)), torch.tensor(7)], ranks, "mean")
    assert (mean[0].tolist(), mean[1].item()) == ([0.5, 0.5], 7)
    print(f"rank {ranks.rank} passed")


if __name__ == "__main__":
    main()
