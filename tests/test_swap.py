"""``swap``: a YAML with another head, what it says of it, and that nothing else moves."""

import difflib
import logging
import math
import os
import re
from pathlib import Path

import pytest
import torch
import yaml

from wespeaker_qmargin import adapter
from wespeaker_qmargin.cli import main
from wespeaker_qmargin.config import load_config
from wespeaker_qmargin.swap import LIKE, default_path, difference, swap, write
from wespeaker_qmargin.train import train

ARC = """\
projection_args:
  project_type: "arc_margin" # add_margin, arc_margin, softmax
  scale: 32.0
  easy_margin: False
"""
RISING = """\
margin_update:
  initial_margin: 0.0
  final_margin: 0.2   # cosine
  increase_start_epoch: 20
  fix_start_epoch: 40
  update_margin: True
  increase_type: "exp" # exp, linear
"""
LARGE = """\
margin_update:
  initial_margin: 0.5
  final_margin: 0.5
  increase_start_epoch: 1
  fix_start_epoch: 1
  update_margin: True
"""
SUBCENTRE = """\
projection_args:
  project_type: 'arc_margin_intertopk_subcenter'
  scale: 32.0
  easy_margin: True   # not here
  K: 3
  mp: 0.06
  k_top: 5
"""
SPHEREFACE2 = """\
projection_args:
  project_type: "sphereface2"
  scale: 32.0
  do_lm: false
  lanbuda: 0.7
  t: 3
  margin_type: "C"
"""
FLOW = "projection_args: {project_type: arc_margin, scale: 32.0, easy_margin: False}  # one line\n"


def stock(head=ARC, schedule=RISING, *, more=""):
    """A YAML in the style of WeSpeaker's recipes."""
    return f"""\
### train configuraton

exp_dir: exp/XVEC-ArcMargin
gpus: "[0,1]"
enable_amp: False # whether enable automatic mixed precision training
{more}num_epochs: 150

dataset_args:
  # 0: as many as there are
  sample_num_per_epoch: 0
  speed_perturb: True
  fbank_args: {{num_mel_bins: 80,
               dither: 1.0}}

model: XVEC
model_init: null
model_args:
  feat_dim: 80
  embed_dim: 16
{head}
margin_scheduler: MarginScheduler
{schedule}
loss: CrossEntropyLoss
loss_args: {{}}

optimizer: SGD
optimizer_args:
  momentum: 0.9

scheduler: ExponentialDecrease
scheduler_args:
  initial_lr: 1.0e-1
  final_lr: 5e-5
"""


STOCK = {
    "arc": stock(),
    "lm": stock(schedule=LARGE, more="do_lm: True\n"),
    "subcentre": stock(SUBCENTRE),
    "sphereface2": stock(SPHEREFACE2),
    "flow": stock(FLOW),
    "softmax": stock('projection_args:\n  project_type: "softmax" # add_margin, softmax\n'),
    "margin": stock(ARC + "  margin: 0.2  # not read\n"),
    "last": stock("", "") + RISING + ARC.rstrip(),
}


def written(tmp_path, text, name="x.yaml"):
    path = tmp_path / name
    path.write_bytes(text.encode())
    return path


def changed_lines(before: str, after: str) -> tuple[list[str], list[str]]:
    lines = [x for x in difflib.ndiff(before.split("\n"), after.split("\n")) if x[0] in "+-"]
    return [x[2:] for x in lines if x[0] == "-"], [x[2:] for x in lines if x[0] == "+"]


def loss_of(config, kind) -> float:
    """The loss of the head that ``config`` builds, on four embeddings."""
    head = adapter.get_projection({**config.projection_args, "embed_dim": 16, "num_class": 9})
    assert type(head).__name__ == kind
    head.update(margin=0.2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        labels, out = torch.arange(4), head(torch.randn(4, 16), torch.arange(4))
    loss = out[1] if isinstance(out, tuple) else torch.nn.functional.cross_entropy(out, labels)
    return loss.item()


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("name", STOCK)
def test_only_the_lines_of_the_head_change(name, newline, tmp_path):
    text = STOCK[name].replace("\n", newline)
    path = written(tmp_path, text)
    swapped = swap(path)
    write(swapped, tmp_path / "y.yaml")
    assert path.read_bytes() == text.encode()
    data = (tmp_path / "y.yaml").read_bytes().decode()
    assert data.count("\r") in (0, data.count("\n"))

    removed, added = changed_lines(text, data)
    keys = {line.strip().split(":")[0] for line in removed + added if line}
    of_head = {"project_type", "scale", "alpha", "projection_args"}
    assert keys <= of_head | set(swapped.dropped)
    assert len([x for x in added if x]) == (1 if name == "flow" else 3)
    old, new = yaml.safe_load(text), yaml.safe_load(data)
    assert new.pop("projection_args") == {"project_type": "q_margin", "alpha": 1.5, "scale": "auto"}
    old.pop("projection_args")
    assert new == old and list(new) == list(old)
    if name != "flow":  # a comment behind a value stays
        kind = next(x for x in removed if "project_type" in x)
        assert next(x for x in added if "project_type" in x) == re.sub(
            r"(?<=[\"'])\w+(?=[\"'])", "q_margin", kind, count=1
        )
    assert loss_of(load_config(tmp_path / "y.yaml", check_paths=False), "QMarginProduct") > 0


def test_what_is_written_of_the_stock_head(tmp_path):
    swapped = swap(written(tmp_path, STOCK["arc"]))
    head = """\
projection_args:
  project_type: "q_margin" # add_margin, arc_margin, softmax
  alpha: 1.5
  scale: auto
"""
    assert swapped.after == STOCK["arc"].replace(ARC, head)
    assert swapped.dropped == {"easy_margin": False}
    assert difference(swapped, "new.yaml").splitlines()[1] == "+++ new.yaml"
    assert '+  project_type: "q_margin"' in difference(swapped, "new.yaml")


@pytest.mark.parametrize("alpha, scale", [(1.25, 20), (1.5, 10), (2, 5)])
def test_auto_is_the_recommended_pair(alpha, scale, tmp_path):
    path = written(tmp_path, STOCK["arc"])
    after = swap(path, alpha=alpha).after
    config = load_config(written(tmp_path, after, "y.yaml"))
    args = {**config.projection_args, "embed_dim": 4, "num_class": 3}
    head = adapter.get_projection(args)
    assert (head.alpha, head.scale) == (alpha, scale)
    assert f"\n  scale: {float(scale)}\n" in swap(path, alpha=alpha, scale=float(scale)).after


@pytest.mark.parametrize(
    "schedule, margin, initial, final",
    [
        (RISING, 0.3, 0.0, 0.3),  # a margin that rises still begins where it did
        (LARGE, 0.2, 0.2, 0.2),  # a fixed one stays fixed
        (RISING.replace("n: 0.0", "n: 0.1"), 0.05, 0.05, 0.05),  # nor does it begin above
        (LARGE.replace("update_margin: True", "update_margin: False"), 0.1, 0.1, 0.1),
        (RISING.replace("update_margin: True", "update_margin: False"), 0.1, 0.1, 0.1),
    ],
)
def test_margin_is_the_only_thing_of_the_schedule_to_change(
    schedule, margin, initial, final, tmp_path
):
    text = stock(schedule=schedule)
    swapped = swap(written(tmp_path, text), margin=margin)
    before, after = yaml.safe_load(text)["margin_update"], swapped.new["margin_update"]
    assert after == {**before, "initial_margin": initial, "final_margin": final}
    removed, _ = changed_lines(text, swapped.after)
    assert {x.split(":")[0].strip() for x in removed} >= {"final_margin", "scale"}
    assert "cosine" not in schedule or "# cosine" in swapped.after
    kept = swap(written(tmp_path, text)).new["margin_update"]
    assert kept == before  # without --margin


@pytest.mark.parametrize(
    "like, kind", [("cosface", "AddMarginProduct"), ("aam", "ArcMarginProduct")]
)
@pytest.mark.parametrize("name", STOCK)
def test_the_control_of_a_q_margin_yaml(name, like, kind, tmp_path):
    path = written(tmp_path, swap(written(tmp_path, STOCK[name]), alpha=1.25).after, "q.yaml")
    control = swap(path, like=like)
    assert control.new["projection_args"] == LIKE[like]
    assert {**control.new, "projection_args": 0} == {**control.old, "projection_args": 0}
    write(control, tmp_path / "control.yaml")
    config = load_config(tmp_path / "control.yaml", check_paths=False)
    assert config.projection_args["scale"] == 32.0 and loss_of(config, kind) > 0
    assert swap(path, like=like, scale=20.0).new["projection_args"]["scale"] == 20.0


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_there_and_back_is_the_same_file(newline, tmp_path):
    text = STOCK["arc"].replace("\n", newline)
    there = swap(written(tmp_path, text), alpha=2)
    back = swap(written(tmp_path, there.after), like="aam")
    assert back.after == text


def test_already_q_margin(tmp_path, capsys):
    path = written(tmp_path, swap(written(tmp_path, STOCK["arc"])).after, "q.yaml")
    with pytest.raises(
        ValueError, match=r"is q_margin alpha 1.5 scale auto already; say what .*--"
    ):
        swap(path)
    removed, added = changed_lines(path.read_text(), swap(path, alpha=2.0).after)
    assert (removed, added) == (["  alpha: 1.5"], ["  alpha: 2.0"])
    removed, added = changed_lines(path.read_text(), swap(path, margin=0.1).after)
    assert [line.split("#")[0].strip() for line in removed + added] == [
        "final_margin: 0.2",
        "final_margin: 0.1",
    ]
    hand = path.read_text().replace("scale: auto", "scale: 32.0\n  K: 3\n  easy_margin: True")
    only = swap(written(tmp_path, hand, "hand.yaml"))  # a scale that somebody chose is his
    assert only.new["projection_args"] == {"project_type": "q_margin", "alpha": 1.5, "scale": 32.0}
    assert only.dropped == {"K": 3, "easy_margin": True}
    with pytest.raises(ValueError, match="is add_margin scale 32.0 already; nothing to change"):
        swap(written(tmp_path, swap(path, like="cosface").after), like="cosface")


def test_a_config_over_a_base(tmp_path):
    written(tmp_path, STOCK["arc"], "base.yaml")
    over = (
        "base: base.yaml  # all else\nprojection_args:\n  project_type: add_margin\n  scale: 30.0\n"
    )
    path = written(tmp_path, over, "over.yaml")
    swapped = swap(path)
    assert swapped.after.startswith("base: base.yaml  # all else\n") and "easy" not in swapped.after
    assert swapped.new["margin_update"]["final_margin"] == 0.2  # the base's
    write(swapped, tmp_path / "over_qmargin.yaml")
    assert load_config(tmp_path / "over_qmargin.yaml").projection_args["alpha"] == 1.5
    with pytest.raises(ValueError, match="margin_update: not in this file but in its base"):
        swap(path, margin=0.1)
    with pytest.raises(ValueError, match="relative to the file; keep the new one in"):
        write(swapped, tmp_path / "elsewhere" / "over.yaml")
    dense = "projection_args: {project_type: q_margin, impl: dense}\n"
    written(tmp_path, stock(dense), "base.yaml")
    assert swap(path).new["projection_args"]["impl"] == "dense"  # as the file over it is read
    no_head = written(tmp_path, "base: base.yaml\nnum_epochs: 3\n", "no_head.yaml")
    with pytest.raises(ValueError, match="projection_args: not in this file but in its base"):
        swap(no_head)


# the command


def command(*words, capsys) -> tuple[int, str, str]:
    status = main(["swap", *map(str, words)])
    return status, *capsys.readouterr()


def test_command_writes_beside_and_says_what_changes(tmp_path, capsys):
    path = written(tmp_path, STOCK["arc"], "xvec.yaml")
    status, out, _ = command(path, capsys=capsys)
    new = tmp_path / "xvec_qmargin.yaml"
    assert status == 0 and out.splitlines()[-1] == str(new)
    assert new.read_text() == swap(path).after and path.read_text() == STOCK["arc"]
    assert "-  scale: 32.0\n" in out and "+  scale: auto\n" in out
    gaps = {m: math.exp(5 * m) / 5 for m in (0, 0.2, 0.5)}
    for margin, gap in gaps.items():
        assert f"  {gap:.3g} at margin {margin:g}, " in out
    assert (
        "2.44 at margin 0.5, a large-margin stage after this one: above 2, no sample is won" in out
    )
    assert (
        out.index("infinite at any margin") < out.index("Zero-loss gap after") < out.index("0.544")
    )
    for words in ("Dropped: easy_margin False", "radians", "150 epochs", "learning rates", "data"):
        assert words in out
    assert "exp_dir is still exp/XVEC-ArcMargin" in out and "own; 'loss: Cross" in out


def test_command_on_a_large_margin_stage(tmp_path, capsys):
    _, out, _ = command(written(tmp_path, STOCK["lm"]), capsys=capsys)
    assert "2.44 at margin 0.5, throughout: above 2, no sample is won (0.544 at margin 0.2)" in out
    _, out, _ = command(
        tmp_path / "x_qmargin.yaml", "--margin", "0.2", "--out", tmp_path / "y.yaml", capsys=capsys
    )
    assert "0.544 at margin 0.2, throughout\n" in out and "stage after" not in out


@pytest.mark.parametrize(
    "name, words, said",
    [
        ("softmax", [], "softmax never reads it"),
        ("softmax", [], "only the backbone fits"),
        ("subcentre", [], "has K prototypes a speaker"),
        ("subcentre", [], "Dropped: easy_margin True, K 3, mp 0.06, k_top 5"),
        (
            "arc",
            ["--scale", "32"],
            "1.53 at margin 0.2, from epoch 40 on: all rivals at a cosine < 0",
        ),
        ("arc", ["--scale", "32"], "s (alpha - 1) = 16; the recommended 5 is 'scale: auto' (10)"),
        ("arc", ["--alpha", "1"], "Zero-loss gap after:\n  infinite"),
        ("arc", ["--like", "cosface"], "add_margin subtracts it from the cosine"),
        ("arc", ["--margin", "0.1"], "0.33 at margin 0.1, from epoch 40 on\n"),
    ],
)
def test_what_the_command_says_of_others(name, words, said, tmp_path, capsys):
    status, out, _ = command(written(tmp_path, STOCK[name]), *words, capsys=capsys)
    assert status == 0 and said in out


def test_help_shows_an_example(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["swap", "--help"])
    assert stop.value.code == 0
    assert "wespeaker-qmargin swap conf/" in capsys.readouterr().out.split("examples:")[1]


def test_names_of_the_new_files():
    assert default_path("a/x.yaml") == Path("a/x_qmargin.yaml")
    assert default_path("a/x.yml", "aam") == Path("a/x_aam.yml")
    assert default_path("x_qmargin.yaml", "cosface") == Path("x_cosface.yaml")
    assert default_path("x_cosface.yaml") == Path("x_qmargin.yaml")


def test_nothing_is_overwritten(tmp_path, capsys):
    path = written(tmp_path, STOCK["arc"])
    for words in ([], ["--out", path], ["--out", tmp_path]):
        (tmp_path / "x_qmargin.yaml").write_text("mine")
        status, out, error = command(path, *words, capsys=capsys)
        assert (status, out) == (1, "") and "exists already and is not overwritten" in error
    assert (tmp_path / "x_qmargin.yaml").read_text() == "mine"
    assert path.read_text() == STOCK["arc"] and len(list(tmp_path.iterdir())) == 2


def test_a_folder_that_cannot_be_written(tmp_path, capsys):
    path = written(tmp_path, STOCK["arc"])
    (tmp_path / "file").write_text("")
    status, out, error = command(path, "--out", tmp_path / "file" / "y.yaml", capsys=capsys)
    assert (status, out) == (1, "") and error.count("\n") == 1
    assert "y.yaml: not written (" in error and "choose another --out" in error


BAD = [
    ("- 1\n", [], "expected keys and values, found list"),
    ("a: [\n", [], "not a plain YAML file"),
    ("model: XVEC\ndino_head_args: {out_dim: 65536}\n", [], "projection_args: missing.*self-super"),
    ("projection_args: 3\n", [], "projection_args: expected keys and values, got 3"),
    (stock("projection_args: {scale: 3}\n"), [], "project_type: unknown head None"),
    (STOCK["arc"].replace('"arc_m', '"arc_n'), [], "'arc_nargin'.*Did you mean 'arc_margin'"),
    (
        STOCK["arc"].replace("False\n\n", "False\n  scale: 30\n\n"),
        [],
        "scale: comes twice with diff",
    ),
    (STOCK["arc"], ["--alpha", "2.5"], r"alpha must be in \[1, 2\]"),
    (STOCK["arc"], ["--scale", "-3"], "scale must be a finite number > 0"),
    (STOCK["arc"], ["--margin", "-0.1"], "--margin: expected a number >= 0"),
    (STOCK["arc"], ["--margin", "nan"], "--margin: expected a number >= 0"),
    (STOCK["arc"], ["--like", "cosface", "--alpha", "1.5"], "--like: expected .*without --alpha"),
    (
        STOCK["arc"],
        ["--like", "cosface", "--scale", "auto"],
        "--scale: of --like expected a number",
    ),
    (stock(schedule=""), ["--margin", "0.1"], "margin_update: missing; --margin has nothing"),
    (stock(schedule="margin_update: [1]\n"), [], "margin_update: expected numbers as margins"),
    (stock("head: &h\n  project_type: sphere\nprojection_args: *h\n"), [], "written with anchors"),
]


@pytest.mark.parametrize("text, words, message", BAD)
def test_bad_input_is_one_line_that_names_the_file(text, words, message, tmp_path, capsys):
    path = written(tmp_path, text)
    status, out, error = command(path, *words, capsys=capsys)
    assert (status, out) == (1, "") and error.count("\n") == 1 and re.search(message, error)
    assert str(path) in error or message.startswith("--")
    assert list(tmp_path.iterdir()) == [path]


def test_other_bad_input(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such config file"):
        swap(tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes("model: é\n".encode("latin-1"))
    with pytest.raises(ValueError, match="latin.yaml: not a UTF-8 text file"):
        swap(tmp_path / "latin.yaml")
    with pytest.raises(ValueError, match="--like: expected cosface or aam"):
        swap(written(tmp_path, STOCK["arc"]), like="arcface")


def test_a_key_that_comes_twice_with_the_same_value_is_told(tmp_path, capsys):
    text = stock(schedule=RISING + "  update_margin: true\n")
    status, out, _ = command(written(tmp_path, text), capsys=capsys)
    assert status == 0 and "Twice, with the same value, kept: update_margin, lines" in out
    assert (tmp_path / "x_qmargin.yaml").read_text().count("update_margin") == 2


# a project_type that is changed by hand, and nothing else


def small(tiny, head: str) -> str:
    """The text of the config ``tiny`` with this head."""
    values = yaml.safe_load(tiny.read_text())
    values.pop("projection_args")
    values.update(num_epochs=1, num_avg=1, valid_speakers=0)
    return yaml.safe_dump(values) + head


def test_project_type_alone_trains_and_warns(tiny, tmp_path, caplog):
    hand = small(tiny, ARC.replace('"arc_margin" #', '"q_margin" #'))
    with caplog.at_level(logging.WARNING):
        config = load_config(written(tmp_path, hand))
    assert config.projection_args["scale"] == 32.0
    assert "s (alpha - 1) = 16" in caplog.text and "cosine gap of 1.53" in caplog.text
    assert "write 'scale: auto' (10)" in caplog.text
    train(config)
    assert (Path(config.exp_dir) / "models" / "model_1.pt").is_file()


def test_what_swap_writes_trains_without_a_warning(tiny, tmp_path, caplog):
    write(swap(written(tmp_path, small(tiny, ARC))), tmp_path / "q.yaml")
    with caplog.at_level(logging.WARNING):
        config = load_config(tmp_path / "q.yaml")
    assert caplog.text == ""
    train(config)
    assert (Path(config.exp_dir) / "models" / "model_1.pt").is_file()


@pytest.mark.parametrize("option", ["easy_margin: True", "K: 3", "mp: 0.06", "k_top: 5"])
def test_by_hand_the_old_options_are_refused(option, tmp_path):
    head = f"projection_args:\n  project_type: q_margin\n  {option}\n"
    with pytest.raises(ValueError, match=f"projection_args.{option.split(':')[0]}"):
        load_config(written(tmp_path, stock(head)))


# the YAMLs of a checkout

FOLDERS = {"voxceleb/v2": 24, "cnceleb/v2": 5, "cnceleb/v3_finetune": 2, "sre/v2": 1}


@pytest.mark.checkout
@pytest.mark.parametrize("folder", FOLDERS)
def test_yamls_of_upstream(folder, tmp_path):
    paths = sorted(
        (Path(os.environ["WESPEAKER_ROOT"]) / "examples" / folder / "conf").glob("*.yaml")
    )
    assert len(paths) == FOLDERS[folder]
    for path in paths:
        swapped, text = swap(path), path.read_bytes().decode()
        new = written(tmp_path, swapped.after, path.name)
        # what surrounds the section is the same to the byte, and so is every other line in it
        parts = [
            re.split(r"(?m)^(projection_args:\s*?$(?:\r?\n +.*)*)", x)
            for x in (text, swapped.after)
        ]
        (above, old, below), (new_above, new_head, new_below) = parts
        assert (above, below) == (new_above, new_below), path
        ours = {"project_type", "alpha", "scale", *swapped.dropped}
        rest = [
            [x for x in part.split("\n") if x.strip().split(":")[0] not in ours]
            for part in (old, new_head)
        ]
        assert rest[0] == rest[1] and '"q_margin"' in new_head, path
        load_config(path, check_paths=False)
        config = load_config(new, check_paths=False)
        assert loss_of(config, "QMarginProduct") > 0
        control = written(tmp_path, swap(new, like="cosface").after, "control.yaml")
        assert loss_of(load_config(control, check_paths=False), "AddMarginProduct") > 0


@pytest.mark.checkout
def test_self_supervised_yamls_of_upstream():
    root = Path(os.environ["WESPEAKER_ROOT"]) / "examples" / "voxceleb" / "v3"
    paths = sorted(root.rglob("conf/*.yaml"))
    assert len(paths) == 4
    for path in paths:
        with pytest.raises(ValueError, match="projection_args: missing"):
            swap(path)
