"""Studies: cells run once, tasks, failures, one tidy table, heat maps."""

import csv
import json
import re

import pytest
import yaml

from wespeaker_qmargin.cli import main
from wespeaker_qmargin.embeddings import read_embeddings
from wespeaker_qmargin.figures import heat_maps_svg
from wespeaker_qmargin.files import read_scores, read_trials
from wespeaker_qmargin.grid import collect, run_cell
from wespeaker_qmargin.score import score_trials
from wespeaker_qmargin.study import read_study


@pytest.fixture
def study(tiny, corpus, tmp_path):
    """A study of three cells, and its content."""
    trials = tmp_path / "all.trials"
    keys = [line.split() for line in (corpus / "utt2spk").read_text().splitlines()]
    lines = [
        f"{a} {b} {'target' if s == t else 'nontarget'}\n"
        for i, (a, s) in enumerate(keys)
        for b, t in keys[i + 1 :]
    ]
    trials.write_text("".join(lines))
    cosface = {"project_type": "add_margin", "scale": 32}
    content = {
        "exp_dir": "study",
        "config": tiny.name,
        "common": {"num_epochs": 2, "valid_speakers": 0},
        "test": {"data": str(corpus), "trials": [str(trials)]},
        "seeds": [0],
        "cells": {"cosface": {"projection_args": cosface}},
        "grid": {"alphas": [1.5], "scales": [5, 10], "margins": [0.1]},
    }
    return write(tmp_path, content), content


def write(folder, content):
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def test_cells_that_are_fine_tuned(study, tmp_path, capsys):
    path, content = study
    content |= {"grid": {}, "exp_dir": "starts"}
    assert main(["grid", str(write(tmp_path, content))]) == 0
    content |= {"exp_dir": "tuned", "finetune": {"from": "starts/cosface/seed_{seed}"}}
    content["finetune"] |= {"prototype_epochs": 0, "prototypes": "random"}
    content["cells"] = {
        "a": {"num_epochs": 1, "num_avg": 1},
        "b": {"finetune": {"prototype_epochs": 1}},
    }
    path = write(tmp_path, content)
    assert main(["grid", str(path)]) == 0
    for name, staged in (("a", False), ("b", True)):
        folder = tmp_path / "tuned" / name / "seed_0"
        report = json.loads((folder / "transfer.json").read_text())
        assert report["checkpoint"] == str(tmp_path / "starts/cosface/seed_0/models/avg_model.pt")
        assert report["rows_by_name"] == 10 and (folder / "prototypes").is_dir() == staged
    before = (folder / "results.json").stat().st_mtime_ns
    assert main(["grid", str(path)]) == 0
    assert (folder / "results.json").stat().st_mtime_ns == before, "a finished cell is one"
    content["finetune"] = {"prototype_epochs": 0}
    assert main(["grid", str(write(tmp_path, content)), "--list"]) == 1
    assert "cell a: finetune: expected from and of the others of from" in capsys.readouterr().err


def test_the_mean_of_other_data_is_subtracted(study, corpus, tmp_path):
    path, content = study
    cell = read_study(path).cells[0]
    scores = {}
    for name, mean in (("plain", {}), ("centred", {"mean": str(corpus)})):
        content |= {"exp_dir": name, "test": content["test"] | mean}
        found = read_study(write(tmp_path, content))
        run_cell(found, cell)
        folder = found.folder(cell)
        scores[name] = read_scores(folder / "scores" / "all.trials.score").scores
    embeddings = read_embeddings(folder / "embeddings" / "xvector.scp")
    trials = read_trials(tmp_path / "all.trials")
    centred = score_trials(trials, embeddings, mean=embeddings.vectors.mean(axis=0))
    assert scores["centred"] == pytest.approx(centred, abs=2e-5)
    assert abs(scores["centred"] - scores["plain"]).max() > 0.01


@pytest.mark.parametrize("key", ["data", "mean", "trials"])
def test_a_missing_test_set_is_told_before_the_training(study, tmp_path, capsys, key):
    _, content = study
    missing = str(tmp_path / "none")
    content["test"][key] = [missing] if key == "trials" else missing
    assert main(["grid", str(write(tmp_path, content)), "--task", "1"]) == 1
    assert f"{missing}: no such file or folder; test of" in capsys.readouterr().err
    assert not (tmp_path / "study").exists()


def test_every_cell_once(study, tmp_path, capsys):
    path, content = study
    assert main(["grid", str(path), "--task", "2"]) == 0
    first = tmp_path / "study" / "alpha1.5_scale5_margin0.1" / "seed_0"
    before = (first / "results.json").stat().st_mtime_ns
    assert main(["grid", str(path), "--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.endswith("finished") for line in listed] == [False, True, False]
    assert main(["grid", str(path), "--jobs", "2"]) == 0
    assert (first / "results.json").stat().st_mtime_ns == before
    with open(tmp_path / "study" / "cells.csv", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 3 and {row["trials"] for row in rows} == {"all"}
    assert [row["seed"] for row in rows] == 3 * ["0"]
    grid = [(row["alpha"], row["scale"], row["margin"]) for row in rows if row["alpha"]]
    assert grid == [("1.5", "5.0", "0.1"), ("1.5", "10.0", "0.1")]
    assert rows[0]["head"] == "add_margin" and rows[0]["alpha"] == ""
    result = json.loads((first / "results.json").read_text())["results"][0]
    assert float(rows[1]["eer"]) == result["eer"]
    for name in ("eer_all", "fnr_all"):
        assert "scale 10" in (tmp_path / "study" / f"{name}.svg").read_text()
    # the same study, another meaning of a cell
    content["common"]["num_epochs"] = 3
    write(tmp_path, content)
    assert main(["grid", str(path)]) == 1
    error = capsys.readouterr().err
    assert "is finished, with another num_epochs" in error
    assert (first / "results.json").stat().st_mtime_ns == before


def test_a_cell_that_fails_does_not_stop_the_others(study, tmp_path, capsys):
    path, content = study
    content["seeds"], content["grid"] = [0], {}
    content["cells"] = {
        "diverges": {"optimizer": "SGD", "scheduler_args": {"initial_lr": 1e30}},
        "works": {},
    }
    write(tmp_path, content)
    assert main(["grid", str(path)]) == 1
    assert "1 of 2 cells failed; the first: " in capsys.readouterr().err
    assert "the loss is" in (tmp_path / "study" / "diverges" / "seed_0" / "task.log").read_text()
    assert (tmp_path / "study" / "works" / "seed_0" / "results.json").is_file()
    assert main(["grid", str(path), "--collect"]) == 0


def test_an_interrupted_cell_goes_on(study, tmp_path, monkeypatch):
    path, _ = study
    read = read_study(path)
    with monkeypatch.context() as patch:
        patch.setattr("wespeaker_qmargin.grid.average_epochs", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run_cell(read, read.cells[1])
    model = read.folder(read.cells[1]) / "models" / "model_2.pt"
    before = model.stat().st_mtime_ns
    run_cell(read, read.cells[1])
    assert model.stat().st_mtime_ns == before and read.is_finished(read.cells[1])


def interrupt(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cels": {}}, r"expected the keys .*; found \['cels'\]"),
        ({"config": None}, "config is missing"),
        ({"test": {"data": "x"}}, "test: expected data, data_type, mean, trials"),
        ({"cells": {}, "grid": {}}, "no cell"),
        ({"seeds": []}, "no cell"),
        ({"grid": {"alphas": [1]}}, r"expected alphas, scales and margins, got \['alphas'\]"),
        ({"config": "none.yaml"}, "none.yaml: no such config file"),
    ],
)
def test_studies_that_make_no_sense(study, tmp_path, change, message):
    _, content = study
    content = {key: x for key, x in {**content, **change}.items() if x is not None}
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        read_study(write(tmp_path, content))


def test_what_the_command_refuses(study, tmp_path, capsys):
    path, _ = study
    for words, message in (
        (["--task", "4"], "the study has the cells 1 to 3"),
        (["--jobs", "0"], "expected at least 1"),
        (["--collect"], "none of its 3 cells is finished"),
    ):
        assert main(["grid", str(path), *words]) == 1
        assert message in capsys.readouterr().err
    assert main(["grid", str(tmp_path / "none.yaml")]) == 1
    with pytest.raises(ValueError, match="none of its"):
        collect(read_study(path))


def test_heat_maps_show_every_number():
    cells = {(a, s, m): 10 * a + s + m for a in (1, 1.5) for s in (5, 20) for m in (0.1, 0.2)}
    cells[1.5, 20, 0.2] = float("nan")
    text = heat_maps_svg("EER, %", cells)
    shown = re.findall(r">([\d.]+|-)</text>", text)
    for (_, _, _), value in cells.items():
        assert ("-" if value != value else f"{value:.3g}") in shown
    for word in ("EER, %", "scale 5", "scale 20", "margin m", "alpha"):
        assert word in text
