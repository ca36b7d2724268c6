"""Fine-tuning: what it is configured with, its two stages, freezing, resuming, the command."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
import yaml

from wespeaker_qmargin import finetune as stage
from wespeaker_qmargin.checkpoints import average_epochs, read_checkpoint
from wespeaker_qmargin.cli import main
from wespeaker_qmargin.config import load_config
from wespeaker_qmargin.finetune import finetune, finetune_config, head_args
from wespeaker_qmargin.train import train
from wespeaker_qmargin.transfer import find_source

_TRAINED = []


@pytest.fixture
def source_dir(tiny, tmp_path_factory):
    """An exp_dir that CosFace trained on the speakers s0 ... s9, made once."""
    if not _TRAINED:
        exp = tmp_path_factory.mktemp("source") / "exp"
        words = ["--exp_dir", str(exp), "--valid_speakers", "0", "--num_epochs", "3"]
        words += ["--projection_args", "{project_type: add_margin, scale: 32.0}"]
        train(load_config(tiny, words))
        average_epochs(exp, 2)
        _TRAINED.append(exp)
    return _TRAINED[0]


@pytest.fixture
def data(corpus, tmp_path):
    """A Kaldi folder: speakers s6 ... s9 under their names, s0 ... s5 as t0 ... t5."""
    folder = tmp_path / "data"
    folder.mkdir()
    shutil.copy(corpus / "wav.scp", folder)
    lines = (line.split() for line in (corpus / "utt2spk").read_text().splitlines())
    names = [(key, spk if spk >= "s6" else spk.replace("s", "t")) for key, spk in lines]
    (folder / "utt2spk").write_text("".join(f"{key} {spk}\n" for key, spk in names))
    return folder


@pytest.fixture
def config(source_dir, data, tmp_path):
    keys = {"exp_dir": str(tmp_path / "tuned"), "train_data": str(data), "data_type": "kaldi"}
    words = ["--num_epochs", "2", "--scheduler_args.initial_lr", "1e-2"]
    return finetune_config(find_source(source_dir), overrides=words, **keys)


def test_what_is_inherited_and_what_wins(source_dir, data, tmp_path):
    source = find_source(source_dir)
    keys = {"exp_dir": str(tmp_path / "tuned"), "train_data": str(data), "data_type": "kaldi"}
    plain = finetune_config(source, **keys)
    before = load_config(source_dir / "config.yaml")
    for key in ("model", "model_args", "dataset_args", "dataloader_args", "optimizer_args"):
        assert getattr(plain, key) == getattr(before, key), key
    assert plain.projection_args == {"project_type": "q_margin"}
    assert plain.scheduler_args["initial_lr"] == 1e-4 and plain.scheduler_args["final_lr"] == 5e-5
    assert plain.margin_update["initial_margin"] == plain.margin_update["final_margin"] == 0.2
    assert plain.lr_ratio == {"projection": 5.0} and plain.num_epochs == 10
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        "num_epochs: 4\nmargin_update: {final_margin: 0.3}\nlr_ratio: {projection: 2}\n"
    )
    tuned = finetune_config(
        source,
        config=mine,
        head=head_args(alpha=2.0),
        overrides=["--num_epochs", "6", "--model_args.embed_dim", "16"],
        **keys,
    )
    assert tuned.num_epochs == 6 and tuned.margin_update["final_margin"] == 0.3
    assert tuned.lr_ratio == {"projection": 2}
    assert tuned.projection_args == {"project_type": "q_margin", "alpha": 2.0}
    words = ["--projection_args.alpha", "1.25"]
    assert finetune_config(source, overrides=words, **keys).projection_args["alpha"] == 1.25
    both = finetune_config(source, config=mine, margin=0.1, **keys)
    assert both.margin_update["initial_margin"] == both.margin_update["final_margin"] == 0.1


def test_a_released_folder_of_wespeakers(source_dir, data, tmp_path):
    """Its config.yaml as upstream's trainer saves it: keys of another run and another machine."""
    folder = tmp_path / "released"
    folder.mkdir()
    shutil.copy(source_dir / "models" / "avg_model.pt", folder)
    saved = yaml.safe_load((source_dir / "config.yaml").read_text())
    for key in ("device", "amp_dtype", "accum_steps", "valid_speakers", "save_state_interval"):
        del saved[key]
    saved |= {"train_data": "/nowhere/raw.list", "noise_data": "/nowhere/musan", "do_lm": True}
    saved |= {"data_type": "shard", "gpus": "[0,1]", "wandb_project": "somebody's"}
    saved["projection_args"] |= {"embed_dim": 16, "num_class": 10, "easy_margin": False}
    saved["optimizer_args"]["lr"] = 0.1
    saved["scheduler_args"] |= {"num_epochs": 150, "epoch_iter": 17062, "scale_ratio": 4.0}
    saved["margin_update"]["epoch_iter"] = 17062
    (folder / "config.yaml").write_text(yaml.safe_dump(saved))
    keys = {"exp_dir": str(tmp_path / "tuned"), "train_data": str(data), "data_type": "kaldi"}
    config = finetune_config(find_source(folder), **keys)
    assert config.noise_data is None and not config.do_lm and config.gpus is None
    assert not config.dataset_args.speed_perturb, "its last stage did not"
    report = finetune(config, find_source(folder), prototype_epochs=0)[1]
    assert report.rows_from_means == 10 and not report.dropped


def test_weights_without_a_config(source_dir, data, tmp_path, tiny):
    weights = tmp_path / "weights.pt"
    shutil.copy(source_dir / "models" / "avg_model.pt", weights)
    keys = {"exp_dir": str(tmp_path / "tuned"), "train_data": str(data), "data_type": "kaldi"}
    tiny.rename(tmp_path / "stated.yaml")
    with pytest.raises(ValueError, match=r"weights.pt: there is no config.yaml .*--config YAML"):
        finetune_config(find_source(weights), **keys)
    stated = ["--num_epochs", "1", "--valid_speakers", "0"]
    config = finetune_config(
        find_source(weights), config=tmp_path / "stated.yaml", overrides=stated, **keys
    )
    assert finetune(config, find_source(weights))[1].rows_from_means == 10


def test_a_stated_model_leaves_the_sources_config_unread(source_dir, data, tmp_path, tiny):
    keys = {"exp_dir": str(tmp_path / "tuned"), "train_data": str(data), "data_type": "kaldi"}
    config = finetune_config(find_source(source_dir), config=tiny, **keys)
    assert config.dataset_args == load_config(tiny).dataset_args
    assert config.projection_args == {"project_type": "q_margin", "alpha": 1.5}


def test_heads():
    assert head_args() is None
    assert head_args(scale="auto") == {"project_type": "q_margin", "scale": "auto"}
    assert head_args(like="cosface") == {"project_type": "add_margin", "scale": 32.0}
    assert head_args(like="cosface", scale=20.0)["scale"] == 20.0
    assert head_args(like="aam")["project_type"] == "arc_margin"
    with pytest.raises(ValueError, match="without --alpha"):
        head_args(like="cosface", alpha=1.5)
    with pytest.raises(ValueError, match="expected cosface.*'arcface'"):
        head_args(like="arcface")


def test_first_the_prototypes_and_then_everything(config, source_dir):
    exp_dir, report = finetune(config, find_source(source_dir), prototype_epochs=2)
    start = read_checkpoint(exp_dir / "init.pt")
    first = read_checkpoint(exp_dir / "prototypes" / "models" / "model_2.pt")
    last = read_checkpoint(exp_dir / "models" / "model_2.pt")
    body = [key for key in start if key != "projection.weight"]
    assert any("running_mean" in key for key in body)
    for key in body:
        assert torch.equal(first[key], start[key]), f"{key}: a frozen backbone does not drift"
    assert not torch.equal(first["projection.weight"], start["projection.weight"])
    kept = [key for key in body if torch.equal(last[key], first[key])]
    assert all(key.endswith(".bias") for key in kept), (
        "one in front of a batch norm has no gradient"
    )
    trained = read_checkpoint(find_source(source_dir).checkpoint)
    assert all(torch.equal(start[key], trained[key]) for key in body)
    assert (report.rows_by_name, report.rows_from_means) == (4, 6)
    assert json.loads((exp_dir / "transfer.json").read_text())["rows_by_name"] == 4
    saved = load_config(exp_dir / "prototypes" / "config.yaml")
    assert saved.scheduler_args["initial_lr"] == saved.scheduler_args["final_lr"] == 0.1
    assert load_config(exp_dir / "config.yaml").lr_ratio == {"projection": 5.0}
    names = (exp_dir / "speakers.txt").read_text().split()
    assert names == (exp_dir / "prototypes" / "speakers.txt").read_text().split()


def test_interrupted_and_resumed_equals_straight(config, source_dir, tmp_path, monkeypatch):
    source = find_source(source_dir)
    straight = finetune(config, source)[0]
    broken = stage.dataclasses.replace(config, exp_dir=str(tmp_path / "broken"))
    for failing in (1, 2):  # while the prototypes are trained, and after that

        def interrupted(config, *, resume_run, failing=failing):
            if (config.exp_dir == broken.exp_dir) == (failing == 2):
                raise KeyboardInterrupt
            return train(config, resume_run=resume_run)

        monkeypatch.setattr(stage, "train", interrupted)
        with pytest.raises(KeyboardInterrupt):
            finetune(broken, source, resume_run=True)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="holds a fine-tuning of .*--resume"):
        finetune(broken, source)
    resumed = finetune(broken, source, resume_run=True)[0]
    one, two = (read_checkpoint(exp / "models" / "model_2.pt") for exp in (straight, resumed))
    assert all(torch.equal(one[key], two[key]) for key in one)
    other = source._replace(checkpoint=source_dir / "models" / "model_3.pt")
    with pytest.raises(ValueError, match="began with .*avg_model.pt, now it is .*model_3.pt"):
        finetune(broken, other, resume_run=True)


def test_a_refused_checkpoint_leaves_nothing(config, source_dir, tmp_path, tiny):
    (tmp_path / "half.pt").write_bytes(find_source(source_dir).checkpoint.read_bytes()[:9000])
    with pytest.raises(ValueError, match=r"half\.pt: not a checkpoint"):
        finetune(config, find_source(source_dir)._replace(checkpoint=tmp_path / "half.pt"))
    assert not (tmp_path / "tuned").exists()
    there = stage.dataclasses.replace(config, exp_dir=str(source_dir))
    with pytest.raises(ValueError, match="holds a run that is no fine-tuning"):
        finetune(there, find_source(source_dir), resume_run=True)
    assert not (source_dir / "init.pt").exists()
    with pytest.raises(ValueError, match="prototype_epochs: expected"):
        finetune(config, find_source(source_dir), prototype_epochs=-1)


def test_a_frozen_backbone_and_class_parallel_over_processes(config):
    stage._refuse_class_parallel(config)
    head = {"projection_args": {**config.projection_args, "class_parallel": True}}
    with pytest.raises(ValueError, match="--prototype_epochs 0"):
        stage._refuse_class_parallel(stage.dataclasses.replace(config, **head))


def test_the_command(source_dir, data, tmp_path, capsys):
    exp = tmp_path / "tuned"
    words = ["finetune", "--from", source_dir, "--data", data, "--exp_dir", exp]
    words += [
        "--like",
        "cosface",
        "--margin",
        "0.1",
        "--prototype_epochs",
        "1",
        "--num_epochs",
        "1",
    ]
    words += ["--prototype_lr", "1e-3", "--per_class", "2"]
    assert main([str(word) for word in words]) == 0
    out = capsys.readouterr().out.splitlines()
    assert "tensors 32 loaded, 0 new, 0 dropped, 0 mismatched" in out[0]
    assert "4 by speaker name, 6 from class means" in out[0] and out[-1] == str(exp)
    saved = load_config(exp / "config.yaml")
    assert saved.projection_args["project_type"] == "add_margin"
    assert saved.margin_update["final_margin"] == 0.1 and saved.num_epochs == 1
    first = load_config(exp / "prototypes" / "config.yaml")
    assert first.scheduler_args["initial_lr"] == 1e-3 and first.num_epochs == 1
    assert main([str(word) for word in words]) == 1
    assert "continue it with --resume" in capsys.readouterr().err
    assert main([str(word) for word in [*words, "--resume"]]) == 0
    with pytest.raises(SystemExit):
        main([str(word) for word in [*words, "--scale", "big"]])


def test_two_processes_start_from_what_one_does(source_dir, data, tmp_path):
    common = ["-m", "wespeaker_qmargin.cli", "finetune", "--from", source_dir, "--data", data]
    common += ["--num_epochs", "1", "--prototype_epochs", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    for name, before in (("one", []), ("two", launcher)):
        command = [sys.executable, *before, *common, "--exp_dir", tmp_path / name]
        command += ["--dataloader_args.batch_size", "4"]
        done = subprocess.run(
            [str(x) for x in command], env=environment, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stderr[-4000:]
    one, two = (read_checkpoint(tmp_path / name / "init.pt") for name in ("one", "two"))
    for key in one:
        torch.testing.assert_close(one[key], two[key], atol=1e-6, rtol=1e-5)
    assert (tmp_path / "two" / "models" / "model_1.pt").is_file()
