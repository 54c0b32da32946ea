"""Which checkpoints the rules keep, told one by one: each costs the same, however many there are already."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Facts:
    """What retention needs to know of a sound checkpoint.

    Attributes:
        name: Its folder's name.
        step: Optimizer steps.
        published: Sorts from the first to the last published.
        score: The metric, so that larger is better; None if it has none.
    """

    name: str
    step: int
    published: tuple[float, int, int]
    score: float | None


class Retention:
    """The rules over the checkpoints that it was told of.

    Attributes:
        unkept: The names that no rule keeps any more; who deletes one takes it out.
    """

    def __init__(self, keep_last: int, keep_best: int, keep_every: int) -> None:
        self._newest, self._best = _Top(keep_last), _Top(keep_best)
        self._every = keep_every
        self._steps: dict[int, _Top] = defaultdict(lambda: _Top(1))
        self._rules: Counter[str] = Counter()  # how many keep it
        self.unkept: set[str] = set()

    @property
    def newest(self) -> str | None:
        """The name of the last published one."""
        return self._newest.first

    @property
    def best(self) -> str | None:
        """The name of the one with the largest score; of equals the first."""
        return self._best.first

    def add(self, facts: Facts) -> None:
        """Take note of one."""
        touched = {facts.name}
        for top, key in self._places(facts):
            self._rules[facts.name] += 1
            if out := top.add(key, facts.name):
                self._rules[out] -= 1
                touched.add(out)
        for name in touched:
            if self._rules[name] == 0:
                del self._rules[name]
                self.unkept.add(name)

    def _places(self, facts: Facts) -> Iterator[tuple[_Top, tuple[Any, ...]]]:
        yield self._newest, facts.published
        if facts.score is not None:
            yield self._best, (facts.score, *(-part for part in facts.published))
        if self._every and facts.step % self._every == 0:
            yield self._steps[facts.step], facts.published[1:]


class _Top:
    """The `count` names with the largest keys, and the very first, also where `count` is 0."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._heap: list[tuple[tuple[Any, ...], str]] = []
        self._first: tuple[tuple[Any, ...], str] | None = None

    @property
    def first(self) -> str | None:
        return self._first[1] if self._first else None

    def add(self, key: tuple[Any, ...], name: str) -> str | None:
        """Take one in; returns which falls out, which may be the same."""
        entry = (key, name)
        self._first = max(self._first, entry) if self._first else entry
        if len(self._heap) < self._count:
            heapq.heappush(self._heap, entry)
            return None
        return heapq.heappushpop(self._heap, entry)[1]
