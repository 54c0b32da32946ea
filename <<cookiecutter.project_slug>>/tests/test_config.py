"""Every choice of the config composes and builds; what is wrong in it ends in one sentence."""

import subprocess
import sys
from pathlib import Path

import pytest
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from jobs import CONF, PACKAGE, ROOT, choices, compose_config, current_engine, environment
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError

from << cookiecutter.package_name >>.assemble import open_schedule
from << cookiecutter.package_name >>.errors import UserError, user_sentence
from << cookiecutter.package_name >>.options import RULES, check_options, read_options
from << cookiecutter.package_name >>.schedule import Schedule
from << cookiecutter.package_name >>.train import train
from << cookiecutter.package_name >>.train_state import TrainState

pytestmark = pytest.mark.usefixtures("engine")


@pytest.mark.parametrize("choice", ("constant", "step", "cosine", "polynomial"))
def test_every_schedule_warms_up_to_the_scaled_rate(choice: str) -> None:
    config = compose_config(f"schedule.decay={choice}")
    state = TrainState(samples=1000, global_batch=4 * config.data.batch_size, world_size=2)
    schedule = open_schedule(config, state)
    assert isinstance(schedule, Schedule)
    assert schedule(0) == config.optimizer.lr
    assert schedule(config.schedule.warmup_epochs) == pytest.approx(4 * config.optimizer.lr)


@pytest.mark.parametrize("choice", choices("experiment"))
def test_every_recipe_changes_what_it_says(choice: str) -> None:
    recipe = OmegaConf.load(CONF / "experiment" / f"{choice}.yaml")
    wanted = {key: value for key, value in recipe.items() if key != "defaults"}
    composed = compose_config(f"experiment={choice}")
    assert wanted
    assert OmegaConf.merge(composed, wanted) == composed


def test_two_recipes_go_together() -> None:
    composed = compose_config("experiment=[digits_cnn,quick]")
    assert (composed.epochs, composed.tracking.log_every, composed.model.width) == (2, 1, 32)


@pytest.mark.parametrize("option", RULES)
def test_every_rule_is_of_an_option_that_exists_and_passes(option: str) -> None:
    if option in ("compile", "channels_last", "horovod.powersgd_rank") and current_engine() != "torch":
        return  # options of that engine alone
    extra = {"data.on_error": ["data=image_folder", "data.classes=2", "data.root=."]}
    config = compose_config(*extra.get(option, []))
    parent, _, key = option.rpartition(".")
    assert key in (OmegaConf.select(config, parent) if parent else config)
    check_options(config)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("precision=fp8", "precision=fp8 must be one of fp32, bf16, fp16"),
        ("epochs=0", "epochs=0 must be a whole number of at least 1"),
        ("epochs=2.5", "epochs=2.5 must be a whole number of at least 1"),
        ("epochs=null", "epochs=null must be a whole number of at least 1"),
        ("epochs=true", "epochs=True must be a whole number of at least 1"),
        ("optimizer.lr=fast", "optimizer.lr=fast must be a number of at least 1e-12"),
        ("label_smoothing=2", "label_smoothing=2 must be a number from 0 to 1"),
        ("sync_batch_norm=maybe", "sync_batch_norm=maybe must be one of true, false"),
        ("data.batch_size=-4", "data.batch_size=-4 must be a whole number of at least 1"),
        ("data.global_batch=0", "data.global_batch=0 must be a whole number of at least 1, or null"),
        ("schedule=step", "schedule=step is no choice: set a single option, as in schedule.decay=..."),
        ("checkpoint=null", "checkpoint=None is no choice: set a single option, as in checkpoint.every_epochs=..."),
    ],
)
def test_a_value_outside_its_rule_is_refused(override: str, sentence: str) -> None:
    with pytest.raises(UserError) as error:
        check_options(compose_config(override))
    assert str(error.value) == sentence


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["data.shape=[64]"], "training inputs have shape (8, 8, 1) but data.shape=(64,): make them equal"),
        (["schedule.warmup_epochs=50"], "schedule.warmup_epochs=50 must lie between 0 and epochs=20"),
        (["data=npy", "data.shape=[1]", "data.classes=2"], "option 'data.source.inputs' has no value"),
        (["model.hidden=wide"], "Error in call to target"),
        (["resume=null"], "there is no checkpoint 'None'"),
    ],
)
def test_options_that_do_not_fit_are_refused(overrides: list[str], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        train(compose_config(*overrides), tmp_path)
    assert str(error.value).startswith(sentence)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("optimizer.lrr=1", "unknown option 'optimizer.lrr': did you mean optimizer.lr?; --cfg job lists all"),
        ("epoch=1", "unknown option 'epoch': did you mean epochs?; --cfg job lists all"),
        ("model=mlpp", "model=mlpp is no choice: it must be one of cnn, mlp, resnet18, resnet50"),
        ("epochs=zero", "epochs=zero must be a whole number of at least 1"),
    ],
)
def test_the_command_ends_in_one_sentence(override: str, sentence: str, tmp_path: Path) -> None:
    options = [f"engine={current_engine()}", f"hydra.run.dir={tmp_path}/run", override]
    command = [sys.executable, "-m", f"{PACKAGE}.train", *options]
    result = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (2, f"error: {sentence}\n")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("data.batch_sze=3", "unknown option 'data.batch_sze': did you mean data.batch_size?"),
        ("epoch=3", "unknown option 'epoch': did you mean epochs?"),
    ],
)
def test_an_unknown_change_of_a_runs_config_is_named(change: str, sentence: str, tmp_path: Path) -> None:
    OmegaConf.save(compose_config(), tmp_path / "config.yaml", resolve=True)  # as train does
    with pytest.raises(ConfigAttributeError) as error:
        read_options(tmp_path / "config.yaml", [change])
    assert user_sentence(error.value) == sentence


def test_a_target_that_is_not_there() -> None:
    with pytest.raises(InstantiationException) as error:
        instantiate({"_target_": "nowhere.Model"})
    sentence = "_target_=nowhere.Model cannot be imported: correct its name, or put its package where Python finds it"
    assert user_sentence(error.value) == sentence
