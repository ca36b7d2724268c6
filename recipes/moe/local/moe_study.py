"""Write the YAMLs of the study for `wespeaker-qmargin grid`, a part at a time.

    base    a small WavLM and MHFA from nothing on clean speech, dense and with experts
    tune    every comparator and mixture on degraded speech at two learning rates, one seed, 60
            speakers held out
    adapt   the same at the rate that was better for those, three seeds
    far     some of them on far speech alone, at the higher rate and for longer, so that the dense
            network forgets clean speech; three seeds

WORK has data/ (degrade.py) and encoder/ (make_encoder.py). Every cell of a part has the same data
and epochs: the head alone first, then what is not frozen.
"""

import argparse
import sys
from pathlib import Path

import yaml

from wespeaker_qmargin.files import write_text
from wespeaker_qmargin.study import held_out_eer

EXAMPLE = """example:
  python recipes/moe/local/moe_study.py recipes/moe/exp/study adapt
"""
SEEDS = [0, 1, 2]
DIM, LAYERS = 96, 3  # of the encoder
HIDDEN = 4 * DIM
BASE_EPOCHS, EPOCHS, HEAD_EPOCHS = 20, 6, 2
BASE_RATE, HEAD_RATE, RATES = 3e-3, 1e-3, (5e-4, 2e-3)
FAR_EPOCHS, FAR_RATE = 10, 2e-3
FAR_CELLS = (
    *("full", "head", "lora", "quality_lora", "adapter_flops", "wide"),
    *("experts_from_start", "experts_reinit", "experts_no_router_loss", "experts_n3k2"),
)
FROZEN = {"frontend": 0.0}


def experts(count: int, top_k: int, **options) -> dict:
    """Return the cell of a mixture in every block."""
    return _frontend(moe={"experts": count, "top_k": top_k, **options})


def _frontend(**wavlm_args) -> dict:
    return {"dataset_args": {"wavlm_args": wavlm_args}}


def _instead(name: str, **options) -> dict:
    return _frontend(feed_forward={"module": f"study_ffn:{name}", **options})


def base() -> dict:
    """Return the starts."""
    return {"dense": {}, "experts": experts(3, 2)}


def adapted() -> dict:
    """Return the comparators, and the mixtures, without their learning rates."""
    last = f"frontend.encoder.encoder.layers.{LAYERS - 1}"
    adapter = {"lr_ratio": {**FROZEN, "adapter": 1.0}}
    cells = {
        "full": {},
        "head": {"lr_ratio": FROZEN},
        "last_layer": {"lr_ratio": {**FROZEN, last: 1.0}},
        "lora": _instead("LowRank") | {"lr_ratio": {**FROZEN, "lora_A": 1.0, "lora_B": 1.0}},
        "quality_lora": _instead("QualityLowRank")
        | {"lr_ratio": {**FROZEN, "updates": 1.0, "quality": 1.0}},
        # beside H hidden units: as many parameters as two more experts, the flops of one more
        "adapter_parameters": _instead("ParallelAdapter", hidden=2 * HIDDEN) | adapter,
        "adapter_flops": _instead("ParallelAdapter", hidden=HIDDEN) | adapter,
        "wide": _instead("ParallelAdapter", hidden=2 * HIDDEN),
        "experts_from_start": experts(3, 2) | {"finetune": {"from": "base/experts/seed_{seed}"}},
        "experts_reinit": experts(3, 2, reinit=0.5),
        "experts_random_routing": experts(3, 2, z_loss=0.0, balance_loss=0.0)
        | {"lr_ratio": {"router": 0.0}},
        "experts_no_router_loss": experts(3, 2, z_loss=0.0, balance_loss=0.0),
        "experts_switch": experts(3, 2, losses="switch"),
    }
    for count in (1, 2, 3, 4):
        for top_k in (1, 2):
            if top_k <= count:
                cells[f"experts_n{count}k{top_k}"] = experts(count, top_k)
    return cells


def rate(value: float) -> dict:
    """Return the schedule's ends: a tenth is left at the end."""
    return {"scheduler_args": {"initial_lr": value, "final_lr": value / 10}}


def tune(work: Path) -> dict:
    """Return every cell at every rate."""
    return {
        f"{name}_lr{value:g}": {**cell, "valid_speakers": 60, **rate(value)}
        for name, cell in adapted().items()
        for value in RATES
    }


def best_rates(work: Path) -> dict[str, float]:
    """Return cell -> rate with the lowest EER of held-out speakers, mean of three epochs.

    Raises:
        FileNotFoundError: a run of tune is missing.
    """
    best = {}
    for name in adapted():
        eers = {value: held_out_eer(work / f"tune/{name}_lr{value:g}/seed_0") for value in RATES}
        best[name] = min(eers, key=eers.get)
    return best


def adapt(work: Path) -> dict:
    """Return every cell at its best rate."""
    rates = best_rates(work)
    return {name: {**cell, **rate(rates[name])} for name, cell in adapted().items()}


def far(work: Path) -> dict:
    """Return the cells that are adapted to far speech alone."""
    return {name: {**adapted()[name], **rate(FAR_RATE)} for name in FAR_CELLS}


def tested_on(work: Path, part: str) -> dict:
    """Return what a part is tested on; tune chooses by held-out training speakers."""
    trials = work / "data/test/trials"
    if part == "tune":
        return {"data": str(work / "data/by_kind/clean"), "trials": [str(trials / "clean.trials")]}
    return {
        "data": str(work / "data/test"),
        "trials": sorted(str(path) for path in trials.glob("*.trials")),
    }


def study(work: Path, part: str) -> dict:
    """Return a part as `wespeaker-qmargin grid` reads it."""
    train = {"base": "train", "far": "train_far"}.get(part, "train_degraded")
    common = {
        "train_data": str(work / "data" / train),
        "dataset_args": {"wavlm_args": {"model_name": str(work / "encoder")}},
        "noise_data": str(work / "lists/musan/wav.scp"),
        "reverb_data": str(work / "lists/rirs/wav.scp"),
        "data_type": "kaldi",
        "device": "cpu",
    }
    content = {
        "exp_dir": part,
        "config": str(Path(__file__).resolve().parents[3] / "conf/mini_wavlm.yaml"),
        "common": common,
        "test": tested_on(work, part),
        "seeds": [0] if part == "tune" else SEEDS,
    }
    if part == "base":
        common |= {"num_epochs": BASE_EPOCHS, **rate(BASE_RATE)}
        return {**content, "cells": base()}
    epochs = FAR_EPOCHS if part == "far" else EPOCHS
    common |= {"num_epochs": epochs, "scheduler_args": {"warm_up_epoch": 0}}
    common["margin_update"] = {"initial_margin": 0.2, "fix_start_epoch": 1}
    common["dataset_args"]["aug_prob"] = 0.0  # the degradation is the data's
    start = {"from": "base/dense/seed_{seed}", "prototype_epochs": HEAD_EPOCHS}
    content["finetune"] = {**start, "prototype_lr": HEAD_RATE}
    return {**content, "cells": {"tune": tune, "adapt": adapt, "far": far}[part](work)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", type=Path)
    parser.add_argument("part", choices=("base", "tune", "adapt", "far"))
    args = parser.parse_args()
    work = args.work.resolve()
    try:
        content = yaml.safe_dump(study(work, args.part), sort_keys=False)
    except OSError as error:
        sys.exit(f"moe_study.py: {error}; the parts before this one must be finished")
    write_text(work / f"{args.part}.yaml", content)


if __name__ == "__main__":
    main()
