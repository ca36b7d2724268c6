"""The study of the mini recipe: its data, every one of its cells, its tables."""

import json
import shutil
import sys
from itertools import chain

import numpy as np
import pytest
import soundfile
import torch
import yaml
from conftest import ROOT
from test_recipe import bash

from wespeaker_qmargin.adapter import get_projection
from wespeaker_qmargin.config import save_config
from wespeaker_qmargin.files import read_table
from wespeaker_qmargin.study import read_study

LOCAL = ROOT / "recipes" / "mini" / "local"
sys.path.insert(0, str(LOCAL))

import make_study  # noqa: E402
import remove_suspects  # noqa: E402
import study_data  # noqa: E402
import study_results  # noqa: E402

KEYS = [f"s{speaker:02d}-{take}" for speaker in range(12) for take in range(2)]


@pytest.fixture
def lists(tmp_path):
    """What prepare_data.py leaves: 12 speakers of 2 utterances, a room, lists of trials."""
    folder, rng = tmp_path / "lists", np.random.default_rng(0)
    for name in ("train", "test/trials", "rirs", "musan", "wav"):
        (folder / name).mkdir(parents=True)
    room = np.zeros(800)
    room[[100, 300, 600]] = 1.0, 0.5, 0.25
    soundfile.write(folder / "wav" / "room.wav", room, 16000, subtype="FLOAT")
    scp = ""
    for key in KEYS:
        path = folder / "wav" / f"{key}.wav"
        soundfile.write(path, 0.1 * rng.standard_normal(8000), 16000)
        scp += f"{key} {path}\n"
    for part in ("train", "test"):
        (folder / part / "wav.scp").write_text(scp)
        (folder / part / "utt2spk").write_text("".join(f"{key} {key[:3]}\n" for key in KEYS))
    for part in ("rirs", "musan"):
        (folder / part / "wav.scp").write_text(f"noise-room {folder}/wav/room.wav\n")
    pairs = [(a, b) for i, a in enumerate(KEYS) for b in KEYS[i + 1 :]]
    lines = (f"{a} {b} {'target' if a[:3] == b[:3] else 'nontarget'}\n" for a, b in pairs)
    text = "".join(lines)
    for name in ("cv", "cv_cross_lang", "cv_same_lang", "ls"):
        (folder / "test" / "trials" / f"{name}.trials").write_text(text)
    return folder


@pytest.fixture
def work(lists):
    """A study's folder with its data, and tune's held-out EERs: the second rate is the best."""
    folder = lists.parent
    study_data.make(lists, folder / "data")
    for name, cell in make_study.tune().items():
        exp = folder / "tune" / name / "seed_0"
        exp.mkdir(parents=True)
        late = abs(np.log(cell["scheduler_args"]["initial_lr"] / 0.001))
        records = [{"valid_eer": x} for x in (0.0, 0.0, late, late, late)]
        (exp / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in records))
    for share in (5, 20):
        study_data.write_table(folder / f"data/train_cleaned{share}_seed0/wav.scp", {"a": "b"})
    return folder


def test_as_many_labels_are_wrong_as_asked_for():
    table = {f"u{i}": f"s{i % 10}" for i in range(200)}
    for share in (0.05, 0.2):
        flipped = study_data.flip_labels(table, share)
        assert list(flipped) == list(table)
        assert sum(flipped[key] != table[key] for key in table) == 200 * share
        assert set(flipped.values()) <= set(table.values())
    assert study_data.flip_labels(table, 0.2) == flipped
    assert study_data.flip_labels(table, 0.2, seed=1) != flipped


def test_far_field_starts_with_the_direct_sound_and_is_as_loud():
    wav, response = np.random.default_rng(0).standard_normal(1000), np.zeros(50)
    response[[10, 30]] = -2.0, 0.5
    wet = study_data.far_field(wav, response)
    expected = -2.0 * wav
    expected[20:] += 0.5 * wav[:-20]
    expected *= np.linalg.norm(wav) / np.linalg.norm(expected)
    np.testing.assert_allclose(wet, expected, atol=1e-9)


def test_data(lists, tmp_path):
    out = tmp_path / "data"
    study_data.make(lists, out)
    truth = read_table(out / "train" / "utt2spk")
    for share in (5, 20):
        labels = read_table(out / f"train_flip{share}" / "utt2spk")
        assert sum(labels[key] != truth[key] for key in truth) == round(share / 100 * len(truth))
    wavs, speakers = (read_table(out / "test" / name) for name in ("wav.scp", "utt2spk"))
    assert wavs.keys() == speakers.keys() and len(wavs) == 2 * len(KEYS)
    assert speakers["far-s03-1"] == "s03"
    near, far = (soundfile.read(wavs[key])[0] for key in ("s03-1", "far-s03-1"))
    assert len(near) == len(far) and not np.allclose(near, far, atol=0.01)
    first = (out / "test" / "trials" / "cv_far.trials").read_text().splitlines()[0]
    assert first == "s00-0 far-s00-1 target"
    assert not (out / "test" / "trials" / "cv_cross_lang_far.trials").exists()


@pytest.mark.parametrize("part", make_study.PARTS)
def test_every_cell_is_a_training_that_begins(part, work):
    if part in ("finetune", "advice"):
        for start in make_study.starts(work):
            path = work / "starts" / start / "seed_0/models/avg_model.pt"
            path.parent.mkdir(parents=True)
            path.touch()
    path = work / f"{part}.yaml"
    path.write_text(yaml.safe_dump(make_study.study(work, part)))
    study = read_study(path)
    assert len(study.cells) == {
        "tune": 30, "heads": 54, "noise": 18, "cleaned": 12, "starts": 2, "finetune": 30,
        "advice": 18, "long": 12,
    }[part]  # fmt: skip
    for cell in study.cells:
        config = study.config(cell)
        head = get_projection({**config.projection_args, "embed_dim": 8, "num_class": 5})
        output = head(torch.randn(2, 8), torch.tensor([0, 4]))
        assert (output[0] if isinstance(output, tuple) else output).shape == (2, 5)
        assert config.model_args["hid_dim"] == 128
        assert config.optimizer == "AdamW" and config.num_avg == 3
        if part in ("heads", "noise"):
            assert config.scheduler_args["initial_lr"] == 0.001, "found by tune"
    with open(path) as stream:
        assert yaml.safe_load(stream)["seeds"] == ([0] if part in ("tune", "starts") else [0, 1, 2])


def test_the_logit_margin_is_cosface_at_alpha_1_and_another_loss_above():
    torch.manual_seed(0)
    embeddings, labels = torch.randn(6, 8), torch.randint(5, (6,))
    heads = {
        (kind, alpha): get_projection(
            {"project_type": kind, "alpha": alpha, "scale": 10.0, "embed_dim": 8, "num_class": 5}
        )
        for kind in ("study_heads:LogitMargin", "q_margin")
        for alpha in (1.0, 1.5)
    }
    weight, losses = torch.randn(5, 8), {}
    for key, head in heads.items():
        head.weight.data, _ = weight, head.update(0.2)
        losses[key] = head(embeddings, labels)[1].item()
    kinds = ("study_heads:LogitMargin", "q_margin")
    assert losses[kinds[0], 1.0] == pytest.approx(losses[kinds[1], 1.0], rel=1e-5)
    assert abs(losses[kinds[0], 1.5] - losses[kinds[1], 1.5]) > 0.01


def test_suspects_are_removed_and_counted(lists, tmp_path, monkeypatch, capsys):
    keys = list(read_table(lists / "train" / "utt2spk"))
    wrong = set(keys[:2])
    truth = {key: "other" if key in wrong else key[:3] for key in keys}
    (tmp_path / "truth").write_text("".join(f"{k} {v}\n" for k, v in truth.items()))
    ranked = [keys[0], keys[5], keys[1], *(k for k in keys if k not in (*keys[:2], keys[5]))]
    lines = [f"{key}\t{-i}\t{float(key in wrong)}" for i, key in enumerate(ranked)]
    (tmp_path / "audit.tsv").write_text("\n".join(["key\tscore\tloss", *lines]) + "\n")
    words = [tmp_path / "audit.tsv", lists / "train", tmp_path / "out"]
    words += ["--share", "0.1", "--truth", tmp_path / "truth"]
    monkeypatch.setattr(sys, "argv", ["remove_suspects.py", *map(str, words)])
    remove_suspects.main()
    found = json.loads((tmp_path / "out" / "found.json").read_text())
    assert found["removed"] == 2 and found["removed_wrong"] == 1 and found["wrong"] == 2
    assert found["auc_loss"] == 1 and found["auc_score"] == pytest.approx(1 - 0.5 / 22)
    assert set(keys) - set(read_table(tmp_path / "out" / "wav.scp")) == {keys[0], keys[5]}


def finish(study, *, rng, gain) -> None:
    """Leave what a finished cell leaves; a system's scores are better by ``gain`` (name)."""
    pairs = [(a, b) for i, a in enumerate(KEYS) for b in KEYS[i + 1 :]]
    for cell in study.cells:
        folder = study.folder(cell)
        (folder / "scores").mkdir(parents=True)
        save_config(study.config(cell), folder / "config.yaml")
        record = {"step": 1, "loss": 1.0, "active": 0.5, "support": 3.0}
        (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
        results = []
        for name in study_results.LISTS:
            lines = []
            for a, b in pairs:
                same = a[:3] == b[:3]
                score = rng.normal() + (1 + gain(cell.name)) * same
                b = f"far-{b}" if name.endswith("far") else b
                lines.append(f"{a} {b} {score:.5f} {'target' if same else 'nontarget'}\n")
            (folder / "scores" / f"{name}.trials.score").write_text("".join(lines))
            fnr = {"0.001": {"fnr": 0.5}}
            results.append({"name": f"{name}.trials", "eer": 0.3, "min_dcf": 1.0, "fnr_at": fnr})
        (folder / "results.json").write_text(json.dumps({"results": results}))


def test_tables(work, caplog):
    content = make_study.study(work, "noise")
    names = ("cosface_flip5", "qmargin_a150_flip5", "cosface_flip20", "qmargin_a150_flip20")
    content["cells"] = {name: content["cells"][name] for name in names}
    (work / "noise.yaml").write_text(yaml.safe_dump(content))
    (work / "tune" / "cells.csv").touch()
    study = read_study(work / "noise.yaml")
    gain = {"qmargin_a150_flip5": 8.0}
    finish(study, rng=np.random.default_rng(0), gain=lambda name: gain.get(name, 0.0))
    shutil.copytree(work / "noise/qmargin_a150_flip5", work / "heads/qmargin_a150_m02")
    found = {"utterances": 24, "wrong": 2, "removed": 2, "removed_wrong": 1, "auc_score": 0.9871}
    (work / "data/train_cleaned5_seed0/found.json").write_text(json.dumps(found))
    probe = work / "probe/cosface_epochs15/probe.md"
    study_results.write_text(probe, f"## {work}/starts/cosface_epochs15\n\n84 % won\n")
    text = study_results.write(work, replicates=20).read_text()
    assert "heads: not finished" in caplog.text and "noise: not" not in caplog.text
    assert "| train_cleaned5_seed0 | 24 | 2 | 2 | 1 | 0.9871 |" in text
    across = "| noise/qmargin_a150_flip5 - heads/qmargin_a150_m02 | +0.00 [+0.00, +0.00] p 1.000 |"
    assert across in text and "heads/entmax" not in text
    assert "## starts/cosface_epochs15" in text and str(work) not in text
    assert "| cosface | 0.001 |" in text and "### noise: control cosface_flip20" in text
    assert (work / "noise.svg").read_text().count("qmargin_a150_flip20 - cosface_flip20") == 1
    rows = {x.split(" | ")[0]: x.split(" | ") for x in text.splitlines() if x.startswith("| ")}
    better = rows["| qmargin_a150_flip5 - cosface_flip5"]
    assert all(cell.startswith("-") for cell in better[1:7])
    assert "50 %" in rows["| qmargin_a150_flip5"][-1]
    assert rows["| qmargin_a150_flip5"][1].startswith("0.00 ± 0.00 [0.00, 0.00]")


def test_every_cell_has_its_control():
    heads = [f"{h}_m0{m}" for h in make_study.HEADS if h not in make_study.PLAIN for m in (1, 2)]
    heads += [*make_study.PLAIN, "scheduled_m02"]
    groups = study_results.controls("heads", heads)
    assert set(groups) == {"cosface_m01", "cosface_m02"}
    assert sorted({*groups, *chain(*groups.values())}) == sorted(heads)
    assert "softmax" in groups["cosface_m01"] and "scheduled_m02" in groups["cosface_m02"]
    names = ["cosface_epochs15_cosface", "cosface_epochs15_q", "cosface_epochs45_cosface"]
    assert study_results.controls("finetune", names) == {names[0]: [names[1]], names[2]: []}


def test_help_and_bad_stages(tmp_path):
    done = bash(ROOT / "recipes" / "mini" / "run_study.sh", "--help")
    assert done.returncode == 0 and "  4  noise" in done.stdout and "--jobs 2" in done.stdout
    done = bash(LOCAL.parent / "run_study.sh", "--work", tmp_path, "--data", tmp_path / "no")
    assert done.returncode != 0 and "no such folder" in done.stderr
