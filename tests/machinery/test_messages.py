"""What ranks say to each other: it arrives to the bit, and nothing that arrives can be more than data."""

import io
import math
import pickle
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from my_training.messages import decode, encode
from my_training.seeds import host_state

DTYPES = ["?", "u1", "i2", ">i4", "i8", "u8", "f2", "f4", "f8", "c8"]


def same(one: Any, other: Any) -> bool:
    """Equal to the bit, and of the same types at every depth."""
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, np.ndarray):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
    return bool(one == other)


def draw(dice: random.Random, depth: int = 4) -> Any:
    """Any value that may travel."""
    plain: list[Callable[[], Any]] = [
        lambda: dice.choice([None, True, False, 0, -0.0, 5e-324, math.inf, -math.inf, 0.1 + 0.2, "", b""]),
        lambda: dice.getrandbits(dice.choice([8, 53, 64, 700])) * dice.choice([1, -1]),
        lambda: struct.unpack("d", struct.pack("Q", dice.getrandbits(62)))[0],
        lambda: "".join(chr(dice.choice([0, 34, 92, 233, 0x1F600, 0xDCFF])) for _ in range(dice.randrange(4))),
        lambda: dice.randbytes(dice.randrange(40)),
        lambda: Path(dice.choice(["/a b", "c/\udcff", "."])),
        lambda: np.frombuffer(dice.randbytes(48), dice.choice(DTYPES[1:])).reshape(dice.choice([(1, -1), (-1,)])),
        lambda: np.array(dice.random() > 0.5),
    ]
    if not depth or dice.random() < 0.3:
        return dice.choice(plain)()
    items = [draw(dice, depth - 1) for _ in range(dice.randrange(4))]
    names = ["", "tuple", "dict", "array", "arr_0"]
    return dice.choice([items, tuple(items), dict(zip(dice.sample(names, len(items)), items, strict=True))])


def test_every_value_arrives_to_the_bit() -> None:
    dice = random.Random(0)
    for value in [host_state(), np.zeros((0, 3)), *(draw(dice) for _ in range(500))]:
        assert same(decode(encode(value)), value), value
    assert math.isnan(decode(encode(math.nan)))
    received = decode(encode(np.asfortranarray(np.arange(6).reshape(2, 3))))
    received += 1  # an array of its own
    assert received.tolist() == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize("value", [{1: 2}, {1}, object(), np.array([object()]), np.float32(1), ValueError("x"), print])
def test_what_is_no_data_does_not_travel(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot travel between ranks"):
        encode([value])


class Harmful:
    """Writes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def zipped(name: str, content: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(name, content)
    return file.getvalue()


def saved(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def head(text: str) -> Any:
    return np.frombuffer(text.encode(), np.uint8)


def test_nothing_that_arrives_runs(tmp_path: Path) -> None:
    harmful = pickle.dumps(Harmful(tmp_path / "ran"))
    good = encode({"a": [1.5, np.arange(9)]}).tobytes()
    messages = [
        b"",
        b"\0",
        b"{}",
        harmful,
        zipped("arr_0.npy", harmful),
        zipped("arr_0", harmful),
        saved(arr_0=np.array([Harmful(tmp_path / "ran")])),
        saved(arr_0=head('{"array": "arr_1"}'), arr_1=np.array([Harmful(tmp_path / "ran")])),
        *(saved(arr_0=head(text)) for text in ("", "{", "{}", '{"eval": "1"}', '{"array": "arr_7"}', '{"path": 1}')),
        saved(arr_0=head('{"tuple": [], "dict": {}}')),
        saved(arr_0=head("[" * 100_000)),
        *(good[:size] for size in range(0, len(good), 7)),
    ]
    for message in messages:
        with pytest.raises(ValueError, match=r"Error|^Bad"):
            decode(np.frombuffer(message, np.uint8))
    assert not (tmp_path / "ran").exists()
