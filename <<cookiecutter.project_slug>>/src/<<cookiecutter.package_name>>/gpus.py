"""The GPUs of this machine, as the driver tells of them."""

from __future__ import annotations

import os
import re
import subprocess


def count_gpus() -> int:
    """GPUs of this machine."""
    return len(re.findall("^GPU ", output_of("nvidia-smi", "--list-gpus"), re.MULTILINE))


def gpu_name(number: int) -> str:
    """What tells a GPU that this process sees from all others of the host.

    Slurm may show each rank one GPU of its own, which all call number 0: the driver's UUIDs differ then.
    """
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    entry = shown.split(",")[number] if shown else str(number)
    known = re.findall(r"^GPU \d+: .*\(UUID: (\S+)\)$", output_of("nvidia-smi", "--list-gpus"), re.MULTILINE)
    return known[int(entry)] if entry.isdecimal() and int(entry) < len(known) else entry


def output_of(*command: str) -> str:
    """What a command prints; nothing if it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
