"""The calibrate command: score files in, log-likelihood ratios out."""

import json
import re

import numpy as np
import pytest

from wespeaker_qmargin import cli
from wespeaker_qmargin.calibrate import calibrate_files, trial_features
from wespeaker_qmargin.files import read_scores, read_table
from wespeaker_qmargin.llr import cllr, fit_calibration

KEYS = [f"u{i:02d}" for i in range(60)]


def write(path, seed, labelled=True, num=1200):
    """AS-Norm's eight columns, where a target's score falls with the shorter duration."""
    rng = np.random.default_rng(seed)
    seconds = np.random.default_rng(9).uniform(1, 30, len(KEYS)).round(3)
    (path.parent / "utt2dur").write_text("".join(f"{k} {x}\n" for k, x in zip(KEYS, seconds)))
    lines = []
    for a, b in rng.integers(0, len(KEYS), (num, 2)):
        same = rng.random() < 0.3
        short = min(seconds[a], seconds[b], 20)
        score = rng.standard_normal() + same * 0.3 * short
        sides = [20 + a, 20 + b, 0.1 + a / 100, 0.1 + b / 100]
        label = ["target" if same else "nontarget", *map(str, sides)] if labelled else []
        lines.append(" ".join([KEYS[a], KEYS[b], f"{score:.8g}", *label]) + "\n")
    path.write_text("".join(lines))
    return path


@pytest.fixture
def data(tmp_path):
    """A file to fit on and two to apply to."""
    write(tmp_path / "fit.score", 0)
    write(tmp_path / "a.score", 1)
    write(tmp_path / "plain.score", 2, labelled=False)
    return tmp_path


def test_the_files_hold_the_ratios(data):
    paths = calibrate_files(
        data / "fit.score", [data / "a.score", data / "plain.score"], out=data / "out"
    )
    assert [x.name for x in paths] == ["cali_a.score", "cali_plain.score"]
    given = read_scores(data / "fit.score")
    fitted = fit_calibration(given.scores[:, None], given.is_target)
    for path, name in zip(paths, ("a.score", "plain.score")):
        before, after = read_scores(data / name), read_scores(path)
        assert (after.enroll, after.test) == (before.enroll, before.test)
        expected = fitted.llr(before.scores[:, None])
        np.testing.assert_allclose(after.scores, expected, rtol=1e-7, atol=1e-7)
    assert read_scores(paths[1]).is_target is None
    record = json.loads((data / "out" / "calibration.json").read_text())
    assert record["weights"] == {"score": fitted.weights[0]} and record["bias"] == fitted.bias
    assert record["num_target"] + record["num_nontarget"] == 1200
    assert record["min_cllr"] < record["cllr"] < 1 and record["min_dcf"] <= record["act_dcf"]


def test_measures_are_upstreams_columns(data):
    _, features, names = trial_features(
        data / "a.score", ["duration", "norm", "cohort"], utt2dur=data / "utt2dur"
    )
    assert names[0] == "score" and len(names) == 13
    seconds = {k: float(x) for k, x in read_table(data / "utt2dur").items()}
    rows = [line.split() for line in (data / "a.score").read_text().splitlines()]
    for row, found in zip(rows, features, strict=True):
        pairs = [[min(seconds[key], 20.0) for key in row[:2]]]
        pairs += [[float(x) for x in row[4:6]], [float(x) for x in row[6:8]]]
        expected = [float(row[2])]
        for pair in pairs:
            low, high = min(pair), max(pair)
            expected += [low, high, high - low, high / low]
        np.testing.assert_allclose(found, expected, rtol=1e-14)


def test_a_measure_that_tells_lowers_the_cost(data):
    def cost(**options):
        path = calibrate_files(data / "fit.score", [data / "a.score"], out=data / "out", **options)[
            0
        ]
        scores = read_scores(path)
        return cllr(scores.scores, scores.is_target)

    with_duration = cost(quality=["duration"], utt2dur=data / "utt2dur")
    assert with_duration < cost() - 0.02
    shorter = cost(quality=["duration"], utt2dur=data / "utt2dur", max_duration=2.0)
    assert shorter > with_duration + 0.01
    assert cost(p_target=0.5) != cost() != cost(l2=0.1)


def test_command_and_metrics_of_its_result(data, capsys):
    words = ["--fit", data / "fit.score", "--apply", data / "a.score", "--out", data / "out"]
    words += ["--quality", "duration", "norm", "cohort", "--utt2dur", data / "utt2dur"]
    assert cli.main(["calibrate", *map(str, words)]) == 0
    printed = capsys.readouterr().out.split()
    assert printed == [str(data / "out" / "cali_a.score")]
    assert cli.main(["metrics", "--llr", *printed, "--out", str(data / "results.json")]) == 0
    assert "minCllr" in capsys.readouterr().out
    result = json.loads((data / "results.json").read_text())["results"][0]
    assert 0 < result["min_cllr"] <= result["cllr"] < 1
    assert result["min_dcf"] <= result["act_dcf"] < 1


def test_separable_scores_give_finite_ratios(data):
    lines = (data / "fit.score").read_text().splitlines()
    rows = [line.split() for line in lines]
    for row in rows:
        row[2] = "0.9" if row[3] == "target" else "-0.9"
    (data / "fit.score").write_text("\n".join(" ".join(row) for row in rows))
    path = calibrate_files(data / "fit.score", [data / "fit.score"], out=data)[0]
    scores = read_scores(path)
    assert np.abs(scores.scores).min() > 5 and np.abs(scores.scores).max() < 100
    assert cllr(scores.scores, scores.is_target) < 0.01


def test_inverted_scores_are_told(data, caplog):
    rows = [line.split() for line in (data / "fit.score").read_text().splitlines()]
    text = "\n".join(f"{a} {b} {-float(score)} {label}" for a, b, score, label, *_ in rows)
    (data / "fit.score").write_text(text)
    calibrate_files(data / "fit.score", [data / "a.score"], out=data / "out")
    assert "scores look inverted" in caplog.text


def edit(path, change):
    rows = [line.split() for line in path.read_text().splitlines()]
    path.write_text("\n".join(" ".join(row) for row in change(rows)))


ALL = ("--quality", "duration", "norm", "cohort", "--utt2dur", "{data}/utt2dur")


@pytest.mark.parametrize(
    "name, change, options, words",
    [
        ("fit", lambda r: [x[:3] for x in r], (), "fit.score: no labels"),
        ("fit", lambda r: [x for x in r if x[3] == "target"], (), "target and 0 non-target"),
        ("fit", lambda r: [x for x in r if x[3] != "target"], (), "score: 0 target and"),
        ("fit", lambda r: [[*x[:2], "0.5", x[3]] for x in r], (), "scores are 0.5: they tell no"),
        ("fit", lambda r: [[*x[:2], "nan", x[3]] for x in r], (), "fit.score:1: score nan"),
        ("a", lambda r: [[*x[:2], "inf", x[3]] for x in r], (), "a.score:1: score inf"),
        ("a", lambda r: [x[:4] for x in r], ALL, "a.score:1: expected the 8 columns"),
        ("a", lambda r: [[*x[:5], "nan", *x[6:]] for x in r], ALL, "a.score:1: columns 5 to 8"),
        ("a", lambda r: [[*x[:6], "-0.1", x[7]] for x in r], ALL, "the cohort of 1200 trials is"),
        ("a", lambda r: [["new", *x[1:]] for x in r], ALL, "without duration.*: 1, the first: new"),
        ("utt2dur", lambda r: [[x[0], "long"] for x in r], ALL, "expected seconds, got 'long'"),
        ("utt2dur", lambda r: [[x[0], "nan"] for x in r], ALL, "expected seconds, got 'nan'"),
        ("utt2dur", lambda r: [[x[0], "0"] for x in r], ALL, "the duration of 1200 trials is not"),
        ("a", lambda r: r, ALL[:2], "duration and the file utt2dur go together"),
        ("a", lambda r: r, ALL[4:], "duration and the file utt2dur go together"),
        ("a", lambda r: r, ("--quality", "norm", "norm"), "quality must be some of"),
        ("a", lambda r: r, ("--apply", "{data}/a.score", "{data}/a.score"), "two files would both"),
        ("a", lambda r: r, ("--apply", "{data}/none.score"), "none.score: no such file"),
        ("a", lambda r: r, ("--p_target", "1"), "expected 0 < p_target < 1"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(data, capfd, name, change, options, words):
    edit(data / (name if name == "utt2dur" else f"{name}.score"), change)
    given = ["--fit", "{data}/fit.score", "--apply", "{data}/a.score", "--out", "{data}/out"]
    given = [word.format(data=data) for word in (*given, *options)]
    assert cli.main(["calibrate", *given]) == 1
    errors = [x for x in capfd.readouterr().err.splitlines() if "error: " in x]
    assert len(errors) == 1 and re.search(words, errors[0]), errors
    assert not (data / "out").exists()


def test_no_file_to_apply_to(data):
    with pytest.raises(ValueError, match="expected one score file or more"):
        calibrate_files(data / "fit.score", [], out=data / "out")
