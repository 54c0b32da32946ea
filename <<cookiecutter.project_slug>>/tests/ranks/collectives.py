"""Run on 2 ranks by test_two_ranks.py: what the communicator and the reducer promise, checked on every rank."""

import os
from collections.abc import Callable

import torch
from jobs import compose_config
from torch import nn

from << cookiecutter.package_name >>.distributed import Communicator, open_communicator
from << cookiecutter.package_name >>.errors import UserError
from << cookiecutter.package_name >>.torch.engine import build
from << cookiecutter.package_name >>.torch.reducer import Reducer, averaged, broadcast_model

SETTINGS = dict.fromkeys(
    ("fusion_threshold_mb", "cycle_time_ms", "cache_capacity", "autotune", "timeline", "stall_check_s")
)


def expect(error: type[Exception], call: Callable[[], object], *words: str) -> None:
    try:
        call()
    except error as caught:
        assert all(word in str(caught) for word in words), str(caught)
    else:
        raise AssertionError(f"no {error.__name__}")


def check_talk(ranks: Communicator) -> None:
    assert ranks.gather({"rank": ranks.rank}, "a") == [{"rank": 0}, {"rank": 1}]
    assert ranks.broadcast(ranks.rank + 5, "b") == 5
    assert ranks.sum([1.0, float(ranks.rank)], "c") == [2.0, 1.0]
    assert ranks.together(lambda: ranks.rank, "d") == ranks.rank
    assert ranks.threads_per_rank() == max(1, len(os.sched_getaffinity(0)) // 2)


def check_failures(ranks: Communicator) -> None:
    def fail_on_rank_1() -> None:
        if ranks.rank == 1:
            raise UserError("no such file")

    def crash_on_rank_1() -> None:
        if ranks.rank == 1:
            raise ZeroDivisionError("by zero")

    def fail() -> None:
        raise UserError("the same everywhere")

    expect(UserError, lambda: ranks.together(fail_on_rank_1, "e"), "rank 1: no such file")
    expect(RuntimeError, lambda: ranks.together(crash_on_rank_1, "f"), "rank 1: ZeroDivisionError: by zero")
    expect(UserError, lambda: ranks.together(fail, "g"), "the same everywhere")
    expect(UserError, lambda: ranks.on_writer(fail, "h"), "the same everywhere")
    assert ranks.on_writer(lambda: ranks.rank, "i") == 0
    ranks.check_equal("same", "hashes")
    expect(RuntimeError, lambda: ranks.check_equal(str(ranks.rank), "hashes"), "hashes of rank 1 differ")


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
    ranks = open_communicator("torch", {**SETTINGS, "stall_shutdown_s": 60})
    assert ranks.size == 2
    check_talk(ranks)
    check_failures(ranks)
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
