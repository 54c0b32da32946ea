"""Run on 2 ranks by test_tensorflow_quantize.py: each brings its part of the samples, and one file comes out."""

import sys
from pathlib import Path

from jobs import compose_config

from << cookiecutter.package_name >>.compress.quantization import post_training
from << cookiecutter.package_name >>.export.command import validation_samples
from << cookiecutter.package_name >>.ranks import open_communicator


def main() -> None:
    ranks = open_communicator("tensorflow", {"stall_shutdown_s": 60})
    folder, target = map(Path, sys.argv[1:])
    samples = validation_samples(compose_config("engine=tensorflow"), 64)
    half = 32 * ranks.rank
    report = post_training(folder, target, "static", [samples[half : half + 32]], ranks)
    assert report["calibration_samples"] == 64
    print(f"rank {ranks.rank} passed")


if __name__ == "__main__":
    main()
