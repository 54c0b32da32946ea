"""The learning rate as a function of epochs done."""

import math

import pytest

from << cookiecutter.package_name >>.errors import UserError
from << cookiecutter.package_name >>.schedule import Schedule, scaling_factor


def test_warm_up_goes_from_one_batchs_rate_to_the_scaled_one() -> None:
    schedule = Schedule(base=0.1, peak=0.8, epochs=10, warmup_epochs=2, decay="constant")
    assert [schedule(progress) for progress in (0, 1, 2, 9)] == pytest.approx([0.1, 0.45, 0.8, 0.8])


@pytest.mark.parametrize(
    ("options", "progress", "factor"),
    [
        ({"decay": "constant"}, 9.0, 1.0),
        ({"decay": "cosine"}, 5.0, 0.5),
        ({"decay": "cosine", "final": 0.2}, 10.0, 0.2),
        ({"decay": "polynomial", "power": 2}, 5.0, 0.25),
        ({"decay": "step", "milestones": [3, 6], "gamma": 0.1}, 2.9, 1.0),
        ({"decay": "step", "milestones": [3, 6], "gamma": 0.1}, 3.0, 0.1),
        ({"decay": "step", "milestones": [3, 6], "gamma": 0.1}, 7.0, 0.01),
    ],
)
def test_decay(options: dict[str, object], progress: float, factor: float) -> None:
    schedule = Schedule(base=1.0, peak=2.0, epochs=10, **options)  # type: ignore[arg-type]
    assert schedule(progress) == pytest.approx(2.0 * factor)


def test_decay_begins_after_the_warm_up() -> None:
    schedule = Schedule(base=1.0, peak=1.0, epochs=10, warmup_epochs=5)
    assert schedule(5) == 1.0
    assert schedule(7.5) == pytest.approx((1 + math.cos(math.pi / 2)) / 2)


@pytest.mark.parametrize(("scaling", "factor"), [("linear", 8), ("sqrt", math.sqrt(8)), ("adasum", 2), ("none", 1)])
def test_scaling(scaling: str, factor: float) -> None:
    assert scaling_factor(scaling, batches=8, adasum_batches=2) == pytest.approx(factor)


def test_what_has_no_meaning_is_refused() -> None:
    with pytest.raises(UserError, match=r"schedule\.warmup_epochs=3 must lie between 0 and epochs=2"):
        Schedule(base=1, peak=1, epochs=2, warmup_epochs=3)
