"""EER before and after fine-tuning, over seeds, with paired speaker-bootstrap intervals.

WORK holds START/before/scores/*.score and START/HEAD_SEED/scores/*.score, on the same trials.
Prints a Markdown table for each start, and writes it to WORK/RESULTS.md and all numbers to
WORK/results.json. An EER after fine-tuning is the mean over the seeds; in each replicate of the
bootstrap all systems are measured on the same draw of speakers, so a difference has an interval of
its own (of the speakers; the seeds are the ones that were run).
"""

import argparse
import json
import logging
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np

from wespeaker_qmargin.files import read_scores, read_table, write_text
from wespeaker_qmargin.roc import bootstrap, eer

EXAMPLE = """example:
  python recipes/finetune/local/compare.py recipes/finetune/exp/minivox --starts base \\
      --heads cosface qmargin --seeds 0 1 2 --utt2spk data/test/utt2spk
"""


def measure(path, speaker_of: dict, *, replicates: int) -> tuple[frozenset, np.ndarray]:
    """Return the trials of a score file, and its EER and that of its replicates, (1 + R,)."""
    trials = read_scores(path)
    if trials.is_target is None:
        raise ValueError(f"{path}: no labels; each line must end with target or nontarget")
    values = [eer(trials.scores, trials.is_target)]

    def keep(curve):
        values.append(curve.eer())
        return values[-1:]

    if replicates:
        speakers = ([speaker_of[key] for key in side] for side in (trials.enroll, trials.test))
        bootstrap(trials.scores, trials.is_target, *speakers, keep, replicates=replicates)
    return frozenset(zip(trials.enroll, trials.test)), np.array(values)


def compare(work, starts, heads, seeds, utt2spk, *, replicates: int = 1000) -> dict:
    """Return ``{start: {trials: {"before", head, "head - before", "head - other": numbers}}}``.

    Numbers are ``{"eer" or "difference", "interval", "seeds"}``, fractions.

    Raises:
        FileNotFoundError, ValueError: a score file that is missing, or of other trials.
    """
    speaker_of, results = read_table(utt2spk), {}
    for start in starts:
        folder = Path(work) / start
        results[start] = {}
        for path in sorted((folder / "before" / "scores").glob("*.score")):
            paths = {"before": [path]}
            for head in heads:
                scores = [folder / f"{head}_{seed}" / "scores" for seed in seeds]
                paths[head] = [x / path.name for x in scores]
            values = _measured(paths, speaker_of, replicates)
            results[start][path.name.removesuffix(".trials.score")] = _numbers(values, heads)
        if not results[start]:
            raise FileNotFoundError(f"{folder}/before/scores: no score files; run stage 5")
    return results


def _measured(paths: dict[str, list], speaker_of, replicates) -> dict[str, np.ndarray]:
    """Return (seeds, 1 + replicates) of each name."""
    measured = {
        name: [measure(x, speaker_of, replicates=replicates) for x in of_name]
        for name, of_name in paths.items()
    }
    if len({trials for of_name in measured.values() for trials, _ in of_name}) > 1:
        raise ValueError(f"{paths['before'][0]}: the other systems were scored on other trials")
    return {name: np.stack([x for _, x in of_name]) for name, of_name in measured.items()}


def _numbers(values: dict[str, np.ndarray], heads) -> dict:
    pairs = [(head, "before") for head in heads] + [(b, a) for a, b in pairwise(heads)]
    means = {name: x.mean(axis=0) for name, x in values.items()}
    numbers = {
        name: {"eer": x[0], "interval": _interval(x), "seeds": values[name][:, 0].tolist()}
        for name, x in means.items()
    }
    for one, other in pairs:
        difference = means[one] - means[other]
        numbers[f"{one} - {other}"] = {
            "difference": difference[0],
            "interval": _interval(difference),
        }
    return numbers


def _interval(values: np.ndarray) -> list[float] | None:
    return np.percentile(values[1:], [2.5, 97.5]).tolist() if len(values) > 1 else None


def markdown(results: dict, seeds) -> str:
    """Return one table a start, in per cent."""
    tables = []
    for start, by_trials in results.items():
        columns = list(next(iter(by_trials.values())))
        rows = [["trials", *columns], ["---"] * (1 + len(columns))]
        rows += [[name, *(_cell(x[column]) for column in columns)] for name, x in by_trials.items()]
        table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        tables.append(f"EER in %, start: {start}, mean of seeds {' '.join(seeds)}\n\n{table}\n")
    return "\n".join(tables)


def _cell(numbers: dict) -> str:
    signed = "+" if "difference" in numbers else ""
    text = f"{100 * numbers.get('eer', numbers.get('difference')):{signed}.2f}"
    if numbers["interval"]:
        text += " [{:{s}.2f}, {:{s}.2f}]".format(*(100 * x for x in numbers["interval"]), s=signed)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work")
    for name in ("starts", "heads", "seeds"):
        parser.add_argument(f"--{name}", nargs="+", required=True)
    parser.add_argument("--utt2spk", required=True, help="speakers of the test utterances")
    parser.add_argument("--bootstrap", type=int, default=1000, help="replicates; 0: no intervals")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    try:
        results = compare(
            args.work,
            args.starts,
            args.heads,
            args.seeds,
            args.utt2spk,
            replicates=args.bootstrap,
        )
    except (OSError, ValueError) as error:
        sys.exit(f"compare.py: {error}")
    table = markdown(results, args.seeds)
    write_text(Path(args.work) / "results.json", json.dumps(results, indent=1) + "\n")
    write_text(Path(args.work) / "RESULTS.md", table)
    print(table)


if __name__ == "__main__":
    main()
