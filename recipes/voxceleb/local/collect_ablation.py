"""Collect the results of run_ablation.sh: one table, and heat maps of EER and FNR.

EXP_DIR/jobs.txt names the jobs, one a line: number, folder, alpha, scale, margin. EXP_DIR gets
ablation.csv (rates are fractions), ablation.md and, for scores with and without AS-Norm,
eer.svg, fnr.svg, eer_asnorm.svg, fnr_asnorm.svg. Jobs that are not finished are empty cells.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from wespeaker_qmargin.figures import heat_maps_svg
from wespeaker_qmargin.files import read_lines, write_text

EXAMPLE = """example:
  python recipes/voxceleb/local/collect_ablation.py recipes/voxceleb/exp/resnet34_ablation
"""
FPR = "0.001"
QUANTITIES = {"eer": "EER, %", "fnr": "FNR at 0.1 % FPR, %"}
NORMS = {"": "cosine", "_asnorm": "AS-Norm"}
COLUMNS = [f"{quantity}{norm}" for norm in NORMS for quantity in ("eer", "min_dcf", "fnr")]


class Job(NamedTuple):
    """A cell of the grid; ``results``: column -> number, empty while it is not finished."""

    alpha: float
    scale: float
    margin: float
    results: dict[str, float]


def collect(exp_dir) -> Path:
    """Write the tables and the figures into ``exp_dir``; return the Markdown table.

    Raises:
        FileNotFoundError: no jobs.txt.  ValueError: a bad line in it, no job that is finished.
    """
    exp_dir = Path(exp_dir)
    jobs = read_jobs(exp_dir)
    if not any(job.results for job in jobs):
        raise ValueError(f"{exp_dir}: none of its {len(jobs)} jobs is finished; stage 3 runs them")
    write_text(exp_dir / "ablation.csv", _csv(jobs))
    write_text(exp_dir / "ablation.md", _markdown(jobs))
    for norm, title in NORMS.items():
        for quantity, label in QUANTITIES.items():
            cells = {job[:3]: 100 * job.results.get(quantity + norm, math.nan) for job in jobs}
            svg = heat_maps_svg(f"{label} ({title})", cells)
            write_text(exp_dir / f"{quantity}{norm}.svg", svg)
    return exp_dir / "ablation.md"


def read_jobs(exp_dir: Path) -> list[Job]:
    """Return the jobs of ``exp_dir``, with what is finished of them."""
    jobs = []
    for number, line in read_lines(exp_dir / "jobs.txt"):
        try:
            _, folder, *values = line.split()
            alpha, scale, margin = map(float, values)
        except ValueError as error:
            raise ValueError(
                f"{exp_dir}/jobs.txt:{number}: expected number, folder, alpha, scale, margin, "
                f"found {line!r}"
            ) from error
        jobs.append(Job(alpha, scale, margin, _results(exp_dir / folder)))
    return jobs


def _results(exp_dir: Path) -> dict[str, float]:
    path = exp_dir / "scores" / "results.json"
    if not (exp_dir / ".measured").is_file():
        return {}
    results = {}
    for result in json.loads(path.read_text(encoding="utf-8"))["results"]:
        norm = "_asnorm" if "_asnorm" in result["name"] else ""
        results[f"eer{norm}"] = result["eer"]
        results[f"min_dcf{norm}"] = result["min_dcf"]
        results[f"fnr{norm}"] = result["fnr_at"][FPR]["fnr"]
    return results


def _csv(jobs: Sequence[Job]) -> str:
    rows = [["alpha", "scale", "margin", *COLUMNS]]
    rows += [[*map("{:g}".format, job[:3]), *_cells(job, COLUMNS, 1, ".6g")] for job in jobs]
    return "".join(",".join(row) + "\n" for row in rows)


def _markdown(jobs: Sequence[Job]) -> str:
    header = ["alpha", "s", "m", "EER %", "minDCF", "FNR % at 0.1 % FPR"]
    header += ["EER %, AS-Norm", "minDCF, AS-Norm", "FNR %, AS-Norm"]
    rows = [header, ["---"] * len(header)]
    for job in jobs:
        cells = dict(zip(COLUMNS, _cells(job, COLUMNS, 100, ".2f")))
        for norm in NORMS:
            cells[f"min_dcf{norm}"] = _cells(job, [f"min_dcf{norm}"], 1, ".3f")[0]
        rows.append([*map("{:g}".format, job[:3]), *(cell or "-" for cell in cells.values())])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _cells(job: Job, columns: Sequence[str], factor: float, digits: str) -> list[str]:
    values = map(job.results.get, columns)
    return ["" if value is None else format(factor * value, digits) for value in values]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("exp_dir", help="folder with jobs.txt and the jobs' folders")
    try:
        print(collect(parser.parse_args().exp_dir).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        sys.exit(f"collect_ablation.py: {error}")


if __name__ == "__main__":
    main()
