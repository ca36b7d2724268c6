"""Training: resuming after a kill, two processes against one, what is left in exp_dir, faults."""

import json
import logging
import os
import platform
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from wespeaker_qmargin import adapter
from wespeaker_qmargin.checkpoints import average_epochs, read_checkpoint
from wespeaker_qmargin.config import load_config
from wespeaker_qmargin.model import SpeakerNet
from wespeaker_qmargin.schedule import Schedules, build_optimizer, parameter_groups
from wespeaker_qmargin.train import train

HERE = Path(__file__).parent
STEPS = 5 * 6  # epochs x steps of the tiny config


def records(exp_dir):
    return [json.loads(line) for line in (Path(exp_dir) / "metrics.jsonl").read_text().splitlines()]


def without_speed(lines):
    return [{k: v for k, v in line.items() if k != "utts_per_s"} for line in lines]


def assert_same_run(one, two):
    for epoch in range(1, 6):
        a, b = (read_checkpoint(Path(d) / "models" / f"model_{epoch}.pt") for d in (one, two))
        assert a.keys() == b.keys()
        assert all(torch.equal(a[k], b[k]) for k in a), f"epoch {epoch}"
    states = [torch.load(Path(d) / "state" / "state.pt", weights_only=True) for d in (one, two)]
    assert str(states[0]["optimizer"]) == str(states[1]["optimizer"])
    assert without_speed(records(one)) == without_speed(records(two))


_STRAIGHT = []


@pytest.fixture
def straight(tiny, tmp_path_factory) -> Path:
    """The exp_dir of one uninterrupted run of the tiny config, made once."""
    if not _STRAIGHT:
        exp = tmp_path_factory.mktemp("straight") / "exp"
        _STRAIGHT.append(train(load_config(tiny, ["--exp_dir", str(exp)])))
    return _STRAIGHT[0]


def test_what_a_run_leaves(straight):
    exp = straight
    found = {str(p.relative_to(exp)) for p in exp.rglob("*") if p.is_file()}
    board = {p for p in found if p.startswith("tensorboard/")}
    assert len(board) == 1
    assert found - board == {
        "best_model.pt",
        "config.yaml",
        "metrics.jsonl",
        "run.json",
        "speakers.txt",
        "state/lock",
        "state/state.pt",
        "train.log",
        *(f"models/model_{epoch}.pt" for epoch in range(1, 6)),
    }
    assert len((exp / "speakers.txt").read_text().split()) == 8
    lines = records(exp)
    training = [r for r in lines if "loss" in r]
    valid = [r["valid_eer"] for r in lines if "valid_eer" in r]
    assert [r["step"] for r in training] == list(range(3, STEPS + 1, 3))
    assert len(valid) == 5 and all(0 <= v <= 1 for v in valid)
    assert training[-1]["loss"] < training[0]["loss"]
    assert training[0]["margin"] == 0 and training[-1]["margin"] == pytest.approx(0.2)
    assert {"accuracy", "active", "support", "lr", "grad_norm", "utts_per_s"} <= training[0].keys()
    run = json.loads((exp / "run.json").read_text())
    assert run["versions"]["torch"] == torch.__version__ and run["wespeaker"]["path"]


def test_checkpoint_is_a_plain_state_dict_of_wespeakers(tiny, straight):
    state = torch.load(straight / "models" / "model_5.pt", weights_only=True)
    xvec = adapter.get_speaker_model("XVEC")(**load_config(tiny).model_args)
    xvec.add_module("projection", torch.nn.Linear(16, 8, bias=False))
    xvec.load_state_dict(state)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_killed_and_resumed_equals_straight(tiny, tmp_path, straight, num_workers):
    exp = tmp_path / "killed"
    command = [sys.executable, "-m", "wespeaker_qmargin.cli", "train", "--config", str(tiny)]
    command += ["--exp_dir", str(exp), "--resume", "--save_state_interval", "2"]
    command += ["--dataloader_args.num_workers", str(num_workers)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    kill_after = random.Random(num_workers).randrange(3, STEPS - 5)
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
        if steps_done(exp) >= kill_after:
            break
    assert process.poll() is None, "the run ended before it could be killed"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert steps_done(exp) < STEPS
    subprocess.run(command, env=environment, check=True, stderr=subprocess.DEVNULL, timeout=120)
    assert_same_run(straight, exp)


def steps_done(exp) -> int:
    try:
        lines = (exp / "metrics.jsonl").read_text().splitlines()
        return max((json.loads(line)["step"] for line in lines), default=0)
    except (FileNotFoundError, json.JSONDecodeError):
        return 0


PARTS = {
    "accumulated": ["--accum_steps", "2"],
    "two processes": [],
    "class-parallel": ["--projection_args.class_parallel", "true"],
    "class-parallel, lazily": [
        *("--projection_args.class_parallel", "true"),
        *("--optimizer", "LazySGD", "--optimizer_args", "{momentum: 0.9, weight_decay: 1e-4}"),
    ],
}


@pytest.fixture
def without_batchnorm(tiny):
    """Return (command, environment) of training a backbone that has no batch norm."""
    text = tiny.read_text()
    cut, end = text.index("model_args:"), text.index("num_avg:")
    tiny.write_text(text[:cut] + "model_args: {feat_dim: 80, embed_dim: 16}\n" + text[end:])
    script = str(HERE / "run_without_batchnorm.py")
    common = [script, "train", "--config", str(tiny), "--model", "MeanNet", "--valid_speakers", "2"]
    common += ["--margin_update.increase_start_epoch", "1", "--margin_update.fix_start_epoch", "2"]
    common += ["--scheduler_args.initial_lr", "0.5"]
    common += ["--optimizer_args", "{momentum: 0.9, weight_decay: 1e-4}"]
    return common, {**os.environ, "OMP_NUM_THREADS": "1"}


def launcher(processes):
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    return [sys.executable, *(words if processes > 1 else [])]


def assert_close_runs(one, two, epochs):
    for epoch in epochs:
        a, b = (read_checkpoint(exp / "models" / f"model_{epoch}.pt") for exp in (one, two))
        assert a.keys() == b.keys()
        for key in a:
            torch.testing.assert_close(a[key], b[key], atol=1e-5, rtol=1e-5)
    ours, theirs = records(one), records(two)
    assert len(ours) == len(theirs)
    for one, two in zip(ours, theirs):
        for key in one.keys() & {"loss", "valid_eer", "accuracy", "active", "support", "grad_norm"}:
            assert one[key] == pytest.approx(two[key], rel=1e-4, abs=1e-4), key


@pytest.mark.parametrize("how", PARTS)
def test_accumulation_and_processes_equal_one_big_batch(without_batchnorm, tmp_path, how):
    """2 processes x batch 4, or batch 4 accumulated twice, is batch 8."""
    common, environment = without_batchnorm
    common = [*common, "--num_epochs", "2"]
    whole = [*launcher(1), *common, "--exp_dir", str(tmp_path / "whole")]
    parts = [*launcher(1 if how == "accumulated" else 2), *common]
    parts += ["--exp_dir", str(tmp_path / "parts"), "--dataloader_args.batch_size", "4"]
    for command in (whole, [*parts, *PARTS[how]]):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr[-9000:]
    assert_close_runs(tmp_path / "whole", tmp_path / "parts", (1, 2))


def test_class_parallel_run_goes_on_in_one_process(without_batchnorm, tmp_path):
    common, environment = without_batchnorm
    common = [*common, "--num_epochs", "5", "--resume", *PARTS["class-parallel, lazily"]]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    subprocess.run(
        [*launcher(1), *common, "--exp_dir", str(whole)], env=environment, check=True, timeout=240
    )
    two = [*launcher(2), *common, "--exp_dir", str(parts), "--dataloader_args.batch_size", "4"]
    with subprocess.Popen(two, env=environment, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None and not (parts / "state" / "state.pt").exists():
            time.sleep(0.01)
        assert process.poll() is None, "the run ended before it could be stopped"
        process.terminate()
    done = steps_done(parts)
    assert done < steps_done(whole)
    subprocess.run(
        [*launcher(1), *common, "--exp_dir", str(parts)], env=environment, check=True, timeout=240
    )
    assert "resuming at epoch" in (parts / "train.log").read_text()
    assert_close_runs(whole, parts, range(1, 6))


def test_lazy_sgd_is_sgd(tiny, tmp_path):
    words = ["--optimizer_args", "{momentum: 0.9, nesterov: true, weight_decay: 1e-3}"]
    words += ["--num_epochs", "2", "--projection_args.impl", "streaming", "--clip_grad_norm", "1"]
    plain = train(load_config(tiny, words))
    words += ["--optimizer", "LazySGD", "--exp_dir", str(tmp_path / "lazy")]
    words += ["--optimizer_args", "{momentum: 0.9, nesterov: true, weight_decay: 1e-3}"]
    lazy = train(load_config(tiny, words))
    assert_close_runs(plain, lazy, (1, 2))


@pytest.mark.parametrize(
    "head", ["{project_type: add_margin, scale: 32}", "{project_type: q_margin, alpha: 1}"]
)
def test_lazy_sgd_needs_sparse_gradients(tiny, head):
    words = ["--optimizer", "LazySGD", "--optimizer_args", "{}", "--projection_args", head]
    with pytest.raises(ValueError, match="LazySGD needs project_type q_margin with alpha > 1"):
        train(load_config(tiny, words))


def test_second_run_in_a_used_exp_dir_is_refused(tiny):
    config = load_config(tiny, ["--num_epochs", "1"])
    train(config)
    with pytest.raises(ValueError, match=r"holds a run \(epoch 2, step 0\).*--resume"):
        train(config)
    with pytest.raises(ValueError, match=r"num_epochs: 1 -> 3"):
        train(load_config(tiny, ["--num_epochs", "3"]), resume_run=True)
    with pytest.raises(ValueError, match=r"8 utterances a step, now it would have 4"):
        words = ["--num_epochs", "1", "--dataloader_args.batch_size", "4"]
        train(load_config(tiny, words), resume_run=True)
    before = (Path(config.exp_dir) / "metrics.jsonl").read_text()
    train(config, resume_run=True)
    assert (Path(config.exp_dir) / "metrics.jsonl").read_text() == before, "nothing was left to do"


def test_a_state_without_keys_that_are_new_since_goes_on(tiny):
    """A newer version resumes an older one's run where a new key stands at its default."""
    config = load_config(tiny, ["--num_epochs", "1"])
    train(config)
    path = Path(config.exp_dir) / "state" / "state.pt"
    state = torch.load(path, weights_only=True)
    del state["config"]["accum_steps"], state["config"]["dataset_args"]["cmvn"]
    torch.save(state, path)
    train(config, resume_run=True)
    with pytest.raises(ValueError, match="dataset_args.cmvn: True -> False"):
        train(
            load_config(tiny, ["--num_epochs", "1", "--dataset_args.cmvn", "false"]),
            resume_run=True,
        )


def test_a_run_goes_on_with_its_own_speakers_only(tiny, corpus):
    words = ["--num_epochs", "1", "--valid_speakers", "0"]
    train(load_config(tiny, words))
    config, table = load_config(tiny, words), (corpus / "utt2spk").read_text()
    try:  # the same path, another name in it
        (corpus / "utt2spk").write_text(table.replace(" s9", " t9"))
        with pytest.raises(ValueError, match=r"other speakers \(10\) than the run's \(10\)"):
            train(config, resume_run=True)
    finally:
        (corpus / "utt2spk").write_text(table)


@pytest.mark.parametrize("amp", ["false", "true"])
def test_everything_frozen_is_refused(tiny, amp):
    parts = [*(f"frame_{i}" for i in range(1, 6)), "seg_1", "seg_2", "projection"]
    ratios = "{" + ", ".join(f"{name}: 0" for name in parts) + "}"
    words = ["--lr_ratio", ratios, "--enable_amp", amp, "--amp_dtype", "bf16"]
    with pytest.raises(ValueError, match="every part of the model is frozen"):
        train(load_config(tiny, words))


def test_two_runs_at_once_are_refused(tiny):
    config = load_config(tiny)
    code = (
        "import sys, time, pathlib; from wespeaker_qmargin.resume import locked\n"
        "with locked(pathlib.Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, config.exp_dir]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match="another run"):
            train(config)
        other.kill()
    train(load_config(tiny, ["--num_epochs", "1"]))


def test_non_finite_loss_stops_before_anything_is_saved(tiny, monkeypatch):
    forward = SpeakerNet.forward

    def poisoned(self, wavs, labels, seeds):
        poisoned.calls += 1
        if poisoned.calls == 9:
            wavs = wavs.clone()
            wavs[5] = float("nan")
        return forward(self, wavs, labels, seeds)

    poisoned.calls = 0
    monkeypatch.setattr(SpeakerNet, "forward", poisoned)
    config = load_config(tiny)
    with pytest.raises(
        ValueError, match=r"loss is nan at epoch 2, step 8 .*alpha 1\.5.*utterances"
    ):
        train(config)
    models = sorted(Path(config.exp_dir, "models").glob("*.pt"))
    assert [p.name for p in models] == ["model_1.pt"]
    assert all(torch.isfinite(v).all() for v in read_checkpoint(models[0]).values())


def test_bad_files_are_told_once_and_stop_the_run_when_many(tiny, corpus, tmp_path, caplog):
    folder = tmp_path / "bad"
    folder.mkdir()
    lines = (corpus / "wav.scp").read_text().splitlines()
    broken = tmp_path / "broken.wav"
    broken.write_bytes(b"not audio")
    for share, stops in ((0.5, False), (0.01, True)):
        bad = [f"{line.split()[0]} {broken}" if i < 6 else line for i, line in enumerate(lines)]
        (folder / "wav.scp").write_text("\n".join(bad) + "\n")
        (folder / "utt2spk").write_text((corpus / "utt2spk").read_text())
        words = ["--train_data", str(folder), "--exp_dir", str(tmp_path / f"exp{share}")]
        words += ["--num_epochs", "2", "--valid_speakers", "0"]
        words += ["--dataset_args.max_bad_share", str(share)]
        caplog.clear()
        if stops:
            with pytest.raises(ValueError, match="cannot be used, more than .*max_bad_share"):
                train(load_config(tiny, words))
        else:
            with caplog.at_level(logging.WARNING):
                train(load_config(tiny, words))
            told = [r.getMessage() for r in caplog.records if "not used" in r.getMessage()]
            assert len(told) == len(set(told)) == 6
            assert all(str(broken) in line for line in told)


def test_bad_files_of_held_out_speakers_are_told_once(tiny, corpus, tmp_path, caplog):
    folder = tmp_path / "bad"
    folder.mkdir()
    lines = (corpus / "wav.scp").read_text().splitlines()
    bad = [f"{x.split()[0]} {tmp_path}/none" if x.split()[0].endswith("-0") else x for x in lines]
    (folder / "wav.scp").write_text("\n".join(bad) + "\n")
    (folder / "utt2spk").write_text((corpus / "utt2spk").read_text())
    words = ["--train_data", str(folder), "--num_epochs", "2", "--valid_speakers", "2"]
    train(load_config(tiny, [*words, "--dataset_args.max_bad_share", "0.5"]))
    told = [x for x in caplog.messages if x.startswith("held out, not used: ")]
    assert len(told) == len(set(told)) == 2 and f"{tmp_path}/none: " in told[0]


def test_list_whose_files_all_fail_ends_at_once(tiny, tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    (folder / "wav.scp").write_text("".join(f"s{i}-0 {tmp_path}/none{i}.wav\n" for i in range(9)))
    (folder / "utt2spk").write_text("".join(f"s{i}-0 s{i}\n" for i in range(9)))
    words = ["--train_data", str(folder), "--valid_speakers", "0"]
    start = time.monotonic()
    with pytest.raises(ValueError, match="No such file"):
        train(load_config(tiny, words))
    assert time.monotonic() - start < 30


def test_too_few_utterances_for_a_batch(tiny):
    with pytest.raises(ValueError, match="48 utterances an epoch make no step of 64"):
        train(load_config(tiny, ["--dataloader_args.batch_size", "64"]))


def test_missing_keys_are_named(tiny):
    with pytest.raises(ValueError, match="train_data: missing"):
        train(load_config(tiny, ["--train_data", "null"]))


def test_noise_and_reverberation_change_training(tiny, tmp_path):
    rng = np.random.default_rng(0)
    for name in ("noise", "rir"):
        (tmp_path / name).mkdir()
        wav = rng.standard_normal(8000) * (np.exp(-np.arange(8000) / 800) if name == "rir" else 0.1)
        soundfile.write(tmp_path / name / f"{name}.wav", wav / np.abs(wav).max() / 2, 16000)
        (tmp_path / name / "wav.scp").write_text(f"{name}-0 {tmp_path}/{name}/{name}.wav\n")
    losses = set()
    for i, words in enumerate(
        (
            [],
            ["--noise_data", f"{tmp_path}/noise/wav.scp"],
            ["--reverb_data", f"{tmp_path}/rir/wav.scp"],
        )
    ):
        words += [
            "--exp_dir",
            f"{tmp_path}/{i}",
            "--num_epochs",
            "1",
            "--dataset_args.aug_prob",
            "1",
        ]
        losses.add(records(train(load_config(tiny, words)))[0]["loss"])
    assert len(losses) == 3


def test_dense_head_trains_too(tiny):
    head = "{project_type: add_margin, scale: 32.0}"
    exp = train(load_config(tiny, ["--projection_args", head, "--num_epochs", "1"]))
    line = records(exp)[0]
    assert line["active"] == 1 and line["support"] == 8 and 0 <= line["accuracy"] <= 1


def test_bfloat16_autocast_keeps_float32_parameters(tiny, tmp_path):
    # without learning: the first steps of a run multiply every rounding
    words = [
        "--num_epochs",
        "1",
        "--scheduler_args.initial_lr",
        "1e-7",
        "--scheduler_args.final_lr",
        "1e-8",
    ]
    plain = train(load_config(tiny, words))
    words += ["--enable_amp", "true", "--exp_dir", str(tmp_path / "amp")]
    amp = train(load_config(tiny, words))
    state = read_checkpoint(amp / "models" / "model_1.pt")
    assert state["seg_1.weight"].dtype == torch.float32
    losses = [records(exp)[0]["loss"] for exp in (plain, amp)]
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], rel=0.05)


def test_clipping_limits_the_step(tiny, tmp_path):
    free = train(load_config(tiny, ["--num_epochs", "1"]))
    words = ["--num_epochs", "1", "--clip_grad_norm", "1e-3", "--exp_dir", str(tmp_path / "clip")]
    clipped = train(load_config(tiny, words))
    config = load_config(tiny)
    torch.manual_seed(config.seed)
    start = SpeakerNet(config, 8).backbone.seg_2.weight.detach()
    moved = [
        (read_checkpoint(exp / "models" / "model_1.pt")["seg_2.weight"] - start).norm()
        for exp in (free, clipped)
    ]
    assert moved[1] < 0.1 * moved[0]
    assert records(clipped)[0]["grad_norm"] > 1e-2, "the norm before clipping is logged"


def test_large_margin_stage_keeps_the_rows_and_does_not_perturb(tiny, tmp_path):
    words = ["--dataset_args.speed_perturb_labels", "new", "--num_epochs", "1"]
    first = train(load_config(tiny, words))
    state = read_checkpoint(first / "models" / "model_1.pt")
    assert state["projection.weight"].shape[0] == 24
    words += ["--do_lm", "true", "--exp_dir", str(tmp_path / "lm")]
    words += ["--checkpoint", str(average_epochs(first, 1))]
    second = train(load_config(tiny, words))
    assert read_checkpoint(second / "models" / "model_1.pt")["projection.weight"].shape[0] == 24
    assert "no speed perturbation" in (second / "train.log").read_text()


def test_model_init_and_checkpoint(tiny, tmp_path):
    source = average_epochs(train(load_config(tiny, ["--num_epochs", "1"])), 1)
    frozen = ["--num_epochs", "1", "--scheduler_args.initial_lr", "1e-12"]
    frozen += ["--scheduler_args.final_lr", "1e-12"]
    kept = {}
    for key in ("model_init", "checkpoint"):
        words = [*frozen, f"--{key}", str(source), "--exp_dir", str(tmp_path / key)]
        kept[key] = read_checkpoint(train(load_config(tiny, words)) / "models" / "model_1.pt")
    saved = read_checkpoint(source)
    for state in kept.values():
        torch.testing.assert_close(state["seg_1.weight"], saved["seg_1.weight"])
    torch.testing.assert_close(kept["checkpoint"]["projection.weight"], saved["projection.weight"])
    assert not torch.allclose(kept["model_init"]["projection.weight"], saved["projection.weight"])


def test_ratios_survive_the_schedule(tiny):
    words = ["--lr_ratio", "{projection: 5, frame_1: 0.08, frame_1.conv_1d: 0.5}"]
    config = load_config(tiny, words)
    net = SpeakerNet(config, 8)
    optimizer = build_optimizer(net, config)
    schedules = Schedules(net, optimizer, config, epoch_iter=10, step_batch=128)
    assert schedules.scale_ratio == 2
    reference = adapter.get_scheduler("ExponentialDecrease")(
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1),
        num_epochs=5,
        epoch_iter=10,
        scale_ratio=2,
        **config.scheduler_args,
    )
    for iteration in (0, 3, 11, 49):
        schedules.step(iteration)
        reference.step(iteration)
        rates = {group["name"]: group["lr"] for group in optimizer.param_groups}
        rate = reference.get_lr()
        assert schedules.lr == rate
        assert rates == pytest.approx(
            {"projection": 5 * rate, "frame_1.conv_1d": 0.5 * rate, "rest": rate}, rel=1e-9
        )


def test_ratio_0_freezes(tiny):
    words = ["--lr_ratio", "{frame_1: 0, seg_1: 0}", "--num_epochs", "1"]
    config = load_config(tiny, words)
    torch.manual_seed(config.seed)
    backbone = SpeakerNet(config, 8).backbone
    before, unfrozen = (m.weight.detach().clone() for m in (backbone.seg_1, backbone.seg_2))
    state = read_checkpoint(train(config) / "models" / "model_1.pt")
    assert torch.equal(state["seg_1.weight"], before)
    assert not torch.equal(state["seg_2.weight"], unfrozen)


@pytest.mark.parametrize(
    "ratio, message",
    [({"head": 5}, "has no such part; it has frame_1"), ({"projection": -1}, "a number >= 0")],
)
def test_faulty_ratios(tiny, ratio, message):
    with pytest.raises(ValueError, match=message):
        parameter_groups(SpeakerNet(load_config(tiny), 8), ratio)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc's malloc")
def test_on_a_cpu_a_step_finds_the_memory_of_the_last_one():
    code = """
import resource, torch
from wespeaker_qmargin.config import Config
from wespeaker_qmargin.experiment import make_accelerator
def pages(size):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(size).sum()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
before = pages(25_000_000), pages(20_000_000)
make_accelerator(Config(model="ResNet34", device="cpu"))
print(*before, pages(25_000_000), pages(20_000_000))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *before, _, after = map(int, done.stdout.split())
    assert min(before) > 100 and after < 10


def test_a_bad_noise_source_is_off_and_told_once(tiny, tmp_path, caplog):
    soundfile.write(tmp_path / "zeros.wav", np.zeros(8000), 16000)
    (tmp_path / "noise.scp").write_text(
        f"noise-0 {tmp_path}/zeros.wav\nnoise-1 {tmp_path}/gone.wav\n"
    )
    words = ["--noise_data", f"{tmp_path}/noise.scp", "--dataset_args.aug_prob", "1"]
    with caplog.at_level(logging.WARNING):
        train(load_config(tiny, [*words, "--num_epochs", "2"]))
    told = [r.getMessage() for r in caplog.records if "not used" in r.getMessage()]
    assert len(told) == len(set(told)) == 3
    assert any("this source is off" in line for line in told)
