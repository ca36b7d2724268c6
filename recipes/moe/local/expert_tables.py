"""Tables of what `wespeaker-qmargin experts` found, means and deviations over the seeds."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from degrade import HELD_OUT, KINDS, SEEN, held_out_languages

from wespeaker_qmargin.experts import SEGMENTS
from wespeaker_qmargin.files import read_table

CHANGES = """### What adaptation changed

Linear CKA with the network before, a number a hidden state from the input of the first block on.
Drift: ||after - before|| / ||before|| of the feed-forward weights, of the expert of a block that
moved least and of that which moved most, mean of the blocks.
"""
USAGE = """### Who hears what

Least load: N times the smallest share of the choices, 1 if even. Then by how much the shares of the
experts differ, half the sum of absolute differences, mean of the blocks: a kind from clean speech,
frames of clean speech from each other, a language (clean) from the mean of all. Dropped: 1 - cosine
of an embedding and the one without an expert of one block, least and most, mean of the blocks.
"""


def tables(cells: dict[str, list[Path]], data: Path) -> str:
    """Return both tables; nothing for nothing.

    Args:
        cells: name -> the folders of its seeds; those with an experts.json are told of.
        data: what degrade.py wrote.
    """
    found = {
        name: [(_read(folder), _read(folder / "languages")) for folder in folders]
        for name, folders in cells.items()
        if all((folder / "experts.json").is_file() for folder in folders)
    }
    if not found:
        return ""
    mixed = {name: x for name, x in found.items() if x[0][0]["data"]["clean"]["experts"]}
    unheard = held_out_languages(read_table(data / "by_kind/clean/utt2spk").values())

    def usage(kinds: dict, spoken: dict) -> dict[str, list[float]]:
        return {**_usage(kinds), **_of_languages(spoken, unheard), **_dropped(kinds)}

    return f"{CHANGES}\n{_rows(found, _changes)}\n{USAGE}\n{_rows(mixed, usage)}"


def _read(folder: Path) -> dict:
    return json.loads((folder / "experts.json").read_text(encoding="utf-8"))


def _rows(found: dict, measure: Callable) -> str:
    """Return a table of what ``measure`` says of the two reports of every seed, a row a system."""
    rows = []
    for name, reports in found.items():
        values = [measure(*pair) for pair in reports]
        rows = rows or [["", *values[0]], ["---"] * (1 + len(values[0]))]
        rows.append([name, *(_cell([x[title] for x in values]) for title in values[0])])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _cell(values: list[list[float]]) -> str:
    mean, deviation = np.mean(values, axis=0), np.std(values, axis=0, ddof=1)
    return ", ".join(f"{a:.3f} ± {b:.3f}" for a, b in zip(mean, deviation))


def _changes(kinds: dict, _) -> dict[str, list[float]]:
    drift = np.mean([sorted(x) for x in kinds["drift"].values()], axis=0)
    similar = {"CKA, clean": ["clean"], "degraded": SEEN, HELD_OUT: [HELD_OUT]}
    found = {
        title: np.mean([kinds["data"][name]["cka"] for name in names], axis=0)
        for title, names in similar.items()
    }
    return {**found, "drift": [drift[0], drift[-1]]}


def _usage(kinds: dict) -> dict[str, list[float]]:
    loads = {name: _loads(x["experts"].values()) for name, x in kinds["data"].items()}
    clean = loads["clean"]
    layers = [x["by_segment"] for x in kinds["data"]["clean"]["experts"].values()]
    none = [np.nan] * clean.shape[1]  # there may be no such frame
    frames = {kind: np.array([x[kind] or none for x in layers]) for kind in SEGMENTS}
    return {
        "least load": [clean.shape[1] * clean.min(axis=1).mean()],
        **{kind: [_apart(loads[kind], clean)] for kind in KINDS},
        "silence, voiced": [_apart(frames["silence"], frames["voiced"])],
        "unvoiced, voiced": [_apart(frames["unvoiced"], frames["voiced"])],
    }


def _of_languages(spoken: dict, unheard: set[str]) -> dict[str, list[float]]:
    loads = {name: _loads(x["experts"].values()) for name, x in spoken["data"].items()}
    everyone = np.mean(list(loads.values()), axis=0)
    away = {name: _apart(load, everyone) for name, load in loads.items()}
    return {
        "languages in adaptation": [np.mean([x for k, x in away.items() if k not in unheard])],
        "other languages": [np.mean([x for k, x in away.items() if k in unheard])],
    }


def _dropped(kinds: dict) -> dict[str, list[float]]:
    layers = [x for found in kinds["data"].values() for x in found["experts"].values()]
    without = np.mean([sorted(x["dropped"]) for x in layers], axis=0)
    return {"dropped": [without[0], without[-1]]}


def _loads(layers: Iterable[dict]) -> np.ndarray:
    return np.array([layer["load"] for layer in layers])


def _apart(one: np.ndarray, other: np.ndarray) -> float:
    """Return the total variation distance of shares (blocks, N), the mean over the blocks."""
    return np.abs(one - other).sum(axis=1).mean() / 2
