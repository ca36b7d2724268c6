"""Copy a data folder without the utterances that `wespeaker-qmargin audit` suspects most.

With --truth, an utt2spk with the right labels, it also says how well the ranking finds the wrong
ones: area under the ROC by the audit's score and by the loss alone, and how many of the utterances
that are removed were wrong.
"""

import argparse
import csv
import json
import sys
from pathlib import Path

import numpy as np
from scipy.stats import mannwhitneyu

from wespeaker_qmargin.files import read_table, write_table, write_text

EXAMPLE = """example:
  python recipes/mini/local/remove_suspects.py exp/run/audit.tsv data/train data/cleaned \\
      --share 0.05
"""


def read_suspects(path) -> list[dict]:
    """Return the rows of an audit's table, the most suspicious first."""
    with open(path, newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream, delimiter="\t"))


def found(suspects: list[dict], utt2spk: dict[str, str], truth: dict[str, str], count: int) -> dict:
    """Return how well the wrong labels are found."""
    wrong = np.array([utt2spk[row["key"]] != truth[row["key"]] for row in suspects])
    numbers = {"utterances": len(wrong), "wrong": int(wrong.sum()), "removed": count}
    numbers["removed_wrong"] = int(wrong[:count].sum())
    for key in ("score", "loss"):
        values = np.array([float(row[key]) for row in suspects])
        statistic = mannwhitneyu(values[wrong], values[~wrong]).statistic
        numbers[f"auc_{key}"] = float(statistic / (wrong.sum() * (~wrong).sum()))
    return numbers


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suspects", help="audit.tsv")
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--share", type=float, required=True, help="of the utterances, in (0, 1)")
    parser.add_argument("--truth", help="utt2spk with the right labels")
    args = parser.parse_args()
    try:
        suspects = read_suspects(args.suspects)
        count = round(args.share * len(suspects))
        doubted = {row["key"] for row in suspects[:count]}
        tables = {name: read_table(args.data / name) for name in ("wav.scp", "utt2spk")}
        for name, table in tables.items():
            kept = {key: value for key, value in table.items() if key not in doubted}
            write_table(args.out / name, kept)
        if args.truth:
            numbers = found(suspects, tables["utt2spk"], read_table(args.truth), count)
            write_text(args.out / "found.json", json.dumps(numbers, indent=1) + "\n")
            print(numbers)
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"remove_suspects.py: {error!r}")


if __name__ == "__main__":
    main()
