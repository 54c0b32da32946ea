"""Run on 2 ranks by test_torch_quantize.py: each shows the model its part of the samples, and one file comes out."""

import sys
from pathlib import Path

from jobs import compose_config

from << cookiecutter.package_name >>.compress.quantization import post_training
from << cookiecutter.package_name >>.compress.torch.fake_quantize import (
    calibrating,
    merge_ranges,
    prepare,
    quantizers,
)
from << cookiecutter.package_name >>.errors import UserError
from << cookiecutter.package_name >>.export.command import validation_samples
from << cookiecutter.package_name >>.export.torch import load_model
from << cookiecutter.package_name >>.ranks import open_communicator


def main() -> None:
    import torch

    ranks = open_communicator("torch", {"stall_shutdown_s": 60})
    folder, target = map(Path, sys.argv[1:])
    samples = validation_samples(compose_config("engine=torch"), 96)
    report = post_training(folder, target, "static", [samples[ranks.rank :: 2]], ranks)
    assert report["calibration_samples"] == 96

    alone = prepare(load_model(folder))
    with calibrating(alone), torch.no_grad():  # rank 1 sees what is twice as large
        alone(torch.from_numpy(samples).permute(0, 3, 1, 2) * (1 + ranks.rank))
    mine = [float(place.highest) for place in quantizers(alone).values()]
    merge_ranges(alone, ranks)
    merged = [float(place.highest) for place in quantizers(alone).values()]
    assert merged == [max(pair) for pair in zip(*ranks.gather(mine, "mine"), strict=True)]
    assert (merged != mine) == (ranks.rank == 0)

    try:
        post_training(folder, target.with_name("few.onnx"), "static", [samples[: 1 - ranks.rank]], ranks)
    except UserError as error:
        assert "1 calibration samples for 2 ranks" in str(error)
    else:
        raise AssertionError("one sample was enough")
    print(f"rank {ranks.rank} passed")


if __name__ == "__main__":
    main()
