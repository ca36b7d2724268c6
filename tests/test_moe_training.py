"""Experts in a training: losses in the forward, groups of their own, a dense checkpoint adapted."""

import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

from wespeaker_qmargin import experiment
from wespeaker_qmargin.checkpoints import average_epochs, read_checkpoint
from wespeaker_qmargin.cli import main
from wespeaker_qmargin.config import load_config
from wespeaker_qmargin.model import SpeakerNet, load_checkpoint
from wespeaker_qmargin.moe import moe_layers
from wespeaker_qmargin.schedule import parameter_groups
from wespeaker_qmargin.train import train
from wespeaker_qmargin.w2vbert import W2VBertFrontend

pytest.importorskip("transformers")

MOE = ["--dataset_args.wavlm_args.moe", "{experts: 3, top_k: 2}"]


def records(exp_dir) -> list[dict]:
    lines = (exp_dir / "metrics.jsonl").read_text().splitlines()
    return [x for x in map(json.loads, lines) if "loss" in x]


def test_training_with_experts(tiny_ssl, tmp_path):
    runs = []
    for name, words in (("dense", []), ("moe", MOE), ("free", MOE)):
        if name == "free":
            words = ["--dataset_args.wavlm_args.moe", "{z_loss: 0, balance_loss: 0}"]
        exp = tmp_path / name
        runs.append(train(load_config(tiny_ssl, [*words, "--exp_dir", str(exp)])))
    dense, mixed, free = map(records, runs)
    assert 15 < mixed[0]["loss"] - free[0]["loss"] < 30, "balance near k = 2, times 10"
    assert 0 < mixed[-1]["least_load"] <= 1 and 0 < mixed[-1]["router_entropy"] <= 1
    assert "least_load" not in dense[-1]
    keys = read_checkpoint(runs[1] / "models" / "model_1.pt").keys()
    assert sum("feed_forward.router.weight" in key for key in keys) == 2
    assert average_epochs(runs[1], 1).is_file()


def test_a_w2v_bert_front_end_has_two_mixtures_a_layer(make_tiny_encoder, tmp_path):
    make_tiny_encoder.make_w2vbert(tmp_path, layers=2)
    dense, mixed = (
        W2VBertFrontend(str(tmp_path), frozen=False, moe=options).eval()
        for options in (None, {"experts": 2, "top_k": 1, "layers": "last1"})
    )
    assert len(moe_layers(mixed)) == 2 == len(mixed.replaced)
    wavs, lens = torch.randn(2, 16000), torch.tensor([16000, 9000])
    with torch.no_grad():
        for one, other in zip(dense(wavs, lens)[0], mixed(wavs, lens)[0]):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    for options in ({"use_lora": True, "frozen": True}, {"feed_forward": {"module": "x:Y"}}):
        with pytest.raises(ValueError, match="moe|feed_forward"):
            W2VBertFrontend(str(tmp_path), moe={"experts": 2}, **options)


def test_router_and_experts_have_their_own_rates(tiny_ssl):
    words = ["--lr_ratio", "{frontend: 0.1, router: 2.0, experts: 0.5, projection: 3}"]
    net = SpeakerNet(load_config(tiny_ssl, [*words, *MOE]), 8)
    groups = parameter_groups(net, load_config(tiny_ssl, words).lr_ratio)
    sizes = {group["name"]: (group["lr_ratio"], len(group["params"])) for group in groups}
    assert sizes["router"] == (2.0, 2) and sizes["experts"] == (0.5, 2 * 3 * 4)
    assert sizes["frontend"][0] == 0.1 and sizes["projection"] == (3.0, 1)
    frozen = parameter_groups(net, {"frontend": 0, "router": 1})
    assert [g["name"] for g in frozen] == ["router", "rest"], "a part of a frozen part is trained"


@pytest.mark.parametrize("reinit", [0, 0.5])
def test_a_dense_run_is_adapted_with_experts(tiny_ssl, corpus, tmp_path, reinit, capsys):
    dense = train(load_config(tiny_ssl, ["--exp_dir", str(tmp_path / "dense")]))
    average_epochs(dense, 1)
    moe_yaml, tuned = tmp_path / "moe.yaml", tmp_path / "tuned"
    moe_yaml.write_text(
        f"dataset_args: {{wavlm_args: {{moe: {{experts: 2, reinit: {reinit}}}}}}}\nnum_epochs: 1\n"
    )
    words = ["--from", dense, "--data", corpus, "--exp_dir", tuned, "--config", moe_yaml]
    assert main(["finetune", *map(str, words), "--prototype_epochs", "0"]) == 0
    start, before = (read_checkpoint(x) for x in (tuned / "init.pt", dense / "models/avg_model.pt"))
    name = "frontend.encoder.encoder.layers.0.feed_forward"
    was = before[f"{name}.intermediate_dense.weight"]
    for i in range(2):
        same = (start[f"{name}.experts.{i}.intermediate_dense.weight"] == was).all(dim=1)
        assert same.sum() == round((1 - reinit) * len(was))
    again = ["--from", tuned, "--data", corpus, "--config", moe_yaml, "--exp_dir", tmp_path / "x"]
    average_epochs(tuned, 1)
    moe_yaml.write_text("dataset_args: {wavlm_args: {moe: {experts: 3}}}\nnum_epochs: 1\n")
    command = ["finetune", *map(str, again), "--prototype_epochs", "0"]
    assert main(command) == 1
    assert "the checkpoint has 2 experts, the network 3" in capsys.readouterr().err
    assert main([*command, "--merge_experts"]) == 0


def test_the_config_of_an_adaptation(tiny_ssl, corpus, tmp_path):
    """The head alone, at its rate; then all, in groups."""
    dense, tuned = tmp_path / "dense", tmp_path / "tuned"
    train(load_config(tiny_ssl, ["--exp_dir", str(dense)]))
    average_epochs(dense, 1)
    words = ["--from", dense, "--data", corpus, "--exp_dir", tuned, "--prototype_lr", "1e-3"]
    words += ["--config", ROOT / "conf/finetune/experts.yaml", "--num_epochs", "1"]
    words += ["--optimizer", "AdamW", "--optimizer_args", "{}"]
    assert main(["finetune", *map(str, words)]) == 0
    places = ("prototypes/models/model_2.pt", "init.pt", "models/model_1.pt")
    first, start, end = (read_checkpoint(tuned / place) for place in places)
    same = {key for key in start if torch.equal(start[key], first[key])}
    assert start.keys() - same == {"projection.weight"}, "the head alone"
    changed = [key for key in end if not torch.equal(end[key], start[key])]
    assert any(".router." in key for key in changed) and any(
        ".experts.2." in key for key in changed
    )


def test_an_export_holds_the_experts(tiny_ssl, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "recipes/voxceleb/local"))
    import export_model

    exp = train(load_config(tiny_ssl, [*MOE, "--exp_dir", str(tmp_path / "exp")]))
    average_epochs(exp, 1)
    out = export_model.export_model(exp, tmp_path / "out")
    net = SpeakerNet(load_config(out / "config.yaml"))
    load_checkpoint(net, out / "avg_model.pt", head=False)
    assert len(moe_layers(net)) == 2


def test_a_collapse_is_told_once(tiny_ssl, tmp_path, caplog):
    moe_args = "{experts: 2, top_k: 1, z_loss: 0, balance_loss: 0}"
    words = ["--dataset_args.wavlm_args.moe", moe_args, "--exp_dir", str(tmp_path / "x")]
    words += ["--num_epochs", "2", "--lr_ratio", "{frontend: 0}"]
    made = load_config(tiny_ssl, words)
    real = experiment.SpeakerNet

    class Collapsed(real):
        def __init__(self, *args):
            super().__init__(*args)
            with torch.no_grad():
                for layer in moe_layers(self).values():
                    layer.router.weight.zero_()  # topk of equal logits: always the same expert

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "SpeakerNet", Collapsed)
        train(made)
    told = [x for x in caplog.messages if "raise balance_loss, or take fewer experts" in x]
    assert len(told) == 2 and "gets 0 % of the choices" in told[0]


@pytest.mark.parametrize(
    "moe_args, message",
    [
        ("{expert: 3}", "wavlm_args.moe.expert: not an argument of MoEOptions"),
        ("{experts: 2, top_k: 3}", "moe.top_k: 3 of 2 experts"),
        ("{layers: [7]}", r"layers: .* got \[7\]"),
    ],
)
def test_bad_options_in_a_yaml(tiny_ssl, moe_args, message):
    words = ["--dataset_args.wavlm_args.moe", moe_args]
    with pytest.raises(ValueError, match=message):
        SpeakerNet(load_config(tiny_ssl, words), 8)


def test_two_processes_are_one(tiny_ssl, tmp_path):
    """DistributedDataParallel: router losses come through the forward, no expert is missing."""
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [sys.executable, *launcher, str(script), str(tiny_ssl)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("equal") == 2


RANKS = """
import copy, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from wespeaker_qmargin.config import load_config
from wespeaker_qmargin.model import SpeakerNet

dist.init_process_group("gloo")
rank = dist.get_rank()
words = ["--dataset_args.wavlm_args.moe", "{experts: 4, top_k: 1, balance_loss: 0}"]
torch.manual_seed(0)
net = SpeakerNet(load_config(sys.argv[1], words), 8).eval()
net.frontend.encoder.config.mask_time_prob = 0.0
for layer in net.modules():
    if hasattr(layer, "router"):
        layer.train()
        layer.experts.eval()
wavs, labels = torch.randn(4, 8000), torch.tensor([0, 1, 2, 3])
mine = slice(2 * rank, 2 * rank + 2)
alone = copy.deepcopy(net)
parallel = DistributedDataParallel(net)
loss, _ = parallel(wavs[mine], labels[mine], None)
loss.backward()
shared = {n: p.grad.clone() for n, p in net.named_parameters()}
alone(wavs, labels, None)[0].backward()
for name, parameter in alone.named_parameters():
    torch.testing.assert_close(shared[name], parameter.grad, atol=1e-5, rtol=1e-3)
print("equal", flush=True)
dist.destroy_process_group()
"""
