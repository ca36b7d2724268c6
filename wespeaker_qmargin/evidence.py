"""Sections of a report beside its results: plans, probes, studies, comparisons, experts."""

import csv
import json
import tempfile
from pathlib import Path

import numpy as np

from wespeaker_qmargin import compare, figures, plan
from wespeaker_qmargin.config import read_config
from wespeaker_qmargin.page import Section


def plan_sections(systems: dict) -> list[Section]:
    """Return what ``wespeaker-qmargin plan`` says of every system with a Q-Margin head.

    ``systems``: name -> experiment folder; one without config.yaml has none.
    """
    sections = []
    for name, exp_dir in systems.items():
        path = Path(exp_dir) / "config.yaml"
        config = read_config(path) if path.is_file() else {}
        head = config.get("projection_args") or {}
        if head.get("project_type") != "q_margin":
            continue
        options = {key: head[key] for key in ("alpha", "scale") if key in head}
        margin = (config.get("margin_update") or {}).get("final_margin", 0.2)
        found = plan.plan(alpha=options.pop("alpha", 1.5), **options, margin=margin)
        with tempfile.TemporaryDirectory() as folder:
            plan.draw(found, Path(folder) / "plan.svg")
            image = (Path(folder) / "plan.svg").read_bytes()
        text = f"```\n{plan.describe(found)}\n```\n"
        sections.append(Section(f"Plan: {name}", text, {f"two classes, {name}.svg": image}))
    return sections


def probe_section(folder) -> Section:
    """Return the table and the plot that ``wespeaker-qmargin probe --out FOLDER`` has left."""
    files = {name: Path(folder) / f"probe.{name}" for name in ("md", "png")}
    for path in files.values():
        _require(path, "`wespeaker-qmargin probe ... --out DIR`")
    text = files["md"].read_text(encoding="utf-8")
    return Section(
        f"Probe: {Path(folder).name}", text, {"share won.png": files["png"].read_bytes()}
    )


def comparison_section(path) -> Section:
    """Return the tables, and a figure, of what ``wespeaker-qmargin compare --out PATH`` wrote."""
    _require(Path(path), "`wespeaker-qmargin compare ... --out FILE.json`")
    images = {}
    try:
        report = json.loads(Path(path).read_text(encoding="utf-8"))
        text = compare.markdown(report)
        if report["differences"] and report["parameters"]["bootstrap"]:
            images["differences.svg"] = _draw_differences(report).encode()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not what compare writes ({error!r})") from error
    return Section(f"Comparison: {Path(path).stem}", text, images, wide=True)


def _draw_differences(report: dict) -> str:
    panels = {}
    for quantity, title in compare.QUANTITIES.items():
        factor, _ = compare.unit(quantity)
        panels[title] = {
            name: tuple(factor * x for x in compare.spread(values[quantity]))
            for name, values in report["differences"].items()
        }
    return figures.differences_svg(panels)


def experts_section(folder) -> Section:
    """Return what ``wespeaker-qmargin experts --out FOLDER`` has left."""
    folder = Path(folder)
    _require(folder / "experts.json", "`wespeaker-qmargin experts ... --out DIR`")
    report = json.loads((folder / "experts.json").read_text(encoding="utf-8"))
    try:
        rows = [
            [data, layer, *(_shares(x) for x in (values["load"], *values["by_segment"].values()))]
            for data, found in report["data"].items()
            for layer, values in found["experts"].items()
        ]
        image = figures.experts_svg(report).encode()
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder}/experts.json: not what experts writes ({error!r})") from error
    text = "An encoder before and after its adaptation.\n\n"
    if rows:
        header = ["data", "mixture", "load, all frames", "silence", "unvoiced", "voiced"]
        table = [header, ["---"] * len(header), *rows]
        text += "Shares of the choices on each expert.\n\n"
        text += "".join(f"| {' | '.join(row)} |\n" for row in table)
    return Section(f"Experts: {folder.name}", text, {"experts.svg": image}, wide=True)


def _shares(load: list[float] | None) -> str:
    return "-" if load is None else " ".join(f"{share:.2f}" for share in load)


def study_section(folder) -> Section:
    """Return the EER of every cell and seed, and the heat maps, of a `grid` study's exp_dir."""
    folder = Path(folder)
    _require(folder / "cells.csv", "`wespeaker-qmargin grid STUDY.yaml --collect`")
    with open(folder / "cells.csv", newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    eers: dict[tuple[str, str], dict[str, float]] = {}
    try:
        for row in rows:
            place = eers.setdefault((row["trials"], row["cell"]), {})
            place[row["seed"]] = 100 * float(row["eer"])
    except (KeyError, ValueError) as error:
        raise ValueError(f"{folder}/cells.csv: not what grid writes ({error!r})") from error
    seeds = sorted({row["seed"] for row in rows}, key=int)
    header = ["trials", "cell", *(f"seed {seed}" for seed in seeds), "mean", "sd"]
    table = [header, ["---"] * len(header), *(_seed_row(*x, seeds) for x in eers.items())]
    text = "EER in %, a run a seed.\n\n" + "".join(f"| {' | '.join(row)} |\n" for row in table)
    if len(seeds) == 1:
        text += "\nOne seed: another may differ, and there is no standard deviation.\n"
    images = {path.name: path.read_bytes() for path in sorted(folder.glob("*.svg"))}
    return Section(f"Study: {folder.name}", text, images, wide=True)


def _seed_row(place: tuple[str, str], eers: dict[str, float], seeds: list[str]) -> list[str]:
    cells = [f"{eers[seed]:.2f}" if seed in eers else "-" for seed in seeds]
    values = list(eers.values())
    sd = f"{np.std(values, ddof=1):.2f}" if len(values) > 1 else "-"
    return [*place, *cells, f"{np.mean(values):.2f}", sd]


def _require(path: Path, how: str) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; {how} writes it")
