"""Comparing systems: closed forms, pairing, p-values, seeds, bad input."""

import json
import math

import numpy as np
import pytest
from scipy.stats import norm

from wespeaker_qmargin.cli import main
from wespeaker_qmargin.compare import compare, markdown
from wespeaker_qmargin.roc import bootstrap, eer

SPEAKERS, TAKES = 24, 5


@pytest.fixture(scope="module")
def trials():
    keys = [f"u{i}" for i in range(SPEAKERS * TAKES)]
    speaker_of = {key: f"s{i // TAKES}" for i, key in enumerate(keys)}
    pairs = [(a, b) for i, a in enumerate(keys) for b in keys[i + 1 :]]
    same = np.array([speaker_of[a] == speaker_of[b] for a, b in pairs])
    return speaker_of, pairs, same


@pytest.fixture
def write(trials, tmp_path):
    speaker_of, pairs, same = trials
    utt2spk = tmp_path / "utt2spk"
    utt2spk.write_text("".join(f"{k} {v}\n" for k, v in speaker_of.items()))

    def write(name: str, scores, order=None):
        lines = [
            f"{a} {b} {x:.17g} {'target' if t else 'nontarget'}\n"
            for (a, b), x, t in zip(pairs, scores, same)
        ]
        path = tmp_path / f"{name}.score"
        path.write_text("".join(lines if order is None else [lines[i] for i in order]))
        return path

    return write, utt2spk


def gaussian(trials, distance: float, seed: int) -> np.ndarray:
    _, pairs, same = trials
    return distance * same + np.random.default_rng(seed).standard_normal(len(pairs))


def test_two_unit_gaussians(trials, write):
    write, utt2spk = write
    paths = [write("one", gaussian(trials, 2.0, 0)), write("two", gaussian(trials, 3.0, 1))]
    report = compare({"A": paths[:1], "B": paths[1:]}, utt2spk, replicates=300)
    for name, distance in (("A", 2), ("B", 3)):
        found = report["systems"][name]["eer"]
        expected = norm.cdf(-distance / 2)
        assert found["mean"] == pytest.approx(expected, abs=0.02)
        assert found["interval"][0] < expected < found["interval"][1]
        assert found["sd"] is None
    gain = report["differences"]["B - A"]["eer"]
    assert gain["difference"] == pytest.approx(norm.cdf(-1.5) - norm.cdf(-1), abs=0.03)
    assert gain["interval"][1] < 0 and gain["p"] == pytest.approx(2 / 301)
    fnr = report["systems"]["A"]["fnr"]["mean"]
    assert fnr == pytest.approx(norm.cdf(norm.isf(1e-3) - 2), abs=0.1)


def test_an_interval_is_that_of_the_system_alone(trials, write):
    speaker_of, pairs, same = trials
    write, utt2spk = write
    scores = gaussian(trials, 2.0, 0)
    found = compare({"A": [write("a", scores)]}, utt2spk, replicates=100)
    sides = ([speaker_of[a] for a, _ in pairs], [speaker_of[b] for _, b in pairs])
    alone = bootstrap(scores, same, *sides, lambda x: [x.eer()], replicates=100)
    assert found["systems"]["A"]["eer"]["interval"] == pytest.approx(alone[0].tolist())
    assert found["differences"] == {}


def test_draws_are_paired_in_any_order_of_the_lines(trials, write):
    write, utt2spk = write
    scores = gaussian(trials, 2.0, 0)
    shuffled = np.random.default_rng(5).permutation(len(scores))
    paths = [write("a", scores), write("b", scores, shuffled)]
    found = compare({"A": paths[:1], "B": paths[1:]}, utt2spk, replicates=100)
    gain = found["differences"]["B - A"]["eer"]
    assert gain == {"difference": 0, "interval": [0, 0], "mixed_interval": None, "p": 1.0}


def test_p_is_uniform_where_nothing_differs(trials, write):
    write, utt2spk = write
    found = []
    for seed in range(15):
        paths = [write(f"{seed}{x}", gaussian(trials, 2.0, 100 * x + seed)) for x in (1, 2)]
        report = compare({"A": paths[:1], "B": paths[1:]}, utt2spk, replicates=40)
        found.append(report["differences"]["B - A"]["eer"]["p"])
    assert 0.3 < np.mean(found) < 0.7
    assert sum(p < 0.05 for p in found) <= 4


def test_inverted_scores_are_told(trials, write, caplog):
    write, utt2spk = write
    paths = [write("right", gaussian(trials, 2, 0)), write("inverted", -gaussian(trials, 2, 0))]
    compare({"A": paths[:1], "B": paths[1:]}, utt2spk, replicates=0)
    (line,) = caplog.messages
    assert line.startswith(f"{paths[1]}: EER 8") and "the scores look inverted" in line


def test_seeds(trials, write):
    write, utt2spk = write
    seeds = {
        name: [gaussian(trials, distance, first + seed) for seed in range(3)]
        for name, distance, first in (("A", 2, 0), ("B", 2.2, 10))
    }
    paths = {
        name: [write(f"{name}{i}", scores) for i, scores in enumerate(x)]
        for name, x in seeds.items()
    }
    report = compare(paths, utt2spk, replicates=200)
    eers = [eer(scores, trials[2]) for scores in seeds["A"]]
    found = report["systems"]["A"]["eer"]
    assert found["seeds"] == eers and found["mean"] == pytest.approx(np.mean(eers))
    assert found["sd"] == pytest.approx(np.std(eers, ddof=1))
    gain = report["differences"]["B - A"]["eer"]
    widths = [np.ptp(gain[key]) for key in ("interval", "mixed_interval")]
    assert widths[1] > widths[0]
    text = markdown(report)
    assert "±" in text and "seeds too" in text and "standard deviation" in text


def test_bad_input(trials, write, tmp_path):
    write, utt2spk = write
    scores = gaussian(trials, 2.0, 0)
    path = write("a", scores)
    with pytest.raises(ValueError, match="not the trials of"):
        other = write("b", scores, range(len(scores) - 1))
        compare({"A": [path], "B": [other]}, utt2spk, replicates=0)
    with pytest.raises(ValueError, match="at least one score file"):
        compare({"A": []}, utt2spk)
    few = tmp_path / "few"
    few.write_text("u0 s0\n")
    with pytest.raises(ValueError, match=r"utterances without speaker, first u1"):
        compare({"A": [path]}, few)
    lines = [line for line in path.read_text().splitlines(True) if line.split()[1] < "u13"]
    (tmp_path / "small.score").write_text("".join(lines))
    few.write_text("".join(f"u{i} s{i % 5}\n" for i in range(SPEAKERS * TAKES)))
    with pytest.raises(ValueError, match="5 speakers are too few to resample: .* needs 10"):
        compare({"A": [path]}, few)


def test_the_command(trials, write, tmp_path, capsys):
    write, utt2spk = write
    paths = [write(name, gaussian(trials, 2.0, i)) for i, name in enumerate("abc")]
    words = ["compare", "--utt2spk", str(utt2spk), "--bootstrap", "50"]
    words += ["--out", str(tmp_path / "x.json"), "--systems", f"A={paths[0]}"]
    assert main([*words, f"B={paths[1]},{paths[2]}"]) == 0
    printed = capsys.readouterr().out
    assert "| B - A |" in printed and "one seed has no standard deviation" in printed
    content = json.loads((tmp_path / "x.json").read_text())
    assert math.isclose(content["parameters"]["fpr"], 0.001)
    assert main([*words, "B"]) == 1 and "NAME=FILE" in capsys.readouterr().err
    assert main([*words, f"A={paths[1]}"]) == 1 and "comes twice" in capsys.readouterr().err
