"""The VoxCeleb recipes themselves, every stage, with tiny networks on a few real speakers."""

import csv
import json
import shutil
import sys

import pytest
import torch
import yaml
from conftest import ROOT, find_minivox
from fake_voxceleb import (
    minivox_voices,
    synthetic_voices,
    utterances,
    wav_bytes,
    write_archives,
)
from test_recipe import bash

from wespeaker_qmargin import adapter
from wespeaker_qmargin.checkpoints import read_checkpoint
from wespeaker_qmargin.config import load_config, save_config
from wespeaker_qmargin.extract import extract_experiment
from wespeaker_qmargin.metrics import evaluate
from wespeaker_qmargin.model import SpeakerNet, full_state, load_checkpoint
from wespeaker_qmargin.score import score_files
from wespeaker_qmargin.upstream import wespeaker_module

RECIPES = ROOT / "recipes" / "voxceleb"
SCRIPTS = ("run.sh", "run_wavlm.sh", "run_w2vbert.sh", "run_ablation.sh")
TINY = ROOT / "conf" / "tiny"
SMALL = ["--gpus", "cpu", "--num_workers", "0", "--bootstrap", "20", "--top_n", "50"]

sys.path[:0] = [str(RECIPES / "local"), str(ROOT / "tools")]

import collect_ablation  # noqa: E402
import export_model  # noqa: E402

make_tiny_encoder = pytest.importorskip("make_tiny_encoder")


def run(script: str, *words, **environment):
    return bash(RECIPES / script, *words, **environment)


def succeed(script: str, *words):
    done = run(script, *words)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """(data, downloads): archives in their own layout, VoxCeleb2 as if it were converted.

    The voices are minivox's, or where that is not, synthetic ones.
    """
    folder = tmp_path_factory.mktemp("voxceleb recipe")  # a space in the path
    minivox, sizes = find_minivox(), {"dev": 20, "test": 30, "vox2": 20, "takes": 6}
    voices = minivox_voices(minivox, **sizes) if minivox else synthetic_voices(**sizes)
    write_archives(folder / "downloads", voices, ffmpeg=None)
    for key, wav in utterances("vox2_dev", voices["vox2_dev"]).items():
        path = folder / "data" / "raw_data" / "voxceleb2_wav" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(wav_bytes(wav))
    return folder / "data", folder / "downloads"


def options(corpus) -> list:
    data, downloads = corpus
    return [
        *("--data", data, "--download_dir", downloads, "--prepare_args", "--expect none --jobs 1"),
        *SMALL,
    ]


@pytest.fixture(scope="module")
def resnet(corpus, tmp_path_factory):
    """The folder of a ResNet's experiment, after all stages."""
    exp = tmp_path_factory.mktemp("resnet34") / "exp"
    words = ["--config", TINY / "resnet34.yaml", "--exp_dir", exp, "--stage", 1, "--stop_stage", 9]
    succeed("run.sh", *options(corpus), *words)
    return exp


def check_files(exp, *, lists: str, train_set: str = "vox2_dev") -> None:
    eval_set = "vox1" if "E" in lists else "vox1_test"
    names = ["config.yaml", "run.json", "speakers.txt", "train.log", "metrics.jsonl", "report.html"]
    names += ["models/avg_model.pt", "results.md", "scores/results.json", "scores/results.txt"]
    names += [f"embeddings/{part}/xvector.scp" for part in (train_set, eval_set)]
    names += [f"export/{name}" for name in ("avg_model.pt", "config.yaml", "speakers.txt")]
    for name in lists:
        names += [f"scores/{s}vox1_{name}.trials.score" for s in ("", f"{train_set}_asnorm50_")]
    assert [name for name in names if not (exp / name).is_file()] == []
    results = json.loads((exp / "scores" / "results.json").read_text())
    assert len(results["results"]) == 2 * len(lists) and "0.001" in results["results"][0]["fnr_at"]


def check_loss_falls(exp) -> None:
    records = map(json.loads, (exp / "metrics.jsonl").read_text().splitlines())
    losses = [record["loss"] for record in records if "loss" in record]
    assert losses[-1] < losses[0]


def trained_eer(exp) -> float:
    results = json.loads((exp / "scores" / "results.json").read_text())["results"]
    return next(result["eer"] for result in results if result["name"] == "vox1_O.trials")


def untrained_eer(exp, data) -> float:
    """Of the same network before its first step; the mean is that of the test utterances."""
    options = {"data_type": "kaldi", "data": str(data / "vox1_test"), "device": "cpu"}
    scp = extract_experiment(exp, which="untrained", out_dir=exp / "untrained", **options)
    trials = [data / "trials" / "vox1_O.trials"]
    scores = score_files(scp, trials, out=exp / "untrained", mean=scp)
    return evaluate(scores, replicates=0)["results"][0]["eer"]


# --- the recipes, from the first to the last stage -----------------------------------------------


@pytest.mark.recipe
def test_resnet34(resnet, corpus):
    untrained = untrained_eer(resnet, corpus[0])
    for exp in (resnet, resnet.with_name("exp_lm_resnet34")):
        check_files(exp, lists="OEH")
        check_loss_falls(exp)
        assert trained_eer(exp) < untrained - 0.04
    before, after = (
        read_checkpoint(exp / "models" / "avg_model.pt")["projection.weight"]
        for exp in (resnet, resnet.with_name("exp_lm_resnet34"))
    )
    assert torch.cosine_similarity(before, after).mean() > 0.8, "prototypes are kept"


@pytest.mark.recipe
def test_what_is_finished_is_skipped(resnet, corpus):
    model = resnet / "models" / "avg_model.pt"
    before = model.stat().st_mtime_ns
    words = ["--config", TINY / "resnet34.yaml", "--exp_dir", resnet, "--stage", 1]
    again = succeed("run.sh", *options(corpus), *words, "--stop_stage", 4)
    assert again.stderr.count("done before") == 4
    assert model.stat().st_mtime_ns == before


@pytest.mark.recipe
def test_wavlm(resnet, corpus, tmp_path):
    make_tiny_encoder.make_wavlm(tmp_path / "wavlm", dim=64, conv_dim=16)
    exp = tmp_path / "exp"
    words = ["--config", TINY / "wavlm_mhfa.yaml", "--exp_dir", exp, "--trials", "O"]
    words += ["--encoder", tmp_path / "wavlm", "--stage", 1, "--stop_stage", 9]
    succeed("run_wavlm.sh", *options(corpus), *words)
    untrained = untrained_eer(exp, corpus[0])
    for folder in (exp, tmp_path / "exp_continued_wavlm_mhfa"):
        check_files(folder, lists="O")
        check_loss_falls(folder)
        assert trained_eer(folder) < untrained - 0.03


@pytest.mark.recipe
def test_w2vbert_low_rank_then_whole_then_large_margin(resnet, corpus, tmp_path):
    make_tiny_encoder.make_w2vbert(tmp_path / "w2vbert", dim=64)
    exp, lora = tmp_path / "exp", tmp_path / "lora"
    words = ["--config", TINY / "w2vbert_mfa.yaml", "--exp_dir", exp, "--trials", "O"]
    words += ["--lora_config", TINY / "w2vbert_lora.yaml", "--lora_dir", lora]
    words += ["--encoder", tmp_path / "w2vbert", "--stage", 1, "--stop_stage", 9]
    succeed("run_w2vbert.sh", *options(corpus), *words)
    check_loss_falls(lora)
    assert any("lora_" in key for key in read_checkpoint(lora / "models" / "avg_model.pt"))
    assert not any("lora_" in key for key in read_checkpoint(lora / "export" / "avg_model.pt"))
    untrained = untrained_eer(exp, corpus[0])
    for folder in (exp, tmp_path / "exp_lm_w2vbert_mfa"):
        check_files(folder, lists="O")
        check_loss_falls(folder)
        assert trained_eer(folder) < untrained - 0.01
    config = load_config(exp / "config.yaml", check_paths=False)
    assert config.model_init == str(lora / "export" / "avg_model.pt"), "prototypes are new"
    check_merged(lora)


def check_merged(exp) -> None:
    """The exported network, without LoRA, is the one that was trained."""
    wav = 0.1 * torch.randn(1, 16000, generator=torch.Generator().manual_seed(0))
    embeddings = []
    for folder, name in ((exp, "models/avg_model.pt"), (exp / "export", "avg_model.pt")):
        net = SpeakerNet(load_config(folder / "config.yaml", check_paths=False))
        load_checkpoint(net, folder / name, head=False)
        embeddings.append(net.eval().embed(wav).detach())
    torch.testing.assert_close(*embeddings, rtol=1e-4, atol=1e-5)


@pytest.mark.recipe
def test_ablation_as_an_array_job(resnet, corpus, tmp_path):
    exp, (data, _) = tmp_path / "grid", corpus
    words = [*options(corpus), "--config", TINY / "resnet34.yaml", "--exp_dir", exp]
    words += ["--scales", "10 20", "--margins", "0.1", "--alphas", "1 1.5", "--data_type", "raw"]
    words += ["--train_args", "--num_epochs 30"]
    succeed("run_ablation.sh", *words, "--stage", 1, "--stop_stage", 3, "--task", 3)
    jobs = [line.split() for line in (exp / "jobs.txt").read_text().splitlines()]
    assert [job[2:] for job in jobs] == [
        [alpha, scale, "0.1"] for alpha in ("1", "1.5") for scale in ("10", "20")
    ]
    finished = [(exp / job[1] / ".measured").is_file() for job in jobs]
    assert finished == [False, False, True, False]
    done = succeed("run_ablation.sh", *words, "--stage", 3, "--stop_stage", 4)
    assert done.stderr.count("done before") == 1
    untrained = untrained_eer(exp / jobs[0][1], data)
    for _, folder, alpha, scale, margin in jobs:
        config = load_config(exp / folder / "config.yaml", check_paths=False)
        assert config.projection_args["project_type"] == "q_margin"
        values = (config.projection_args[key] for key in ("alpha", "scale"))
        assert (*values, config.margin_update["final_margin"]) == (
            float(alpha),
            float(scale),
            float(margin),
        )
        assert config.train_data == f"{data}/vox1_dev/raw.list"
        check_loss_falls(exp / folder)
        assert trained_eer(exp / folder) < untrained - 0.03
    with open(exp / "ablation.csv", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [float(row["eer"]) for row in rows] == [
        pytest.approx(trained_eer(exp / job[1]), rel=1e-5) for job in jobs
    ]
    assert all(float(row["fnr_asnorm"]) > 0 for row in rows)
    assert done.stdout.count("\n| ") >= 5
    for name in ("eer", "fnr", "eer_asnorm", "fnr_asnorm"):
        assert "<svg" in (exp / f"{name}.svg").read_text()


# --- what is refused, and how --------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS)
def test_without_words_the_stages_are_printed(script):
    done = run(script)
    assert done.returncode == 0 and done.stdout == run(script, "--help").stdout
    assert "  1  data" in done.stdout and "--train_args" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--stage", "10"], "no stage 10: they are 1 to 9"),
        (["--stage", "0"], "no stage 0"),
        (["--stop_stage", "all"], "no stage all"),
        (["--stag", "1"], "unknown option --stag"),
        (["--config", "nothing.yaml"], "--config nothing.yaml: no such file"),
        (["--stage", "9", "--stop_stage", "9", "--ft_config", "no.yaml"], "--ft_config no.yaml"),
        (["--train_set", "vox3_dev"], "expected vox2_dev or vox1_dev"),
        (["--trials", "O X"], "--trials X: expected some of O E H"),
        (["--data_type", "feat"], "expected shard or raw"),
        (
            ["--train_set", "vox1_dev", "--trials", "O E"],
            "speakers of Vox1-E are those of vox1_dev",
        ),
        (["--train_set", "vox1_dev", "--trials", "H"], "which this system was trained on"),
        (["--node_rank", "2", "--nnodes", "2"], "expected less than 2"),
        (["--node_rank", "1", "--nnodes", "2", "--stage", "1"], "node 1 only trains"),
    ],
)
def test_options_that_make_no_sense(words, message, tmp_path):
    done = run("run.sh", "--stage", "1", "--data", tmp_path / "data", *words)
    assert done.returncode != 0 and message in done.stderr
    assert not (tmp_path / "data").exists()


def test_the_ablation_has_four_stages_and_as_many_jobs_as_cells():
    done = run("run_ablation.sh", "--stage", "5")
    assert done.returncode != 0 and "they are 1 to 4" in done.stderr
    done = run("run_ablation.sh", "--stage", "3", "--task", "49")
    assert done.returncode != 0 and "jobs 1 to 48" in done.stderr


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (2, "vox2_dev/wav.scp: no such file; stage 1 writes it"),
        (3, "vox2_dev/shard.list: no such file; stage 2 writes it"),
        (4, "holds no finished training; stage 3 trains"),
        (9, "which stage 4 writes"),
    ],
)
def test_a_stage_before_its_time(stage, message, tmp_path):
    words = ["--data", tmp_path, "--exp_dir", tmp_path / "exp", "--config", TINY / "resnet34.yaml"]
    done = run("run.sh", *words, *SMALL, "--stage", stage, "--stop_stage", stage)
    assert done.returncode != 0 and message in done.stderr


def test_a_config_without_its_base_is_told_before_any_data_is_prepared(tmp_path):
    (tmp_path / "run.yaml").write_text("base: gone.yaml\n")
    words = ["--config", tmp_path / "run.yaml", "--data", tmp_path / "data"]
    done = run("run.sh", *words, "--stage", 1, "--stop_stage", 3)
    assert done.returncode != 0 and f"{tmp_path}/gone.yaml: no such config file" in done.stderr
    assert not (tmp_path / "data").exists()


@pytest.mark.recipe
def test_downloads_that_are_not_there(corpus, tmp_path):
    downloads = tmp_path / "downloads"
    shutil.copytree(corpus[1], downloads)
    (downloads / "veri_test2.txt").unlink()
    words = ["--data", tmp_path / "data", "--download_dir", downloads, "--trials", "O"]
    done = run("run.sh", *words, "--train_set", "vox1_dev", "--stage", 1, "--stop_stage", 2)
    assert done.returncode != 0 and "veri_test2.txt" in done.stderr
    assert "downloads.py" in done.stderr


@pytest.mark.recipe
def test_an_encoder_of_the_hub_without_network(resnet, corpus, tmp_path):
    words = [*options(corpus), "--config", TINY / "wavlm_mhfa.yaml", "--exp_dir", tmp_path / "exp"]
    words += ["--encoder", "microsoft/wavlm-base-plus", "--stage", 2, "--stop_stage", 4]
    done = run("run_wavlm.sh", *words, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "hub"))
    assert done.returncode != 0 and "stage 4" not in done.stderr
    assert "hf download microsoft/wavlm-base-plus" in done.stderr
    assert (corpus[0] / "vox2_dev" / "shard.list").is_file(), "what was finished is kept"


# --- several processes ---------------------------------------------------------------------------


@pytest.fixture
def torchrun(tmp_path, monkeypatch):
    """Stand-ins that write down how they are called; returns the file."""
    calls = tmp_path / "calls"
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "torchrun"
    script.write_text(f'#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES $*" >> "{calls}"\n')
    script.chmod(0o755)
    for name in ("vox2_dev/shard.list", "exp/models/avg_model.pt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return calls


def call_train(tmp_path, *words):
    code = f'PATH="{tmp_path}/bin:$PATH"; bash "$@"'
    words = [
        *("--config", TINY / "resnet34.yaml", "--data", tmp_path, "--exp_dir", tmp_path / "exp"),
        *words,
    ]
    return bash("-c", code, "bash", RECIPES / "run.sh", *words, *("--stage", 3, "--stop_stage", 3))


def test_a_process_a_gpu(torchrun, tmp_path):
    assert call_train(tmp_path, "--gpus", "[0, 2]").returncode == 0
    called = torchrun.read_text()
    assert called.startswith("0,2 --standalone --nproc_per_node 2 -m wespeaker_qmargin.cli train ")
    assert f"--train_data {tmp_path}/vox2_dev/shard.list" in called
    assert (tmp_path / "exp" / ".trained").is_file()


def test_several_nodes(torchrun, tmp_path):
    nodes = ["--nnodes", "2", "--master", "host:1234", "--gpus", "[0,1]", "--node_rank"]
    done = call_train(tmp_path, *nodes, "1")
    assert done.returncode == 0 and "node 1 is done" in done.stderr
    assert not (tmp_path / "exp" / ".trained").exists(), "node 0 says so"
    assert call_train(tmp_path, *nodes, "0").returncode == 0
    second, first = torchrun.read_text().splitlines()
    where = "--nnodes 2 --node_rank {} --master_addr host --master_port 1234 --nproc_per_node 2"
    assert where.format(0) in first and where.format(1) in second


# --- exported models -----------------------------------------------------------------------------


def export(run: str, state: dict, folder):
    """Export a model with these tensors as if the run had trained it; return its config, too."""
    exp = folder / "exp"
    save_config(load_config(ROOT / "conf" / "voxceleb" / f"{run}.yaml"), exp / "config.yaml")
    (exp / "speakers.txt").write_text("a\nb\nc\n")
    (exp / "models").mkdir()
    torch.save(state, exp / "models" / "avg_model.pt")
    out = export_model.export_model(exp, folder / "out")
    assert (out / "speakers.txt").read_text() == "a\nb\nc\n"
    return out, yaml.safe_load((out / "config.yaml").read_text())


def test_wespeaker_loads_an_exported_model(tmp_path):
    run = "resnet34/qmargin_a150_m02"
    torch.manual_seed(0)
    net = SpeakerNet(load_config(ROOT / "conf" / "voxceleb" / f"{run}.yaml"), 3).eval()
    folder, content = export(run, full_state(net), tmp_path)
    # what its load_model does
    model = wespeaker_module("models.speaker_model").get_speaker_model(content["model"])
    model = model(**content["model_args"])
    wespeaker_module("utils.checkpoint").load_checkpoint(model, str(folder / "avg_model.pt"))
    frames = torch.randn(2, 120, 80)
    torch.testing.assert_close(model.eval()(frames)[-1], net.backbone(frames)[-1])


def test_what_only_training_needs_is_not_exported(tmp_path):
    _, content = export("w2vbert_mfa/qmargin_a150", {"x": torch.zeros(1)}, tmp_path)
    options = content["dataset_args"]["w2vbert_args"]
    assert set(options) == {"model_name", "frozen", "use_lora"}  # WeSpeaker's front-end has these
    backbone = adapter.get_speaker_model(content["model"])
    with torch.device("meta"):
        assert backbone(**content["model_args"]).n_mfa_layers == 25


def test_nothing_to_export(tmp_path):
    with pytest.raises(FileNotFoundError, match="config.yaml"):
        export_model.export_model(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- the table of the ablation -------------------------------------------------------------------


def write_grid(folder, eers: dict) -> None:
    """Jobs with these (alpha, scale, margin) -> EER; None is not finished."""
    lines = []
    for number, ((alpha, scale, margin), eer) in enumerate(eers.items(), 1):
        name = f"job{number}"
        lines.append(f"{number} {name} {alpha} {scale} {margin}\n")
        if eer is None:
            continue
        results = [
            {"name": name, "eer": x, "min_dcf": 0.3, "fnr_at": {"0.001": {"fnr": 4 * x}}}
            for name, x in (("vox1_O.trials", eer), ("vox1_dev_asnorm300_vox1_O.trials", eer / 2))
        ]
        (folder / name / "scores").mkdir(parents=True)
        (folder / name / "scores" / "results.json").write_text(json.dumps({"results": results}))
        (folder / name / ".measured").touch()
    (folder / "jobs.txt").write_text("".join(lines))


def test_the_table_has_every_job(tmp_path):
    eers = {(a, s, 0.1): 0.02 * a + s / 1000 for a in (1, 1.5) for s in (5, 10)}
    eers[1.5, 10, 0.1] = None
    write_grid(tmp_path, eers)
    assert collect_ablation.collect(tmp_path) == tmp_path / "ablation.md"
    rows = [line.split(" | ") for line in (tmp_path / "ablation.md").read_text().splitlines()]
    assert rows[2][:6] == ["| 1", "5", "0.1", "2.50", "0.300", "10.00"]
    assert rows[2][6] == "1.25" and rows[5][3:5] == ["-", "-"]
    with open(tmp_path / "ablation.csv", newline="") as stream:
        found = list(csv.DictReader(stream))
    assert [row["eer"] for row in found] == ["0.025", "0.03", "0.035", ""]
    assert [row["fnr_asnorm"] for row in found] == ["0.05", "0.06", "0.07", ""]


def test_heat_maps_show_every_number(tmp_path):
    write_grid(tmp_path, {(1.25, 20, 0.1): 0.0248, (1, 10, 0.1): 0.2912, (1, 20, 0.1): None})
    collect_ablation.collect(tmp_path)
    text = (tmp_path / "eer.svg").read_text()
    for word in ("EER, % (cosine)", "scale 20", "alpha", ">2.48<", ">29.1<"):
        assert word in text, word
    assert ">9.92<" in (tmp_path / "fnr.svg").read_text()
    assert "AS-Norm" in (tmp_path / "fnr_asnorm.svg").read_text()


def test_a_grid_that_cannot_be_collected(tmp_path):
    with pytest.raises(FileNotFoundError, match="jobs.txt"):
        collect_ablation.collect(tmp_path)
    write_grid(tmp_path, {(1, 5, 0.1): None})
    with pytest.raises(ValueError, match="none of its 1 jobs is finished; stage 3"):
        collect_ablation.collect(tmp_path)
    (tmp_path / "jobs.txt").write_text("1 job1 one 5 0.1\n")
    with pytest.raises(ValueError, match=r"jobs.txt:1: expected number"):
        collect_ablation.collect(tmp_path)
