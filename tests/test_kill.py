"""SIGKILL at random moments: nothing that was complete is lost, the next start goes on.

QMARGIN_KILLS: how often each command is killed (8); tools/soak.sh takes 200.
"""

import ctypes
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from wespeaker_qmargin import train as training
from wespeaker_qmargin.checkpoints import read_checkpoint
from wespeaker_qmargin.config import load_config

KILLS = int(os.environ.get("QMARGIN_KILLS", 8))
HARNESS = Path(__file__).with_name("kill_harness.py")


def test_killed_commands_leave_what_undisturbed_ones_leave(tiny, tmp_path):
    command = [sys.executable, HARNESS, tiny, tmp_path / "work", "--kills", str(KILLS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout)
    counts = json.loads(done.stdout.splitlines()[-1])
    assert list(counts) == ["train", "extract", "score", "report"]
    assert all(x["kills"] >= KILLS for x in counts.values())


FULL = """
import resource, sys
from wespeaker_qmargin.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
sys.exit(main(sys.argv[2:]))
"""


def train(tiny, exp, *, largest: int):
    """Train where no file can grow beyond ``largest`` bytes, as on a disk that is full."""
    words = ["train", "--config", tiny, "--exp_dir", exp, "--resume"]
    words += ["--num_epochs", 2, "--num_avg", 1]
    command = [sys.executable, "-c", FULL, largest, *words]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True)


def test_a_full_disk_stops_in_one_line_and_what_was_complete_stays(tiny, tmp_path):
    exp, other = tmp_path / "full", tmp_path / "straight"
    assert train(tiny, other, largest=2**40).returncode == 0
    size = (other / "state" / "state.pt").stat().st_size
    done = train(tiny, exp, largest=size * 4 // 5)  # a model fits, the larger state does not
    assert done.returncode == 1 and "state.pt: cannot be written; is the disk full?" in done.stderr
    assert "Traceback" not in done.stderr
    assert read_checkpoint(exp / "models" / "model_1.pt")
    assert not (exp / "state" / "state.pt").exists()
    assert not list(exp.rglob("*.tmp")), "half a file is not left to fill the disk"
    assert train(tiny, exp, largest=2**40).returncode == 0, "there is room again"
    ours, theirs = (read_checkpoint(x / "models" / "model_2.pt") for x in (exp, other))
    assert all(torch.equal(x, theirs[key]) for key, x in ours.items())


@pytest.mark.parametrize("command", ["train", "extract", "score", "report"])
def test_a_place_that_cannot_be_written(command, tiny, tmp_path):
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "below"
    words = {
        "train": ["--config", tiny, "--exp_dir", place],
        "extract": ["--exp_dir", place, "--data", tmp_path, "--out", place],
        "score": ["--embeddings", place, "--trials", place, "--out", place],
        "report": ["--systems", f"A={place}", "--out", place / "x.html"],
    }[command]
    command = [sys.executable, "-m", "wespeaker_qmargin.cli", command, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and str(place) in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_what_a_killed_writer_left_is_removed_at_the_next_start(tiny, tmp_path):
    config = load_config(tiny, ["--exp_dir", str(tmp_path / "exp"), "--num_epochs", "1"])
    exp = training.train(config)
    left = [exp / "models/.model_1.pt.a1_b2c3d.tmp", exp / "state/.state.pt.00000000.tmp"]
    kept = [exp / "models/.mine.tmp", exp / "embeddings/.xvector.ark.abcdefgh.tmp"]
    kept[1].parent.mkdir()
    for path in (*left, *kept):
        path.touch()
    training.train(config, resume_run=True)
    assert not any(path.exists() for path in left) and all(path.exists() for path in kept)


def as_any_user() -> None:
    """Give up root's right to write and read where the mode forbids it, for good."""
    for right in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH; PR_CAPBSET_DROP is 24
        ctypes.CDLL(None).prctl(24, right, 0, 0, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="drops a Linux capability")
def test_a_read_only_exp_dir(tiny, corpus, tmp_path):
    """What must write there says so in one line; what only reads there works."""
    exp, out = tmp_path / "exp", tmp_path / "out"
    training.train(load_config(tiny, ["--num_epochs", "1"]))
    out.mkdir()
    trials = out / "trials"
    trials.write_text("s0-0 s0-1 target\ns0-0 s1-0 nontarget\n")
    before = {path: path.read_bytes() for path in exp.rglob("*") if path.is_file()}

    def run(*words):
        command = [sys.executable, "-m", "wespeaker_qmargin.cli", *map(str, words)]
        return subprocess.run(command, preexec_fn=as_any_user, capture_output=True, text=True)

    folders = [exp, *(path for path in exp.rglob("*") if path.is_dir())]
    try:
        for path in (*before, *folders):
            path.chmod(0o555)
        extract = ("extract", "--exp_dir", exp, "--data", corpus, "--model", 1)
        embeddings = out / "embeddings/xvector.scp"
        assert run(*extract, "--out", out / "embeddings").returncode == 0
        score = ("score", "--embeddings", embeddings, "--trials", trials)
        assert run(*score, "--out", out / "scores").returncode == 0
        refused = [
            run("train", "--config", tiny, "--exp_dir", exp, "--resume"),
            run(*extract, "--out", exp / "embeddings"),
            run(*score, "--out", exp / "scores"),
            run("average", "--exp_dir", exp, "--num", 1),
            run("metrics", out / "scores/trials.score", "--out", exp / "x.json"),
        ]
    finally:
        for path in (*folders, *before):
            path.chmod(0o755)
    for done in refused:
        last = done.stderr.splitlines()[-1]
        assert done.returncode == 1 and str(exp) in last and "ermission denied" in last, last
        assert "Traceback" not in done.stderr
    assert before == {path: path.read_bytes() for path in exp.rglob("*") if path.is_file()}


def test_a_clock_that_jumps_changes_nothing(tiny, tmp_path, monkeypatch):
    """Speed and time left are wrong for a line; the training is the same."""
    runs, real = [], time.monotonic
    clock = itertools.cycle([1e9, -1e9, 0.0])
    for jumps in (False, True):
        exp = tmp_path / f"jumps_{jumps}"
        if jumps:
            monkeypatch.setattr(time, "time", lambda: next(clock))
            monkeypatch.setattr(time, "monotonic", lambda: real() + next(clock))
        training.train(load_config(tiny, ["--exp_dir", str(exp), "--num_epochs", "1"]))
        monkeypatch.undo()
        runs.append(read_checkpoint(exp / "models" / "model_1.pt"))
    assert all(torch.equal(x, runs[1][key]) for key, x in runs[0].items())
