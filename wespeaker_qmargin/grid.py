"""Many trainings of one study: what its YAML lists, each once, and one table of all results."""

import argparse
import csv
import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from wespeaker_qmargin.checkpoints import average_epochs
from wespeaker_qmargin.config import (
    load_config,
)
from wespeaker_qmargin.extract import extract_experiment
from wespeaker_qmargin.figures import heat_maps_svg
from wespeaker_qmargin.files import write_text
from wespeaker_qmargin.finetune import finetune
from wespeaker_qmargin.metrics import evaluate
from wespeaker_qmargin.score import score_files
from wespeaker_qmargin.study import Cell, Study, grid_cells, read_study
from wespeaker_qmargin.train import train
from wespeaker_qmargin.transfer import find_source

logger = logging.getLogger(__name__)

FPR = 0.001
COLUMNS = (
    *("cell", "seed", "head", "alpha", "scale", "margin", "trials", "eer", "min_dcf", "fnr"),
    *("active", "support", "loss"),
)


def run_cell(study: Study, cell: Cell) -> None:
    """Train a cell, or go on with it; average, extract, score and measure; leave results.json."""
    folder, config = study.folder(cell), study.config(cell)
    if study.is_finished(cell):
        logger.info("finished before: %s", folder)
        return
    for path in (study.test["data"], study.test.get("mean"), *study.test["trials"]):
        if path is not None and not Path(path).exists():  # hours of training come first
            raise FileNotFoundError(f"{path}: no such file or folder; test of the study names it")
    if cell.finetune:
        options = {key: value for key, value in cell.finetune.items() if key != "from"}
        finetune(config, find_source(cell.finetune["from"]), resume_run=True, **options)
    else:
        train(config, resume_run=True)
    average_epochs(folder, config.num_avg)
    test, out = study.test, folder / "embeddings"
    options = {"data_type": test.get("data_type", "kaldi"), "device": config.device}
    mean = None
    if "mean" in test:
        mean = extract_experiment(folder, data=test["mean"], out_dir=out / "mean", **options)
    embeddings = extract_experiment(folder, data=test["data"], out_dir=out, **options)
    scores = score_files(embeddings, test["trials"], mean=mean, out=folder / "scores")
    report = evaluate(scores, fpr=[FPR], replicates=0)
    write_text(folder / "results.json", json.dumps(report, indent=1) + "\n")


def run_all(study_path, study: Study, *, jobs: int) -> None:
    """Run every cell that is not finished, ``jobs`` at a time, each in a process of its own.

    Raises:
        ValueError: some failed (after all others were run); each has its task.log.
    """
    todo = [i for i, cell in enumerate(study.cells, 1) if not study.is_finished(cell)]
    logger.info("%d of %d cells are to do", len(todo), len(study.cells))
    threads = max(1, (os.cpu_count() or 1) // jobs)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}

    def run(number: int) -> Path | None:
        folder = study.folder(study.cells[number - 1])
        folder.mkdir(parents=True, exist_ok=True)
        logger.info("task %d: %s", number, folder)
        command = [sys.executable, "-m", "wespeaker_qmargin.cli", "grid", str(study_path)]
        with open(folder / "task.log", "ab") as log:
            done = subprocess.run(
                [*command, "--task", str(number)], env=environment, stdout=log, stderr=log
            )
        return folder / "task.log" if done.returncode else None

    with ThreadPoolExecutor(jobs) as pool:
        failed = [log for log in pool.map(run, todo) if log is not None]
    if failed:
        raise ValueError(f"{len(failed)} of {len(todo)} cells failed; the first: {failed[0]}")


def collect(study: Study) -> Path:
    """Write EXP_DIR/cells.csv, a line for each finished cell, seed and trial list; return it.

    Columns: ``COLUMNS``; rates are fractions, ``fnr`` is at 0.1 % FPR; active, support and loss are
    those of the last interval of the training. Beside it, where the study has a ``grid``, heat maps
    of the means over the seeds, ``eer_TRIALS.svg`` and ``fnr_TRIALS.svg``.

    Raises:
        ValueError: no cell is finished.
    """
    rows = [row for cell in study.cells if study.is_finished(cell) for row in _rows(study, cell)]
    if not rows:
        raise ValueError(f"{study.exp_dir}: none of its {len(study.cells)} cells is finished")
    stream = io.StringIO()
    writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    path = study.exp_dir / "cells.csv"
    write_text(path, stream.getvalue())
    _draw(study, rows)
    return path


def _draw(study: Study, rows: list[dict]) -> None:
    names = set(dict(grid_cells(study.grid)))
    for trials in sorted({row["trials"] for row in rows}):
        for quantity, label in (("eer", "EER"), ("fnr", "FNR at 0.1 % FPR")):
            cells: dict[tuple, list] = {}
            for row in rows:
                if row["cell"] in names and row["trials"] == trials:
                    place = (row["alpha"], row["scale"], row["margin"])
                    cells.setdefault(place, []).append(100 * row[quantity])
            if cells:
                means = {place: sum(x) / len(x) for place, x in cells.items()}
                svg = heat_maps_svg(f"{label}, %, {trials}", means)
                write_text(study.exp_dir / f"{quantity}_{trials}.svg", svg)


def _rows(study: Study, cell: Cell) -> Iterator[dict]:
    folder = study.folder(cell)
    config = load_config(folder / "config.yaml", check_paths=False)
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    last = [record for record in map(json.loads, lines) if "loss" in record][-1]
    head = config.projection_args
    shared = {
        "cell": cell.name,
        "seed": cell.seed,
        "head": head["project_type"],
        "alpha": last.get("alpha", ""),
        "scale": last.get("scale", head.get("scale", "")),
        "margin": config.margin_update.get("final_margin", 0.0),
        **{key: last[key] for key in ("active", "support", "loss")},
    }
    for result in json.loads((folder / "results.json").read_text(encoding="utf-8"))["results"]:
        yield {
            **shared,
            "trials": result["name"].removesuffix(".trials"),
            "eer": result["eer"],
            "min_dcf": result["min_dcf"],
            "fnr": result["fnr_at"][f"{FPR:g}"]["fnr"],
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``wespeaker-qmargin grid``."""
    parser.epilog = (
        "example:\n"
        "  wespeaker-qmargin grid study.yaml --jobs 2      all cells that are not finished\n"
        "  wespeaker-qmargin grid study.yaml --list        number, folder, finished or not\n"
        "  wespeaker-qmargin grid study.yaml --task $SLURM_ARRAY_TASK_ID\n"
        "  wespeaker-qmargin grid study.yaml --collect     cells.csv and heat maps of what is there"
    )
    add = parser.add_argument
    add("study", help="YAML: exp_dir, config, common, test, seeds, cells, grid")
    add("--jobs", type=int, default=1, help="cells at a time [1]")
    add("--task", type=int, help="run this cell alone, from 1")
    add("--list", action="store_true", help="list the cells")
    add("--collect", action="store_true", help="run nothing, write the tables")


def run(args: argparse.Namespace) -> None:
    """Run what was asked for; all cells end with the tables."""
    study = read_study(args.study)
    if args.jobs < 1:
        raise ValueError(f"--jobs: expected at least 1, got {args.jobs}")
    if args.list:
        for number, cell in enumerate(study.cells, 1):
            state = "finished" if study.is_finished(cell) else "to do"
            print(f"{number} {study.folder(cell)} {state}")
    elif args.task is not None:
        if not 1 <= args.task <= len(study.cells):
            raise ValueError(f"--task: the study has the cells 1 to {len(study.cells)}")
        run_cell(study, study.cells[args.task - 1])
    else:
        if not args.collect:
            run_all(args.study, study, jobs=args.jobs)
        print(collect(study))
