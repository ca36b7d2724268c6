"""Collect the study: WORK/tables.md, every number with its interval, and WORK/PART.svg.

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

from wespeaker_qmargin.compare import compare, spread
from wespeaker_qmargin.figures import differences_svg
from wespeaker_qmargin.files import write_text
from wespeaker_qmargin.grid import collect
from wespeaker_qmargin.study import Study, read_study

EXAMPLE = """example:
  python recipes/mini/local/study_results.py recipes/mini/exp/study
"""
LISTS = ("cv", "cv_cross_lang", "cv_same_lang", "cv_far", "ls", "ls_far")
DRAWN = ("cv", "cv_cross_lang", "cv_far")
PAIRS = {  # across controls and parts: what -> what it is compared with
    "heads/qmargin_a150_m01": "heads/logit_a150_m01",
    "heads/qmargin_a150_m02": "heads/logit_a150_m02",
    "heads/entmax": "heads/qmargin_a150_m02",
    "heads/sparsemax": "heads/qmargin_a200_m02",
    "heads/scheduled_m02": "heads/qmargin_a150_m02",
    **{
        f"noise/{head}_flip{share}": f"heads/{head}_m02"
        for head in ("cosface", "qmargin_a125", "qmargin_a150")
        for share in (5, 20)
    },
    **{
        f"cleaned/{head}_cleaned{share}": f"noise/{head}_flip{share}"
        for head in ("cosface", "qmargin_a150")
        for share in (5, 20)
    },
}
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
    elif part in ("advice", "long"):
        groups = {"cosface_m02" if part == "advice" else "cosface": names}
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


def measure(study: Study, part: str, work: Path, *, replicates: int) -> dict[str, dict]:
    """Return control -> trial list -> what ``compare`` says of the control and its others."""
    folders: dict[str, list[Path]] = {}
    for cell in study.cells:
        folders.setdefault(cell.name, []).append(study.folder(cell))
    return {
        control: {
            name: compare(
                {
                    x: [folder / "scores" / f"{name}.trials.score" for folder in folders[x]]
                    for x in (control, *others)
                },
                work / "data/test/utt2spk",
                replicates=replicates,
            )
            for name in LISTS
        }
        for control, others in controls(part, list(folders)).items()
    }


def table(measured: dict[str, dict], active: dict[str, float]) -> str:
    """Return the systems of a control, then the differences to it."""
    rows = [["", *LISTS, "active at the end"], ["---"] * (2 + len(LISTS))]
    for x in measured[LISTS[0]]["systems"]:
        row = [eer_cell(measured[name]["systems"][x]["eer"]) for name in LISTS]
        rows.append([x, *row, f"{100 * active[x]:.0f} %"])
    for x in measured[LISTS[0]]["differences"]:
        found = (measured[name]["differences"][x]["eer"] for name in LISTS)
        rows.append([x, *map(difference_cell, found), ""])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def pair_table(work: Path, *, replicates: int) -> str:
    """Return the differences of ``PAIRS``, those of cells with finished seeds."""
    rows = [["", *DRAWN], ["---"] * (1 + len(DRAWN))]
    for pair in PAIRS.items():
        cells = []
        for name in DRAWN:
            files = {
                x: sorted((work / x).glob(f"seed_*/scores/{name}.trials.score")) for x in pair[::-1]
            }
            if all(files.values()):
                found = compare(files, work / "data/test/utt2spk", replicates=replicates)
                cells.append(difference_cell(found["differences"][" - ".join(pair)]["eer"]))
        if cells:
            rows.append([" - ".join(pair), *cells])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def draw(measured: dict[str, dict]) -> str:
    """Return the differences of a part as a figure."""
    panels = {f"{name}, EER %": {} for name in DRAWN}
    for group in measured.values():
        for name, panel in zip(DRAWN, panels.values()):
            for difference, values in group[name]["differences"].items():
                panel[difference] = tuple(100 * x for x in spread(values["eer"]))
    return differences_svg(panels)


def eer_cell(values: dict) -> str:
    """Return an EER of ``compare`` in %: mean over the seeds, their deviation, the interval."""
    low, high = values["interval"] or (float("nan"),) * 2
    sd = "" if values["sd"] is None else f" ± {100 * values['sd']:.2f}"
    return f"{100 * values['mean']:.2f}{sd} [{100 * low:.2f}, {100 * high:.2f}]"


def difference_cell(values: dict) -> str:
    """Return a difference of ``compare`` in points of EER, its interval over seeds too, and p."""
    difference, low, high = (100 * x for x in spread(values))
    return f"{difference:+.2f} [{low:+.2f}, {high:+.2f}] p {values['p']:.3f}"


def active_shares(study: Study) -> dict[str, float]:
    """Return cell -> share of the samples with a gradient in the last interval, over the seeds."""
    shares: dict[str, list[float]] = {}
    for cell in study.cells:
        lines = (study.folder(cell) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        last = [x for x in map(json.loads, lines) if "active" in x][-1]
        shares.setdefault(cell.name, []).append(last["active"])
    return {name: sum(values) / len(values) for name, values in shares.items()}


def audit_table(paths: list[Path]) -> str:
    """Return what remove_suspects.py has found, a row a run."""
    rows = []
    for path in paths:
        numbers = json.loads(path.read_text(encoding="utf-8"))
        rows = rows or [["", *numbers], ["---"] * (1 + len(numbers))]
        rows.append([path.parent.name, *(f"{value:.4g}" for value in numbers.values())])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def write(work: Path, *, replicates: int) -> Path:
    """Write the tables of all finished parts; return their file."""
    text = []
    if (work / "tune" / "cells.csv").is_file():
        rates = best_rates(work)
        rows = "".join(f"| {head} | {rate:g} |\n" for head, rate in rates.items())
        text.append(f"### learning rates found\n\n| head | rate |\n| --- | --- |\n{rows}")
    for part in ("heads", "long", "noise", "cleaned", "finetune", "advice"):
        path = work / f"{part}.yaml"
        study = read_study(path) if path.is_file() else None
        if study is None or not all(map(study.is_finished, study.cells)):
            logger.warning("%s: not finished, left out", part)
            continue
        collect(study)
        measured, active = measure(study, part, work, replicates=replicates), active_shares(study)
        for control, group in measured.items():
            text.append(f"### {part}: control {control}\n\n{table(group, active)}")
        write_text(work / f"{part}.svg", draw(measured))
    text.append(f"### across parts\n\n{pair_table(work, replicates=replicates)}")
    found = sorted(work.glob("data/*/found.json"))
    if found:
        text.append(f"### audit: wrong labels found\n\n{audit_table(found)}")
    for path in sorted(work.glob("probe/*/probe.md")):
        probe = path.read_text(encoding="utf-8").replace(f"{work}/", "")
        text.append(f"### probe of {path.parent.name}\n\n{probe}")
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
        print(write(args.work.resolve(), replicates=args.bootstrap).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        sys.exit(f"study_results.py: {error}")


if __name__ == "__main__":
    main()
