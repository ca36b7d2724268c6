"""The audit: scores against a loop, any head's loss, flipped labels found, what it leaves out."""

import dataclasses
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from wespeaker_qmargin import audit as stage
from wespeaker_qmargin.audio import load_audio
from wespeaker_qmargin.audit import Suspect, audit
from wespeaker_qmargin.checkpoints import read_checkpoint
from wespeaker_qmargin.cli import main
from wespeaker_qmargin.config import load_config, save_config
from wespeaker_qmargin.lists import read_utterances
from wespeaker_qmargin.model import SpeakerNet, load_checkpoint, save_checkpoint

ALL = ["--valid_speakers", "0"]
HEADS = {
    "q_margin": "{project_type: q_margin, alpha: 1.5}",
    "add_margin": "{project_type: add_margin, scale: 32.0}",
    "sphereface2": "{project_type: sphereface2, scale: 32.0}",
}


@pytest.fixture
def few(corpus, tmp_path):
    """Two utterances of each speaker."""
    folder = tmp_path / "few"
    folder.mkdir()
    for name in ("wav.scp", "utt2spk"):
        lines = (corpus / name).read_text().splitlines()
        (folder / name).write_text("".join(f"{x}\n" for x in lines if x.split()[0][-1] in "01"))
    return folder


@pytest.fixture
def config(tiny, few):
    return load_config(tiny, [*ALL, "--train_data", str(few)])


def make_run(folder, config, epochs=(1, 3, 4), speakers=None):
    speakers = speakers or [f"s{i}" for i in range(10)]
    save_config(config, folder / "config.yaml")
    (folder / "speakers.txt").write_text("".join(f"{name}\n" for name in speakers))
    copies = 3 if config.dataset_args.speed_perturb_labels == "new" else 1
    for epoch in epochs:
        torch.manual_seed(epoch)
        net = SpeakerNet(config, copies * len(speakers))
        save_checkpoint(net, folder / "models" / f"model_{epoch}.pt")
    return folder


def by_hand(exp, utterance, speakers):
    """Return (likely, score, loss, stability) over the epochs 1, 3, 4."""
    config, cosines, losses = load_config(exp / "config.yaml"), [], []
    wav = torch.from_numpy(load_audio(utterance, 16000))[None]
    label = speakers.index(utterance.spk)
    for epoch in (1, 3, 4):
        path = exp / "models" / f"model_{epoch}.pt"
        net = SpeakerNet(config, len(read_checkpoint(path)["projection.weight"]))
        load_checkpoint(net, path)
        net.eval().projection.update(0.2)
        with torch.no_grad():
            losses.append(float(net(wav, torch.tensor([label]), None)[0]))
            own = F.normalize(net.projection.weight) @ F.normalize(net.embed(wav)[0], dim=0)
        cosines.append(own.double().numpy())
    cosines = np.array(cosines)
    rivals = [j for j in range(cosines.shape[1]) if j % len(speakers) != label]
    mean = cosines.mean(axis=0)
    best = max(rivals, key=lambda j: mean[j])
    nearest = [max(rivals, key=lambda j: row[j]) % len(speakers) for row in cosines]
    likely = best % len(speakers)
    stability = np.mean([j == likely for j in nearest])
    return speakers[likely], mean[best] - mean[label], np.mean(losses), stability


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("labels", ["same", "new"])
def test_against_a_loop(tiny, few, tmp_path, head, labels, monkeypatch):
    words = [*ALL, "--train_data", str(few), "--projection_args", HEADS[head]]
    words += ["--dataset_args.speed_perturb_labels", labels]
    exp = make_run(tmp_path / "run", load_config(tiny, words))
    monkeypatch.setattr(stage, "_BLOCK", 7)
    found = audit(exp)
    assert [x.score for x in found] == sorted((x.score for x in found), reverse=True)
    by_key, speakers = {x.key: x for x in found}, [f"s{i}" for i in range(10)]
    assert len(by_key) == 20
    for utterance in read_utterances("kaldi", few)[::5]:
        likely, *values = by_hand(exp, utterance, speakers)
        mine = by_key[utterance.key]
        assert (mine.labelled, mine.likely) == (utterance.spk, likely)
        assert mine.path == utterance.source
        np.testing.assert_allclose((mine.score, mine.loss, mine.stability), values, rtol=1e-4)


def test_the_last_epochs(config, tmp_path):
    exp = make_run(tmp_path / "run", config)
    two = audit(exp, epochs=2)
    assert {x.stability for x in two} <= {0.0, 0.5, 1.0}
    (exp / "models" / "model_1.pt").unlink()
    assert audit(exp) == two


def filter_banks(self, wavs, seeds=None):
    """In the place of embeddings: 16 bands, which tell the voices of the corpus apart."""
    bands = F.avg_pool1d(self.features(wavs).mean(dim=1), 5)
    return bands - bands.mean(dim=1, keepdim=True)


def test_flipped_labels_come_first(tiny, corpus, tmp_path, monkeypatch):
    """Of a head that has not learnt the wrong labels."""
    monkeypatch.setattr(SpeakerNet, "embed", filter_banks)
    flipped = {"s1-2": "s7", "s4-0": "s8", "s6-5": "s2"}
    folder = tmp_path / "data"
    folder.mkdir()
    shutil.copy(corpus / "wav.scp", folder)
    rows = [line.split() for line in (corpus / "utt2spk").read_text().splitlines()]
    lines = [f"{key} {flipped.get(key, spk)}\n" for key, spk in rows]
    (folder / "utt2spk").write_text("".join(lines))
    words = [*ALL, "--train_data", str(folder), "--dataset_args.cmvn", "false"]
    config = load_config(tiny, words)
    exp = make_run(tmp_path / "run", config)
    net, random = SpeakerNet(config, 10), torch.Generator().manual_seed(0)
    wavs = [torch.from_numpy(load_audio(u, 16000)) for u in read_utterances("kaldi", corpus)]
    means = torch.cat([net.embed(wav[None]) for wav in wavs]).reshape(10, 6, 16).mean(dim=1)
    for epoch in (1, 3, 4):
        noise = 0.05 * means.std() * torch.randn(10, 16, generator=random)
        net.projection.weight.data = means + noise
        save_checkpoint(net, exp / "models" / f"model_{epoch}.pt")
    first = audit(exp)[:3]
    assert {x.key: (x.labelled, x.likely) for x in first} == {
        key: (label, key[:2]) for key, label in flipped.items()
    }
    assert all(x.score > 0 and x.stability == 1 for x in first)


def test_audio_that_cannot_be_used(config, few, tmp_path, caplog):
    (tmp_path / "bad.wav").write_text("no audio")
    lines = (few / "wav.scp").read_text().splitlines()
    lines = [f"s4-1 {tmp_path}/bad.wav" if x.startswith("s4-1") else x for x in lines]
    (few / "wav.scp").write_text("\n".join(lines))
    found = audit(make_run(tmp_path / "run", config))
    assert len(found) == 19 and "s4-1" not in {x.key for x in found}
    assert "not used: s4-1" in caplog.text


def test_embeddings_that_are_not_finite(config, tmp_path, monkeypatch, caplog):
    def broken(self, wavs, seeds=None):
        return filter_banks(self, wavs) / (0 if wavs[0, 0] == first else 1)

    utterances = read_utterances("kaldi", config.train_data)
    first = load_audio(utterances[3], 16000)[0]
    monkeypatch.setattr(SpeakerNet, "embed", broken)
    found = audit(make_run(tmp_path / "run", config))
    assert len(found) == 19 and utterances[3].key not in {x.key for x in found}
    assert f"{utterances[3].key}: an embedding is not finite" in caplog.text


def test_bad_input(config, tmp_path):
    exp = make_run(tmp_path / "run", config)
    (tmp_path / "softmax").mkdir()
    softmax = dataclasses.replace(config, projection_args={"project_type": "softmax"})
    save_config(softmax, tmp_path / "softmax" / "config.yaml")
    shutil.copytree(exp / "models", tmp_path / "softmax" / "models")
    with pytest.raises(ValueError, match="project_type softmax: it has no row a class"):
        audit(tmp_path / "softmax")
    with pytest.raises(ValueError, match="4 checkpoints are needed, found 3"):
        audit(exp, epochs=4)
    with pytest.raises(ValueError, match="only in one of them: s2, s3"):
        other = make_run(tmp_path / "other", config, speakers=["s0", "s1", "x"])
        audit(other)
    (exp / "speakers.txt").write_text("".join(f"s{i}\n" for i in range(9, -1, -1)))
    with pytest.raises(ValueError, match="none, the order differs"):
        audit(exp)
    for epoch in (1, 3):
        (exp / "models" / f"model_{epoch}.pt").unlink()
    with pytest.raises(ValueError, match="2 checkpoints are needed, found 1"):
        audit(exp)


def test_the_command(config, tmp_path, capsys):
    exp = make_run(tmp_path / "run", config)
    assert main(["audit", "--exp_dir", str(exp), "--top", "3"]) == 0
    *lines, path = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and lines[0].split("\t") == list(Suspect._fields)
    table = (exp / "audit.tsv").read_text().splitlines()
    assert path == str(exp / "audit.tsv") and table[:4] == lines and len(table) == 21
    assert main(["audit", "--exp_dir", str(tmp_path)]) == 1
    assert "no such config file" in capsys.readouterr().err
