"""Write the YAMLs of the study for `wespeaker-qmargin grid`, a part at a time.

    base    a small WavLM and MHFA from nothing on clean speech, dense and with experts
    adapt   that network on degraded speech: everything that experts are compared with

WORK has data/ (degrade.py) and encoder/ (tools/make_tiny_encoder.py). Every cell of adapt has the
same data, epochs and learning rates: the head alone first, then what is not frozen.
"""

import argparse
from pathlib import Path

import yaml

from wespeaker_qmargin.files import write_text

EXAMPLE = """example:
  python recipes/moe/local/make_study.py recipes/moe/exp/study adapt
"""
SEEDS = [0, 1, 2]
DIM, LAYERS, HEADS, CONV_DIM = 96, 4, 4, 48  # of the encoder that run_study.sh makes
HIDDEN = 4 * DIM
BASE_EPOCHS, EPOCHS, HEAD_EPOCHS = 40, 6, 2
BASE_LR, LR, HEAD_LR = 1e-3, 2e-4, 1e-3
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


def adapt() -> dict:
    """Return the comparators, and the mixtures."""
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


def study(work: Path, part: str) -> dict:
    """Return a part as `wespeaker-qmargin grid` reads it."""
    adapted = part == "adapt"
    train = "train_degraded" if adapted else "train"
    lr = LR if adapted else BASE_LR
    common = {
        "num_epochs": EPOCHS if adapted else BASE_EPOCHS,
        "train_data": str(work / "data" / train),
        "dataset_args": {"wavlm_args": {"model_name": str(work / "encoder")}},
        "scheduler_args": {"initial_lr": lr, "final_lr": lr / 10},
    }
    if adapted:
        common["scheduler_args"]["warm_up_epoch"] = 0
        common["margin_update"] = {"initial_margin": 0.2, "fix_start_epoch": 1}
        common["dataset_args"]["aug_prob"] = 0.0  # the degradation is the data's
    trials = sorted(str(path) for path in (work / "data/test/trials").glob("*.trials"))
    content = {
        "exp_dir": part,
        "config": str(Path(__file__).resolve().parents[3] / "conf/mini_wavlm.yaml"),
        "common": common,
        "test": {"data": str(work / "data/test"), "trials": trials},
        "seeds": SEEDS,
        "cells": adapt() if adapted else base(),
    }
    if adapted:
        content["finetune"] = {
            "from": "base/dense/seed_{seed}",
            "prototype_epochs": HEAD_EPOCHS,
            "prototype_lr": HEAD_LR,
        }
    return content


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", type=Path)
    parser.add_argument("part", choices=("base", "adapt"))
    args = parser.parse_args()
    work = args.work.resolve()
    content = yaml.safe_dump(study(work, args.part), sort_keys=False)
    write_text(work / f"{args.part}.yaml", content)


if __name__ == "__main__":
    main()
