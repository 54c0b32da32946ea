"""Where a checkpoint comes from: the code, the versions and the host."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import socket
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

_VERSIONED = ("horovod", "torch", "tensorflow", "tensorflow-cpu", "keras", "numpy")


def describe(config_text: str) -> dict[str, Any]:
    """What meta.json says of the code, its libraries and its config; runs git, so call it once per run."""
    commit = _git("rev-parse", "HEAD")
    versions = {}
    for package in _VERSIONED:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "git_commit": commit,
        "git_dirty": bool(_git("status", "--porcelain")) if commit else None,
        "config_hash": hashlib.sha256(config_text.encode()).hexdigest(),
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "versions": versions,
    }


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None
