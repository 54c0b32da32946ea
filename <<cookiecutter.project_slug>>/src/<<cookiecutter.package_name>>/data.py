"""Data sets: where samples come from. No framework in it; each wing turns what is fetched into tensors.

A data set gives inputs of shape (n, *shape), channels last, as float32 or as uint8 (0 to 255, made float on the
device), and integer labels of shape (n,).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

from .errors import UserError
from .sampler import Indices

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]
Samples = tuple[Array, Array]
IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png"}


class Dataset(Protocol):
    """Samples that can be fetched by index, in any order, from any process."""

    def __len__(self) -> int:
        """The number of samples."""

    def fetch(self, indices: Indices, epoch: int) -> Samples:
        """Inputs and labels of the samples; `epoch` seeds the augmentation."""


@dataclass(frozen=True)
class Splits:
    """The two parts that every data source provides."""

    train: Dataset
    validation: Dataset


@dataclass(frozen=True)
class ArrayDataset:
    """Samples held in memory."""

    inputs: Array
    labels: Array

    def __len__(self) -> int:
        """The number of samples."""
        return len(self.labels)

    def fetch(self, indices: Indices, epoch: int) -> Samples:
        """The rows at `indices`."""
        return self.inputs[indices], self.labels[indices]


def normalizer(
    settings: Any, uint8: Any, to_float: Callable[[Any], Any], constant: Callable[[Array], Any] = lambda array: array
) -> Callable[[Any], Any]:
    """Turns what a data set gives into what a model takes: uint8 from 0 to 1, then (x - mean) / std per channel.

    Args:
        settings: data.normalize: mean and std, or None.
        uint8: That type in the framework of the inputs, which are (n, *shape), channels last.
        to_float: Makes them float32.
        constant: Makes a float32 array what the framework calculates with.
    """
    mean, std = (constant(np.array(list(settings[key]), np.float32)) if settings else None for key in ("mean", "std"))

    def normalize(inputs: Any) -> Any:
        floats = to_float(inputs) / 255 if inputs.dtype == uint8 else to_float(inputs)
        return (floats - mean) / std if settings else floats

    return normalize


def normalized(inputs: Array, settings: Any) -> npt.NDArray[np.float32]:
    """The same for arrays."""
    floats: npt.NDArray[np.float32] = normalizer(settings, np.uint8, lambda array: array.astype(np.float32))(inputs)
    return floats


def hold_out(samples: int, fraction: float, seed: int) -> tuple[Indices, Indices]:
    """Training and validation indices: a random `fraction` is held out, the same on every rank."""
    if not 0 < fraction < 1:
        raise UserError(f"validation_fraction={fraction} must lie between 0 and 1, as in 0.1")
    order = np.random.default_rng(seed).permutation(samples)
    held = round(samples * fraction)
    if not 0 < held < samples:
        raise UserError(f"validation_fraction={fraction} of {samples} samples leaves a part empty: change it")
    return np.sort(order[held:]), np.sort(order[:held])


def digits(validation_fraction: float = 0.2, seed: int = 0) -> Splits:
    """1,797 handwritten digits of 8 x 8 pixels, in a file of this package (shape 8, 8, 1; 10 classes).

    They are the test part of "Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak, UCI Machine
    Learning Repository, 1998 (doi:10.24432/C50P49, CC BY 4.0), as scikit-learn ships it.
    """
    rows = np.loadtxt(Path(__file__).with_name("digits.csv.gz"), np.float32, delimiter=",")
    inputs, labels = rows[:, :64].reshape(-1, 8, 8, 1) / 16, rows[:, 64].astype(np.int64)
    train, validation = hold_out(len(labels), validation_fraction, seed)
    return Splits(ArrayDataset(inputs[train], labels[train]), ArrayDataset(inputs[validation], labels[validation]))


def synthetic(shape: Sequence[int], classes: int, samples: int = 4096, seed: int = 0) -> Splits:
    """Random inputs and labels, to measure speed without any reading; validation is one eighth of `samples`."""
    rng = np.random.default_rng(seed)
    inputs = rng.standard_normal((samples, *shape), dtype=np.float32)
    labels = rng.integers(0, classes, samples)
    held = max(1, samples // 8)
    return Splits(ArrayDataset(inputs, labels), ArrayDataset(inputs[:held], labels[:held]))


@dataclass(frozen=True)
class NpyDataset:
    """Rows of a pair of .npy files, memory-mapped: each process reads only the rows that it is asked for."""

    inputs: Path
    labels: Path
    rows: Indices

    def __len__(self) -> int:
        """The number of samples."""
        return len(self.rows)

    def fetch(self, indices: Indices, epoch: int) -> Samples:
        """The rows at `indices`, read from the files."""
        # Sorted rows are read in the order of the file; opening a map costs microseconds and keeps pickling cheap.
        order = np.argsort(indices)
        back = np.argsort(order)
        rows = self.rows[indices[order]]
        return _map(self.inputs)[rows][back], _map(self.labels)[rows][back].astype(np.int64)


def npy(inputs: str, labels: str, classes: int, validation_fraction: float = 0.1, seed: int = 0) -> Splits:
    """A pair of .npy files of equal length: inputs (n, *shape), uint8 or float32, and labels (n,) under `classes`."""
    files = Path(inputs), Path(labels)
    lengths = tuple(len(_map(file)) for file in files)
    if lengths[0] != lengths[1]:
        raise UserError(
            f"{inputs} has {lengths[0]} rows but {labels} has {lengths[1]}: each input needs exactly one label"
        )
    low, high = int(_map(files[1]).min(initial=0)), int(_map(files[1]).max(initial=0))
    if low < 0 or high >= classes:
        raise UserError(f"{labels} has labels from {low} to {high}: data.classes={classes} allows 0 to {classes - 1}")
    train, validation = hold_out(lengths[0], validation_fraction, seed)
    return Splits(NpyDataset(*files, train), NpyDataset(*files, validation))


def _map(file: Path) -> Array:
    try:
        if not file.is_file():
            raise FileNotFoundError("no regular file")  # a pipe would be waited for
        array: Array = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as a .npy array ({error}): write it with numpy.save") from error
    return array


@dataclass(frozen=True)
class Images:
    """Encoded images as uint8 RGB of `size` x `size` pixels; a subclass says where each one is.

    Training images are cropped at random (Szegedy et al. 2015, arXiv:1409.4842: 8 to 100 % of the area) and
    mirrored by half; what falls to an image depends on (seed, epoch, index) alone. Validation images are resized
    by their shorter side and cut from the centre. An image that is skipped counts as one whose gradient is zero.
    """

    size: int
    augment: bool
    seed: int
    on_error: str

    def read(self, index: int) -> tuple[str | BinaryIO, int]:
        """A file with the encoded image, and its label."""
        raise NotImplementedError

    def where(self, index: int) -> str:
        """What to call the image in a message."""
        raise NotImplementedError

    def fetch(self, indices: Indices, epoch: int) -> Samples:
        """Decode the images at `indices`; with on_error=skip the unreadable ones are missing from the result."""
        decoded = [sample for sample in (self._sample(int(index), epoch) for index in indices) if sample is not None]
        if not decoded:
            return np.empty((0, self.size, self.size, 3), np.uint8), np.empty(0, np.int64)
        images, labels = zip(*decoded, strict=True)
        return np.stack(images), np.array(labels, np.int64)

    def _sample(self, index: int, epoch: int) -> tuple[Array, int] | None:
        from PIL import Image

        try:
            file, label = self.read(index)
            with Image.open(file) as image:
                image.draft("RGB", (2 * self.size, 2 * self.size))  # lets the JPEG decoder skip detail
                return self._crop(image.convert("RGB"), np.random.default_rng((self.seed, epoch, index))), label
        except (OSError, SyntaxError, ValueError) as error:
            sentence = f"{self.where(index)} cannot be read ({error})"
            if self.on_error == "skip":
                log.warning(f"{sentence}: skipped")
                return None
            raise UserError(f"{sentence}: mend or remove it, or set data.on_error=skip") from error

    def _crop(self, image: Any, rng: np.random.Generator) -> Array:
        box = _random_box(image.size, rng) if self.augment else _centre_box(image.size)
        pixels = np.asarray(image.resize((self.size, self.size), resample=2, box=box))
        return pixels[:, ::-1] if self.augment and rng.random() < 0.5 else pixels


@dataclass(frozen=True)
class ImageFolder(Images):
    """JPEG and PNG files, one folder per class."""

    files: tuple[str, ...]
    labels: Array

    def __len__(self) -> int:
        """The number of files."""
        return len(self.files)

    def read(self, index: int) -> tuple[str | BinaryIO, int]:
        """The file's name and its label."""
        return self.files[index], int(self.labels[index])

    def where(self, index: int) -> str:
        """The file's name."""
        return f"image {self.files[index]}"


def _random_box(size: tuple[int, int], rng: np.random.Generator) -> tuple[float, float, float, float]:
    width, height = size
    area = width * height * rng.uniform(0.08, 1.0)
    ratio = np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3)))
    crop_width, crop_height = min(width, np.sqrt(area * ratio)), min(height, np.sqrt(area / ratio))
    left, top = rng.uniform(0, width - crop_width), rng.uniform(0, height - crop_height)
    return left, top, left + crop_width, top + crop_height


def _centre_box(size: tuple[int, int]) -> tuple[float, float, float, float]:
    width, height = size
    side = min(width, height) * 0.875  # 224 of 256, as in the usual ImageNet evaluation
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def image_folder(
    root: str,
    size: int,
    classes: int,
    train: str = "train",
    validation: str = "val",
    augment: bool = True,
    seed: int = 0,
    on_error: str = "fail",
) -> Splits:
    """`root`/train/<class>/*.jpg and `root`/val/<class>/*.jpg (or .jpeg, .png), decoded when fetched.

    Args:
        root: The folder that holds the two parts.
        size: Height and width of the images given to the model, in pixels.
        classes: How many class folders there must be.
        train: Name of the training part.
        validation: Name of the validation part, with the same class folders.
        augment: Crop and mirror the training images at random.
        seed: Seed of the augmentation.
        on_error: What to do with an unreadable image: fail, or skip it with a warning.
    """
    names = _class_names(Path(root, train))
    if len(names) != classes:
        raise UserError(f"{Path(root, train)} has {len(names)} class folders: data.classes={classes} must be equal")
    parts = [_list_images(Path(root, part), names) for part in (train, validation)]
    return Splits(
        ImageFolder(size, augment, seed, on_error, *parts[0]), ImageFolder(size, False, seed, on_error, *parts[1])
    )


def _class_names(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise UserError(f"image folder {folder} does not exist: it must hold one folder per class")
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir())


def _list_images(folder: Path, names: list[str]) -> tuple[tuple[str, ...], Array]:
    files, labels = [], []
    for label, name in enumerate(names):
        inside = (folder / name).iterdir() if (folder / name).is_dir() else ()
        found = sorted(str(file) for file in inside if file.suffix.lower() in IMAGE_SUFFIXES)
        files += found
        labels += [label] * len(found)
    if not files:
        raise UserError(f"image folder {folder} has no .jpg, .jpeg or .png files in folders named by class")
    return tuple(files), np.array(labels, dtype=np.int64)


def check_samples(dataset: Dataset, shape: Sequence[int], classes: int, name: str) -> None:
    """Fetch one sample and compare it with the config, so that a mistake shows before training starts.

    Raises:
        UserError: if the data set is empty, or its shape, type or label does not fit data.shape and data.classes.
    """
    if len(dataset) == 0:
        raise UserError(f"the {name} data has no samples: it needs at least one")
    inputs, labels = dataset.fetch(np.arange(1), 0)
    if inputs.shape[1:] != tuple(shape):
        raise UserError(f"{name} inputs have shape {inputs.shape[1:]} but data.shape={tuple(shape)}: make them equal")
    if inputs.dtype not in (np.float32, np.uint8):
        raise UserError(f"{name} inputs are {inputs.dtype}: they must be float32, or uint8 from 0 to 255")
    if len(labels) and not 0 <= labels[0] < classes:
        raise UserError(f"a {name} label is {labels[0]}: it must be from 0 to {classes - 1} (data.classes={classes})")
