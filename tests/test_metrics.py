"""The metrics command: files in, numbers, table and JSON out."""

import argparse
import json

import numpy as np
import pytest

from wespeaker_qmargin import cli, metrics
from wespeaker_qmargin.llr import cllr, min_cllr


@pytest.fixture
def data(tmp_path):
    """A folder with two score files, utt2spk, and a gender for each speaker."""
    rng = np.random.default_rng(0)
    utterances = [f"s{i % 24:02d}-{i // 24}" for i in range(120)]
    gender = {f"s{i:02d}": "f" if i < 12 else "m" for i in range(24)}
    for name in ("a.trials.score", "b.score"):
        with open(tmp_path / name, "w") as stream:
            for enroll, test in rng.integers(0, 120, (1500, 2)):
                if rng.random() < 0.3:
                    test = (enroll + 24 * rng.integers(1, 5)) % 120
                same = enroll % 24 == test % 24
                score = rng.standard_normal() + 2 * same
                label = "target" if same else "nontarget"
                stream.write(f"{utterances[enroll]} {utterances[test]} {score:.8g} {label}\n")
    (tmp_path / "utt2spk").write_text("".join(f"{u} {u[:3]}\n" for u in utterances))
    (tmp_path / "spk2gender").write_text("".join(f"{s} {g}\n" for s, g in gender.items()))
    (tmp_path / "utt2gender").write_text("".join(f"{u} {gender[u[:3]]}\n" for u in utterances))
    return tmp_path


def read(path):
    rows = [line.split() for line in path.read_text().splitlines()]
    return np.array([float(x[2]) for x in rows]), np.array([x[3] == "target" for x in rows]), rows


def test_results_are_those_of_the_functions(data):
    path = data / "a.trials.score"
    scores, is_target, rows = read(path)
    costs = {"p_target": 0.05, "c_miss": 2.0, "c_fa": 3.0}
    report = metrics.evaluate(
        [path, data / "b.score"], utt2spk=data / "utt2spk", **costs, fpr=[0.1, 1e-2], replicates=40
    )
    assert report["parameters"] == {
        **costs,
        "fpr": [0.1, 0.01],
        "bootstrap": 40,
        "seed": 0,
        "interval": 0.95,
        "utt2spk": str(data / "utt2spk"),
        "by": None,
        "llr": False,
        "skip_bad": False,
    }
    assert [x["name"] for x in report["results"]] == ["a.trials", "b"]
    enroll, test = ([row[side][:3] for row in rows] for side in (0, 1))
    interval, dcf_interval, fnr_interval = metrics.bootstrap(
        scores,
        is_target,
        enroll,
        test,
        lambda x: [x.eer(), x.min_dcf(**costs), x.fnr_at_fpr(0.01)],
        replicates=40,
    ).tolist()
    result = report["results"][0]
    assert result.pop("fnr_at")["0.01"] == {
        "fnr": metrics.fnr_at_fpr(scores, is_target, 0.01),
        "interval": fnr_interval,
    }
    assert result == {
        "scores": str(path),
        "name": "a.trials",
        "num_skipped": 0,
        "num_target": is_target.sum(),
        "num_nontarget": (~is_target).sum(),
        "num_speaker": 24,
        "eer": metrics.eer(scores, is_target),
        "eer_interval": interval,
        "eer_upstream": metrics.eer_upstream(scores, is_target),
        "eer_threshold": metrics.roc(scores, is_target).eer_threshold(),
        "min_dcf": metrics.min_dcf(scores, is_target, **costs),
        "min_dcf_interval": dcf_interval,
        "act_dcf": None,
        "cllr": None,
        "min_cllr": None,
        "groups": None,
    }


def test_without_speakers_no_intervals_and_a_reason(data, caplog):
    result = metrics.evaluate([data / "b.score"])["results"][0]
    assert "needs a utt2spk file" in caplog.text
    assert result["eer_interval"] is result["num_speaker"] is result["min_dcf_interval"] is None
    assert result["fnr_at"]["0.001"]["interval"] is None
    metrics.evaluate([data / "b.score"], utt2spk=data / "utt2spk", replicates=0)
    assert "0 replicates" in caplog.text


def test_seed_changes_the_intervals_only(data):
    first, second = (
        metrics.evaluate([data / "b.score"], utt2spk=data / "utt2spk", replicates=50, seed=seed)[
            "results"
        ][0]
        for seed in (0, 1)
    )
    assert first["eer"] == second["eer"]
    assert first["eer_interval"] != second["eer_interval"]


def test_groups_hold_the_trials_with_both_sides_in_them(data):
    options = {"utt2spk": data / "utt2spk", "replicates": 50}
    by_speaker = metrics.evaluate([data / "b.score"], by=data / "spk2gender", **options)
    by_utterance = metrics.evaluate([data / "b.score"], by=data / "utt2gender", **options)
    assert by_speaker["results"] == by_utterance["results"]
    scores, is_target, rows = read(data / "b.score")
    result = by_speaker["results"][0]
    assert set(result["groups"]) == {"f", "m"}
    for gender, group in result["groups"].items():
        inside = np.array([all((x[:3] < "s12") == (gender == "f") for x in r[:2]) for r in rows])
        assert 0 < inside.sum() < len(inside)
        part, labels = scores[inside], is_target[inside]
        assert group["num_target"] == labels.sum()
        assert group["num_nontarget"] == (~labels).sum()
        assert group["num_speaker"] == 12
        assert group["eer"] == metrics.eer(part, labels)
        threshold = result["eer_threshold"]
        assert group["fnr"] == pytest.approx((part[labels] < threshold).mean())
        assert group["fpr"] == pytest.approx((part[~labels] >= threshold).mean())
        for rate in ("eer", "fnr", "fpr"):
            low, high = group[f"{rate}_interval"]
            assert 0 <= low < group[rate] < high <= 1


def test_small_and_one_class_groups_are_told(data, caplog):
    lines = [f"s{i:02d} {'a' if i < 5 else 'one' if i == 5 else 'b'}" for i in range(24)]
    (data / "by").write_text("\n".join(lines))
    report = metrics.evaluate(
        [data / "b.score"], utt2spk=data / "utt2spk", by=data / "by", replicates=20
    )
    groups = report["results"][0]["groups"]
    assert "no intervals for group a: 5 speakers are too few" in caplog.text
    assert groups["a"]["eer"] is not None and groups["a"]["eer_interval"] is None
    assert groups["b"]["eer_interval"] is not None
    assert "group one: no rates" in caplog.text
    assert groups["one"]["eer"] is None and groups["one"]["num_nontarget"] == 0
    assert " one " in metrics.format_table(report)


def run(*words):
    parser = argparse.ArgumentParser()
    metrics.add_arguments(parser)
    metrics.run(parser.parse_args([str(word) for word in words]))
    return parser


def test_command_prints_and_writes(data, capsys):
    out = data / "new" / "results.json"
    options = ["--utt2spk", data / "utt2spk", "--by", data / "spk2gender", "--bootstrap", 20]
    options += ["--seed", 3, "--p_target", 0.05, "--c_miss", 2, "--c_fa", 3, "--fpr", 0.1, 0.01]
    parser = run(data / "a.trials.score", data / "b.score", *options, "--out", out)
    assert "wespeaker-qmargin metrics" in parser.epilog
    report = json.loads(out.read_text())
    assert report == metrics.evaluate(
        [data / "a.trials.score", data / "b.score"],
        utt2spk=data / "utt2spk",
        by=data / "spk2gender",
        p_target=0.05,
        c_miss=2.0,
        c_fa=3.0,
        fpr=[0.1, 0.01],
        replicates=20,
        seed=3,
    )
    printed = capsys.readouterr().out
    for name, value in report["parameters"].items():
        assert f"{name} {value}" in printed
    rows = [line for line in printed.splitlines() if line.startswith("| ")]
    assert len(rows) == 4 and "FNR % at FPR 0.01" in rows[0]
    result = report["results"][1]
    low, high = result["eer_interval"]
    assert f"| b | {result['num_target']} |" in rows[3]
    assert f"| {100 * result['eer']:.2f} [{100 * low:.2f}, {100 * high:.2f}] |" in rows[3]


def test_two_systems_are_told_apart(data):
    (data / "other").mkdir()
    (data / "other" / "b.score").write_text((data / "b.score").read_text())
    report = metrics.evaluate([data / "b.score", data / "other" / "b.score"])
    assert str(data / "other" / "b.score") in metrics.format_markdown(report)


@pytest.mark.parametrize(
    "name, text, words",
    [
        ("b.score", "", "b.score: the file is empty"),
        ("b.score", "s00-0 s00-1 0.5\n", "b.score: no labels"),
        ("b.score", "s00-0 s00-1 0.5 target\n", "b.score: 1 target and 0 non-target"),
        ("b.score", "s00-0 s00-1 nan target\n", "b.score:1: score nan"),
        ("utt2spk", "s00-0 s00\n", "b.score: without speaker in .*utt2spk: 119 keys"),
        ("spk2gender", "s00 f\n", "b.score: without group in .*spk2gender: 115 keys"),
        ("utt2spk", None, "utt2spk: no such file"),
    ],
)
def test_bad_files_are_named_and_nothing_is_written(data, name, text, words):
    (data / "results.json").write_text("old")
    if text is None:
        (data / name).unlink()
    else:
        (data / name).write_text(text)
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        run(
            *(data / "b.score", "--utt2spk", data / "utt2spk", "--by", data / "spk2gender"),
            *("--out", data / "results.json"),
        )
    assert (data / "results.json").read_text() == "old"


def test_bad_options_are_refused(data):
    for options, words in (
        ({"replicates": -1}, "replicates >= 0"),
        ({"p_target": 1.5}, "p_target must lie between 0 and 1"),
        ({"fpr": [2.0]}, "FPR must lie between 0 and 1"),
    ):
        with pytest.raises(ValueError, match=words):
            metrics.evaluate([data / "b.score"], **options)
    with pytest.raises(ValueError, match="expected score files"):
        metrics.evaluate([])


def score_file(path, targets, others):
    lines = [f"a b {x} target" for x in targets] + [f"a c {x} nontarget" for x in others]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def command(*words):
    return cli.main(["metrics", "--bootstrap", "0", *map(str, words)])


@pytest.mark.parametrize(
    "targets, others, rates",
    [
        ([0.5] * 3, [0.5] * 4, "50.00 | 1.0000"),
        ([1, 2], [0, -1], "0.00 | 0.0000"),
        ([0, -1], [1, 2], "100.00 | 1.0000"),
    ],
)
def test_degenerate_files_have_their_rates(tmp_path, capsys, caplog, targets, others, rates):
    eer, cost = rates.split(" | ")
    text = []
    lines = score_file(tmp_path / "a", targets, others).read_text().splitlines()
    shuffled = np.random.default_rng(0).permutation(lines)
    for order in (lines, lines[::-1], shuffled):
        (tmp_path / "a").write_text("\n".join(order))
        assert command(tmp_path / "a", "--out", tmp_path / "results.json") == 0
        text.append(capsys.readouterr().out.splitlines()[-1].split(" | "))
    assert {(cells[4], cells[6]) for cells in text} == {(eer, cost)}
    assert ("look inverted" in caplog.text) == (eer == "100.00")
    assert json.loads((tmp_path / "results.json").read_text())["results"][0]["eer"] * 100 == float(
        eer
    )


@pytest.mark.parametrize(
    "targets, others, words",
    [
        ([1, 2, 3], [], "3 target and 0 non-target trials: both are needed"),
        ([], [1, 2], "0 target and 2 non-target trials: both are needed"),
        ([], [], "the file is empty"),
        ([1, "nan"], [0], "a:2: score nan of a b"),
        ([1, 2], [0, "-inf"], "a:4: score -inf of a c"),
        ([1, "1e999"], [0], "a:2: score 1e999 of a b"),
        ([1, "high"], [0], "a:2: 'high' is not a score"),
    ],
)
def test_unusable_files_are_one_line_and_a_status(tmp_path, capfd, targets, others, words):
    path = score_file(tmp_path / "a", targets, others)
    assert command(path, "--out", tmp_path / "results.json") == 1
    out, error = capfd.readouterr()
    lines = [line for line in error.splitlines() if "error: " in line]
    assert len(lines) == 1 and words in lines[0] and not out
    assert not (tmp_path / "results.json").exists()


@pytest.mark.parametrize("option", ["--skip-bad", "--skip_bad"])
def test_bad_lines_are_skipped_and_counted(tmp_path, capsys, caplog, option):
    path = score_file(tmp_path / "a", [3, "nan", 1], [0, "inf", "-inf", 2])
    assert command(path, option, "--out", tmp_path / "results.json") == 0
    result = json.loads((tmp_path / "results.json").read_text())["results"][0]
    assert (result["num_skipped"], result["num_target"], result["num_nontarget"]) == (3, 2, 2)
    assert result["eer"] == metrics.eer([3, 1, 0, 2], [True, True, False, False])
    assert "3 of 7 scores are not finite, the first in line 2: skipped" in caplog.text
    header, _, row = capsys.readouterr().out.splitlines()[-3:]
    assert header.endswith("| lines skipped |") and row.endswith("| 3 |")


def test_nothing_but_bad_lines(tmp_path, capfd):
    path = score_file(tmp_path / "a", ["nan"], ["inf"])
    assert command(path, "--skip-bad") == 1
    assert "2 of 2 scores are not finite" in capfd.readouterr().err


def test_costs_of_ratios(data):
    path = data / "b.score"
    scores, is_target, _ = read(path)
    report = metrics.evaluate([path], llr=True, replicates=0, p_target=0.3)
    result = report["results"][0]
    assert result["cllr"] == cllr(scores, is_target)
    assert result["min_cllr"] == min_cllr(scores, is_target) <= result["cllr"]
    assert result["act_dcf"] == metrics.act_dcf(scores, is_target, p_target=0.3)
    assert f"| {result['act_dcf']:.4f} | {result['cllr']:.4f} |" in metrics.format_markdown(report)
