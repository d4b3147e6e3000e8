"""What a result depends on beside its configuration: versions, machine, command."""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from qknorm_fairseq.runs import Run

COMMAND = "python -m qknorm_fairseq.experiment"


def environment(run: Run) -> dict[str, Any]:
    """What a result depends on beside the configuration, and the command that repeats it."""
    return {
        "command": f"{COMMAND} {shlex.join((run.config_name, *run.overrides))}",
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "commit": _git_commit(),
        **machine(),
    }


def machine() -> dict[str, Any]:
    """Versions and hardware."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "packages": {name: _version(name) for name in _PACKAGES},
    }


_PACKAGES = (
    *("qknorm-fairseq", "torch", "fairseq-fixed", "fairseq", "numpy", "hydra-core", "omegaconf"),
    *("sentencepiece", "sacrebleu", "sacremoses"),
)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _processor() -> str:
    try:
        found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text("utf-8"))
    except OSError:
        found = None
    return found[1] if found else platform.processor()
