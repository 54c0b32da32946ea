"""What only the PyTorch engine does: fewer channels, low rank, distillation with features."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
import torch
from compress_helpers import alone, compress_config, make_source, report_of, run_compress
from engine_helpers import make, train
from jobs import PACKAGE
from omegaconf import OmegaConf
from torch import nn

from << cookiecutter.package_name >>.checkpoints.store import Store
from << cookiecutter.package_name >>.compress.command import compress
from << cookiecutter.package_name >>.compress.torch import measure
from << cookiecutter.package_name >>.compress.torch.distillation import TorchDistillation
from << cookiecutter.package_name >>.compress.torch.fake_quantize import STEPS
from << cookiecutter.package_name >>.compress.torch.shrink import fewer_channels, low_rank, shrunk
from << cookiecutter.package_name >>.engine import rank_files
from << cookiecutter.package_name >>.errors import UserError
from << cookiecutter.package_name >>.evaluate import evaluate_run
from << cookiecutter.package_name >>.export.torch import load_model
from << cookiecutter.package_name >>.ranks import Communicator, open_communicator
from << cookiecutter.package_name >>.torch.models import resnet18

CHANNELS = OmegaConf.create({"sparsity": 0.5, "scope": "layer", "layers": ["*"], "skip": []})
RANK = OmegaConf.create({"rank": None, "energy": 0.8, "layers": ["*"], "skip": []})


@pytest.fixture(scope="module")
def communicator() -> Communicator:
    return open_communicator("torch")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TESTED_ENGINE", "torch")
        yield make_source(tmp_path_factory.mktemp("torch") / "source")


@pytest.mark.parametrize("method", ["channels", "low_rank"])
def test_a_smaller_residual_network_is_built_again(method: str) -> None:
    """The description alone, plain values, gives the architecture whose weights fit."""
    inputs = torch.rand(2, 3, 32, 32)
    base = resnet18((32, 32, 3), 10)
    model, changes, _ = fewer_channels(base, CHANNELS, inputs, 10) if method == "channels" else low_rank(base, RANK)
    other = shrunk(resnet18((32, 32, 3), 10), changes)
    other.load_state_dict(model.state_dict())
    assert torch.equal(model.eval()(inputs), other.eval()(inputs))
    assert other(inputs).shape == (2, 10)
    sizes = [sum(p.numel() for p in one.parameters()) for one in (resnet18((32, 32, 3), 10), other)]
    assert sizes[1] < 0.9 * sizes[0]


@pytest.mark.parametrize(
    ("layers", "sentence"),
    [
        (
            [nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16), nn.Conv2d(16, 8, 3), nn.Flatten(), nn.LazyLinear(10)],
            "1, a GroupNorm",
        ),
        (
            [nn.Conv2d(3, 16, 3), nn.Conv2d(16, 10, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()],
            "cuts what this model answers",
        ),
    ],
)
def test_channels_that_cannot_go_are_refused(layers: list[nn.Module], sentence: str) -> None:
    model, inputs = nn.Sequential(*layers), torch.rand(2, 3, 8, 8)
    model(inputs)
    with pytest.raises(UserError, match=sentence):
        fewer_channels(model, CHANNELS, inputs, 10)


class Fixed(nn.Module):
    """Says its layers in another order than it calls them, and knows their widths by heart."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.answer, self.middle, self.first = nn.Linear(10, 10), nn.Linear(8 * 36, 10), nn.Conv2d(3, 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        x = x.flatten(1) if self.width == 0 else x.reshape(len(x), self.width)
        return self.answer(self.middle(x).relu())  # type: ignore[no-any-return]


def test_what_answers_stays_whatever_it_is_called() -> None:
    inputs = torch.rand(2, 3, 8, 8)
    chosen, changes, _ = fewer_channels(Fixed(0), CHANNELS, inputs, 10)
    assert chosen(inputs).shape == (2, 10)
    assert {*changes[0]["layers"]} == {"first", "middle", "answer"}
    with pytest.raises(UserError, match=r"compress=channels breaks this model \(.*\): use compress=low_rank or prune"):
        fewer_channels(Fixed(8 * 36), CHANNELS, inputs, 10)


def test_multiplications_are_counted_in_attention_too(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    monkeypatch.setattr(measure, "load_model", lambda folder, trusted: layer)
    tokens = 10
    dense, attention = tokens * (4 * 32 * 32 + 2 * 32 * 64), 2 * tokens * tokens * 32
    assert measure.count(Path(), (tokens, 32), ())["macs"] == dense + attention


@torch.no_grad()
def test_a_layer_of_low_rank_is_factored_without_loss() -> None:
    layer = nn.Conv2d(8, 32, 3, stride=2, padding=1)
    layer.weight.copy_((torch.rand(32, 4) @ torch.rand(4, 72)).reshape(layer.weight.shape))
    model, inputs = nn.Sequential(layer), torch.rand(2, 8, 6, 6)
    wanted = model(inputs)
    with pytest.raises(UserError, match="no layer gets smaller by compress=low_rank"):
        low_rank(model, OmegaConf.merge(RANK, {"rank": 32}))
    factored, changes, _ = low_rank(model, OmegaConf.merge(RANK, {"energy": 0.999999}))
    assert changes[0]["layers"]["0"]["rank"] <= 4
    assert torch.allclose(factored(inputs), wanted, rtol=1e-2)


@pytest.mark.slow
def test_half_the_channels(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_compress(source, tmp_path, "compress=channels", "compress.finetune.epochs=5", ranks=2)
    assert result.returncode == 0, result.stdout + result.stderr
    models = report_of(tmp_path)["models"]
    assert models["after"]["macs"] <= 0.35 * models["before"]["macs"]
    assert models["after"]["parameters"] < 0.35 * models["before"]["parameters"]
    assert models["after"]["accuracy"] >= models["before"]["accuracy"] - 0.02
    monkeypatch.setitem(sys.modules, "torch_pruning", None)  # whoever loads the model need not have it
    model = load_model(tmp_path / "artefact" / "model")
    assert sum(p.numel() for p in model.parameters()) == models["after"]["parameters"]
    measured = evaluate_run(tmp_path, "artefact", [])
    assert measured["val/accuracy"] == pytest.approx(models["after"]["accuracy"], abs=1e-6)


@pytest.mark.slow
def test_a_chain(source: Path, tmp_path: Path) -> None:
    steps = [
        "compress=distill model@compress.student=mlp compress.student.hidden=[64] compress.finetune.epochs=2",
        "compress=low_rank compress.finetune.epochs=1",
        "compress=int8",
    ]
    listed = ",".join(f"'{step}'" for step in steps)
    result = run_compress(source, tmp_path, "compress=chain", f"compress.steps=[{listed}]")
    assert result.returncode == 0, result.stdout + result.stderr
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    models = report_of(tmp_path)["models"]
    assert [*models] == ["before", "1-distill", "2-low_rank", "2-low_rank, ONNX Runtime", "3-int8"]
    assert models["before"]["bytes"] > models["1-distill"]["bytes"] > models["2-low_rank"]["bytes"]
    assert models["2-low_rank"]["gzipped"] > 2 * models["3-int8"]["gzipped"]
    parent = Path(report_of(tmp_path / "2-low_rank")["lineage"]["parent"])
    assert parent.parent == tmp_path / "1-distill" / "checkpoints"
    again = [sys.executable, "-m", f"{PACKAGE}.compress.measure", str(tmp_path)]
    subprocess.run(again, env=alone(), check=True)
    assert [*report_of(tmp_path)["models"]] == [*models]


@pytest.mark.slow
def test_rounding_is_trained_on_two_ranks(source: Path, tmp_path: Path) -> None:
    """After pruning: the zeros stay. The ranges are the widest of both ranks'."""
    steps = (
        "'compress=prune compress.sparsity=0.5 compress.finetune.epochs=1','compress=qat compress.finetune.epochs=2'"
    )
    result = run_compress(source, tmp_path, "compress=chain", f"compress.steps=[{steps}]", ranks=2)
    assert result.returncode == 0, result.stdout + result.stderr
    models = report_of(tmp_path)["models"]
    assert models["2-qat"]["accuracy"] >= models["before"]["accuracy"] - 0.01
    published = Store(tmp_path / "2-qat" / "checkpoints").find_good("artefact").folder
    ranks = [torch.load(file, weights_only=True)["buffers"] for file in rank_files(published)]
    places = [name.removesuffix(".highest") for name in ranks[0] if name.endswith(".highest")]
    assert any(ranks[0][f"{name}.highest"] != ranks[1][f"{name}.highest"] for name in places), (
        "each sees its own samples"
    )
    tensors = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph_of(published).initializer}
    for name in places:
        lowest, highest = (torch.stack([rank[f"{name}.{end}"] for rank in ranks]) for end in ("lowest", "highest"))
        assert tensors[f"model.{name}.scale"] == pytest.approx(float(highest.amax() - lowest.amin()) / STEPS)
    weights = [tensor for tensor in tensors.values() if tensor.ndim > 1]
    zeros = sum(int((weight == 0).sum()) for weight in weights) / sum(weight.size for weight in weights)
    assert models["2-qat"]["sparsity"] == pytest.approx(zeros)
    assert zeros >= 0.5


def graph_of(checkpoint: Path) -> onnx.GraphProto:
    return onnx.load(checkpoint / "artefact" / "model.onnx").graph


STUDENT = ("model=mlp", "model.hidden=[8]")


def accuracy(communicator: Communicator, seed: int, teacher: nn.Module | None) -> float:
    import numpy as np

    engine, splits = make(communicator, *STUDENT, f"seed={seed}")
    if teacher is not None:
        options = {"temperature": 4.0, "weight": 0.7, "features": [], "feature_weight": 0.0}
        engine.hooks = TorchDistillation(teacher, engine.model, OmegaConf.create(options))
    train(engine, splits, steps=150)
    return float(engine.evaluate(splits.validation, [np.arange(359)]).correct / 359)


@pytest.mark.slow
def test_a_taught_student_is_no_worse(communicator: Communicator) -> None:
    teacher, splits = make(communicator, "model=mlp")
    train(teacher, splits, steps=200)
    alone = [accuracy(communicator, seed, None) for seed in range(3)]
    taught = [accuracy(communicator, seed, teacher.model) for seed in range(3)]
    assert sum(taught) >= sum(alone)


def test_distillation_with_features(communicator: Communicator) -> None:
    """The loss is zero where student and teacher are one, and grows with what they differ in."""
    teacher, student = (nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)) for _ in range(2))
    options = {"temperature": 2.0, "weight": 1.0, "features": ["0"], "feature_weight": 1.0}
    inputs = torch.rand(5, 4)

    def loss() -> float:
        hooks = TorchDistillation(teacher, student, OmegaConf.create(options))
        return float(hooks.loss(torch.tensor(7.0), inputs, student(inputs)))

    assert loss() > 0.01
    student.load_state_dict(teacher.state_dict())
    assert loss() == pytest.approx(0, abs=1e-6)
    with pytest.raises(UserError, match=r"the teacher has no layer nine: there are "):
        TorchDistillation(teacher, student, OmegaConf.create({**options, "features": ["nine"]}))


@torch.no_grad()
def test_features_of_other_widths_are_compared_by_attention() -> None:
    student, teacher = (
        nn.Sequential(nn.Conv2d(1, width, 3), nn.Flatten(), nn.Linear(16 * width, 2)) for width in (4, 8)
    )
    options = OmegaConf.create({"temperature": 2.0, "weight": 0.0, "features": ["0"], "feature_weight": 1.0})
    inputs = torch.rand(5, 1, 6, 6)
    hooks = TorchDistillation(teacher, student, options)
    assert float(hooks.loss(torch.tensor(0.0), inputs, student(inputs))) > 0.01
    for own, twice in zip(student[0].parameters(), teacher[0].parameters(), strict=True):
        twice.copy_(torch.cat([own, own]))  # the same attention, since only its places' ratios count
    assert float(hooks.loss(torch.tensor(0.0), inputs, student(inputs))) == pytest.approx(0, abs=1e-6)
    options.features = ["1"]
    hooks = TorchDistillation(teacher, student, options)
    with pytest.raises(
        UserError, match=r"1 gives \(64,\) in the student and \(128,\) in the teacher: name layers that"
    ):
        hooks.loss(torch.tensor(0.0), inputs, student(inputs))


@pytest.mark.slow
def test_a_teacher_of_ones_own_must_be_the_same_on_all_ranks(source: Path, tmp_path: Path) -> None:
    """This one has random weights, where a real one would read its own."""
    teacher = f"compress.teacher={{_target_:{PACKAGE}.torch.models.mlp,shape:[8,8,1],classes:10}}"
    result = run_compress(source, tmp_path, "compress=distill", "compress.finetune.epochs=1", teacher, ranks=2)
    assert result.returncode != 0
    assert "the teachers of rank 1 differ from rank 0's" in result.stdout + result.stderr
    alone = run_compress(source, tmp_path, "compress=distill", "compress.finetune.epochs=1", teacher)
    assert alone.returncode == 0, alone.stdout + alone.stderr


@pytest.mark.slow  # for the source
def test_a_student_of_another_number_of_classes(source: Path, tmp_path: Path) -> None:
    config = compress_config(source, "compress=distill", "compress.student.classes=7")
    with pytest.raises(UserError, match="the student answers with 7 classes and its teacher with 10"):
        compress(config, tmp_path)


def test_skipped_layers_keep_their_channels() -> None:
    options = OmegaConf.merge(CHANNELS, {"skip": ["0"]})
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(32, 10))
    small, _, _ = fewer_channels(model, options, torch.rand(2, 1, 6, 6), 10)
    assert [tuple(p.shape) for p in small.parameters()][:4:2] == [(8, 1, 3, 3), (4, 8, 3, 3)]
    with pytest.raises(UserError, match=r"no layer is called 9"):
        fewer_channels(model, OmegaConf.merge(CHANNELS, {"layers": ["9"]}), torch.rand(2, 1, 6, 6), 10)
