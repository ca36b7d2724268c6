"""Schedules of alpha and scale, and the guard against starvation."""

import json
import logging
from types import SimpleNamespace

import pytest
import torch
import yaml

from wespeaker_qmargin.checkpoints import read_checkpoint
from wespeaker_qmargin.config import load_config
from wespeaker_qmargin.guard import StarvationGuard
from wespeaker_qmargin.head import QMarginProduct, auto_scale
from wespeaker_qmargin.ramps import HeadRamps, Ramp, alpha_ramp
from wespeaker_qmargin.train import train
from wespeaker_qmargin.upstream import wespeaker_module

DENSE_TO_SPARSE = {"final_alpha": 1.5, "increase_start_epoch": 2, "fix_start_epoch": 4}


def records(exp_dir) -> list[dict]:
    lines = (exp_dir / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "loss" in record]


@pytest.mark.parametrize("increase_type", ["linear", "exp"])
def test_a_ramp_is_wespeakers_margin(increase_type):
    head = torch.nn.Module()
    head.update = lambda margin: setattr(head, "margin", margin)
    model = SimpleNamespace(projection=head)
    options = {"increase_start_epoch": 3, "fix_start_epoch": 7, "increase_type": increase_type}
    reference = wespeaker_module("utils.schedulers").MarginScheduler(
        model, 10, initial_margin=0.1, final_margin=0.4, update_margin=True, **options
    )
    ramp = Ramp(0.1, 0.4, 3, 7, increase_type)
    for iteration in range(80):
        reference.step(iteration)
        assert ramp.at(iteration / 10) == pytest.approx(head.margin, abs=1e-6)


def config_of(**sections):
    content = {"alpha_update": {}, "scale_update": {}, "projection_args": {}}
    return SimpleNamespace(**{**content, **sections})


def test_the_scale_follows_where_it_is_auto():
    head = QMarginProduct(8, 20, alpha=1.5)
    ramps = HeadRamps(head, config_of(alpha_update=DENSE_TO_SPARSE), epoch_iter=10)
    for iteration, alpha in ((0, 1), (9, 1), (10, 1), (20, 1.25), (30, 1.5), (99, 1.5)):
        ramps.step(iteration)
        assert (head.alpha, head.scale) == (alpha, auto_scale(alpha))
    fixed = QMarginProduct(8, 20, alpha=1.5, scale=12)
    args = {"alpha_update": DENSE_TO_SPARSE, "projection_args": {"scale": 12}}
    HeadRamps(fixed, config_of(**args), epoch_iter=10).step(20)
    assert (fixed.alpha, fixed.scale) == (1.25, 12)
    args["scale_update"] = {"final_scale": 6, "increase_start_epoch": 1, "fix_start_epoch": 3}
    HeadRamps(fixed, config_of(**args), epoch_iter=10).step(10)
    assert (fixed.alpha, fixed.scale) == (1, 19)


def test_a_head_on_the_way_is_the_head_made_so():
    torch.manual_seed(0)
    head = QMarginProduct(16, 30, alpha=1.5)
    embeddings, labels = torch.randn(12, 16), torch.randint(30, (12,))
    for alpha in (1.0, 1.001, 1.2, 2.0):
        head.update_alpha(alpha)
        made = QMarginProduct(16, 30, alpha=alpha)
        made.load_state_dict(head.state_dict())
        torch.testing.assert_close(
            head.loss(embeddings, labels)[0], made.loss(embeddings, labels)[0], rtol=0, atol=0
        )
    with pytest.raises(ValueError, match="alpha must be in"):
        head.update_alpha(2.1)
    with pytest.raises(ValueError, match="need alpha > 1"):
        QMarginProduct(16, 30, impl="top_k").update_alpha(1.0)


def test_a_run_from_dense_to_sparse_resumes(tiny, tmp_path):
    content = yaml.safe_load(tiny.read_text())
    content["alpha_update"] = DENSE_TO_SPARSE
    tiny.write_text(yaml.safe_dump(content))
    config = load_config(tiny, ["--num_epochs", "4", "--valid_speakers", "0"])
    straight = records(train(config))
    per_epoch = {line["epoch"]: line for line in straight}
    assert [per_epoch[epoch]["alpha"] for epoch in (1, 4)] == [1, 1.5]
    assert 1 < per_epoch[2]["alpha"] < per_epoch[3]["alpha"] < 1.5
    assert per_epoch[1]["support"] == 10 > per_epoch[4]["support"], "dense, then sparse"
    assert [per_epoch[epoch]["scale"] for epoch in (1, 4)] == [32, 10]
    words = ["--num_epochs", "4", "--valid_speakers", "0", "--exp_dir", str(tmp_path / "again")]
    interrupted = load_config(tiny, words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("wespeaker_qmargin.train._Training._end_epoch", stop_after(2))
        with pytest.raises(KeyboardInterrupt):
            train(interrupted)
    train(interrupted, resume_run=True)
    states = [
        read_checkpoint(folder / "models" / "model_4.pt")
        for folder in (tmp_path / "exp", tmp_path / "again")
    ]
    assert all(torch.equal(x, states[1][key]) for key, x in states[0].items())


def stop_after(epoch: int):
    from wespeaker_qmargin.train import _Training

    end_epoch = _Training._end_epoch

    def stopping(self):
        end_epoch(self)
        if self.at.epoch == epoch + 1:
            raise KeyboardInterrupt

    return stopping


# --- starvation ----------------------------------------------------------------------------------


def test_widening_lowers_alpha_at_its_scale(caplog):
    head = QMarginProduct(8, 20, alpha=1.5)
    schedules = SimpleNamespace(ramps=HeadRamps(head, config_of(), epoch_iter=10))
    guard = StarvationGuard(schedules, min_active=0.2, action="widen")
    with caplog.at_level(logging.INFO):
        assert not guard.starves(0.2, head, 1) and head.alpha == 1.5
        assert not guard.starves(0.19, head, 1) and (head.alpha, head.scale) == (1.25, 10)
        assert not guard.starves(0.1, head, 1) and head.alpha == 1.25, "once an epoch"
    assert "19.0 %" in caplog.text and "0.544" in caplog.text and "gap 0.659" in caplog.text
    schedules.ramps.step(50)
    assert (head.alpha, head.scale) == (1.25, 10), "the schedule keeps it"
    for epoch in range(2, 9):
        guard.starves(0.0, head, epoch)
    assert head.alpha - 1 == pytest.approx(0.03125)
    assert "not widened further" in caplog.text


@pytest.mark.parametrize("action", ["warn", "widen", "stop"])
def test_what_training_does(tiny, action):
    words = ["--valid_speakers", "0", "--num_epochs", "3", "--projection_args.alpha", "2"]
    words += ["--starvation", f"{{min_active: 0.999999, action: {action}}}"]
    words += ["--margin_update.final_margin", "0", "--scheduler_args.initial_lr", "1"]
    config = load_config(tiny, words)
    if action != "stop":
        exp = train(config)
        alphas = [line["alpha"] for line in records(exp)]
        assert (alphas[-1] < 2) == (action == "widen")
        assert "have a gradient, less than" in (exp / "train.log").read_text()
        state = torch.load(exp / "state" / "state.pt", weights_only=True)
        assert (state["narrowing"] < 1) == (action == "widen")
        assert records(exp)[-1]["effective_batch"] == 8 * records(exp)[-1]["active"]
        return
    with pytest.raises(ValueError, match="starvation.action stop, at epoch"):
        train(config)
    again = load_config(tiny, [*words[:-6], "--margin_update.final_margin", "0", *words[-2:]])
    assert again.starvation == {}
    train(again, resume_run=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--starvation", "{min_active: 1.5}"], "min_active: expected a share"),
        (["--starvation", "{action: panic}"], "action: expected one of warn, widen, stop"),
        (["--starvation", "{least: 0.1}"], "starvation.least: not an argument"),
        (["--alpha_update", "{final_alpha: 1.5}"], "increase_start_epoch: missing"),
        (
            ["--alpha_update", "{final_alpha: 3, increase_start_epoch: 1, fix_start_epoch: 2}"],
            r"final_alpha: expected a number in \[1, 2\], got 3",
        ),
        (
            ["--scale_update", "{final_scale: 0, increase_start_epoch: 1, fix_start_epoch: 2}"],
            "final_scale: expected a number > 0",
        ),
        (
            ["--alpha_update", "{final_alpha: 2, increase_start_epoch: 3, fix_start_epoch: 2}"],
            "expected 1 <= increase_start_epoch <= fix_start_epoch",
        ),
        (
            [
                *("--projection_args.project_type", "add_margin", "--projection_args.scale", "32"),
                *("--starvation", "{min_active: 0.1}"),
            ],
            "starvation: is for project_type q_margin alone",
        ),
    ],
)
def test_settings_that_make_no_sense(tiny, words, message):
    with pytest.raises(ValueError, match=message):
        load_config(tiny, words)


def test_kinds_of_increase():
    with pytest.raises(ValueError, match="expected linear or exp, got 'cosine'"):
        alpha_ramp(**DENSE_TO_SPARSE, increase_type="cosine")
