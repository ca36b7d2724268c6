"""Leads and grid statistics against double-precision loops; verdicts and advice."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from wespeaker_qmargin import leads as module
from wespeaker_qmargin.functional import q_margin_per_sample
from wespeaker_qmargin.leads import Cell, GridStatistics
from wespeaker_qmargin.plan import Setting
from wespeaker_qmargin.verdict import advise, verdict

SETTINGS = [
    Setting.of(alpha, scale, margin)
    for alpha, scale in ((1.0, 16.0), (1.25, 20.0), (1.5, 10.0), (1.5, 4.0), (1.8, 9.0), (2.0, 5.0))
    for margin in (0.0, 0.1, 0.2)
]


def embedded(num_speakers=10, copies=3, samples=90, noise=0.12, seed=0):
    """Prototypes of speakers and their copies, which are near them, and samples around them."""
    random = torch.Generator().manual_seed(seed)
    speakers = torch.randn(num_speakers, 24, generator=random).repeat(copies, 1)
    prototypes = speakers + 0.8 * torch.randn(speakers.shape, generator=random)
    labels = torch.randint(len(prototypes), (samples,), generator=random)
    spread = noise * torch.rand(samples, 1, generator=random) * 24**0.5
    units = F.normalize(prototypes)[labels]
    return prototypes, units + spread * torch.randn(units.shape, generator=random) / 3, labels


def posterior(scores, label, alpha, log_q_target):
    """By bisection on the threshold, float64."""
    q = np.ones(len(scores))
    q[label] = math.exp(log_q_target)
    if alpha == 1:
        p = q * np.exp(scores - scores.max())
        return p / p.sum()
    h = alpha - 1
    low, high = scores.max() - 200, scores.max() + 200
    for _ in range(200):
        tau = (low + high) / 2
        p = q * np.maximum(1 + h * (scores - tau), 0) ** (1 / h)
        low, high = (tau, high) if p.sum() > 1 else (low, tau)
    return p


def by_hand(prototypes, embeddings, labels, setting, copies):
    """Return of each sample: own cosine, best rival's, its class, best of any, support, g."""
    units = F.normalize(prototypes.double()).numpy()
    rows = F.normalize(embeddings.double()).numpy()
    size, found = len(units) // copies, []
    for row, label in zip(rows, labels.tolist()):
        cosines = units @ row
        others = [j for j in range(len(units)) if j != label]
        rivals = [j for j in others if j % size != label % size]
        kept = [label, *rivals]
        alpha, scale, margin, _ = setting
        p = posterior(scale * cosines[kept], 0, alpha, -scale * margin)
        slope = math.sqrt((1 - p[0]) ** 2 + (p[1:] ** 2).sum()) if p[1:].any() else 0
        best = max(rivals, key=lambda j: cosines[j])
        own = cosines[label], cosines[best], best, cosines[others].max()
        found.append((*own, (p > 0).sum(), slope))
    return np.array(found).T


@pytest.mark.parametrize("copies", [1, 3])
def test_against_a_loop(copies):
    data = embedded()
    statistics = GridStatistics(data[0], SETTINGS, copies=copies)
    statistics.add(*(x[:50] for x in data[1:]))
    statistics.add(*(x[50:] for x in data[1:]))
    samples = statistics.samples()
    assert torch.equal(samples.label, data[2])
    for setting, cell in zip(SETTINGS, statistics.cells(samples)):
        own, best, rival, crowded, support, g = by_hand(*data, setting, copies)
        np.testing.assert_allclose(samples.lead, own - best, atol=1e-6)
        np.testing.assert_allclose(samples.crowded_lead, own - crowded, atol=1e-6)
        assert (samples.rival.numpy() == rival).all()
        assert cell.won == pytest.approx((own - best >= setting.gap).mean())
        assert cell.won_crowded == pytest.approx((own - crowded >= setting.gap).mean())
        assert cell.support == pytest.approx(support.mean(), abs=0.03), setting
        assert cell.support_high == pytest.approx(np.sort(support)[85], abs=1)  # 86 of 90: 95 %
        assert cell.gradient == pytest.approx(g.mean(), rel=1e-4, abs=1e-6)
        share = g.sum() ** 2 / (len(g) * (g**2).sum()) if g.any() else 0
        assert cell.effective_share == pytest.approx(share, rel=1e-3)
        assert cell.effective_share <= 1 - cell.won + 1e-6
        assert cell.k == setting.scale * (setting.alpha - 1)
    won = [cell.won for cell in statistics.cells(samples)]
    assert min(won) == 0 and max(won) > 0.2, "the grid must tell cells apart"


@pytest.mark.parametrize("setting", [x for x in SETTINGS if x.alpha > 1])
def test_won_is_what_has_no_gradient(setting):
    prototypes, embeddings, labels = embedded(copies=1)
    statistics = GridStatistics(prototypes, [setting])
    statistics.add(embeddings, labels)
    scores = setting.scale * F.normalize(embeddings) @ F.normalize(prototypes).T
    log_q = -setting.scale * setting.margin
    _, _, active = q_margin_per_sample(scores, labels, alpha=setting.alpha, log_q_target=log_q)
    lead = statistics.samples().lead
    assert ((lead < setting.gap) == active.numpy()).all()


def test_own_copies_are_no_rivals():
    prototypes = torch.eye(4)[[0, 1, 0, 1]]  # at both speeds the same
    statistics = GridStatistics(prototypes, [Setting.of(2, 5, 0.1)], copies=2)
    statistics.add(torch.eye(4)[:1], torch.tensor([2]))
    samples = statistics.samples()
    assert samples.lead.tolist() == [1] and samples.crowded_lead.tolist() == [0]
    assert samples.rival.item() in (1, 3)
    (cell,) = statistics.cells(samples)
    assert (cell.won, cell.won_crowded, cell.support, cell.gradient) == (1, 0, 1, 0)
    assert cell.effective_share == 0


def test_few_cosines_are_held_at_a_time(monkeypatch):
    data, held, nearest = embedded(), [], module.nearest

    def watched(cosines, *args, **options):
        held.append(cosines.numel())
        return nearest(cosines, *args, **options)

    whole = GridStatistics(data[0], SETTINGS)
    whole.add(*data[1:])
    monkeypatch.setattr(module, "nearest", watched)
    monkeypatch.setattr(module, "_ELEMENTS", 200)
    monkeypatch.setattr(module, "_PARTS", 4)
    pieces = GridStatistics(data[0], SETTINGS)
    pieces.add(*data[1:])
    assert max(held) <= 200 and sum(held) == 90 * 30
    assert len(pieces._parts) < 4
    np.testing.assert_allclose(whole.samples().lead, pieces.samples().lead, atol=1e-6)
    for one, other in zip(whole.cells(whole.samples()), pieces.cells(pieces.samples())):
        assert one[0] == other[0] and one[1:] == pytest.approx(other[1:], rel=1e-5)


def test_nothing_to_compare_with():
    with pytest.raises(ValueError, match="at least two speakers"):
        GridStatistics(torch.randn(3, 4), SETTINGS, copies=3)
    with pytest.raises(ValueError, match="no sample"):
        GridStatistics(torch.randn(3, 4), SETTINGS).samples()


def cells_of(lead, triples):
    cells = []
    for alpha, scale, margin in triples:
        setting = Setting.of(alpha, scale, margin)
        won = float((lead >= setting.gap).mean())
        cells.append(Cell(setting, won, won, 3.0, 5, 0.5, 0.5))
    return cells


GRID = [(a, k / (a - 1), m) for a in (1.25, 1.5, 2.0) for k in (2.5, 5, 10) for m in (0.1, 0.2)]
GRID.append((1.0, 32.0, 0.2))


@pytest.mark.parametrize(
    ("won", "word"),
    [(0, "safe"), (0.499, "safe"), (0.5, "mild"), (0.799, "mild"), (0.8, "starving")],
)
def test_verdicts(won, word):
    assert verdict(won) == word


def test_advice_by_the_share_won():
    # gaps at margin 0.2: 0.544 (k 5), 0.659 (2.5), 0.739 (10); at 0.1: 0.330, 0.514, 0.272
    few = np.full(100, 0.2, dtype=np.float32)
    found = advise(cells_of(few, GRID), few, margin=0.2)
    assert found.cell.setting[:3] == (2.0, 5.0, 0.2), "k 5, then the largest alpha"
    assert "safe, 0 % won" in found.reason

    many = np.repeat(np.float32([0.3, 0.6]), [40, 60])  # only k 5 is won, by 60 %
    found = advise(cells_of(many, GRID), many, margin=0.2)
    assert found.cell.setting.alpha == 2 and found.cell.k in (2.5, 10)
    assert verdict(found.cell.won) == "safe"

    nearer = [*GRID, (1.5, 8, 0.2), (1.8, 30, 0.2)]  # k 4: gap 0.556, won by 60 % as well
    assert advise(cells_of(many, nearer), many, margin=0.2).cell.k in (2.5, 10)

    mild = np.repeat(np.float32([0.3, 0.7, 0.8]), [30, 15, 55])
    found = advise(cells_of(mild, GRID), mild, margin=0.2)
    assert found.cell.k == 10 and found.cell.won == pytest.approx(0.55)
    assert "wins least, 55 %" in found.reason

    all_won = np.full(100, 0.9, dtype=np.float32)
    found = advise(cells_of(all_won, GRID), all_won, margin=0.2)
    assert found.cell is None and "stay with CosFace, or raise the margin" in found.reason
    margin = math.log(5 * 0.9) / 5
    assert Setting.of(1.5, 10, margin).gap == pytest.approx(0.9)
    assert f"would be active at {margin:.2f}" in found.reason

    found = advise(cells_of(few, GRID), few, margin=0.3)
    assert found.cell is None and "target margin 0.3" in found.reason
