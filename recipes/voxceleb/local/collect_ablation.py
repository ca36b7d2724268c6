"""Collect the results of run_ablation.sh: one table, and heat maps of EER and FNR.

EXP_DIR/jobs.txt names the jobs, one a line: number, folder, alpha, scale, margin. EXP_DIR gets
ablation.csv (rates are fractions), ablation.md and, for scores with and without AS-Norm,
eer.svg, fnr.svg, eer_asnorm.svg, fnr_asnorm.svg. Jobs that are not finished are empty cells.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from wespeaker_qmargin.figures import GREY, SETTINGS
from wespeaker_qmargin.files import atomic_path, read_lines, write_text

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
            with atomic_path(exp_dir / f"{quantity}{norm}.svg") as temporary:
                heat_maps(jobs, quantity + norm, f"{label} ({title})", temporary)
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


def heat_maps(jobs: Sequence[Job], column: str, title: str, path: Path) -> None:
    """Draw ``column`` over scale and margin, a panel an alpha, as SVG; every cell has its number.

    One scale of colours, logarithmic, as the worst cells are ten times the best.
    """
    alphas, scales, margins = (sorted({job[i] for job in jobs}) for i in range(3))
    values = np.full((len(alphas), len(margins), len(scales)), np.nan)
    for job in jobs:
        place = alphas.index(job.alpha), margins.index(job.margin), scales.index(job.scale)
        values[place] = 100 * job.results.get(column, np.nan)
    positive = values[values > 0]
    low, high = (positive.min(), positive.max()) if positive.size else (1, 10)
    norm = LogNorm(low, max(high, 1.01 * low))
    with rc_context({**SETTINGS, "axes.grid": False}):
        width = 0.75 * len(scales) + 0.3
        size = (len(alphas) * width + 0.8, 0.45 * len(margins) + 1.3)
        figure = Figure(figsize=size, layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", weight="bold")
        for number, alpha in enumerate(alphas):
            axes = figure.add_subplot(1, len(alphas), number + 1)
            _draw(axes, values[number], norm)
            axes.set_title(f"alpha {alpha:g}")
            axes.set_xticks(range(len(scales)), [f"{scale:g}" for scale in scales])
            axes.set_yticks(range(len(margins)), [f"{margin:g}" for margin in margins])
            axes.set_xlabel("scale s")
            if number == 0:
                axes.set_ylabel("margin m")
        figure.savefig(path, format="svg", metadata={"Date": None})


def _draw(axes, values: np.ndarray, norm: LogNorm) -> None:
    axes.imshow(np.ma.masked_invalid(values), cmap="cividis_r", norm=norm, aspect="auto")
    for (row, column), value in np.ndenumerate(values):
        known = np.isfinite(value)
        dark = known and value > 0 and norm(value) > 0.5
        text = f"{value:.3g}" if known else "-"
        axes.text(column, row, text, ha="center", va="center", color="white" if dark else "black")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelcolor=GREY)


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
