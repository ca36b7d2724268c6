"""A study's YAML: many trainings that differ in a few keys, each with a name and a seed."""

import dataclasses
import inspect
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from wespeaker_qmargin.config import (
    Config,
    load_config,
    make_config,
    overlay,
    read_config,
    read_yaml,
    to_dict,
)
from wespeaker_qmargin.finetune import finetune

_TEST_KEYS = {"data", "trials", "data_type", "mean"}
_KEYS = {"exp_dir", "config", "common", "test", "seeds", "cells", "grid", "finetune"}
_FINETUNE_KEYS = {"from", *inspect.signature(finetune).parameters} - {
    *("config", "source", "resume_run"),
}


class Cell(NamedTuple):
    """One training: ``name`` with a seed, what its configuration adds to the study's, and, where it
    is a fine-tuning, ``from`` and the options of `finetune.finetune`."""

    name: str
    seed: int
    content: dict
    finetune: dict


@dataclasses.dataclass(frozen=True)
class Study:
    """A study's YAML, read: ``cells`` in the order of their task numbers, from 1."""

    exp_dir: Path
    content: dict
    test: dict
    grid: dict
    cells: list[Cell]

    def folder(self, cell: Cell) -> Path:
        """Return where a cell goes."""
        return self.exp_dir / cell.name / f"seed_{cell.seed}"

    def config(self, cell: Cell) -> Config:
        """Return a cell's checked configuration."""
        own = {"seed": cell.seed, "exp_dir": str(self.folder(cell))}
        return make_config(overlay(overlay(self.content, cell.content), own))

    def is_finished(self, cell: Cell) -> bool:
        """Say whether a cell has its results.

        Raises:
            ValueError: it has, with another configuration than the study's YAML says now.
        """
        folder = self.folder(cell)
        if not (folder / "results.json").is_file():
            return False
        before, now = to_dict(load_config(folder / "config.yaml")), to_dict(self.config(cell))
        given = {"checkpoint"} if cell.finetune else set()  # finetune's own
        changed = sorted(key for key in now.keys() - given if before.get(key) != now[key])
        if changed:
            raise ValueError(
                f"{folder}: is finished, with another {', '.join(changed)} than the study says "
                "now; give the cell another name, or remove the folder"
            )
        return True


def read_study(path) -> Study:
    """Read a study.

    Keys: ``exp_dir`` and ``config``, a YAML of the trainer, relative to the study's file;
    ``common``, keys of it for all cells; ``test``: ``data`` (and ``data_type``, kaldi), ``trials``
    (a list of files), ``mean`` (data whose mean embedding is subtracted before the cosine, as
    WeSpeaker's recipes do with the training's; without it nothing is); ``seeds``; ``cells``, name
    -> keys of the configuration; ``grid``: ``alphas``, ``scales``, ``margins``, every combination a
    cell with Q-Margin; ``finetune``: cells are fine-tuned ``from`` a checkpoint (``{seed}`` in it
    is the cell's; relative to the study's file) with the options of `finetune.finetune`; in a cell:
    what differs there.

    Raises:
        FileNotFoundError, ValueError: no such file, an unknown or missing key, no cell.
    """
    path = Path(path).resolve()
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such study")
    study = read_yaml(path)
    if not study.keys() <= _KEYS:
        unknown = sorted(map(str, study.keys() - _KEYS))
        raise ValueError(f"{path}: expected the keys {', '.join(sorted(_KEYS))}; found {unknown}")
    for key in ("exp_dir", "config", "test"):
        if key not in study:
            raise ValueError(f"{path}: {key} is missing")
    test = study["test"]
    if not {"data", "trials"} <= test.keys() <= _TEST_KEYS:
        raise ValueError(f"{path}: test: expected {', '.join(sorted(_TEST_KEYS))}")
    cells = {**(study.get("cells") or {}), **dict(grid_cells(study.get("grid") or {}))}
    seeds = study.get("seeds", [0])
    if not cells or not seeds:
        raise ValueError(f"{path}: no cell; write some under cells or grid, and seeds")
    content = read_config(path.parent / study["config"])
    return Study(
        path.parent / study["exp_dir"],
        overlay(content, study.get("common") or {}),
        test,
        study.get("grid") or {},
        [
            _cell(name, seed, x or {}, study.get("finetune") or {}, path.parent)
            for seed in seeds
            for name, x in cells.items()
        ],
    )


def _cell(name: str, seed: int, content: dict, finetune: dict, folder: Path) -> Cell:
    content = dict(content)
    finetune = {**finetune, **(content.pop("finetune", None) or {})}
    if finetune:
        if not {"from"} <= finetune.keys() <= _FINETUNE_KEYS:
            raise ValueError(
                f"cell {name}: finetune: expected from and of the others of "
                f"{', '.join(sorted(_FINETUNE_KEYS))}; found {', '.join(sorted(finetune))}"
            )
        finetune["from"] = str(folder / str(finetune["from"]).replace("{seed}", str(seed)))
    return Cell(name, seed, content, finetune)


def held_out_eer(folder) -> float:
    """Return the validation EER of a finished run, the mean over its last three epochs.

    What a study chooses a learning rate by: ``valid_speakers`` must hold some out.
    """
    lines = (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    eers = [record["valid_eer"] for record in map(json.loads, lines) if "valid_eer" in record]
    if not eers:
        raise ValueError(f"{folder}: no validation EER; set valid_speakers")
    return sum(eers[-3:]) / len(eers[-3:])


def grid_cells(grid: dict) -> Iterator[tuple[str, dict]]:
    """Yield name and configuration of every combination of a study's ``grid``."""
    if grid and grid.keys() != {"alphas", "scales", "margins"}:
        raise ValueError(f"grid: expected alphas, scales and margins, got {sorted(grid)}")
    axes = (grid.get(key, []) for key in ("alphas", "scales", "margins"))
    for alpha, scale, margin in itertools.product(*axes):
        yield (
            f"alpha{alpha:g}_scale{scale:g}_margin{margin:g}",
            {
                "projection_args": {"project_type": "q_margin", "alpha": alpha, "scale": scale},
                "margin_update": {"final_margin": margin},
            },
        )
