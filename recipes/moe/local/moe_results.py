"""Collect the study: every comparator and mixture with paired intervals.

Writes WORK/tables.md, and for each part, adapt and far, WORK/PART.svg with what it says of EER.

EER, mean over the seeds, of clean trials, of clean enrolment and degraded probes (the trials of all
kinds in adaptation together), of both degraded, and of kinds that were not in it; differences to
full fine-tuning. Then Cllr and actDCF at one threshold for all three kinds of trials together:
scores are calibrated on one half of the speakers and measured on the other, both ways.
"""

import argparse
import json
import logging
import sys
from pathlib import Path

import moe_study
import numpy as np
import torch
from degrade import HELD_OUT, KINDS, RATE, SEEN
from expert_tables import tables
from study_results import difference_cell, eer_cell
from torch.utils.flop_counter import FlopCounterMode

from wespeaker_qmargin.compare import compare, spread
from wespeaker_qmargin.config import load_config
from wespeaker_qmargin.figures import differences_svg
from wespeaker_qmargin.files import Scores, read_scores, read_table, write_text
from wespeaker_qmargin.llr import cllr, fit_calibration
from wespeaker_qmargin.model import SpeakerNet
from wespeaker_qmargin.roc import roc
from wespeaker_qmargin.schedule import parameter_groups
from wespeaker_qmargin.study import read_study

EXAMPLE = """example:
  python recipes/moe/local/moe_results.py recipes/moe/exp/study
"""
CONTROL = "full"
PARTS = {"adapt": f"Adapted to {', '.join(SEEN)}", "far": "Adapted to far alone"}
COLUMNS = {  # of a part: title -> trial lists
    "adapt": {
        "clean": ["clean"],
        "clean, degraded": [f"{kind}_clean" for kind in SEEN],
        "both degraded": [f"{kind}_both" for kind in SEEN],
        f"clean, {HELD_OUT} (held out)": [f"{HELD_OUT}_clean"],
        f"both {HELD_OUT}": [f"{HELD_OUT}_both"],
    },
    "far": {
        "clean": ["clean"],
        "clean, far": ["far_clean"],
        "both far": ["far_both"],
        "clean, others (held out)": [f"{kind}_clean" for kind in KINDS if kind != "far"],
    },
}
logger = logging.getLogger("moe_results")


def merged(folders: list[Path], lists: list[str], out: Path) -> list[Path]:
    """Write the trials of several lists as one score file a seed; return the files."""
    paths = []
    for seed, folder in enumerate(folders):
        text = [(folder / f"scores/{name}.trials.score").read_text() for name in lists]
        paths.append(out / f"{'+'.join(lists)}_{seed}.score")
        write_text(paths[-1], "".join(text))
    return paths


def measure(
    cells: dict[str, list[Path]], columns: dict[str, list[str]], work: Path, *, replicates: int
) -> dict[str, dict]:
    """Return column -> what ``compare`` says of all cells, the control first."""
    measured = {}
    for title, lists in columns.items():
        systems = {
            name: merged(folders, lists, work / "merged" / name) for name, folders in cells.items()
        }
        control = {CONTROL: systems.pop(CONTROL)}
        measured[title] = compare(
            control | systems, work / "data/test/utt2spk", replicates=replicates
        )
    return measured


def error_tables(measured: dict[str, dict]) -> str:
    """Return the EER of every cell, and its difference to the control."""
    header = ["", *measured]
    texts = []
    for section, cell in (("systems", eer_cell), ("differences", difference_cell)):
        rows = [header, ["---"] * len(header)]
        for name in next(iter(measured.values()))[section]:
            found = (values[section][name]["eer"] for values in measured.values())
            rows.append([name, *map(cell, found)])
        texts.append(_table(rows))
    return f"### EER, %\n\n{texts[0]}\n### Differences of EER to {CONTROL}\n\n{texts[1]}"


def draw(measured: dict[str, dict]) -> str:
    """Return the differences of EER as a figure, a panel a column."""
    panels = {
        title.removesuffix(" (held out)"): {
            name: tuple(100 * x for x in spread(difference["eer"]))
            for name, difference in values["differences"].items()
        }
        for title, values in measured.items()
    }
    return differences_svg(panels)


def one_threshold(cells: dict[str, list[Path]], work: Path) -> str:
    """Return Cllr and actDCF over the three kinds of trials at one calibration."""
    speaker_of = read_table(work / "data/test/utt2spk")
    speakers = sorted(set(speaker_of.values()))
    half = set(np.random.default_rng(0).permutation(speakers)[: len(speakers) // 2].tolist())
    lists = ["clean", *(f"{kind}_{way}" for kind in KINDS for way in ("clean", "both"))]
    rows = [["", "Cllr, bits", "actDCF"], ["---"] * 3]
    for name, folders in cells.items():
        values = []
        for path in merged(folders, lists, work / "merged" / name):
            scores = read_scores(path)
            sides = [np.array([speaker_of[key] in half for key in x]) for x in scores[:2]]
            first, second = sides[0] & sides[1], ~sides[0] & ~sides[1]
            found = [_measured(scores, a, b) for a, b in ((first, second), (second, first))]
            values.append(np.mean(found, axis=0))
        (costs, dcfs), deviation = np.mean(values, axis=0), np.std(values, axis=0, ddof=1)
        rows.append([name, f"{costs:.3f} ± {deviation[0]:.3f}", f"{dcfs:.3f} ± {deviation[1]:.3f}"])
    return f"### All kinds of trials at one threshold\n\n{_table(rows)}"


def _measured(scores: Scores, fit: np.ndarray, test: np.ndarray) -> tuple[float, float]:
    found = fit_calibration(scores.scores[fit, None], scores.is_target[fit])
    llr = found.bias + scores.scores[test] * found.weights[0]
    return cllr(llr, scores.is_target[test]), roc(llr, scores.is_target[test]).act_dcf()


def sizes(cells: dict[str, list[Path]]) -> str:
    """Return parameters, those that were trained, flops of an embedding, minutes of training."""
    header = ["", "parameters", "trained", "Mflop / s of speech", "learning rate", "minutes"]
    rows = [header, ["---"] * len(header)]
    for name, folders in cells.items():
        config = load_config(folders[0] / "config.yaml", check_paths=False)
        net = SpeakerNet(config)
        frozen = [part for part, ratio in config.lr_ratio.items() if ratio == 0]
        counts = [p.numel() for p in net.parameters()]
        trained = _trained(net, config) if frozen else sum(counts)
        minutes = [_minutes(folder) for folder in folders]
        sizes = [f"{sum(counts):,}", f"{trained:,}", f"{_mflop_per_s(net.eval()):.1f}"]
        rows.append(
            [name, *sizes, f"{config.scheduler_args['initial_lr']:g}", f"{np.mean(minutes):.1f}"]
        )
    return f"### Parameters and flops (without the head), time\n\n{_table(rows)}"


@torch.no_grad()
def _mflop_per_s(net: SpeakerNet, seconds: float = 2.0) -> float:
    """Matrix products and convolutions, those of the experts that are chosen."""
    wav = 0.1 * torch.randn(1, round(seconds * RATE), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter:
        net.embed(wav)
    return counter.get_total_flops() / seconds / 1e6


def _trained(net: SpeakerNet, config) -> int:
    groups = parameter_groups(net, {k: v for k, v in config.lr_ratio.items() if k != "projection"})
    return sum(p.numel() for group in groups for p in group["params"])


def _minutes(folder: Path) -> float:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [x for x in map(json.loads, lines) if "utts_per_s" in x]
    config = load_config(folder / "config.yaml", check_paths=False)
    steps = np.diff([0, *(x["step"] for x in records)])
    batch = config.dataloader_args.batch_size
    return sum(n * batch / x["utts_per_s"] for n, x in zip(steps, records)) / 60


def _table(rows: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def results(work: Path, part: str, *, replicates: int) -> str:
    """Return the tables of a finished part; write its figure."""
    study = read_study(work / f"{part}.yaml")
    missing = [cell.name for cell in study.cells if not study.is_finished(cell)]
    if missing:
        raise ValueError(f"{part}: {len(missing)} cells to do, the first is {missing[0]}")
    own: dict[str, list[Path]] = {}
    for cell in study.cells:
        own.setdefault(cell.name, []).append(study.folder(cell))
    starts = {"not adapted": "dense", "experts, not adapted": "experts"}
    cells = {
        title: [work / "base" / name / f"seed_{seed}" for seed in moe_study.SEEDS]
        for title, name in starts.items()
    } | own
    measured = measure(cells, COLUMNS[part], work, replicates=replicates)
    write_text(work / f"{part}.svg", draw(measured))
    texts = [error_tables(measured), one_threshold(cells, work), sizes(own)]
    return "\n".join([f"## {PARTS[part]}\n", *texts, tables(own, work / "data")])


def write(work: Path, *, replicates: int) -> Path:
    """Write the tables of the finished study; return their file."""
    texts = [results(work, part, replicates=replicates) for part in PARTS]
    write_text(work / "tables.md", "\n".join(texts))
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
        sys.exit(f"moe_results.py: {error}")


if __name__ == "__main__":
    main()
