"""The configs: each loads, builds at full size, says what it is, and means what the papers say."""

import re

import pytest
import torch
import transformers
import yaml
from conftest import ROOT

from wespeaker_qmargin import config as config_module
from wespeaker_qmargin import w2vbert, wavlm
from wespeaker_qmargin.config import load_config, read_config
from wespeaker_qmargin.model import SpeakerNet
from wespeaker_qmargin.schedule import Schedules, build_optimizer

CONF = ROOT / "conf"
VOXCELEB = CONF / "voxceleb"
# those of conf/finetune are laid over the config of a checkpoint
ALL = [p for p in sorted(CONF.rglob("*.yaml")) if p.parent.name != "finetune"]
BASES = sorted(VOXCELEB.glob("*/base.yaml"))
RUNS = [p for p in sorted(VOXCELEB.glob("*/*.yaml")) if p not in BASES]
TINY = sorted((CONF / "tiny").glob("*.yaml"))

# name -> project_type, scale, alpha
PAIRS = {
    "cosface": ("add_margin", 32, None),
    "qmargin_a125": ("q_margin", 20, 1.25),
    "qmargin_a150": ("q_margin", 10, 1.5),
    "qmargin_a200": ("q_margin", 5, 2),
}
# the first paper's: ..., target margin
ECCV = {
    "aam": ("arc_margin", 32, None, 0.2),
    "cosface": ("add_margin", 32, None, 0.2),
    "entmax": ("q_margin", "auto", 1.5, 0),
    "sparsemax": ("q_margin", "auto", 2, 0),
    "qmargin_a150_s5": ("q_margin", 5, 1.5, 0.2),
    "qmargin_a150_s10": ("q_margin", 10, 1.5, 0.2),
    "qmargin_a175_s5": ("q_margin", 5, 1.75, 0.2),
    "qmargin_a175_s10": ("q_margin", 10, 1.75, 0.2),
}
# epochs, crop in frames, initial and final rate, warm-up epochs, margins, ramp from, ramp to
RESNET = (150, 200, 0.1, 5e-5, 6, 0, 0.2, 20, 40)
RESNET_CONTINUED = (10, 200, 1e-4, 5e-5, 0, 0.2, 0.2, 1, 1)
RESNET_LM = (5, 600, 1e-4, 2.5e-5, 1, 0.5, 0.5, 1, 1)
WAVLM = (30, 300, 0.01, 4.4e-3, 3, 0, 0.2, 2, 5)
WAVLM_CONTINUED = (5, 300, 8e-3, 5e-5, 0, 0.2, 0.2, 1, 1)
W2VBERT = (5, 200, 1e-4, 5e-5, 0, 0.2, 0.2, 1, 1)
W2VBERT_LM = (2, 600, 1e-4, 5e-5, 0, 0.5, 0.5, 1, 1)


def with_margin(schedule: tuple, margin: float) -> tuple:
    return (*schedule[:6], margin, *schedule[7:])


def table() -> dict[str, tuple]:
    """Every run of the papers: file -> (head, schedule)."""
    runs = {"resnet34/speed_aam": (("arc_margin", 32, None), RESNET)}
    for name, pair in PAIRS.items():
        for margin in (0.1, 0.2):
            file = f"resnet34/{name}_m{round(10 * margin):02d}"
            runs[file] = (pair, with_margin(RESNET, margin))
        runs[f"resnet34/speed_{name}"] = (pair, RESNET)
        runs[f"resnet34/continued_{name}"] = (pair, RESNET_CONTINUED)
        runs[f"resnet34/lm_{name}"] = (pair, RESNET_LM)
        runs[f"wavlm_mhfa/{name}"] = (pair, WAVLM)
        runs[f"wavlm_mhfa/continued_{name}"] = (pair, WAVLM_CONTINUED)
        runs[f"w2vbert_mfa/{name}"] = (pair, W2VBERT)
        runs[f"w2vbert_mfa/lm_{name}"] = (pair, W2VBERT_LM)
    for name, (*head, margin) in ECCV.items():
        runs[f"resnet34/eccv_{name}"] = (tuple(head), with_margin(RESNET, margin))
    return runs


def name_of(path) -> str:
    return str(path.relative_to(CONF).with_suffix(""))


def run_name(path) -> str:
    return str(path.relative_to(VOXCELEB).with_suffix(""))


# --- what they build -----------------------------------------------------------------------------


def load_encoder(_, model_type: str):
    """The released encoder without its weights: the defaults of transformers are its sizes."""
    if model_type == "wavlm":
        return transformers.WavLMModel(transformers.WavLMConfig())
    return transformers.Wav2Vec2BertModel(transformers.Wav2Vec2BertConfig())


@pytest.fixture
def build(monkeypatch):
    """A config's whole network, on the device that holds nothing."""
    monkeypatch.setattr(wavlm, "load_transformers", load_encoder)
    monkeypatch.setattr(wavlm, "hears_normalised", lambda *_: False)
    monkeypatch.setattr(w2vbert, "load_transformers", load_encoder)

    def build(config, num_class: int = 5994) -> SpeakerNet:
        with torch.device("meta"):
            return SpeakerNet(config, num_class)

    return build


def count(module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("path", ALL, ids=name_of)
def test_it_loads_with_the_words_of_the_recipes_and_builds(path, build):
    data = ["--train_data", "x/shard.list", "--noise_data", "x/wav.scp", "--checkpoint", "x/y.pt"]
    config = load_config(path, ["--exp_dir", "exp", *data], check_paths=False)
    assert config.exp_dir == "exp" and config.num_avg <= config.num_epochs
    net = build(config)
    assert type(net.projection).__name__ != "Linear"
    assert net.projection.weight.shape[0] == 5994
    if path.parent.parent == VOXCELEB:
        assert net.projection.weight.shape[1] == 256


@pytest.mark.parametrize(
    ("folder", "backbone", "whole"),
    [
        ("resnet34", 6_634_336, 6_634_336),
        ("wavlm_mhfa", 2_302_554, 2_302_554 + 94_381_936),
        ("w2vbert_mfa", 6_160_640, 6_160_640 + 580_493_120),
    ],
)
def test_sizes(folder, backbone, whole, build):
    net = build(load_config(VOXCELEB / folder / "base.yaml"), 10)
    assert count(net.backbone) == backbone
    assert count(net) - count(net.projection) == whole


def test_one_step_of_the_real_resnet34():
    config = load_config(VOXCELEB / "resnet34" / "qmargin_a150_m02.yaml")
    torch.manual_seed(0)
    net = SpeakerNet(config, 20)
    loss, _ = net(0.1 * torch.randn(4, 16240), torch.tensor([0, 1, 2, 3]), [1, 2, 3, 4])
    loss.backward()
    assert torch.isfinite(loss) and net.backbone.conv1.weight.grad.abs().max() > 0


def test_low_rank_updates_and_adapters_are_all_that_lora_trains(build):
    net = build(load_config(VOXCELEB / "w2vbert_mfa" / "lora.yaml"), 10)
    trained = {n for n, p in net.frontend.named_parameters() if p.requires_grad}
    assert len(trained) == 24 * 2 * 2 and all("lora_" in name for name in trained)
    assert net.frontend.encoder.peft_config["default"].r == 64
    assert all(p.requires_grad for p in net.backbone.parameters())


# --- keys ----------------------------------------------------------------------------------------


def unread(content: dict) -> set[str]:
    """Keys that nobody reads, because another one switches off what would."""
    data, head = content["dataset_args"], content.get("projection_args", {})
    frontend = data.get("frontend", "fbank")
    dead = {f"{x}_args" for x in ("fbank", "s3prl", "tfmel", "wavlm", "w2vbert")} - {
        f"{frontend}_args"
    }
    dead.add("shuffle_args")
    for switch, keys in {
        "cmvn": ("cmvn_args",),
        "spec_aug": ("spec_aug_args",),
        "filter": ("filter_args",),
        "speed_perturb": ("speed_perturb_mode", "speed_perturb_labels"),
    }.items():
        default = getattr(config_module.DatasetArgs(), switch)
        dead |= set() if data.get(switch, default) else set(keys)
    found = {f"dataset_args.{key}" for key in dead & data.keys()}
    wrong = {"margin", "num_class", "embed_dim", "do_lm"}
    wrong |= set() if head.get("project_type") == "arc_margin" else {"easy_margin"}
    found |= {f"projection_args.{key}" for key in wrong & head.keys()}
    if "initial_lr" in content.get("scheduler_args", {}) and "lr" in content["optimizer_args"]:
        found.add("optimizer_args.lr")
    for section, keys in {
        "scheduler_args": ("num_epochs", "epoch_iter", "scale_ratio"),
        "margin_update": ("epoch_iter",),
    }.items():
        found |= {f"{section}.{key}" for key in content.get(section, {}) if key in keys}
    return found


@pytest.mark.parametrize("path", ALL, ids=name_of)
def test_no_key_that_nobody_reads(path):
    assert unread(read_config(path)) == set()


def test_dead_keys_are_found():
    stock = {
        "dataset_args": {"shuffle_args": {}, "spec_aug_args": {}, "wavlm_args": {}, "cmvn": False},
        "projection_args": {"project_type": "q_margin", "easy_margin": False},
        "scheduler_args": {"initial_lr": 1, "epoch_iter": 3},
        "optimizer_args": {"lr": 1},
    }
    assert unread(stock) == {
        "dataset_args.shuffle_args",
        "dataset_args.spec_aug_args",
        "dataset_args.wavlm_args",
        "projection_args.easy_margin",
        "scheduler_args.epoch_iter",
        "optimizer_args.lr",
    }


@pytest.mark.parametrize("path", BASES, ids=name_of)
def test_a_base_is_complete_and_every_key_is_explained(path):
    lines = path.read_text().splitlines()
    for line in lines:
        if re.match(r" *\w+: *[^ #]", line):
            assert "#" in line, line
    content = read_config(path)
    # what only the recipe knows, and what nobody reads
    from_recipe = {"exp_dir", "gpus", "data_type", "train_data", "train_label"}
    from_recipe |= {"reverb_data", "noise_data"}
    assert config_module.Config.__dataclass_fields__.keys() - content.keys() == from_recipe
    marked = {line.split(":")[0].strip() for line in lines if "not in the paper" in line[30:]}
    assert marked >= {
        "optimizer",
        "weight_decay",
        "batch_size",
        "clip_grad_norm",
        "enable_amp",
        "speed_perturb",
        "aug_prob",
    }


# --- headers -------------------------------------------------------------------------------------


def header(path) -> dict[str, str]:
    lines = []
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            break
        lines.append(line[1:])
    parts = re.split(r"(?:^|\n) (Purpose|Command|Estimate|Published): ", "\n".join(lines))
    return dict(zip(parts[1::2], parts[2::2]))


@pytest.mark.parametrize("path", RUNS + TINY, ids=name_of)
def test_every_run_says_what_it_is(path):
    said = header(path)
    assert list(said) == ["Purpose", "Command", "Estimate", "Published"]
    if path in RUNS:
        assert f"conf/voxceleb/{run_name(path)}.yaml" in said["Command"]
        assert re.search(r"\d h .*on one A100", said["Estimate"], re.DOTALL)
        assert "not yet run" in " ".join(said["Published"].split())
    for file in re.findall(r"\b(?:recipes|conf|tools)/[\w/]+\.\w+", said["Command"]):
        assert (ROOT / file).is_file(), file


@pytest.mark.parametrize("path", RUNS, ids=name_of)
def test_a_run_is_differences_only(path):
    content = yaml.safe_load(path.read_text())
    assert (path.parent / content.pop("base")).is_file()
    assert sum(len(v) if isinstance(v, dict) else 1 for v in content.values()) <= 16


# --- what they mean ------------------------------------------------------------------------------


def test_the_runs_are_those_of_the_papers():
    assert {run_name(path) for path in RUNS} == table().keys() | {
        "w2vbert_mfa/lora",
        "wavlm_mhfa/experts",
    }


@pytest.mark.parametrize("run", sorted(table()))
def test_heads_and_schedules(run):
    (kind, scale, alpha), schedule = table()[run]
    config = load_config(VOXCELEB / f"{run}.yaml")
    head, rates, margins = config.projection_args, config.scheduler_args, config.margin_update
    assert (head["project_type"], head["scale"], head.get("alpha")) == (kind, scale, alpha)
    assert config.scheduler == "ExponentialDecrease"
    assert schedule == (
        config.num_epochs,
        config.dataset_args.num_frms,
        rates["initial_lr"],
        rates["final_lr"],
        rates["warm_up_epoch"],
        margins["initial_margin"],
        margins["final_margin"],
        margins["increase_start_epoch"],
        margins["fix_start_epoch"],
    )
    perturbed = run.startswith("resnet34/speed_")
    assert config.dataset_args.speed_perturb == perturbed
    assert config.dataset_args.speed_perturb_labels == "new"
    assert config.do_lm == ("/lm_" in run)


def test_what_the_backbones_do_not_share():
    folders = ("resnet34", "wavlm_mhfa", "w2vbert_mfa")
    resnet, mhfa, mfa = (load_config(VOXCELEB / folder / "base.yaml") for folder in folders)
    assert (resnet.model, mhfa.model, mfa.model) == ("ResNet34", "MHFA", "W2VBert_Adapter_MFA")
    assert (mhfa.optimizer, mhfa.dataloader_args.batch_size) == ("SGD", 128)
    assert mhfa.optimizer_args == {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-6}
    assert resnet.optimizer_args == {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-4}
    assert (mhfa.lr_ratio, mhfa.clip_grad_norm) == ({"frontend": 0.08}, 5)
    assert mfa.lr_ratio == {"projection": 5}
    assert resnet.dataset_args.aug_prob == 0.6


class Rates:
    """A config's schedules as the trainer runs them: 10 steps an epoch, 64 utterances a step."""

    def __init__(self, run: str, build, step_batch: int = 64):
        self.config = load_config(VOXCELEB / f"{run}.yaml")
        net = build(self.config, 10)
        self.optimizer = build_optimizer(net, self.config)
        self.schedules = Schedules(
            net, self.optimizer, self.config, epoch_iter=10, step_batch=step_batch
        )
        self.last = 10 * self.config.num_epochs

    def at(self, epoch: float) -> tuple[float, float]:
        """The rate and the margin after so many epochs."""
        self.schedules.step(round(10 * epoch))
        return self.schedules.lr, self.schedules.margin

    def groups(self) -> dict[str, float]:
        return {group["name"]: group["lr"] for group in self.optimizer.param_groups}


def test_resnet34_from_scratch_goes_from_01_to_5e5(build):
    rates = Rates("resnet34/qmargin_a150_m01", build)
    decay = 5e-4  # over 150 epochs
    assert rates.at(0) == (0, 0)
    assert rates.at(3)[0] == pytest.approx(0.5 * 0.1 * decay ** (3 / 150))
    assert rates.at(6)[0] == pytest.approx(0.1 * decay ** (6 / 150))
    assert rates.at(18.9)[1] == 0  # in epoch 19
    assert rates.at(29)[1] == pytest.approx(0.1 * (1 - 1e-3**0.5), rel=1e-3)
    assert rates.at(39)[1] == 0.1  # epoch 40 starts
    assert rates.at(150)[0] == pytest.approx(5e-5)
    # on two GPUs with 128 utterances each, as upstream: four times the rate
    assert Rates("resnet34/qmargin_a150_m01", build, 256).at(6)[0] == pytest.approx(
        0.4 * decay ** (6 / 150)
    )


@pytest.mark.parametrize(
    ("run", "first", "last", "margin"),
    [
        ("resnet34/continued_qmargin_a150", 1e-4, 5e-5, 0.2),
        ("wavlm_mhfa/continued_cosface", 8e-3, 5e-5, 0.2),
        ("w2vbert_mfa/qmargin_a200", 1e-4, 5e-5, 0.2),
        ("w2vbert_mfa/lm_qmargin_a125", 1e-4, 5e-5, 0.5),
    ],
)
def test_fine_tuning_has_its_rate_and_margin_from_the_first_step_on(
    run, first, last, margin, build
):
    rates = Rates(run, build)
    assert rates.schedules.margin == margin  # before it, too
    assert rates.at(0) == (pytest.approx(first), margin)
    assert rates.at(rates.config.num_epochs) == (pytest.approx(last), margin)


def test_wavlm_learns_slower_and_prototypes_of_w2vbert_faster(build):
    rates = Rates("wavlm_mhfa/cosface", build)
    lr, margin = rates.at(3)
    assert lr == pytest.approx(0.01 * 0.44 ** (3 / 30)) and 0 < margin < 0.2
    assert rates.groups() == {"frontend": pytest.approx(0.08 * lr), "rest": lr}
    rates = Rates("w2vbert_mfa/cosface", build)
    lr, _ = rates.at(2)
    assert rates.groups() == {"projection": pytest.approx(5 * lr), "rest": lr}
