"""Where samples come from, and what is refused."""

import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from << cookiecutter.package_name >>.data import (
    Splits,
    check_samples,
    digits,
    hold_out,
    image_folder,
    npy,
    synthetic,
)
from << cookiecutter.package_name >>.errors import UserError


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Two classes of small pictures: dark cats in JPEG, bright dogs in PNG, of several shapes and modes."""
    for part in ("train", "val"):
        for name, shade, suffix, mode in (("cat [1]", 40, "jpg", "L"), ("dog", 220, "png", "RGBA")):
            folder = tmp_path / part / name
            folder.mkdir(parents=True)
            for index in range(3):
                Image.new(mode, (40 + 10 * index, 60), (shade,) * len(mode)).save(folder / f"{index}.{suffix}")
    (tmp_path / "train" / "cat [1]" / "notes.txt").write_text("not an image")
    return tmp_path


def open_images(root: Path, **options: object) -> Splits:
    return image_folder(str(root), **{"size": 16, "classes": 2, **options})  # type: ignore[arg-type]


def test_digits_are_real_and_split_without_overlap() -> None:
    splits = digits()
    assert (len(splits.train), len(splits.validation)) == (1438, 359)
    inputs, labels = splits.train.fetch(np.arange(1438), 0)
    assert inputs.shape == (1438, 8, 8, 1)
    assert (inputs.min(), inputs.max()) == (0, 1)
    assert set(labels) == set(range(10))


def test_hold_out_parts_are_disjoint_and_whole() -> None:
    train, validation = hold_out(100, 0.25, seed=1)
    assert sorted([*train, *validation]) == list(range(100))
    assert len(validation) == 25


@pytest.mark.parametrize("fraction", [0.0, 1.0, -1.0, 0.001])
def test_a_part_may_not_be_empty(fraction: float) -> None:
    with pytest.raises(UserError, match=f"validation_fraction={fraction}"):
        hold_out(10, fraction, seed=0)


def test_synthetic_is_the_same_for_every_rank() -> None:
    first, second = (synthetic([4, 4, 3], 10, samples=16).train.fetch(np.arange(16), 0) for _ in range(2))
    assert np.array_equal(first[0], second[0])
    assert first[0].dtype == np.float32


def test_npy_rows_come_in_the_order_asked_for(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(50, dtype=np.float32)[:, None] * [1, 10])
    np.save(tmp_path / "y.npy", np.arange(50, dtype=np.int32))
    train = npy(str(tmp_path / "x.npy"), str(tmp_path / "y.npy"), classes=50, validation_fraction=0.2).train
    inputs, labels = train.fetch(np.array([7, 2, 30]), 0)
    assert np.array_equal(inputs[:, 0], labels)
    assert list(labels) == [int(train.fetch(np.array([i]), 0)[1][0]) for i in (7, 2, 30)]
    assert len(pickle.dumps(train)) < 2000  # the worker processes get the name, not the array


def test_npy_of_different_lengths_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((5, 2)))
    np.save(tmp_path / "y.npy", np.zeros(4))
    with pytest.raises(UserError, match=r"x\.npy has 5 rows but .*y\.npy has 4"):
        npy(str(tmp_path / "x.npy"), str(tmp_path / "y.npy"), classes=1)


def test_npy_labels_beyond_the_classes_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((5, 2), np.float32))
    np.save(tmp_path / "y.npy", np.arange(5))
    with pytest.raises(UserError, match=r"labels from 0 to 4: data\.classes=4 allows 0 to 3"):
        npy(str(tmp_path / "x.npy"), str(tmp_path / "y.npy"), classes=4)


def test_npy_that_would_run_code_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(UserError, match=r"x\.npy cannot be read as a \.npy array"):
        npy(str(tmp_path / "x.npy"), str(tmp_path / "x.npy"), classes=1)
    with pytest.raises(UserError, match=r"none\.npy cannot be read"):
        npy(str(tmp_path / "none.npy"), str(tmp_path / "x.npy"), classes=1)


def test_images_are_decoded_with_their_class(images: Path) -> None:
    validation = open_images(images).validation
    inputs, labels = validation.fetch(np.arange(6), 0)
    assert inputs.shape == (6, 16, 16, 3)
    assert inputs.dtype == np.uint8
    assert list(labels) == [0, 0, 0, 1, 1, 1]
    assert abs(int(inputs[0].mean()) - 40) < 3
    assert abs(int(inputs[5].mean()) - 220) < 3


def test_augmentation_depends_on_epoch_and_index_alone(images: Path) -> None:
    stripes = np.arange(60, dtype=np.uint8)[:, None, None] * np.ones((1, 60, 3), np.uint8) * 4
    Image.fromarray(stripes).save(images / "train" / "cat [1]" / "0.jpg")
    train = open_images(images).train
    alone, together = train.fetch(np.array([0]), 1)[0], train.fetch(np.array([4, 0]), 1)[0]
    assert np.array_equal(alone[0], together[1])
    assert not np.array_equal(alone, train.fetch(np.array([0]), 2)[0])


def test_an_unreadable_image_is_named(images: Path, caplog: pytest.LogCaptureFixture) -> None:
    (images / "train" / "dog" / "1.png").write_bytes(b"not a picture")
    every = np.arange(6)
    with pytest.raises(UserError, match=r"dog/1\.png cannot be read.*data\.on_error=skip"):
        open_images(images).train.fetch(every, 0)
    inputs, labels = open_images(images, on_error="skip").train.fetch(every, 0)
    assert (len(inputs), list(labels)) == (5, [0, 0, 0, 1, 1])
    assert "dog/1.png" in caplog.text
    assert open_images(images, on_error="skip").train.fetch(np.array([4]), 0)[0].shape == (0, 16, 16, 3)


def test_image_folders_without_sense_are_refused(images: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has 2 class folders: data\.classes=3"):
        open_images(images, classes=3)
    with pytest.raises(UserError, match="does not exist"):
        open_images(tmp_path / "nowhere")
    for file in (images / "val").glob("*/*"):
        file.unlink()
    with pytest.raises(UserError, match=r"val has no \.jpg, \.jpeg or \.png"):
        open_images(images)


def test_samples_are_compared_with_the_config() -> None:
    train = digits().train
    check_samples(train, [8, 8, 1], 10, "training")
    with pytest.raises(UserError, match=r"shape \(8, 8, 1\) but data\.shape=\(8, 8\)"):
        check_samples(train, [8, 8], 10, "training")
    with pytest.raises(UserError, match="label"):
        check_samples(train, [8, 8, 1], 0, "training")
