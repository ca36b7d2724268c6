"""Reading, overlaying, overriding and checking configurations."""

import logging
from pathlib import Path

import pytest
import yaml

from wespeaker_qmargin.config import load_config, parse_overrides, save_config, to_dict

ROOT = Path(__file__).resolve().parent.parent


def test_conf_folder_loads():
    paths = sorted((ROOT / "conf").glob("*.yaml"))
    assert paths
    for path in paths:
        load_config(path)


def test_base_is_overlaid_section_by_section(tmp_path, tiny):
    child = tmp_path / "child.yaml"
    child.write_text("base: tiny.yaml\nnum_epochs: 7\nmodel_args: {hid_dim: 20}\n")
    config, base = load_config(child), load_config(tiny)
    assert config.num_epochs == 7 and config.model_args["hid_dim"] == 20
    assert config.model_args["stats_dim"] == base.model_args["stats_dim"]


def test_changed_name_leaves_the_arguments_of_the_old_one_behind(tmp_path, tiny):
    child = tmp_path / "child.yaml"
    child.write_text(
        "base: tiny.yaml\noptimizer: AdamW\n"
        "projection_args: {project_type: add_margin, scale: 32}\n"
        "model: ECAPA_TDNN_c512\nmodel_args: {feat_dim: 80, embed_dim: 16}\n"
    )
    config = load_config(child)
    assert config.optimizer_args == {}
    assert config.projection_args == {"project_type": "add_margin", "scale": 32}
    assert config.model_args == {"feat_dim": 80, "embed_dim": 16}
    grandchild = tmp_path / "grandchild.yaml"
    grandchild.write_text("base: child.yaml\noptimizer: AdamW\noptimizer_args: {lr: 0.1}\n")
    assert load_config(grandchild).model_args == config.model_args


def test_base_in_a_circle(tmp_path):
    (tmp_path / "a.yaml").write_text("base: b.yaml\n")
    (tmp_path / "b.yaml").write_text("base: a.yaml\n")
    with pytest.raises(ValueError, match=r"circle.*a\.yaml.*b\.yaml.*a\.yaml"):
        load_config(tmp_path / "a.yaml")


def test_overrides_reach_every_level(tiny):
    words = "--num-epochs 3 --model_args.hid_dim=20 --scheduler_args.final_lr 1e-4 --enable_amp"
    config = load_config(tiny, words.split())
    assert config.num_epochs == 3 and config.model_args["hid_dim"] == 20
    assert config.scheduler_args["final_lr"] == 1e-4 and config.enable_amp is True


def test_parse_overrides():
    assert parse_overrides(["--a.b", "1e-4", "--c=[0,1]", "--d", "--e", "-1", "--f-g", "null"]) == {
        "a.b": 1e-4,
        "c": [0, 1],
        "d": True,
        "e": -1,
        "f_g": None,
    }
    with pytest.raises(ValueError, match="expected --key value, found 'x'"):
        parse_overrides(["x"])


def test_number_in_exponent_form_is_a_number(tiny):
    tiny.write_text(tiny.read_text().replace("initial_lr: 0.1", "initial_lr: 1e-4"))
    assert load_config(tiny).scheduler_args["initial_lr"] == 1e-4


@pytest.mark.parametrize(
    "words, message",
    [
        ("--num_epoch 3", "num_epoch: unknown key. Did you mean 'num_epochs'"),
        ("--dataset_args.num_frm 3", "dataset_args.num_frm: unknown key. Did you mean 'num_frms'"),
        ("--num_epochs three", "num_epochs: expected int, got 'three'"),
        ("--num_epochs 2.5", "num_epochs: expected int, got 2.5"),
        ("--num_epochs true", "num_epochs: expected int, got True"),
        ("--num_epochs 0", "num_epochs: expected a number >= 1"),
        ("--seed -1", "seed: expected a number in"),
        ("--enable_amp 1", "enable_amp: expected bool"),
        ("--dataset_args 3", "dataset_args: expected a section"),
        ("--dataset_args.aug_prob 1.5", r"aug_prob: expected a number in \[0, 1\]"),
        ("--dataset_args.frontend mel", "dataset_args.frontend: expected one of"),
        ("--data_type shards", "Did you mean 'shard'"),
        ("--model XVECC", "model: WeSpeaker's wespeaker.models.tdnn has no 'XVECC'"),
        ("--model_args.hidden 3", "model_args.hidden: not an argument of XVEC. Did you mean"),
        ("--model_args.hid_dim wide", "model_args.hid_dim: expected a number, got 'wide'"),
        ("--optimizer SDG", "optimizer: torch has no 'SDG'. Did you mean 'SGD'"),
        ("--optimizer_args.momentun 0.9", "optimizer_args.momentun.*Did you mean 'momentum'"),
        ("--scheduler_args.initial_lr fast", "scheduler_args.initial_lr: expected a number"),
        ("--scheduler Exponential", "Did you mean 'ExponentialDecrease'"),
        ("--margin_update.final_margin -1", "margin_update.final_margin: expected a number >= 0"),
        ("--margin_update.final 1", "margin_update.final: not an argument of MarginScheduler"),
        ("--loss CrossEntropy", "Did you mean 'CrossEntropyLoss'"),
        ("--projection_args.project_type q_margn", "Did you mean 'q_margin'"),
        ("--projection_args.alpha 0.9", r"projection_args: alpha must be in \[1, 2\]"),
        ("--projection_args.scale -3", "projection_args: scale must be"),
        ("--projection_args.scal 3", "projection_args.scal: not an option of q_margin"),
        ("--dataset_args.fbank_args.mels 80", "fbank_args.mels: not an argument of fbank"),
        ("--dataset_args.filter_args.min 80", "filter_args.min"),
        ("--margin_update.final_margin null", "margin_update.final_margin: missing"),
        ("--margin_update.fix_start_epoch null", "margin_update.fix_start_epoch: missing"),
        ("--optimizer_args.momentum [1]", "optimizer_args.momentum: expected a number, got"),
        ("--gpus [a]", "gpus: expected GPU numbers"),
        ("--train_data /no/such/list", "train_data: /no/such/list does not exist"),
    ],
)
def test_faults_are_named(tiny, words, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load_config(tiny, words.split())


@pytest.mark.parametrize("gpus, expected", [("'[0,1]'", [0, 1]), ("3", [3]), ("'0,2'", [0, 2])])
def test_gpus_as_stock_yamls_hold_them(tiny, gpus, expected):
    assert load_config(tiny, ["--gpus", gpus]).gpus == expected


@pytest.mark.parametrize("gpus", ["'[0f: ['", "'0, -1'", "[true]", "0.5"])
def test_gpus_that_are_no_numbers(tiny, gpus):
    with pytest.raises(ValueError, match="gpus: expected GPU numbers"):
        load_config(tiny, ["--gpus", gpus])


def test_missing_keys(tmp_path, tiny):
    tiny.write_text(tiny.read_text().replace("model: XVEC\n", ""))
    with pytest.raises(ValueError, match="model: missing"):
        load_config(tiny)


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "expected keys and values, found NoneType"),
        ("- 1", "expected keys and values, found list"),
        ("a: [", "not a plain YAML file"),
        ("model: !!python/object/apply:os.system ['true']", "not a plain YAML file"),
    ],
)
def test_files_that_are_no_config(tmp_path, text, message):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_config(path)


def test_no_such_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such config file"):
        load_config(tmp_path / "none.yaml")


def test_scale_far_from_auto_warns_with_the_gap(tiny, caplog):
    with caplog.at_level(logging.WARNING):
        load_config(tiny, ["--projection_args.scale", "32"])
    # k = 32 * 0.5 = 16, gap = exp(16 * 0.2) / 16
    assert "s (alpha - 1) = 16" in caplog.text and "1.53" in caplog.text
    assert "scale: auto" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        load_config(tiny, ["--projection_args.scale", "10"])
    assert caplog.text == ""


def test_foreign_margin_that_disagrees_warns(tiny, caplog):
    with caplog.at_level(logging.WARNING):
        load_config(tiny, ["--projection_args.margin", "0.5"])
    assert "margin_update.final_margin 0.2 decides" in caplog.text


def test_saved_config_reads_back_the_same(tmp_path, tiny):
    config = load_config(tiny)
    save_config(config, tmp_path / "saved" / "config.yaml")
    assert load_config(tmp_path / "saved" / "config.yaml") == config


def test_check_paths_can_be_off(tiny):
    with pytest.raises(FileNotFoundError):
        load_config(tiny, ["--noise_data", "/nowhere"])
    assert load_config(tiny, ["--noise_data", "/nowhere"], check_paths=False).noise_data


def test_config_is_frozen(tiny):
    config = load_config(tiny)
    with pytest.raises(AttributeError):
        config.num_epochs = 3
    assert yaml.safe_load(yaml.safe_dump(to_dict(config))) == to_dict(config)


UPSTREAM_KEYS = {
    # every key that occurs in the 24 YAMLs of upstream's examples/voxceleb/v2/conf, with a value
    "gpus": "[0,1]",
    "do_lm": True,
    "dataset_args.speed_perturb_mode": "expanded",
    "dataset_args.shuffle_args": {"shuffle_size": 2500},
    "dataset_args.cmvn": False,
    "dataset_args.cmvn_args": {"norm_mean": True, "norm_var": False},
    "dataset_args.s3prl_args": {"upstream_args": {"name": "wavlm_large"}, "frozen": True},
    "dataset_args.tfmel_args": {"n_fft": 512},
    "dataset_args.w2vbert_args": {"model_name": "facebook/w2v-bert-2.0", "frozen": False},
    "scheduler_args.num_epochs": 5,
    "scheduler_args.scale_ratio": 12.0,
    "dataloader_args.prefetch_factor": 8,
}


@pytest.mark.parametrize("key", UPSTREAM_KEYS)
def test_upstream_keys_are_known(tiny, key):
    value = yaml.safe_dump(UPSTREAM_KEYS[key], default_flow_style=True).split("\n...")[0]
    load_config(tiny, [f"--{key}", value])


@pytest.mark.checkout
def test_all_upstream_yamls_pass_unchanged():
    import os

    folder = Path(os.environ["WESPEAKER_ROOT"]) / "examples" / "voxceleb" / "v2" / "conf"
    paths = sorted(folder.glob("*.yaml"))
    assert len(paths) == 24
    for path in paths:
        load_config(path)
