"""Write the YAMLs of the study for `wespeaker-qmargin grid`, a part at a time.

WORK has data/ (study_data.py).

    tune      every head at three learning rates, one seed, 60 training speakers held out
    heads     every head at the rate that was best for it, by the mean EER of the held-out speakers
              over the last three epochs, as in all parts below but the last two
    long      four of them with three times as many epochs
    noise     three of them with wrong labels
    cleaned   two of them on what is left without the audit's suspects
    starts    two CosFace networks, trained as long as the others and three times as long
    finetune  both gone on with
    advice    the second gone on with, at settings that the probe calls safe, mild and starving
"""

import argparse
import sys
from pathlib import Path

import yaml

from wespeaker_qmargin.files import write_text
from wespeaker_qmargin.study import held_out_eer

EXAMPLE = """example:
  python recipes/mini/local/make_study.py recipes/mini/exp/study heads
"""
PARTS = ("tune", "heads", "long", "noise", "cleaned", "starts", "finetune", "advice")
SEEDS = [0, 1, 2]
RATES = (0.0005, 0.001, 0.002)
EPOCHS, CONTINUED, ADVISED = 15, 5, 10
PAIRS = {"a125": (1.25, 20.0), "a150": (1.5, 10.0), "a200": (2.0, 5.0)}  # alpha, s


def _q_margin(alpha: float, scale: float) -> dict:
    return {"project_type": "q_margin", "alpha": alpha, "scale": scale}


# head -> projection_args; those in PLAIN have no margin
HEADS = {
    "softmax": {"project_type": "softmax"},
    "cosface": {"project_type": "add_margin", "scale": 32.0},
    "aam": {"project_type": "arc_margin", "scale": 32.0, "easy_margin": False},
    "sphereface2": {"project_type": "sphereface2", "scale": 32.0},
    "entmax": _q_margin(1.5, 10.0),
    "sparsemax": _q_margin(2.0, 5.0),
    "logit_a150": {"project_type": "study_heads:LogitMargin", "alpha": 1.5, "scale": 10.0},
    **{f"qmargin_{name}": _q_margin(*pair) for name, pair in PAIRS.items()},
}
PLAIN = ("softmax", "entmax", "sparsemax")


def cell(head: str, margin: float, **others) -> dict:
    """Return a cell of a study."""
    margin = 0.0 if head in PLAIN else margin
    return {"projection_args": HEADS[head], "margin_update": {"final_margin": margin}, **others}


def rate(value: float) -> dict:
    """Return the schedule's ends: a tenth is left at the end."""
    return {"scheduler_args": {"initial_lr": value, "final_lr": value / 10}}


def tune() -> dict:
    """Return the cells in which the learning rates are found."""
    return {
        f"{head}_lr{value:g}": cell(head, 0.2, valid_speakers=60, **rate(value))
        for head in HEADS
        for value in RATES
    }


def best_rates(work: Path) -> dict[str, float]:
    """Return head -> learning rate from the finished tune study.

    Raises:
        FileNotFoundError: a run of it is missing.
    """
    best = {}
    for head in HEADS:
        eers = {
            value: held_out_eer(work / "tune" / f"{head}_lr{value:g}/seed_0") for value in RATES
        }
        best[head] = min(eers, key=eers.get)
    return best


def heads(work: Path) -> dict:
    """Return every head at both margins, and the run that passes from alpha 1 to 1.5."""
    rates, cells = best_rates(work), {}
    for head in HEADS:
        for margin in (0.0,) if head in PLAIN else (0.1, 0.2):
            name = head if head in PLAIN else f"{head}_m{10 * margin:02.0f}"
            cells[name] = cell(head, margin, **rate(rates[head]))
    ramp = {"final_alpha": 1.5, "increase_start_epoch": 3, "fix_start_epoch": 10}
    scheduled = {**_q_margin(1.5, 10.0), "scale": "auto"}
    cells["scheduled_m02"] = {
        **cells["qmargin_a150_m02"],
        "projection_args": scheduled,
        "alpha_update": ramp,
    }
    return cells


def long(work: Path) -> dict:
    """Return CosFace, two sparse heads and the run that passes to alpha 1.5, with more epochs."""
    same, names = heads(work), ("qmargin_a150", "scheduled", "qmargin_a125", "cosface")
    return {name: {**same[f"{name}_m02"], "num_epochs": 3 * EPOCHS} for name in names}


def noise(work: Path) -> dict:
    """Return CosFace and Q-Margin with wrong labels; without, they are in `heads`."""
    rates = best_rates(work)
    return {
        f"{head}_flip{share}": cell(
            head, 0.2, **rate(rates[head]), train_data=str(work / f"data/train_flip{share}")
        )
        for head in ("cosface", "qmargin_a125", "qmargin_a150")
        for share in (5, 20)
    }


def cleaned(work: Path) -> dict:
    """Return the same without the utterances that an audit of Q-Margin's first seed suspects."""
    rates = best_rates(work)
    return {
        f"{head}_cleaned{share}": cell(
            head,
            0.2,
            **rate(rates[head]),
            train_data=str(work / f"data/train_cleaned{share}_seed0"),
        )
        for head in ("cosface", "qmargin_a150")
        for share in (5, 20)
    }


def starts(work: Path) -> dict:
    """Return the CosFace networks that are fine-tuned: one seed, two lengths."""
    rates = best_rates(work)
    return {
        f"cosface_epochs{epochs}": cell("cosface", 0.2, **rate(rates["cosface"]), num_epochs=epochs)
        for epochs in (EPOCHS, 3 * EPOCHS)
    }


def finetune(work: Path) -> dict:
    """Return every start gone on with: CosFace, the three pairs, and a nearly dense Q-Margin."""
    projections = {"cosface": HEADS["cosface"], "qmargin_a110": _q_margin(1.1, 32.0)}
    projections |= {name: HEADS[name] for name in HEADS if name.startswith("qmargin")}
    return {
        f"{start}_{name}": _goes_on(work, start, args, 0.2, num_epochs=CONTINUED, **rate(0.0002))
        for start in starts(work)
        for name, args in projections.items()
    }


def advice(work: Path) -> dict:
    """Return the long start gone on with at a rate that changes it: what the probe would forbid."""
    cells = {"cosface_m02": (HEADS["cosface"], 0.2), "cosface_m00": (HEADS["cosface"], 0.0)}
    for scale, margin in ((5.0, 0.2), (10.0, 0.05), (20.0, 0.02), (32.0, 0.0)):
        name = f"qmargin_a200_s{scale:.0f}_m{margin:g}".replace("0.", "0")
        cells[name] = _q_margin(2.0, scale), margin
    start = f"cosface_epochs{3 * EPOCHS}"
    return {
        name: _goes_on(work, start, *cell, num_epochs=ADVISED, **rate(0.001))
        for name, cell in cells.items()
    }


def _goes_on(work: Path, start: str, projection_args: dict, margin: float, **others) -> dict:
    cell = {
        **others,
        "projection_args": projection_args,
        "margin_update": {"initial_margin": margin, "final_margin": margin, "fix_start_epoch": 1},
        "checkpoint": str(work / "starts" / start / "seed_0/models/avg_model.pt"),
    }
    cell["scheduler_args"] |= {"warm_up_epoch": 0}
    return cell


def study(work: Path, part: str) -> dict:
    """Return a part as `wespeaker-qmargin grid` reads it."""
    cells = tune() if part == "tune" else globals()[part](work)
    trials = sorted(str(path) for path in (work / "data/test/trials").glob("*.trials"))
    return {
        "exp_dir": part,
        "config": str(Path(__file__).resolve().parents[3] / "conf/mini_xvec.yaml"),
        "common": {
            "num_epochs": EPOCHS,
            "num_avg": 3,
            "valid_speakers": 0,
            "model_args": {"hid_dim": 128, "stats_dim": 384},
            "data_type": "kaldi",
            "train_data": str(work / "data/train"),
            "noise_data": str(work / "lists/musan/wav.scp"),
            "reverb_data": str(work / "lists/rirs/wav.scp"),
            "device": "cpu",
        },
        "test": {"data": str(work / "data/test"), "trials": trials},
        "seeds": [0] if part in ("tune", "starts") else SEEDS,
        "cells": cells,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", type=Path)
    parser.add_argument("part", choices=PARTS)
    args = parser.parse_args()
    work = args.work.resolve()
    try:
        content = yaml.safe_dump(study(work, args.part), sort_keys=False)
    except OSError as error:
        sys.exit(f"make_study.py: {error}; the parts before this one must be finished")
    write_text(work / f"{args.part}.yaml", content)


if __name__ == "__main__":
    main()
