"""Compressed gradients: what they go with, and compressors of one's own; ranks/test_torch_training.py trains."""

from typing import Any

import pytest
from jobs import RANKS, compose_config

from << cookiecutter.package_name >>.engine import open_engine
from << cookiecutter.package_name >>.errors import UserError
from << cookiecutter.package_name >>.options import check_options
from << cookiecutter.package_name >>.ranks import open_communicator

POWERSGD = ("horovod.compression=powersgd", "horovod.powersgd_rank=2")


def test_adasum_cannot_be_of_such_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESTED_ENGINE", "torch")
    with pytest.raises(UserError, match=r"powersgd adds gradients up: use it with horovod\.op=average"):
        open_engine(compose_config(*POWERSGD, "horovod.op=adasum"), open_communicator("torch"))


def test_a_resume_with_another_compression_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that the config names counts, not the checkpoint's; what one compression kept is not for another."""
    monkeypatch.setenv("TESTED_ENGINE", "torch")
    monkeypatch.syspath_prepend(str(RANKS))
    communicator = open_communicator("torch")
    halves = "horovod.compression={_target_:torch_halves.Halves}"
    ways = (POWERSGD, (POWERSGD[0], "horovod.powersgd_rank=3"), (halves,))
    engines: list[Any] = [open_engine(compose_config(*way), communicator) for way in ways]
    reducers = [engine.reducer for engine in engines]
    for reducer in reducers:
        for other in reducers:
            before = str(reducer.compressor.state())
            reducer.load_state(other.state())
            assert str(reducer.compressor.state()) == before


def test_a_compressor_of_ones_own_is_named_in_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESTED_ENGINE", "torch")
    monkeypatch.syspath_prepend(str(RANKS))
    config = compose_config("horovod.compression={_target_:torch_halves.Halves}")
    check_options(config)
    engine: Any = open_engine(config, open_communicator("torch"))
    assert type(engine.reducer.compressor).__name__ == "Halves"
    engine.reducer.load_state(engine.reducer.state())
    own = engine.reducer.compressor
    for value, finite in ((1.0, True), (1e9, False), (1.0, True)):  # too large for fp16 once, and then no more
        for gradient in (parameter.grad.fill_(value) for parameter in engine.model.parameters()):
            assert gradient.isfinite().all()
        own.reduce()
        assert all(bool(parameter.grad.isfinite().all()) is finite for parameter in engine.model.parameters())
    with pytest.raises(
        UserError, match=r"horovod.compression=half must be one of none, fp16, powersgd, or {_target_: a"
    ):
        check_options(compose_config("horovod.compression=half"))
    with pytest.raises(Exception, match=r"torch_halves\.None"):
        open_engine(compose_config("horovod.compression={_target_:torch_halves.None}"), open_communicator("torch"))
