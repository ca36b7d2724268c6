"""What a result depends on beside its config: command, commit, versions, machine."""

import os
import platform
import subprocess
import sys
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from wespeaker_qmargin import upstream


def provenance(device: torch.device) -> dict:
    """Return the content of run.json: plain values."""
    versions = {"python": platform.python_version()}
    for package in ("wespeaker-qmargin", "torch", "numpy", "accelerate"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return {
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "git_commit": git_commit(),
        "versions": versions,
        "wespeaker": upstream.wespeaker_source(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
    }


def git_commit() -> str | None:
    """Return the commit of the checkout that this package runs from, "+changes" if it has any."""
    here = Path(__file__)
    # an installed copy may lie in somebody else's repository: this very file must be tracked
    if not _git(here.parent, "ls-files", "--error-unmatch", here.name):
        return None
    changed = _git(here.parent, "status", "--porcelain", "--untracked-files=no")
    return _git(here.parent, "rev-parse", "HEAD") + ("+changes" if changed else "")


def _git(folder: Path, *words: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip()
