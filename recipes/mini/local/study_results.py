"""Collect the study: WORK/tables.md, every number with its interval.

EER of the mean over the seeds, with paired intervals over speakers; differences are to the control
of a part (CosFace at the same margin, the same labels, the same start). Parts that are not finished
are left out, and named.
"""

import argparse
import json
import logging
import sys
from pathlib import Path

from make_study import PLAIN, best_rates

from wespeaker_qmargin.compare import compare
from wespeaker_qmargin.files import write_text
from wespeaker_qmargin.grid import collect
from wespeaker_qmargin.study import Study, read_study

EXAMPLE = """example:
  python recipes/mini/local/study_results.py recipes/mini/exp/study
"""
LISTS = ("cv", "cv_cross_lang", "cv_same_lang", "cv_far", "ls", "ls_far")
logger = logging.getLogger("study_results")


def controls(part: str, names: list[str]) -> dict[str, list[str]]:
    """Return control -> the cells of ``part`` that are compared with it."""
    if part == "heads":
        groups = {"cosface_m01": [], "cosface_m02": []}
        for name in names:
            margin = "m01" if name.endswith("m01") else "m02"
            groups[f"cosface_{margin}"].append(name)
            if name in PLAIN:
                groups["cosface_m01"].append(name)
    elif part in ("noise", "cleaned"):
        groups = {name: [] for name in names if name.startswith("cosface")}
        for name in names:
            groups[f"cosface_{name.rsplit('_', 1)[1]}"].append(name)
    else:
        groups = {name: [] for name in names if name.endswith("_cosface")}
        for name in names:
            control = next(c for c in groups if name.startswith(c.removesuffix("cosface")))
            groups[control].append(name)
    return {c: [name for name in group if name != c] for c, group in groups.items()}


def tables(study: Study, part: str, work: Path, *, replicates: int) -> str:
    """Return a table for every list and control of a finished part."""
    cells: dict[str, list[Path]] = {}
    for cell in study.cells:
        cells.setdefault(cell.name, []).append(study.folder(cell))
    sections = []
    for control, others in controls(part, list(cells)).items():
        rows = [["", *LISTS, "active at the end"], ["---"] * (2 + len(LISTS))]
        measured = {
            name: compare(
                {
                    x: [folder / "scores" / f"{name}.trials.score" for folder in cells[x]]
                    for x in (control, *others)
                },
                work / "data/test/utt2spk",
                replicates=replicates,
            )
            for name in LISTS
        }
        for x in (control, *others):
            row = [eer_cell(measured[name]["systems"][x]["eer"]) for name in LISTS]
            rows.append([x, *row, _active(cells[x])])
        for x in others:
            differences = (measured[name]["differences"][f"{x} - {control}"] for name in LISTS)
            rows.append([f"{x} - control", *(difference_cell(d["eer"]) for d in differences), ""])
        lines = (f"| {' | '.join(row)} |\n" for row in rows)
        sections.append(f"### {part}: control {control}\n\n{''.join(lines)}")
    return "\n".join(sections)


def eer_cell(values: dict) -> str:
    """Return an EER of ``compare`` in %: mean over the seeds, their deviation, the interval."""
    low, high = values["interval"] or (float("nan"),) * 2
    sd = "" if values["sd"] is None else f" ± {100 * values['sd']:.2f}"
    return f"{100 * values['mean']:.2f}{sd} [{100 * low:.2f}, {100 * high:.2f}]"


def difference_cell(values: dict) -> str:
    """Return a difference of ``compare`` in points of EER, its interval over seeds too, and p."""
    low, high = values["mixed_interval"] or values["interval"]
    p = values["p"]
    return f"{100 * values['difference']:+.2f} [{100 * low:+.2f}, {100 * high:+.2f}] p {p:.3f}"


def _active(folders: list[Path]) -> str:
    shares = []
    for folder in folders:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        shares.append([x for x in map(json.loads, lines) if "active" in x][-1]["active"])
    return f"{100 * sum(shares) / len(shares):.0f} %"


def write(work: Path, *, replicates: int) -> Path:
    """Write the tables of all finished parts; return their file."""
    text = []
    if (work / "tune" / "cells.csv").is_file():
        rates = best_rates(work)
        rows = "".join(f"| {head} | {rate:g} |\n" for head, rate in rates.items())
        text.append(f"### learning rates found\n\n| head | rate |\n| --- | --- |\n{rows}")
    for part in ("heads", "noise", "cleaned", "finetune"):
        path = work / f"{part}.yaml"
        study = read_study(path) if path.is_file() else None
        if study is None or not all(map(study.is_finished, study.cells)):
            logger.warning("%s: not finished, left out", part)
            continue
        collect(study)
        text.append(tables(study, part, work, replicates=replicates))
    for path in sorted(work.glob("data/*/found.json")):
        numbers = json.loads(path.read_text(encoding="utf-8"))
        text.append(f"### audit for {path.parent.name}\n\n{numbers}\n")
    for path in sorted(work.glob("probe/*/probe.md")):
        text.append(f"### probe of {path.parent.name}\n\n{path.read_text(encoding='utf-8')}")
    write_text(work / "tables.md", "\n".join(text))
    return work / "tables.md"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", type=Path)
    parser.add_argument("--bootstrap", type=int, default=1000, help="replicates [1000]")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        print(write(args.work, replicates=args.bootstrap).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        sys.exit(f"study_results.py: {error}")


if __name__ == "__main__":
    main()
