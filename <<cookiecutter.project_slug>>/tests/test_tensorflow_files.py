"""Files of Keras and TensorFlow: models that go out and come in, records of images."""

import io
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from jobs import PACKAGE, compose_config
from PIL import Image
from safetensors.numpy import load_file

from << cookiecutter.package_name >>.assemble import open_data
from << cookiecutter.package_name >>.checkpoints.store import Store
from << cookiecutter.package_name >>.errors import UserError
from << cookiecutter.package_name >>.tensorflow.models import cnn, keras_file
from << cookiecutter.package_name >>.tensorflow.tfrecord import Records, tfrecords
from << cookiecutter.package_name >>.train import train


def test_a_keras_file_comes_in(tmp_path: Path) -> None:
    start = cnn([8, 8, 1], 10, width=4)
    start.save(tmp_path / "start.keras")
    target = f"{PACKAGE}.tensorflow.models.keras_file"
    options = [f"model._target_={target}", *("~model.shape", "~model.classes", "~model.hidden", "~model.dropout")]
    options += [f"+model.path={tmp_path}/start.keras", "epochs=1", "optimizer.lr=1e-12", "optimizer.weight_decay=0"]
    state = train(compose_config("engine=tensorflow", *options), tmp_path / "run")
    trained = Store(tmp_path / "run" / "checkpoints").find("latest").folder
    assert state.step > 0
    weights = load_file(trained / "model.safetensors")
    for variable in start.trainable_variables:  # steps so small change nothing: it is the file's model
        np.testing.assert_allclose(weights[variable.path], variable.numpy(), atol=1e-6)


def test_a_file_with_code_is_refused(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Lambda(lambda x: x * 2)])
    model.save(tmp_path / "code.keras")
    with pytest.raises(UserError, match="it holds Python code in a Lambda layer"):
        keras_file(str(tmp_path / "code.keras"))


@pytest.mark.parametrize("name", ["old.keras", "none.keras", "old.h5", "saved_model"])
def test_a_file_of_keras_2_is_refused(tmp_path: Path, name: str) -> None:
    """Keras 2 wrote HDF5 or SavedModel, whatever the file was called."""
    if name == "old.keras":
        cnn([8, 8, 1], 10, width=4).save(tmp_path / "old.h5")
        (tmp_path / "old.h5").rename(tmp_path / name)
    if name == "saved_model":
        cnn([8, 8, 1], 10, width=4).export(tmp_path / name, verbose=False)
    if name == "old.h5":
        (tmp_path / name).write_bytes(b"not HDF5 at all")
    with pytest.raises(UserError, match=r"it is no \.keras file of Keras 3; save it with model\.save"):
        keras_file(str(tmp_path / name))


def write_shard(file: Path, shades: list[int], first_label: int = 0) -> None:
    with tf.io.TFRecordWriter(str(file)) as writer:
        for label, shade in enumerate(shades):
            encoded = io.BytesIO()
            Image.new("RGB", (40, 30), (shade, shade, shade)).save(encoded, "PNG")
            features = {
                "image/encoded": tf.train.Feature(bytes_list=tf.train.BytesList(value=[encoded.getvalue()])),
                "image/class/label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label + first_label])),
            }
            writer.write(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    for name in ("train-0", "train-1", "val-0"):
        write_shard(tmp_path / name, [40, 120, 220])
    return tmp_path


def options(folder: Path) -> list[str]:
    sources = [f"data.source.train={folder}/train-*", f"data.source.validation={folder}/val-*"]
    return ["engine=tensorflow", "data=tensorflow_records", *sources, "data.shape=[16,16,3]", "data.classes=3"]


def test_records_come_in_any_order(shards: Path) -> None:
    splits = open_data(compose_config(*options(shards), "data.augment=false"))
    assert (len(splits.train), len(splits.validation)) == (6, 3)
    inputs, labels = splits.train.fetch(np.array([5, 0, 4]), 0)
    assert list(labels) == [2, 0, 1]
    assert [int(image.mean()) for image in inputs] == [220, 40, 120]


def test_training_on_records(shards: Path, tmp_path: Path) -> None:
    quick = [
        "epochs=1",
        "model=cnn",
        "model.width=4",
        "data.batch_size=2",
        "data.workers=2",
        "tracking.tensorboard=false",
    ]
    state = train(compose_config(*options(shards), *quick), tmp_path / "run")
    assert state.step == 3


def test_records_that_do_not_fit_are_refused(shards: Path, caplog: pytest.LogCaptureFixture) -> None:
    def source(**changes: object) -> Records:
        names = {"train": f"{shards}/train-*", "validation": f"{shards}/val-*", "size": 8, "classes": 3}
        part = tfrecords(**{**names, **changes}).train  # type: ignore[arg-type]
        assert isinstance(part, Records)
        return part

    every = np.arange(6)
    with pytest.raises(UserError, match=r"no TFRecord file matches .*nothing-\*"):
        source(train=f"{shards}/nothing-*")
    with pytest.raises(UserError, match=r"record .*train-0:\d+ is damaged, or has no pixels or image/class/label"):
        source(image="pixels").fetch(every, 0)
    with pytest.raises(UserError, match=r"has label 0: with data\.source\.first_label=1 .* must be under 4"):
        source(first_label=1).fetch(every, 0)
    content = (shards / "train-0").read_bytes()
    (shards / "train-0").write_bytes(content[:-1])
    with pytest.raises(UserError, match=r"train-0 ends within a record at byte \d+"):
        source()
    (shards / "train-0").write_bytes(content.replace(b"IHDR", b"IHDX", 1))
    with pytest.raises(UserError, match=r"record .*train-0:\d+ cannot be read"):
        source().fetch(every, 0)
    assert len(source(on_error="skip").fetch(every, 0)[1]) == 5
    assert "skipped" in caplog.text
