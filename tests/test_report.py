"""The report: what it reads, what it says, what it refuses."""

import base64
import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import numpy as np
import pytest
from scipy.special import ndtri

from wespeaker_qmargin import compare, figures, metrics, page, report
from wespeaker_qmargin.evidence import comparison_section
from wespeaker_qmargin.roc import roc

NAMES = ("CosFace", "Q-Margin <b>&|$x_1$")


def write_system(exp_dir, *, distance=2.0, seed=0, trained=True, lists=("cv", "l$s$")):
    """Make an experiment folder of 12 speakers with 3 utterances each, measured for real."""
    rng = np.random.default_rng(seed)
    utts = [f"s{i // 3:02d}-{i % 3}" for i in range(36)]
    utt2spk = exp_dir.parent / "utt2spk"
    (exp_dir / "scores").mkdir(parents=True)
    utt2spk.write_text("".join(f"{utt} {utt[:3]}\n" for utt in utts))
    paths = []
    for name in lists:
        lines = []
        for a, b in [(a, b) for a in utts for b in utts if a < b]:
            same = a[:3] == b[:3]
            score = rng.normal() + distance * same
            lines.append(f"{a} {b} {score:.8g} {'target' if same else 'nontarget'}\n")
        paths.append(exp_dir / "scores" / f"{name}.trials.score")
        paths[-1].write_text("".join(lines))
    results = metrics.evaluate(paths, utt2spk=utt2spk, replicates=100, fpr=[0.01])
    (exp_dir / "scores" / "results.json").write_text(json.dumps(results))
    if trained:
        records = [
            {"step": i, "epoch": 0, "loss": 5 - i / 10, "lr": 0.1, "margin": 0.2, "active": None}
            for i in range(10)
        ]
        records.append({"epoch": 0, "step": 9, "valid_eer": 0.25})
        (exp_dir / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in records))
        run = {"command": "train <x>", "git_commit": "abc123", "seconds": 12.5, "gpu": None}
        (exp_dir / "run.json").write_text(json.dumps(run))
    return exp_dir


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    systems = {
        NAMES[0]: write_system(folder / "a", distance=2.0, seed=1),
        NAMES[1]: write_system(folder / "b", distance=2.1, seed=2),
        "_untrained": write_system(folder / "c", distance=0.3, seed=3, trained=False, lists=["cv"]),
    }
    out = folder / "out" / "report.html"
    report.build_report(systems, out, title="A <title>", note="only <smoke> | data")
    return folder, systems, out


def svgs(out):
    found = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', out.read_text())
    return [base64.b64decode(text).decode() for text in found]


def test_page_is_well_formed_and_holds_no_external_asset(built):
    _, _, out = built
    text = out.read_text()
    open_tags = []

    class Checker(HTMLParser):
        def handle_starttag(self, tag, attrs):
            values = dict(attrs)
            assert not values.get("src") or values["src"].startswith("data:image/svg+xml;base64,")
            assert not {"href", "onload", "onclick"} & set(values) and tag not in ("script", "link")
            if tag not in ("meta", "img"):
                open_tags.append(tag)

        def handle_endtag(self, tag):
            assert open_tags.pop() == tag

    Checker().feed(text.replace("<!doctype html>", ""))
    assert not open_tags
    assert "url(" not in text and "@import" not in text
    for svg in svgs(out):
        root = ElementTree.fromstring(svg[svg.index("<svg") :])
        links = [v for x in root.iter() for k, v in x.attrib.items() if k.endswith("href")]
        assert all(link.startswith("#") for link in links)


def test_names_are_escaped(built):
    _, _, out = built
    text = out.read_text()
    assert "A &lt;title&gt;" in text and "A <title>" not in text
    assert "Q-Margin &lt;b&gt;&amp;|$x_1$" in text and "<b>" not in text
    assert "only &lt;smoke&gt; | data" in text and "train &lt;x&gt;" in text
    rows = out.with_name("results.md").read_text().splitlines()
    table = [row for row in rows if row.startswith("|")]
    columns = {len(re.findall(r"(?<!\\)\|", row)) for row in table}
    assert len(columns) == 1 and len(table) == 2 + 5
    det = svgs(out)[:2]
    for svg in det:
        drawn = "".join(ElementTree.fromstring(svg[svg.index("<svg") :]).itertext())
        assert "$x_1$" in drawn and ("l$s$" in drawn) == (svg is not det[0])


def test_numbers_are_those_of_the_metrics(built):
    _, systems, out = built
    markdown, text = out.with_name("results.md").read_text(), out.read_text()
    assert "only <smoke> | data" in markdown
    for exp_dir in systems.values():
        for result in json.loads((exp_dir / "scores" / "results.json").read_text())["results"]:
            low, high = result["eer_interval"]
            cell = f"{100 * result['eer']:.2f} [{100 * low:.2f}, {100 * high:.2f}]"
            assert f"| {cell} |" in markdown
            assert f"[{100 * low:.2f}, {100 * high:.2f}]" in text
            fnr = result["fnr_at"]["0.01"]
            assert f"| {100 * fnr['fnr']:.2f} [{100 * fnr['interval'][0]:.2f}, " in markdown
            assert f"| {result['min_dcf']:.3f} [" in markdown
    assert "FNR % at FPR 1 %" in markdown and "100 bootstrap replicates" in markdown
    det = svgs(out)
    assert len(det) == 3  # two trial lists, training
    assert "_untrained: " in det[0] and "_untrained: " not in det[1]
    assert "abc123" in text and "12.5" in text


def test_the_same_input_gives_the_same_bytes(built, tmp_path):
    _, systems, out = built
    report.build_report(systems, tmp_path / "x.html", title="A <title>", note="only <smoke> | data")
    assert (tmp_path / "x.html").read_bytes() == out.read_bytes()


def verdict(**systems):
    read = {}
    for name, (eer, interval, *count) in systems.items():
        counts = {"num_target": (count or [10])[0], "num_nontarget": 10}
        result = {"eer": eer, "eer_interval": interval, **counts}
        read[name] = report.System("", {}, {"cv": result}, {}, {}, {})
    return report._verdict("cv", read)


def test_a_winner_is_claimed_only_where_intervals_lie_apart():
    assert "nothing to compare" in verdict(a=(0.1, [0.09, 0.11]))
    apart = verdict(a=(0.2, [0.18, 0.22]), b=(0.1, [0.09, 0.17]), c=(0.3, [0.25, 0.4]))
    assert apart == "b has the lowest EER, and its interval lies below that of a and c."
    touching = verdict(a=(0.2, [0.18, 0.22]), b=(0.1, [0.09, 0.18]), c=(0.3, [0.25, 0.4]))
    assert touching.startswith("No winner is claimed: the intervals of b and a overlap.")
    assert "The interval of b lies below that of c." in touching
    assert "no interval for a." in verdict(a=(0.1, None), b=(0.3, [0.2, 0.4]))
    assert "not measured on the same trials" in verdict(
        a=(0.1, [0.0, 0.1], 10), b=(0.3, [0.2, 0.4], 11)
    )


def test_the_longest_of_repeated_steps_is_the_last_record(tmp_path):
    log = tmp_path / "metrics.jsonl"
    log.write_text('{"step": 2, "loss": 9}\n{"step": 1, "loss": 3}\n{"step": 2, "loss": 1}\n')
    series = report._read_series(log)
    assert series["loss"] == ([1, 2], [3, 1]) and series["lr"] == ([], [])
    log.write_text('{"step": null, "loss": 9}\n{"step": 1, "loss": NaN, "lr": null}\n')
    assert not any(map(any, report._read_series(log).values()))


def break_results(text):
    return lambda exp_dir: (exp_dir / "scores" / "results.json").write_text(text)


def swap_scores(exp_dir):
    path = exp_dir / "scores" / "cv.trials.score"
    path.write_text(path.read_text().replace(" -", " "))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda x: (x / "scores" / "results.json").unlink(), r"results\.json: no such file; write"),
        (break_results('{"parameters": {}, "resu'), r"results\.json: not complete JSON"),
        (break_results("[]"), r"results\.json: expected a JSON object"),
        (break_results("{}"), r"results\.json: misses an entry"),
        (break_results(""), r"results\.json: the file is empty"),
        (lambda x: (x / "scores" / "cv.trials.score").unlink(), r"cv\.trials\.score: no such"),
        (lambda x: (x / "scores" / "cv.trials.score").write_text("a b\n"), r"score:1: expected"),
        (swap_scores, r"numbers are not those of .*cv\.trials\.score"),
        (lambda x: (x / "metrics.jsonl").write_text('{"step": 1}\n{"st'), r"metrics\.jsonl:2"),
        (lambda x: (x / "metrics.jsonl").write_text('{"step":1,"lr":"a"}'), r"metrics\.jsonl:1"),
        (lambda x: (x / "run.json").write_text('{"command"'), r"run\.json: not complete JSON"),
    ],
)
def test_missing_and_half_files_are_named_and_nothing_is_lost(tmp_path, damage, message):
    exp_dir = write_system(tmp_path / "exp", lists=["cv"])
    damage(exp_dir)
    out = tmp_path / "report.html"
    out.write_text("old")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        report.build_report({"a": exp_dir}, out)
    assert out.read_text() == "old" and not (tmp_path / "results.md").exists()
    assert not list(tmp_path.glob(".*"))


def test_a_moved_folder_keeps_its_scores(tmp_path):
    exp_dir = write_system(tmp_path / "exp", lists=["cv"])  # results.json names absolute paths
    moved = exp_dir.rename(tmp_path / "moved")
    assert "cv" in report.read_system(moved).curves


def test_det_points_are_the_error_rates_of_thresholds():
    rng = np.random.default_rng(0)
    scores = np.concatenate([rng.normal(2, 1, 500), rng.normal(0, 1, 500)])
    is_target = np.arange(1000) < 500
    x, y = figures._det_points(roc(scores, is_target), low=0.001)
    drawn = {(round(a, 9), round(b, 9)) for a, b in zip(x, y)}
    thresholds = np.append(np.unique(scores), np.inf)
    fpr = (scores[~is_target] >= thresholds[:, None]).mean(1)
    fnr = (scores[is_target] < thresholds[:, None]).mean(1)
    naive = ndtri(np.clip([fpr, fnr], 1e-4, 1 - 1e-4))
    assert drawn <= {(round(a, 9), round(b, 9)) for a, b in naive.T}
    nearest = np.abs(naive.T[:, None] - np.array([x, y]).T).sum(2).min(1)
    assert nearest.max() < 0.01  # nothing visible was left out


@pytest.mark.parametrize(("num", "distance"), [(2, 9.0), (40, 0.0), (40, -3.0), (20000, 5.0)])
def test_det_limits_hold_every_curve(num, distance):
    rng = np.random.default_rng(0)
    curve = roc(
        np.append(rng.normal(distance, 1, num), rng.normal(0, 1, num)), np.arange(2 * num) < num
    )
    low, high = figures._det_limits([curve])
    assert 1e-4 <= low < high <= 0.99 and (curve.eer() < high or high == 0.99)
    ticks = figures._det_ticks(low, high)
    assert len(ticks) > 3 and min(np.diff(ndtri(np.divide(ticks, 100)))) > 0
    assert "<svg" in figures.det_svg("x", {"a": curve}, order=["a"])


def test_panels_show_what_was_logged_and_colours_stay_with_the_system():
    series = {"b": {key: ([], []) for key in figures.PANELS}}
    series["b"]["loss"] = ([1, 2], [2.0, 1.0])
    svg = figures.training_svg(series, order=["a", "b"])
    assert "Training loss" in svg and "Margin" not in svg and "Validation" not in svg
    assert figures.COLOURS[1].lower() in svg.lower()
    assert figures.COLOURS[0].lower() not in svg.lower()


def test_values_of_any_json_type_have_a_text():
    assert page._text({"a": [1, "b"], "c": None, "d": 0.123456}) == "a 1 b, c -, d 0.1235"


def test_command(tmp_path, capsys):
    import argparse

    exp_dir = write_system(tmp_path / "exp=1", lists=["cv"], trained=False)
    parser = argparse.ArgumentParser()
    report.add_arguments(parser)
    assert "wespeaker-qmargin report" in parser.epilog
    out = tmp_path / "page.html"
    report.run(parser.parse_args(["--systems", f"a={exp_dir}", "--out", str(out)]))
    printed = capsys.readouterr().out
    assert "| cv | a |" in printed and str(out) in printed
    assert "<h2>Training" not in out.read_text()
    for systems, message in [(["a"], "NAME=EXP_DIR"), ([f"a={exp_dir}"] * 2, "comes twice")]:
        with pytest.raises(ValueError, match=message):
            report.run(parser.parse_args(["--systems", *systems, "--out", str(out)]))


# --- what other commands have left ---------------------------------------------------------------

PNG = bytes.fromhex("89504e470d0a1a0a")


@pytest.fixture
def evidence(tmp_path):
    """What plan, probe, grid and compare leave; names that would be HTML or links."""
    system = write_system(tmp_path / "q", lists=["cv"])
    (system / "config.yaml").write_text(
        "projection_args: {project_type: q_margin, alpha: 1.5, scale: 10}\n"
        "margin_update: {final_margin: 0.2}\n"
    )
    probe = tmp_path / "probe"
    probe.mkdir()
    (probe / "probe.md").write_text("| alpha | won |\n| --- | --- |\n| <b>1.5</b> | 38 % |\n")
    (probe / "probe.png").write_bytes(PNG)
    study = tmp_path / "study"
    study.mkdir()
    (study / "eer_cv.svg").write_text("<svg/>")
    rows = [("[a](javascript:x)", s, "cv", e) for s, e in ((0, 0.1), (2, 0.12), (10, 0.17))]
    rows.append(("b_c_d", 0, "cv", 0.2))
    lines = ["cell,seed,trials,eer", *(",".join(map(str, row)) for row in rows)]
    (study / "cells.csv").write_text("\n".join(lines) + "\n")
    scores = [str(system / "scores" / "cv.trials.score")]
    found = compare.compare({"A": scores, "B": scores}, tmp_path / "utt2spk", replicates=20)
    (tmp_path / "a_b.json").write_text(json.dumps(found))
    return {"q": system}, {
        "probes": [probe],
        "studies": [study],
        "comparisons": [tmp_path / "a_b.json"],
    }


def test_plans_probes_studies_and_comparisons(evidence, tmp_path):
    systems, others = evidence
    table = report.build_report(systems, tmp_path / "r.html", **others)
    text = (tmp_path / "r.html").read_text()
    titles = re.findall("<h2>(.*?)</h2>", text)
    assert titles[-5:-1] == ["Plan: q", "Probe: probe", "Study: study", "Comparison: a_b"]
    assert "zero-loss gap exp(k m) / k: 0.5437, reachable" in text
    assert "&lt;b&gt;1.5&lt;/b&gt;" in text and "<b>" not in text
    assert "href" not in text and "[a](javascript:x)" in text and ">b_c_d<" in text
    cells = re.findall("<td>([^<]*)</td>", text[text.index("Study: study") :])
    assert cells[2:7] == ["10.00", "12.00", "17.00", "13.00", "3.61"]
    assert cells[9:14] == ["20.00", "-", "-", "20.00", "-"]
    assert "B - A" in text and "+0.00" in text
    shown = comparison_section(others["comparisons"][0]).images["differences.svg"]
    assert shown.count(b"B - A") == 1 and b"FNR % at FPR 0.1 %" in shown
    assert base64.b64encode(PNG).decode() in text
    assert "## Study: study" in table.read_text() and "| b_c_d |" in table.read_text()


@pytest.mark.parametrize(
    ("kind", "file", "content", "message"),
    [
        ("probes", "probe.md", None, "probe.md: no such file; `wespeaker-qmargin probe"),
        ("studies", "cells.csv", None, "cells.csv: no such file; .*--collect"),
        ("studies", "cells.csv", "cell,seed\n1,2\n", "cells.csv: not what grid writes"),
        ("comparisons", None, "[1]", "not what compare writes"),
        ("comparisons", None, None, "no such file; `wespeaker-qmargin compare"),
    ],
)
def test_what_others_left_unfinished(evidence, tmp_path, kind, file, content, message):
    systems, others = evidence
    path = others[kind][0] / file if file else others[kind][0]
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        report.build_report(systems, tmp_path / "out" / "r.html", **others)
    assert not (tmp_path / "out").exists()
