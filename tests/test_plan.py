"""The plan: gaps and curves against closed forms, support against simulation, warnings."""

import json
import math

import numpy as np
import pytest
import torch

from wespeaker_qmargin.cli import main
from wespeaker_qmargin.functional import q_margin_per_sample
from wespeaker_qmargin.plan import describe, plan, two_class_curve

PNG = b"\x89PNG\r\n"


def test_the_recommended_pairs_share_a_gap():
    found = plan(alpha=1.5, scale=10, margin=0.2)
    assert found.k == 5 and found.warnings == []
    assert [x[:2] for x in found.recommended] == [(1.25, 20), (1.5, 10), (2, 5)]
    for setting in (found.setting, *found.recommended, *found.smallest_gap):
        assert setting.gap == pytest.approx(math.e / 5)
    half = plan(alpha=1.5, margin=0.5).smallest_gap
    assert [x.scale * (x.alpha - 1) for x in half] == pytest.approx([2, 2, 2])
    assert [x.gap for x in half] == pytest.approx([math.e / 2] * 3), "e m is the smallest"


@pytest.mark.parametrize("alpha", [1.1, 1.25, 1.5, 2])
@pytest.mark.parametrize("q", [1.0, 0.5])
def test_two_class_curve_against_bisection(alpha, q):
    scale, lead = 7.0, np.linspace(-0.9, 0.9, 37)

    def mass(theta, tau):
        return q * np.maximum(1 + (alpha - 1) * (theta - tau), 0) ** (1 / (alpha - 1))

    for x, p in zip(lead, two_class_curve(lead, alpha=alpha, scale=scale, q=q)):
        low, high = -100.0, 100.0
        for _ in range(200):
            tau = (low + high) / 2
            low, high = (tau, high) if mass(scale * x, tau) + mass(0, tau) > 1 else (low, tau)
        assert p == pytest.approx(mass(scale * x, low), abs=1e-9)


@pytest.mark.parametrize("alpha", [1.25, 1.5, 1.75, 2])
def test_where_the_curves_become_flat(alpha):
    found = plan(alpha=alpha, scale=9.0, margin=0)
    for (name, lead), q in zip(found.saturation.items(), (1.0, 0.5)):
        leads = [lead * (1 - 1e-3), lead * (1 + 1e-3), -lead * (1 + 1e-3)]
        inside, outside, losing = two_class_curve(leads, alpha=alpha, scale=9.0, q=q)
        assert inside < 1 and outside == pytest.approx(1, abs=1e-12) and losing == 0, name
    assert found.saturation["q = (1, 1)"] == pytest.approx(1 / found.k)


def test_a_sample_is_won_where_the_gap_says():
    found = plan(alpha=1.5, scale=10, margin=0.2)
    for factor, active in ((0.999, True), (1.001, False)):
        scores = torch.tensor([[10 * found.setting.gap * factor, 0.0]], dtype=torch.float64)
        p = two_class_curve([factor * found.setting.gap], alpha=1.5, scale=10, margin=0.2)
        loss, *_ = q_margin_per_sample(scores, torch.tensor([0]), alpha=1.5, log_q_target=-2.0)
        assert (loss.item() > 0) == active and (p[0] < 1) == active


def test_alpha_one_is_the_logistic_curve():
    lead = np.linspace(-1, 1, 9)
    p = two_class_curve(lead, alpha=1, scale=4.0, margin=0.1)
    np.testing.assert_allclose(p, 1 / (1 + np.exp(-4 * (lead - 0.1))))
    found = plan(alpha=1, num_class=10)
    assert found.support == 10 and "CosFace" in found.warnings[0]
    assert "no sample is ever won" in describe(found)


@pytest.mark.parametrize(("alpha", "num_class", "dim"), [(1.5, 2000, 256), (2.0, 500, 64)])
def test_support_at_the_start_against_simulation(alpha, num_class, dim):
    found = plan(alpha=alpha, num_class=num_class, dim=dim)
    random = torch.Generator().manual_seed(0)
    draw = [torch.randn(n, dim, generator=random) for n in (200, num_class)]
    embeddings, weight = (torch.nn.functional.normalize(x) for x in draw)
    labels = torch.randint(num_class, (200,), generator=random)
    scores = found.setting.scale * embeddings @ weight.T
    _, support, *_ = q_margin_per_sample(scores, labels, alpha=alpha)
    assert found.support == pytest.approx(support.double().mean().item(), rel=0.15, abs=1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"alpha": 1.5, "scale": 32}, ["hardly ever won", "flat beyond", "0.0625", "use scale 10"]),
        ({"alpha": 1.5, "margin": 0.5}, ["no sample can ever be won", "2.44", "at most 2"]),
        ({"alpha": 2, "scale": 32, "margin": 0.5}, ["no sample can ever", "use scale 5"]),
    ],
)
def test_warnings_give_the_reason(options, words):
    text = " ".join(plan(**options).warnings)
    assert all(word in text for word in words), text
    assert not plan(alpha=1.25).warnings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 0.9}, r"alpha: expected a number in \[1, 2\], got 0.9"),
        ({"alpha": math.nan}, "alpha: expected"),
        ({"alpha": 1.5, "margin": -1}, "margin: expected a number >= 0, got -1"),
        ({"alpha": 1.5, "scale": 0}, "scale must be > 0"),
        ({"alpha": 1.5, "num_class": 1}, "classes: expected at least 2, got 1"),
        ({"alpha": 1.5, "num_class": 9, "dim": 0}, "dim: expected at least 1, got 0"),
    ],
)
def test_values_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        plan(**options)


def test_the_command(tmp_path, capsys):
    words = ["--alpha", "1.5", "--classes", "5994", "--margin", "0.2"]
    files = {"plot": tmp_path / "x" / "plan.png", "out": tmp_path / "plan.json"}
    words += [str(w) for key, path in files.items() for w in (f"--{key}", path)]
    assert main(["plan", *words]) == 0
    printed = capsys.readouterr().out
    assert "k = s (alpha - 1) = 5" in printed and "of 5994 classes are active" in printed
    assert files["plot"].read_bytes().startswith(PNG)
    content = json.loads(files["out"].read_text())
    assert content["setting"]["gap"] == pytest.approx(0.5437, abs=1e-4)
    assert len(content["curves"]["lead"]) == len(content["curves"]["q = (1, 1)"]) == 401
    assert main(["plan", "--alpha", "1", "--out", str(files["out"])]) == 0
    assert json.loads(files["out"].read_text())["setting"]["gap"] is None
    assert main(["plan", "--alpha", "3"]) == 1
    assert "alpha: expected" in capsys.readouterr().err
