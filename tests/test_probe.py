"""The probe: what it measures against loops over utterances, whose prototypes, files, bad input."""

import json
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from wespeaker_qmargin import adapter
from wespeaker_qmargin import probe as stage
from wespeaker_qmargin.audio import load_audio
from wespeaker_qmargin.checkpoints import read_checkpoint
from wespeaker_qmargin.cli import main
from wespeaker_qmargin.config import load_config, save_config
from wespeaker_qmargin.data import TrainSet
from wespeaker_qmargin.finetune import finetune_config
from wespeaker_qmargin.lists import read_utterances, speaker_labels
from wespeaker_qmargin.model import SpeakerNet, load_checkpoint, save_checkpoint
from wespeaker_qmargin.plan import Setting
from wespeaker_qmargin.probe import probe
from wespeaker_qmargin.probe_grid import grid
from wespeaker_qmargin.probe_report import markdown, to_json
from wespeaker_qmargin.transfer import find_source
from wespeaker_qmargin.upstream import wespeaker_module

NAMES = ["s9", "s1", "s0", "s5", "s2", "s3", "s8", "s4", "s7", "s6"]
SETTINGS = [Setting.of(a, s, 0.2) for a, s in ((1, 32.0), (1.5, 10.0), (2, 5.0), (2, 25.0))]
PNG = b"\x89PNG\r\n"


def make_experiment(folder, config, speakers=NAMES, *, names=("models/avg_model.pt",)):
    """An exp_dir as ``train`` leaves it, with weights that nobody trained."""
    save_config(config, folder / "config.yaml")
    (folder / "speakers.txt").write_text("".join(f"{name}\n" for name in speakers))
    copies = 3 if config.dataset_args.speed_perturb_labels == "new" else 1
    for seed, name in enumerate(names):
        torch.manual_seed(seed)
        save_checkpoint(SpeakerNet(config, copies * len(speakers)), folder / name)
    return folder


@pytest.fixture
def exp(tiny, tmp_path):
    return make_experiment(tmp_path / "source", load_config(tiny))


def start(source, corpus, words=(), **keys):
    keys = {"train_data": str(corpus), "data_type": "kaldi", **keys}
    return finetune_config(find_source(source), overrides=words, **keys)


def looked_at(source, corpus, words=(), **options):
    return probe(start(source, corpus, words), find_source(source), SETTINGS, **options)


def reference(config, checkpoint, embeddings, labels):
    """Return (own, best rival's cosine, its speaker) with the rows of NAMES, one by one."""
    weight = F.normalize(read_checkpoint(checkpoint)["projection.weight"].double())
    found = []
    for embedding, label in zip(embeddings, labels):
        cosines = dict(zip(NAMES, (weight @ F.normalize(embedding.double(), dim=0)).tolist()))
        own = cosines.pop(label)
        rival = max(cosines, key=cosines.get)
        found.append((own, cosines[rival], rival))
    return zip(*found)


def loaded(config, checkpoint):
    net = SpeakerNet(config)
    load_checkpoint(net, checkpoint, head=False)
    return net.eval()


def check(found, expected):
    own, best, rival = expected
    np.testing.assert_allclose(found.samples.own.numpy(), own, atol=1e-5)
    np.testing.assert_allclose(found.samples.best.numpy(), best, atol=1e-5)
    assert [found.speakers[i] for i in found.samples.rival.tolist()] == list(rival)


def test_whole_utterances_one_by_one(exp, corpus):
    config, checkpoint = start(exp, corpus), exp / "models" / "avg_model.pt"
    net, utterances = loaded(config, checkpoint), read_utterances("kaldi", corpus)
    with torch.no_grad():
        wavs = (torch.from_numpy(load_audio(u, 16000))[None] for u in utterances)
        embeddings = [net.embed(wav)[0] for wav in wavs]
    found = looked_at(exp, corpus, whole=True)
    check(found, reference(config, checkpoint, embeddings, [u.spk for u in utterances]))
    assert (found.utterances, found.listed, found.copies) == (60, 60, 1)
    assert found.report.rows_by_name == 10
    assert "whole and clean" in markdown([found])


def test_crops_as_training_sees_them(exp, corpus):
    words = ["--noise_data", str(corpus), "--dataset_args.aug_prob", "1", "--seed", "3"]
    config, checkpoint = start(exp, corpus, words), exp / "models" / "avg_model.pt"
    net, utterances = loaded(config, checkpoint), read_utterances("kaldi", corpus)
    items = TrainSet(
        utterances,
        speaker_labels(utterances),
        config.dataset_args,
        seed=3,
        augmenter=stage.build_augmenter(config),
    )
    samples = [items[0, i] for i in range(60)]
    with torch.no_grad():
        embeddings = [net.embed(x.wav[None], [x.seed])[0] for x in samples]
    found = looked_at(exp, corpus, words)
    check(found, reference(config, checkpoint, embeddings, [f"s{x.label}" for x in samples]))
    assert "noise on 100 %" in found.conditions
    clean = looked_at(exp, corpus, ["--seed", "3"])
    assert not torch.allclose(clean.samples.own, found.samples.own, atol=1e-3)
    assert "no augmentation" in clean.conditions and "60 frames" in clean.conditions


def test_batch_size_of_a_step(exp, corpus):
    assert looked_at(exp, corpus, ["--accum_steps", "3"], sample=8).batch_size == 24
    assert looked_at(exp, corpus, sample=8, batch_size=500).batch_size == 500


def test_a_sample_is_drawn_by_the_seed(exp, corpus):
    few = {"sample": 20, "whole": True}
    one, two, other = (looked_at(exp, corpus, ["--seed", s], **few) for s in "112")
    assert torch.equal(one.samples.own, two.samples.own)
    assert not torch.equal(one.samples.own, other.samples.own)
    assert (one.utterances, one.listed, len(one.samples.own)) == (20, 60, 20)
    for name in ("sample", "batch_size"):
        with pytest.raises(ValueError, match=f"{name}: expected a number >= 1, got 0"):
            looked_at(exp, corpus, **{name: 0})


def test_own_copies_at_other_speeds(tiny, corpus, tmp_path):
    words = ["--dataset_args.speed_perturb_labels", "new"]
    folder = make_experiment(tmp_path / "source", load_config(tiny, words))
    path = folder / "models" / "avg_model.pt"
    state = read_checkpoint(path)
    state["projection.weight"] = state["projection.weight"][:10].repeat(3, 1)  # no copy differs
    torch.save(state, path)
    found = looked_at(folder, corpus)
    assert found.copies == 3 and found.report.rows_by_name == 30
    assert set(found.samples.label.tolist()) - set(range(10)), "some are at another speed"
    np.testing.assert_allclose(found.samples.crowded_lead.clip(0), 0, atol=1e-6)
    assert (found.samples.lead > 0.01).any()
    speakers = {"rival": found.samples.rival % 10, "own": found.samples.label % 10}
    assert (speakers["rival"] != speakers["own"]).all()
    assert "own copies too" in markdown([found]) and "as other speakers" in found.conditions
    fixed = looked_at(folder, corpus, ["--do_lm", "true"])
    assert set(fixed.samples.label.tolist()) <= set(range(10)), "that stage does not perturb"


def test_prototypes_of_speakers_that_the_checkpoint_does_not_know(exp, corpus, tmp_path):
    folder = tmp_path / "renamed"
    folder.mkdir()
    shutil.copy(corpus / "wav.scp", folder)
    lines = [line.split() for line in (corpus / "utt2spk").read_text().splitlines()]
    names = {f"s{i}": f"s{i}" if i < 4 else f"t{i}" for i in range(10)}
    (folder / "utt2spk").write_text("".join(f"{key} {names[spk]}\n" for key, spk in lines))
    found = looked_at(exp, folder, whole=True, per_class=6)
    text = markdown([found])
    assert "4 are the checkpoint's, by name, 6 class means" in text
    assert "strong rivals" in text
    (exp / "speakers.txt").unlink()
    found = looked_at(exp, folder, whole=True)
    text = markdown([found])
    assert "0 are the checkpoint's, by name, 10 class means" in text
    assert "no speakers.txt says whose rows" in text and "strong rivals" not in text


def test_an_aam_checkpoint_of_wespeakers(tiny, corpus, tmp_path):
    head = "{project_type: arc_margin, scale: 32.0, easy_margin: false}"
    config = load_config(tiny, ["--projection_args", head])
    folder = make_experiment(tmp_path / "source", config)
    torch.manual_seed(5)
    model = wespeaker_module("models.speaker_model").get_speaker_model(config.model)
    model = model(**config.model_args)
    args = {"embed_dim": config.model_args["embed_dim"], "num_class": 10}
    model.add_module("projection", adapter.get_projection({**config.projection_args, **args}))
    path = folder / "models" / "avg_model.pt"
    wespeaker_module("utils.checkpoint").save_checkpoint(model, str(path))
    net, utterances = loaded(config, path), read_utterances("kaldi", corpus)
    with torch.no_grad():
        wavs = (torch.from_numpy(load_audio(u, 16000))[None] for u in utterances)
        embeddings = [net.embed(wav)[0] for wav in wavs]
    found = looked_at(folder, corpus, whole=True)
    check(found, reference(config, path, embeddings, [u.spk for u in utterances]))


@pytest.mark.parametrize(
    "head",
    [
        "{project_type: arc_margin_intertopk_subcenter, scale: 32, easy_margin: false}",
        "{project_type: softmax}",  # batch norm, ReLU, then the rows
    ],
)
def test_a_head_without_a_row_a_class_gives_none(tiny, corpus, tmp_path, head):
    folder = make_experiment(tmp_path / "source", load_config(tiny, ["--projection_args", head]))
    found = looked_at(folder, corpus, whole=True)
    assert (found.report.rows_by_name, found.report.rows_from_means) == (0, 10)
    with pytest.raises(ValueError, match="it has no row a class, which prototypes are"):
        looked_at(folder, corpus, ["--projection_args", head])


def test_embeddings_that_are_not_finite_are_left_out(exp, corpus, monkeypatch, caplog):
    embed = SpeakerNet.embed

    def broken(self, wavs, seeds=None):
        found = embed(self, wavs, seeds)
        return found.index_fill(0, torch.tensor([1]), torch.nan) if len(found) > 1 else found

    monkeypatch.setattr(SpeakerNet, "embed", broken)
    found = looked_at(exp, corpus)
    assert len(found.samples.own) == 60 - 8 and found.samples.own.isfinite().all()
    assert "not finite, left out: s0-1" in caplog.text


def test_by_speaker(exp, corpus):
    found = looked_at(exp, corpus, whole=True)
    (content,) = to_json([found])["checkpoints"]
    assert list(content["speakers"]) == [f"s{i}" for i in range(10)]
    mine = content["speakers"]["s3"]
    lead = found.samples.lead[found.samples.label == 3]
    assert mine["samples"] == 6 and mine["mean_lead"] == pytest.approx(lead.mean(), abs=1e-6)
    assert mine["won"] == pytest.approx((lead >= content["speakers_won_at_gap"]).mean())
    rivals = found.samples.rival[found.samples.label == 3].tolist()
    assert mine["rival"] in {f"s{i}" for i in rivals if rivals.count(i) >= len(rivals) / 10}
    assert sum(content["lead"]["histogram"]["counts"]) == 60


def test_default_grid(exp, corpus):
    found = grid(start(exp, corpus))
    products = {round(x.scale * (x.alpha - 1), 6) for x in found if x.alpha > 1}
    assert products == {2.5, 5, 10} and {x.margin for x in found} == {0.1, 0.2}
    for alpha, scale in ((1.25, 20), (1.5, 10), (2, 5), (1, 32)):
        assert Setting.of(alpha, scale, 0.2) in found
    wide = start(exp, corpus, ["--margin_update.final_margin", "0.5"])
    wide = [x for x in grid(wide) if x.margin == 0.5]
    assert Setting.of(1.5, 4, 0.5) in wide, "k = 1 / m"
    own = start(exp, corpus, ["--projection_args", "{project_type: q_margin, alpha: 1.7}"])
    assert any(x.alpha == 1.7 and x.scale == pytest.approx(5 / 0.7) for x in grid(own))
    plain = start(exp, corpus)
    some = grid(plain, cells=["7,1.5,0.3"], alphas=[1.5, 2])
    assert [x[:3] for x in some] == [(1.5, 10, 0.2), (2, 5, 0.2), (1.5, 7, 0.3)]
    assert [x[:3] for x in grid(plain, cells=["auto,2,0.1"])] == [(2, 5, 0.1)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cells": ["10,3,0.2"]}, r"scale 10.0, alpha 3.0, margin 0.2: alpha must be in \[1, 2\]"),
        ({"cells": ["0,1.5,0.2"]}, "scale 0.0, .*: scale must be > 0"),
        ({"cells": ["10,1.5,-1"]}, "margin -1.0: margin must be >= 0"),
        ({"cells": ["100,2,0.9"]}, "margin 0.9: .* below 80"),
        ({"cells": ["10,1.5"]}, "expected scale,alpha,margin, .* got '10,1.5'"),
        ({"alphas": [0.5]}, "alpha 0.5, margin 0.2: alpha must be"),
        ({"margins": [float("nan")]}, "margin nan: .*margin finite"),
    ],
)
def test_values_out_of_range(exp, corpus, options, message):
    with pytest.raises(ValueError, match=message):
        grid(start(exp, corpus), **options)


def test_the_command(exp, corpus, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["--checkpoint", str(exp), "--data", str(corpus), "--out", str(out), "--sample", "40"]
    assert main(["probe", *words, "--valid_speakers", "2"]) == 0
    printed = capsys.readouterr().out
    assert "40 of 48 utterances" in printed and "reference" in printed
    assert "0.38 %" in printed and "nearest to 5" in printed and "Recommended at margin" in printed
    assert (out / "probe.md").read_text() == printed
    assert (out / "probe.png").read_bytes().startswith(PNG)
    content = json.loads((out / "probe.json").read_text())
    (one,) = content["checkpoints"]
    assert len(one["cells"]) == 20 and one["transfer"]["rows_by_name"] == 8
    assert [x["gap"] for x in one["cells"] if x["alpha"] == 1] == [None, None]
    assert content["thresholds"]["starving"] == 0.8


def test_several_checkpoints(tiny, corpus, tmp_path, capsys, monkeypatch):
    names = [f"models/model_{i}.pt" for i in (2, 4, 9)]
    folder = make_experiment(tmp_path / "source", load_config(tiny), names=names)
    words = [w for name in names for w in ("--checkpoint", str(folder / name))]
    words += ["--data", str(corpus), "--grid", "10,1.5,0.2 5,2,0.1", "--out", str(tmp_path / "out")]
    drawn = []
    monkeypatch.setattr(stage, "draw", lambda found, path: drawn.extend(found))
    assert main(["probe", *words, "--whole"]) == 0
    assert capsys.readouterr().out.count("## ") == 3
    assert [one.epoch for one in drawn] == [2, 4, 9]
    content = json.loads((tmp_path / "out" / "probe.json").read_text())["checkpoints"]
    assert [one["epoch"] for one in content] == [2, 4, 9]
    assert len({one["lead"]["mean"] for one in content}) == 3
    monkeypatch.undo()
    stage.draw(drawn, tmp_path / "won.png")
    renamed = [one._replace(epoch=None) for one in drawn]
    stage.draw(renamed, tmp_path / "named.svg")
    assert (tmp_path / "won.png").read_bytes().startswith(PNG)
    assert "model_4.pt" in (tmp_path / "named.svg").read_text()


def test_bad_input(exp, corpus, tmp_path, capsys):
    def error(*words):
        assert main(["probe", "--checkpoint", str(exp), "--data", str(corpus), *words]) == 1
        return capsys.readouterr().err

    assert "another architecture" in error("--model_args.hid_dim", "20")
    assert "got '10'" in error("--grid", "10")
    (tmp_path / "wav.scp").write_text("")
    assert "the file is empty" in error("--data", str(tmp_path))
    assert "nowhere" in error("--checkpoint", str(tmp_path / "nowhere"))
    assert "unknown key" in error("--nonsense", "1")
    shutil.copy(exp / "models" / "avg_model.pt", tmp_path / "weights.pt")
    assert "state it with --config" in error("--checkpoint", str(tmp_path / "weights.pt"))
