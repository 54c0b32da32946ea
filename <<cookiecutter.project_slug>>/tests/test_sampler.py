"""Which samples each rank sees: the plan is the same for any number of ranks."""

from itertools import chain, product

import numpy as np
import pytest

from << cookiecutter.package_name >>.errors import UserError
from << cookiecutter.package_name >>.sampler import Position, Sampler, Share, evaluation_batches

SIZES = (1, 2, 3, 5)


def shares_of_all(size: int, **options: int | str) -> list[list[Share]]:
    """For each rank its shares of two epochs."""
    samplers = [Sampler(rank=rank, size=size, **options) for rank in range(size)]  # type: ignore[arg-type]
    return [list(sampler.shares(Position(), epochs=2)) for sampler in samplers]


def global_batches(ranks: list[list[Share]]) -> list[list[int]]:
    """The samples of each step, over ranks and passes in order."""
    steps = zip(*ranks, strict=True)
    return [[int(i) for share in step for part in share.passes for i in part] for step in steps]


@pytest.mark.parametrize(("samples", "batch", "accumulation"), [(97, 20, 1), (97, 20, 3), (64, 16, 2), (7, 50, 1)])
def test_any_number_of_ranks_trains_on_the_same_batches(samples: int, batch: int, accumulation: int) -> None:
    options = {"samples": samples, "global_batch": batch, "accumulation": accumulation, "seed": 3}
    alone, *others = (global_batches(shares_of_all(size, **options)) for size in SIZES)
    assert all(other == alone for other in others)


@pytest.mark.parametrize("size", SIZES)
def test_each_sample_once_per_epoch_and_in_another_order_in_the_next(size: int) -> None:
    batches = global_batches(shares_of_all(size, samples=97, global_batch=20))
    first, second = ([*chain(*part)] for part in (batches[:5], batches[5:]))
    assert sorted(first) == sorted(second) == list(range(97))
    assert first != second


@pytest.mark.parametrize("size", SIZES)
def test_a_short_batch_is_counted_exactly(size: int) -> None:
    for step in zip(*shares_of_all(size, samples=21, global_batch=20), strict=True):
        count = sum(len(part) for share in step for part in share.passes)
        assert {share.global_count for share in step} == {count}


@pytest.mark.parametrize(("before", "after"), [*product(SIZES, SIZES)])
def test_the_plan_goes_on_from_any_position_with_another_number_of_ranks(before: int, after: int) -> None:
    whole = global_batches(shares_of_all(before, samples=97, global_batch=20))
    position = Sampler(97, 20, size=before).share(Position(0, 40)).end
    rest = [list(Sampler(97, 20, rank=rank, size=after).shares(position, 2)) for rank in range(after)]
    assert global_batches(rest) == whole[3:]


def test_replicate_shows_every_sample_to_every_rank_in_its_own_order() -> None:
    ranks = shares_of_all(2, samples=30, global_batch=20, distribution="replicate")
    orders = [[int(i) for share in shares[:3] for i in share.passes[0]] for shares in ranks]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(30))
    assert orders[0] != orders[1]
    assert ranks[0][0].global_count == 20


def test_another_seed_is_another_order() -> None:
    plans = [global_batches(shares_of_all(1, samples=50, global_batch=10, seed=seed)) for seed in (0, 1, 0)]
    assert plans[0] == plans[2] != plans[1]


def test_progress_counts_epochs() -> None:
    sampler = Sampler(samples=100, global_batch=20)
    assert sampler.progress(Position(2, 50)) == 2.5
    assert sampler.steps_per_epoch == 5


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"samples": 10, "global_batch": 1, "size": 2}, ["global batch of 1", "2 ranks", "data.global_batch"]),
        ({"samples": 10, "global_batch": 3, "size": 2, "accumulation": 2}, ["global batch of 3", "2 accumulation"]),
        ({"samples": 0, "global_batch": 4}, ["no samples"]),
        ({"samples": 9, "global_batch": 5, "size": 2, "distribution": "replicate"}, ["5", "multiple of 2"]),
    ],
)
def test_plans_without_sense_are_refused(options: dict[str, int | str], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        Sampler(**options)  # type: ignore[arg-type]
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(("samples", "size"), [*product((1, 2, 7, 100), SIZES)])
def test_evaluation_counts_each_sample_on_one_rank(samples: int, size: int) -> None:
    parts = [evaluation_batches(samples, 8, rank, size) for rank in range(size)]
    batches = [batch for part in parts for batch in part]
    assert sorted(np.concatenate(batches).tolist()) == list(range(samples))
    assert all(len(batch) <= 8 for batch in batches)
    assert len({len(part) for part in parts}) == 1  # ranks that agree between batches must have equally many
