"""The mini recipe itself, every stage, on a very small corpus; and the shell tools it stands on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
from conftest import ROOT, voice

from wespeaker_qmargin.files import read_scores

RECIPE = ROOT / "recipes" / "mini" / "run.sh"
SMALL = (
    "--num_epochs 2 --num_avg 1 --valid_speakers 2 --dataloader_args.batch_size 8 "
    "--model_args.hid_dim 16 --model_args.stats_dim 24 --model_args.embed_dim 16 "
    "--dataset_args.num_frms 60 --margin_update.increase_start_epoch 1 "
    "--margin_update.fix_start_epoch 2 --log_batch_interval 2"
)


def bash(*words, **environment) -> subprocess.CompletedProcess:
    """Run bash with this Python's environment as the active one."""
    prefix = Path(sys.prefix)
    active = {"VIRTUAL_ENV": str(prefix), "PATH": f"{prefix / 'bin'}:{os.environ['PATH']}"}
    return subprocess.run(
        ["bash", *map(str, words)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **active, "OMP_NUM_THREADS": "1", **environment},
        timeout=900,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A Kaldi-style folder: 12 training and 10 test speakers, trials, noise and an impulse."""
    folder = tmp_path_factory.mktemp("small corpus")  # a space in the path
    for part, speakers in (("train", range(12)), ("test", range(20, 30))):
        (folder / part / "wav").mkdir(parents=True)
        scp, utt2spk = [], []
        for speaker in speakers:
            for take in range(4):
                path = f"{part}/wav/s{speaker}-{take}.flac"
                soundfile.write(folder / path, voice(speaker, take), 16000)
                scp.append(f"s{speaker}-{take} {path}\n")
                utt2spk.append(f"s{speaker}-{take} s{speaker}\n")
        (folder / part / "wav.scp").write_text("".join(scp))
        (folder / part / "utt2spk").write_text("".join(utt2spk))
    keys = [line.split() for line in utt2spk]
    (folder / "test" / "trials").mkdir()
    trials = [
        f"{a} {b} {'target' if s == t else 'nontarget'}\n"
        for i, (a, s) in enumerate(keys)
        for b, t in keys[i + 1 :]
    ]
    (folder / "test" / "trials" / "all.trials").write_text("".join(trials))
    (folder / "aug").mkdir()
    rng = np.random.default_rng(0)
    for name in ("noise", "rir"):
        wav = rng.standard_normal(8000) * np.exp(-np.arange(8000) / 1000)
        soundfile.write(folder / "aug" / f"{name}.wav", 0.5 * wav / np.abs(wav).max(), 16000)
        (folder / "aug" / f"{name}.scp").write_text(f"{name}-0 aug/{name}.wav\n")
    return folder


@pytest.mark.recipe
def test_every_stage_from_wav_to_report(folder, tmp_path):
    work = tmp_path / "work dir"
    options = ["--data", folder, "--work", work, "--bootstrap", "50", "--top_n", "5"]
    done = bash(RECIPE, *options, "--train_args", SMALL)
    assert done.returncode == 0, done.stderr[-3000:]
    for system in ("cosface", "qmargin"):
        exp = work / system
        for name in (
            "config.yaml",
            "train.log",
            "models/model_2.pt",
            "models/avg_model.pt",
            "best_model.pt",
            "embeddings/train/xvector.scp",
            "embeddings/test/xvector.scp",
            "scores/all.trials.score",
            "scores/train_asnorm5_all.trials.score",
            "scores/results.json",
        ):
            assert (exp / name).is_file(), name
    scores = read_scores(work / "qmargin" / "scores" / "all.trials.score")
    assert len(scores.scores) == 40 * 39 // 2
    results = json.loads((work / "untrained" / "scores" / "results.json").read_text())
    assert 0 <= results["results"][0]["eer"] <= 1 and results["results"][0]["eer_interval"]
    assert "| all | untrained |" in done.stdout and "| all | qmargin |" in done.stdout
    assert (work / "report.html").read_text().count("<img") == 4  # DET, training, plan
    # once more: finished stages are skipped, nothing is trained again
    before = (work / "qmargin" / "models" / "model_2.pt").stat().st_mtime_ns
    again = bash(RECIPE, *options, "--train_args", SMALL)
    assert again.returncode == 0 and "done before" in again.stderr
    assert (work / "qmargin" / "models" / "model_2.pt").stat().st_mtime_ns == before


@pytest.mark.recipe
def test_a_failing_stage_stops_the_recipe(folder, tmp_path):
    done = bash(RECIPE, "--data", tmp_path / "nothing", "--work", tmp_path / "work")
    assert done.returncode != 0 and "nothing" in done.stderr
    assert not (tmp_path / "work" / "cosface").exists()


def test_help_and_unknown_options():
    done = bash(RECIPE, "--help")
    assert done.returncode == 0 and "stages" in done.stdout
    done = bash(RECIPE, "--stag", "1")
    assert done.returncode == 2 and "unknown option --stag" in done.stderr
    done = bash(RECIPE, "--stage")
    assert done.returncode == 2 and "needs a value" in done.stderr


def test_parse_options(tmp_path):
    script = tmp_path / "script.sh"
    script.write_text(
        "set -euo pipefail\nstop_stage=1\nname=\nusage() { echo usage; }\n"
        f'source "{ROOT}/tools/parse_options.sh"\necho "$stop_stage|$name"\n'
    )
    out = bash(script, "--stop-stage", "3", "--name=a b").stdout
    assert out == "3|a b\n"
    assert bash(script, "--PATH", "x").returncode == 2
    assert bash(script, "word").returncode == 2
    assert bash(script, "--help").stdout == "usage\n"


def test_setup_twice_takes_seconds_and_refuses_a_false_checkout(tmp_path):
    code = f'source "{ROOT}/tools/setup.sh" test && command -v python'
    done = bash("-c", code)
    assert done.returncode == 0 and done.stdout.strip().startswith(sys.prefix)
    assert "installing" not in done.stderr
    done = bash("-c", code, WESPEAKER_ROOT=str(tmp_path))
    assert done.returncode != 0 and "no WeSpeaker checkout" in done.stderr


def test_make_raw_list(tmp_path, corpus):
    tool = [sys.executable, ROOT / "tools" / "make_raw_list.py"]
    files = [corpus / "wav.scp", corpus / "utt2spk", tmp_path / "raw.list"]
    subprocess.run([*tool, *files], check=True, capture_output=True)
    lines = [json.loads(line) for line in (tmp_path / "raw.list").read_text().splitlines()]
    assert len(lines) == 60 and lines[0] == {
        "key": "s0-0",
        "spk": "s0",
        "wav": f"{corpus}/s0-0.wav",
    }
    (tmp_path / "utt2spk").write_text("other x\n")
    done = subprocess.run(
        [*tool, files[0], tmp_path / "utt2spk", tmp_path / "new.list"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "not in" in done.stderr
    assert not (tmp_path / "new.list").exists()
