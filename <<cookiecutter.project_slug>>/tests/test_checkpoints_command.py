"""The command: python -m <package>.checkpoints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import PACKAGE
from store_helpers import bomb, content, flip_byte, publish, steps

from << cookiecutter.package_name >>.checkpoints.command import main
from << cookiecutter.package_name >>.checkpoints.store import Store, Writer
from << cookiecutter.package_name >>.errors import UserError
from << cookiecutter.package_name >>.tables import print_table


@pytest.fixture
def run(tmp_path: Path) -> str:
    return str(tmp_path / "runs" / "first")


@pytest.fixture
def store(run: str) -> Store:
    """A run of three checkpoints; 10 is the best."""
    store = Store(Path(run) / "checkpoints", metric="val/accuracy")
    for step, accuracy in ((10, 0.9), (20, 0.8), (30, 0.7)):
        meta = {"epoch": step // 10, "metrics": {"val/accuracy": accuracy}, "git_commit": "a" * 40, "git_dirty": True}
        store.publish(step, content(), meta)
    return store


def printed(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    assert main([*arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(UserError) as refusal:
        main([*arguments])
    assert capsys.readouterr().out == ""
    return str(refusal.value)


def test_list(store: Store, run: str, capsys: pytest.CaptureFixture[str]) -> None:
    store.tag("production", store.find(20))
    (store.find(30).folder / "model.bin").unlink()
    assert main(["list", run]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[0] == ["step", "epoch", "val/accuracy", "size", "age", "tags", "state", "commit"]
    assert lines[2][:3] == ["10", "1", "0.9"]
    assert lines[2][-3:] == ["best", "good", "aaaaaaaa+"]
    assert "production" in lines[3]
    assert lines[4][-6:] == ["latest", "damaged:", "model.bin", "is", "missing", "aaaaaaaa+"]

    rows = printed(capsys, "list", run)
    assert [row["step"] for row in rows] == [10, 20, 30]
    assert rows[0]["metric"] == 0.9
    assert rows[1]["tags"] == ["production"]
    assert rows[2]["problems"] == ["model.bin is missing"]


def test_a_table_fits_the_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    table = ("name", "what it is"), [("first", "a b c d e f g h i"), ("second", "one line\nanother"), ("third", "")]
    print_table(*table)
    monkeypatch.setenv("COLUMNS", "19")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_table(*table, title="narrow")
    assert capsys.readouterr().out.splitlines() == [
        *("name    what it is", "------  -----------------", "first   a b c d e f g h i"),
        *("second  one line", "        another", "third", "narrow"),
        *("name    what it is", "------  -----------", "first   a b c d e f", "        g h i"),
        *("second  one line", "        another", "third"),
    ]


def test_list_sees_altered_bytes_when_asked(store: Store, run: str, capsys: pytest.CaptureFixture[str]) -> None:
    flip_byte(store.find(20).folder / "model.bin")
    assert [bool(row["problems"]) for row in printed(capsys, "list", run)] == [False, False, False]
    assert [bool(row["problems"]) for row in printed(capsys, "list", run, "--verify")] == [False, True, False]


def test_a_store_folder_will_do_and_an_empty_one_too(
    store: Store, run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert printed(capsys, "list", run) == printed(capsys, "list", str(store.folder))
    assert printed(capsys, "list", str(tmp_path)) == []
    assert main(["list", str(tmp_path)]) == 0


def test_show(store: Store, run: str, capsys: pytest.CaptureFixture[str]) -> None:
    about = printed(capsys, "show", run, "latest")
    assert about["ancestors"] == ["step-00000020", "step-00000010"]
    assert about["files"]["model.bin"] == 2000
    assert about["meta"]["epoch"] == 3
    assert about["tags"] == ["latest"]
    (store.find(20).folder / "MANIFEST.json").unlink()
    assert printed(capsys, "show", run, "20")["problems"] == ["MANIFEST.json is missing"]
    assert main(["show", run]) == 0
    assert "meta.metrics.val/accuracy" in capsys.readouterr().out


def test_verify(store: Store, run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "verify", run) == {f"step-000000{step}": [] for step in (10, 20, 30)}
    flip_byte(store.find(20).folder / "model.bin")
    assert len(printed(capsys, "verify", run, code=1)["step-00000020"]) == 1
    assert printed(capsys, "verify", run, "best", "30") == {"step-00000010": [], "step-00000030": []}
    assert main(["verify", run]) == 1
    assert "model.bin was altered" in capsys.readouterr().out


def test_tags(store: Store, run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "tag", run, "production", "best") == {"production": "step-00000010"}
    assert printed(capsys, "tag", run, "production", "20") == {"production": "step-00000020"}
    assert store.find("production").step == 20
    assert main(["untag", run, "production"]) == 0
    assert capsys.readouterr().out == "production: removed\n"
    assert "there is no tag 'production'" in refused(capsys, "untag", run, "production")
    assert "a tag cannot be called 'best'" in refused(capsys, "tag", run, "best", "20")
    flip_byte(store.find(30).folder / "model.bin")
    assert "is damaged (model.bin was altered" in refused(capsys, "tag", run, "production", "30")


def test_prune(store: Store, run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "prune", run, "--keep-last", "1", "--dry-run") == {"step-00000020": "would delete"}
    assert printed(capsys, "prune", run, "--keep-last", "1") == {"step-00000020": "deleted"}
    assert steps(store) == [10, 30]  # the best by the metric that was saved with them
    with store.lock():
        assert "is in use by" in refused(capsys, "prune", run, "--keep-last", "1")


def test_push_and_pull(store: Store, run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"file://{tmp_path}/mirror"
    assert printed(capsys, "push", run, url) == {"step-00000030": url}
    folder = tmp_path / "there" / "checkpoints"
    assert printed(capsys, "pull", url, str(folder.parent), "best") == {"step-00000010": str(folder / "step-00000010")}
    assert "no good checkpoint '99'" in refused(capsys, "pull", url, str(folder.parent), "99")
    assert "cannot be used: Protocol not known" in refused(capsys, "push", run, "nonsense://x")


@pytest.mark.parametrize("command", ["list", "show", "verify"])
def test_no_such_run(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no folder runs/nothing: give a run's" in refused(capsys, command, "runs/nothing")


def tensors(**values: Any) -> Writer:
    save_file = pytest.importorskip("safetensors.numpy").save_file

    def write(folder: Path) -> None:
        save_file({key: np.asarray(value, dtype=np.float32) for key, value in values.items()}, folder / "w.safetensors")
        (folder / "other.bin").write_bytes(str(values).encode())
        (folder / "config.yaml").write_text(f"model:\n  width: {len(values)}\nseed: 1\n")

    return write


def test_diff(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store(Path(run) / "checkpoints")
    publish(store, 10, 0.5, tensors(same=[1, 2], moved=[1, 2], shape=[1], gone=[1]))
    publish(store, 20, 0.6, tensors(same=[1, 2], moved=[1, 2.5], shape=[1, 2]))
    found = printed(capsys, "diff", run, "10", "20")
    assert found["config"] == {"model.width": [4, 3]}
    assert found["metrics"] == {"val/accuracy": [0.5, 0.6]}
    other = found["weights"].pop("other.bin")
    assert other[0] != other[1] and other[0].startswith("SHA-256 ")
    assert found["weights"] == {
        "w.safetensors:gone": ["[1]", None],
        "w.safetensors:moved": ["[2]", "differs by up to 0.5"],
        "w.safetensors:shape": ["[1]", "[2]"],
    }
    assert main(["diff", run, "10", "20"]) == 0
    assert "differs by up to 0.5" in capsys.readouterr().out
    assert printed(capsys, "diff", run, "10", "10") == {"config": {}, "metrics": {}, "weights": {}}


def test_diff_reads_no_damaged_or_malicious_file(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, canary = Store(Path(run) / "checkpoints"), tmp_path / "canary"
    for step in (10, 20):
        publish(store, step, write=tensors(a=[step]))
    (store.find(20).folder / "w.safetensors").write_bytes(bomb(canary))
    assert "is damaged" in refused(capsys, "diff", run, "10", "20")
    publish(store, 30, write=lambda folder: (folder / "w.safetensors").write_bytes(bomb(canary)))
    assert set(printed(capsys, "diff", run, "10", "30")["weights"]) >= {"w.safetensors", "other.bin"}
    assert not canary.exists()


def test_types_that_numpy_lacks(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    save_file = pytest.importorskip("safetensors.torch").save_file
    store = Store(Path(run) / "checkpoints")
    for step in (10, 20):
        value = {"a": torch.full((2,), float(step), dtype=torch.bfloat16)}
        publish(store, step, write=lambda folder, value=value: save_file(value, folder / "w.safetensors"))  # type: ignore[misc]
    weights = printed(capsys, "diff", run, "10", "20")["weights"]
    assert weights["w.safetensors:a"][1] in ("not compared: numpy has no such type", "differs by up to 10")


def test_it_loads_nothing_heavy(store: Store, run: str) -> None:
    code = (
        "import sys;"
        "from << cookiecutter.package_name >>.checkpoints.command import main; main(sys.argv[1:]);"
        "heavy = {'torch', 'tensorflow', 'hydra', 'omegaconf', 'fsspec', 'numpy', 'horovod'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code, "list", run], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    for command in ("list", "show", "verify", "diff", "tag", "untag", "prune", "push", "pull"):
        assert f"    {command} " in text
    assert f"python -m {PACKAGE}.checkpoints " in text
