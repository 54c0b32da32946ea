"""Into which groups gradients are put, so that the first can travel while the last are still computed."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

GROUP_BYTES = 25 * 2**20  # as torch's DDP: large enough for bandwidth, small enough to start early


def group_gradients(sizes: Sequence[int], kinds: Sequence[Hashable], groups: int | None) -> list[list[int]]:
    """Consecutive indices in groups of about equal bytes, each of one kind (type and device).

    Args:
        sizes: Bytes of each gradient, in the order in which they are computed.
        kinds: What must be the same within a group.
        groups: How many there are to be; None: one for each 25 MB.
    """
    total = sum(sizes)
    target = total / (groups or math.ceil(total / GROUP_BYTES) or 1)
    parts: list[list[int]] = []
    filled = 0.0
    for index, size in enumerate(sizes):
        if not parts or filled >= target or kinds[parts[-1][0]] != kinds[index]:
            parts.append([])
            filled = 0.0
        parts[-1].append(index)
        filled += size
    return parts
