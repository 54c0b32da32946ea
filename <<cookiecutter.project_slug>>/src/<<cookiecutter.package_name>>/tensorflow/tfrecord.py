"""TFRecord shards of images as a data set whose samples can be fetched in any order."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from glob import glob
from pathlib import Path

import numpy as np
import tensorflow as tf
from google.protobuf.message import DecodeError

from ..data import Array, Images, Splits
from ..errors import UserError

HEADER = struct.Struct("<QI")  # length and its checksum; the data and another checksum follow
CHECKSUM_BYTES = 4


@dataclass(frozen=True)
class Records(Images):
    """Encoded images and labels in tf.train.Example records; each is found by its place in the shards."""

    files: tuple[str, ...]
    places: Array  # (n, 3): file, offset, bytes
    image: str
    label: str
    first_label: int
    classes: int

    def __len__(self) -> int:
        """The number of records."""
        return len(self.places)

    def read(self, index: int) -> tuple[io.BytesIO, int]:
        """The encoded image and its label."""
        number, offset, size = map(int, self.places[index])
        with open(self.files[number], "rb") as file:
            file.seek(offset)
            content = file.read(size)
        try:
            features = tf.train.Example.FromString(content).features.feature
            encoded, label = features[self.image].bytes_list.value[0], features[self.label].int64_list.value[0]
        except (IndexError, DecodeError) as error:
            raise UserError(
                f"{self.where(index)} is damaged, or has no {self.image} or {self.label} ({error}): name its features"
            ) from error
        if not 0 <= label - self.first_label < self.classes:
            raise UserError(
                f"{self.where(index)} has label {label}: with data.source.first_label={self.first_label} and"
                f" data.classes={self.classes} it must be under {self.first_label + self.classes}"
            )
        return io.BytesIO(encoded), label - self.first_label

    def where(self, index: int) -> str:
        """The record's file and offset."""
        number, offset, _ = map(int, self.places[index])
        return f"record {self.files[number]}:{offset}"


def tfrecords(
    train: str,
    validation: str,
    size: int,
    classes: int,
    image: str = "image/encoded",
    label: str = "image/class/label",
    first_label: int = 0,
    augment: bool = True,
    seed: int = 0,
    on_error: str = "fail",
) -> Splits:
    """Shards that two patterns name, such as /data/train-*; decoded and augmented as image folders are.

    Args:
        train: Pattern of the training shards.
        validation: Pattern of the validation shards.
        size: Height and width of the images given to the model, in pixels.
        classes: Number of classes.
        image: The feature that holds the encoded image (JPEG or PNG).
        label: The feature that holds the label.
        first_label: What the files call the first class: 1 in the usual ImageNet shards.
        augment: Crop and mirror the training images at random.
        seed: Seed of the augmentation.
        on_error: What to do with an unreadable image: fail, or skip it with a warning.
    """

    def part(pattern: str, augmented: bool) -> Records:
        files = tuple(sorted(glob(pattern)))
        if not files:
            raise UserError(f"no TFRecord file matches {pattern}: name existing shards, such as /data/train-*")
        places = np.array([(n, *place) for n, file in enumerate(files) for place in _places(Path(file))], np.int64)
        return Records(size, augmented, seed, on_error, files, places, image, label, first_label, classes)

    return Splits(part(train, augment), part(validation, False))


def _places(file: Path) -> Iterator[tuple[int, int]]:
    """Offset and length of each record; reads the headers only."""
    end, at = file.stat().st_size, 0
    with file.open("rb") as shard:
        while at < end:
            shard.seek(at)
            header = shard.read(HEADER.size)
            size = HEADER.unpack(header)[0] if len(header) == HEADER.size else end
            if at + HEADER.size + size + CHECKSUM_BYTES > end:
                raise UserError(f"{file} ends within a record at byte {at}: it was cut, or is no TFRecord file")
            yield at + HEADER.size, size
            at += HEADER.size + size + CHECKSUM_BYTES
