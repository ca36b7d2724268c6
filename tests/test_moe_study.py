"""The study of experts: degraded speech, the encoder, every comparator and mixture, the tables."""

import copy
import io
import json
import sys

import numpy as np
import pytest
import soundfile
import torch
import yaml
from conftest import ROOT, voice
from test_recipe import bash

from wespeaker_qmargin.cli import main
from wespeaker_qmargin.files import read_table, read_trials
from wespeaker_qmargin.grid import run_cell
from wespeaker_qmargin.study import read_study
from wespeaker_qmargin.upcycle import feed_forwards, replace_feed_forwards

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")
LOCAL = ROOT / "recipes" / "moe" / "local"
sys.path[:0] = [str(LOCAL), str(ROOT / "recipes" / "mini" / "local")]

import degrade  # noqa: E402
import make_encoder  # noqa: E402
import moe_results  # noqa: E402
import moe_study  # noqa: E402

RATE = degrade.RATE


@pytest.fixture(scope="module")
def lists(tmp_path_factory):
    """What prepare_data.py leaves of 12 speakers in two languages: voices, breath, silence."""
    folder = tmp_path_factory.mktemp("study") / "lists"
    for name in ("train", "test/trials", "rirs", "musan", "wav"):
        (folder / name).mkdir(parents=True)
    room = np.zeros(800)
    room[[100, 300, 600]] = 1.0, 0.5, 0.25
    noise = np.random.default_rng(0).standard_normal(16000) / 10
    for name, wav in (("room", room), ("noise", noise)):
        soundfile.write(folder / f"wav/{name}.wav", wav, RATE, subtype="FLOAT")
    keys = [f"cv-{'ab' if s % 2 else 'cd'}-{s:02d}_{take}" for s in range(12) for take in range(2)]
    for key in keys:
        breath = np.geomspace(0.1, 1e-5, 3200) * np.random.default_rng(1).standard_normal(3200)
        wav = np.append(voice(int(key[6:8]), int(key[-1]), seconds=1.6), breath)
        soundfile.write(folder / f"wav/{key}.wav", wav, RATE)
    for part in ("train", "test"):
        scp = "".join(f"{key} {folder}/wav/{key}.wav\n" for key in keys)
        (folder / part / "wav.scp").write_text(scp)
        (folder / part / "utt2spk").write_text("".join(f"{key} {key[:8]}\n" for key in keys))
    for part, name in (("rirs", "room"), ("musan", "noise")):
        (folder / part / "wav.scp").write_text(f"noise-{name} {folder}/wav/{name}.wav\n")
    lines = [
        f"{a} {b} {'target' if a[:8] == b[:8] else 'nontarget'}\n"
        for i, a in enumerate(keys)
        for b in keys[i + 1 :]
    ]
    (folder / "test/trials/cv.trials").write_text("".join(lines))
    return folder


@pytest.fixture(scope="module")
def data(lists):
    out = lists.parent / "data"
    degrade.make(lists, out)
    return out


def test_every_kind_is_what_it_says(lists):
    degrader = degrade.Degrader(lists / "rirs/wav.scp", lists / "musan/wav.scp")
    wav = voice(3, 0, seconds=2.0)
    found = {
        kind: degrader(wav, kind, np.random.default_rng(1)).astype(np.float64)
        for kind in degrade.KINDS
    }
    assert len(found.pop("short")) == 1.5 * RATE
    high = np.fft.rfftfreq(len(wav), 1 / RATE) > 4200
    for kind, degraded in found.items():
        assert len(degraded) == len(wav) and np.abs(degraded).max() <= 1
        power = np.abs(np.fft.rfft(degraded)) ** 2
        assert (power[high].sum() / power.sum() < 1e-4) == (kind != "far"), kind
    like = {kind: np.corrcoef(found["band"], x)[0, 1] for kind, x in found.items()}
    assert 0.98 < like["mulaw"] < 1 and 0.7 < like["opus"] < like["mulaw"], "aligned, not equal"
    assert like["far"] < 0.9


def test_the_codec_has_8_kbit_a_second():
    narrow = degrade.resample(voice(1, 0, seconds=10.0), RATE, degrade.BAND)
    sizes = []
    for part in (narrow[: len(narrow) // 2], narrow):
        file = io.BytesIO()
        how = {"format": "OGG", "subtype": "OPUS", "compression_level": degrade.OPUS_LEVEL}
        soundfile.write(file, part, degrade.BAND, **how)
        sizes.append(8 * len(file.getvalue()))
    assert (sizes[1] - sizes[0]) / 5 == pytest.approx(8000, rel=0.25), "beside the file's header"


def test_noise_is_as_loud_as_asked_for():
    rng = np.random.default_rng(0)
    wav, noise = rng.standard_normal(8000), rng.standard_normal(500)
    heard = degrade.far(wav, np.array([1.0]), noise, 6.0)
    ratio = np.square(wav).mean() / np.square(heard - wav).mean()
    assert 10 * np.log10(ratio) == pytest.approx(6, abs=0.01)


def test_data(data, lists):
    kinds = read_table(data / "train_degraded/utt2kind")
    assert set(kinds.values()) == set(degrade.SEEN), "the codec is in no training utterance"
    assert {key[3:5] for key in kinds} == {"ab"}, "and every second language of the test"
    assert read_table(data / "train_far/utt2kind") == dict.fromkeys(kinds, "far")
    assert read_table(data / "train/wav.scp") == read_table(lists / "train/wav.scp")
    test = read_table(data / "test/wav.scp")
    assert len(test) == 24 * (1 + len(degrade.KINDS))
    lists_of = {path.stem: read_trials(path) for path in (data / "test/trials").iterdir()}
    assert len(lists_of) == 1 + 2 * len(degrade.KINDS)
    clean, both = lists_of["clean"], lists_of["opus_both"]
    assert both.enroll[0] == f"opus-{clean.enroll[0]}" and both.test[5] == f"opus-{clean.test[5]}"
    mixed = lists_of["far_clean"]
    assert mixed.enroll == clean.enroll and mixed.test[0] == f"far-{clean.test[0]}"
    assert (mixed.is_target == clean.is_target).all()
    assert len(read_table(data / "by_language/ab/wav.scp")) == 12
    assert degrade.language("cv-rm-sursilv-6d08f045") == "rm"
    assert degrade.language("ls-0026") == degrade.language("voice") == "unknown"
    assert not degrade.held_out_languages(["ls-0026", "ls-0027"])
    assert set(read_table(data / "by_kind/far/utt2spk")) == set(read_table(lists / "test/wav.scp"))


def test_the_filter_bank_hears_each_band(tmp_path):
    """A tone is loudest in the band that is nearest to it, whatever its phase."""
    make_encoder.make(tmp_path, dim=16, layers=1)
    model = transformers.WavLMModel.from_pretrained(tmp_path).eval()
    first, second = model.feature_extractor.conv_layers
    time = torch.arange(RATE // 2) / RATE
    centres = 2595 * np.log10(1 + np.array([degrade.BAND / 20, 1000, 3000]) / 700)
    ends = [2595 * np.log10(1 + f / 700) for f in (make_encoder.LOW, make_encoder.HIGH)]
    grid = np.linspace(*ends, make_encoder.BANDS)
    for frequency, mel in zip((400, 1000, 3000), centres):
        wave = torch.cos(2 * torch.pi * frequency * time + 0.7)
        bands = second.conv(torch.relu(first.conv(wave[None, None])))[0]
        loudest = bands.mean(dim=1).argmax().item()
        assert abs(grid[loudest] - mel) <= grid[1] - grid[0]


@pytest.mark.parametrize("name", ["ParallelAdapter", "LowRank", "QualityLowRank"])
def test_a_comparator_is_the_module_itself_at_first(name, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(LOCAL))
    make_encoder.make(tmp_path, dim=16, layers=2)
    dense = transformers.WavLMModel.from_pretrained(tmp_path).eval()
    other = copy.deepcopy(dense)
    options = {"hidden": 8} if name == "ParallelAdapter" else {"r": 2}
    names = replace_feed_forwards(other, module=f"study_ffn:{name}", **options)
    assert names == [slot.name for slot in feed_forwards(dense)]
    wavs = torch.randn(2, 8000)
    with torch.no_grad():
        torch.testing.assert_close(other(wavs)[0], dense(wavs)[0])
    kept = {key.replace(".base_layer", "") for key in other.state_dict()}
    assert dense.state_dict().keys() <= kept, "a dense checkpoint fits"
    for key, parameter in other.named_parameters():
        if "up" in key or "lora_B" in key or "adapter.2" in key:
            torch.nn.init.normal_(parameter)
    with torch.no_grad():
        assert (other(wavs)[0] - dense(wavs)[0]).abs().max() > 1e-3
    with pytest.raises(ValueError, match="feed_forward: study_ffn.*'size'"):
        replace_feed_forwards(copy.deepcopy(dense), module=f"study_ffn:{name}", size=3)


@pytest.fixture
def work(data, lists, tmp_path, monkeypatch):
    """A study of a minute: a narrow encoder, one epoch, few rates."""
    monkeypatch.syspath_prepend(str(LOCAL))
    small = {"DIM": 16, "HIDDEN": 64, "LAYERS": 2, "EPOCHS": 1, "BASE_EPOCHS": 1, "HEAD_EPOCHS": 0}
    small |= {"FAR_EPOCHS": 1, "FAR_CELLS": ("full", "experts_n1k1")}
    for name, value in {**small, "RATES": (1e-3,), "SEEDS": [0, 1]}.items():
        monkeypatch.setattr(moe_study, name, value)
    make_encoder.make(tmp_path / "encoder", dim=16, layers=2)
    (tmp_path / "data").symlink_to(data)
    (tmp_path / "lists").symlink_to(lists)
    return tmp_path


SMALL = {
    **{"num_avg": 1, "log_batch_interval": 1, "dataloader_args": {"batch_size": 8}},
    "dataset_args": {"num_frms": 60, "filter": False, "aug_prob": 0.0},
    "model_args": {"head_nb": 2, "embed_dim": 16, "compression_dim": 8},
}


def run_part(work, part: str) -> None:
    content = moe_study.study(work, part)
    common = content["common"]
    common |= {k: v for k, v in SMALL.items() if k != "dataset_args"}
    common["dataset_args"] |= SMALL["dataset_args"]
    for cell in content["cells"].values():
        if "valid_speakers" in cell:
            cell["valid_speakers"] = 4
    (work / f"{part}.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    found = read_study(work / f"{part}.yaml")
    for cell in found.cells:  # in this process: each of them would take longer to start
        run_cell(found, cell)


def tuned(work):
    path = work / "tune.yaml"
    path.write_text(yaml.safe_dump(moe_study.study(work, "tune"), sort_keys=False))
    return path


def analyse_run(work, name: str, seed: int) -> None:
    """What stage 4 does with a run."""
    run, start = work / f"adapt/{name}/seed_{seed}", "experts" if "from_start" in name else "dense"
    for part, out in (("by_kind", run), ("by_language", run / "languages")):
        sets = [f"{folder.name}={folder}" for folder in sorted((work / "data" / part).iterdir())]
        words = ["--exp_dir", run, "--from", work / f"base/{start}/seed_{seed}", "--out", out]
        options = ["--sample", 3, "--drop", 1, "--data", *sets]
        assert main(["experts", *map(str, [*words, *options])]) == 0


@pytest.mark.recipe
def test_the_whole_study_in_miniature(work, caplog):
    """Every cell is adapted from the dense network, or its own, and is in the tables."""
    for name in list(moe_study.adapted()):
        folder = work / f"tune/{name}_lr0.001/seed_0"
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text(3 * (json.dumps({"valid_eer": 0.1}) + "\n"))
    run_part(work, "base")
    run_part(work, "adapt")
    run_part(work, "far")
    for name in moe_study.adapted():
        report = json.loads((work / f"adapt/{name}/seed_1/transfer.json").read_text())
        start = "experts" if name == "experts_from_start" else "dense"
        assert f"base/{start}/seed_1" in report["checkpoint"]
        assert not report["dropped"] and not report["mismatched"]
        allowed = ("router", "adapter", "lora", "updates", "quality")
        assert all(any(x in key for x in allowed) for key in report["new"]), name
    assert [x.name for x in read_study(tuned(work)).cells] == [
        f"{name}_lr0.001" for name in moe_study.adapted()
    ]
    looked_at = {"full": 1, "wide": 1, "lora": 1, "experts_n3k2": 2, "experts_from_start": 2}
    for name in looked_at:
        for seed in (0, 1):
            analyse_run(work, name, seed)
    assert "before and after are not the same ones" in caplog.text, "of LoRA there is no drift"
    (work / "adapt/lora/seed_0/experts.json").unlink()  # of a seed without it no row is made
    text = moe_results.write(work, replicates=20).read_text()
    rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")]
    for name in moe_study.adapted():
        told = looked_at[name] if name in looked_at and name != "lora" else 0
        far = 3 if name in moe_study.FAR_CELLS else 0
        assert rows.count(name) == 3 + told + far, name
    assert rows.count("not adapted") == rows.count("experts, not adapted") == 4
    assert "nan" not in text
    assert (work / "adapt.svg").read_text().count("experts_n3k2 - full") == 1
    assert (work / "far.svg").read_text().count("experts_n1k1 - full") == 1


def test_help_and_bad_stages(tmp_path, monkeypatch):
    script = ROOT / "recipes/moe/run_study.sh"
    done = bash(script, "--help")
    assert done.returncode == 0 and "experts" in done.stdout
    assert bash(script, "--stgae", "1").returncode != 0
    monkeypatch.setattr(sys, "argv", ["moe_study.py", str(tmp_path), "adapt"])
    with pytest.raises(SystemExit, match="the parts before this one must be finished"):
        moe_study.main()
