"""Metrics, scores and training logs of several systems -> one HTML page and a Markdown table."""

import argparse
import json
import math
from pathlib import Path
from typing import NamedTuple

from wespeaker_qmargin import evidence, figures, page
from wespeaker_qmargin.files import read_lines, read_scores, write_text
from wespeaker_qmargin.roc import Roc, roc

PARAMETERS = ("p_target", "c_miss", "c_fa", "bootstrap", "interval")


class System(NamedTuple):
    """What one experiment folder says about itself."""

    exp_dir: Path
    parameters: dict  # of the metrics: PARAMETERS
    results: dict[str, dict]  # trial list -> numbers
    curves: dict[str, Roc]  # trial list -> ROC
    series: dict[str, tuple[list, list]]  # quantity -> (steps, values); empty without training
    run: dict  # run.json


def build_report(
    systems: dict,
    out,
    *,
    title: str = "Speaker verification",
    note: str = "",
    probes=(),
    studies=(),
    comparisons=(),
    experts=(),
) -> Path:
    """Write the page ``out`` and ``results.md`` beside it; return the latter's path.

    Args:
        systems: name -> experiment folder, which holds ``scores/results.json`` (written by the
            metrics command), the score files it names, and, where there was training,
            ``metrics.jsonl`` and ``run.json``.
        note: a remark that both files show first, as that the data is synthetic.
        probes, studies, comparisons, experts: what those commands have left, see ``evidence``.

    Raises:
        FileNotFoundError: no results or scores.  ValueError: a file that is cut off, or results
        that are not those of the score file.  Nothing is written then.
    """
    if not systems:
        raise ValueError("expected at least one system, NAME=EXP_DIR")
    read = {name: read_system(exp_dir) for name, exp_dir in systems.items()}
    lists = list(dict.fromkeys(key for system in read.values() for key in system.results))
    header, rows = _table(read, lists)
    verdicts = {key: _verdict(key, read) for key in lists}
    sections = [
        *evidence.plan_sections(systems),
        *map(evidence.probe_section, probes),
        *map(evidence.study_section, studies),
        *map(evidence.comparison_section, comparisons),
        *map(evidence.experts_section, experts),
    ]
    summary = page.Summary(title, note, header, rows, verdicts, _measures(read))
    content = page.html_page(
        summary,
        det={key: _det_figure(key, read) for key in lists},
        training=_training_figure(read),
        provenance={name: {"folder": str(x.exp_dir), **x.run} for name, x in read.items()},
        sections=sections,
    )
    table = Path(out).with_name("results.md")
    write_text(table, page.markdown(summary, sections))
    write_text(out, content)
    return table


def read_system(exp_dir) -> System:
    """Read an experiment folder; raises as ``build_report``."""
    exp_dir = Path(exp_dir)
    path = exp_dir / "scores" / "results.json"
    remedy = f"write it with `wespeaker-qmargin metrics ... --out {path}`"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; {remedy}")
    report = _read_json(path, remedy)
    results, curves = {}, {}
    try:
        for result in report["results"]:
            key = result["name"].replace(".trials", "")
            if key in results:
                raise ValueError(f"{path}: two results are named {key}")
            results[key], curves[key] = result, _read_curve(path, result)
        parameters = {key: report["parameters"][key] for key in PARAMETERS}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: misses an entry ({error!r}); {remedy}") from error
    if not results:
        raise ValueError(f"{path}: holds no results; {remedy}")
    log, run = exp_dir / "metrics.jsonl", exp_dir / "run.json"
    return System(
        exp_dir,
        parameters,
        results,
        curves,
        _read_series(log) if log.exists() else {},
        _read_json(run, "delete it, or train again") if run.exists() else {},
    )


def _read_json(path: Path, remedy: str) -> dict:
    text = "\n".join(line for _, line in read_lines(path))
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not complete JSON ({error}); {remedy}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def _read_curve(path: Path, result: dict) -> Roc:
    named = Path(result["scores"])
    # as named beside results.json or from here, or moved together with results.json
    candidates = [path.parent / named, named, path.parent / named.name]
    found = next((candidate for candidate in candidates if candidate.is_file()), None)
    if found is None:
        raise FileNotFoundError(f"{named}: no such score file, but {path} names it")
    scores = read_scores(found, skip_bad=bool(result.get("num_skipped")))
    if scores.is_target is None:
        raise ValueError(f"{found}: no labels; each line must end with target or nontarget")
    curve = roc(scores.scores, scores.is_target)
    counts = (int(scores.is_target.sum()), int((~scores.is_target).sum()))
    if counts != (result["num_target"], result["num_nontarget"]) or not math.isclose(
        curve.eer(), result["eer"], abs_tol=1e-9
    ):
        raise ValueError(f"{path}: its numbers are not those of {found}; run the metrics again")
    return curve


def _read_series(path: Path) -> dict[str, tuple[list, list]]:
    """Return quantity -> (steps, values); where a step was logged twice the later record counts."""
    series = {key: {} for key in figures.PANELS}
    for number, line in read_lines(path):
        try:
            record = json.loads(line)
            step = record.get("step")
            values = {key: record.get(key) for key in series}
            for key, value in values.items():
                if step is not None and value is not None and math.isfinite(value):
                    series[key][int(step)] = value
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}:{number}: not a training record ({error})") from error
    return {key: tuple(map(list, zip(*sorted(x.items())))) or ([], []) for key, x in series.items()}


def _det_figure(key: str, systems: dict[str, System]) -> str:
    curves = {name: x.curves[key] for name, x in systems.items() if key in x.curves}
    return figures.det_svg(key, curves, order=list(systems))


def _training_figure(systems: dict[str, System]) -> str | None:
    series = {name: x.series for name, x in systems.items() if any(map(any, x.series.values()))}
    return figures.training_svg(series, order=list(systems)) if series else None


def _table(systems: dict[str, System], lists: list[str]) -> tuple[list[str], list[page.Row]]:
    """Return the header of the results table and its rows."""
    rates = dict.fromkeys(
        rate for x in systems.values() for y in x.results.values() for rate in y.get("fnr_at") or {}
    )
    header = ["Trials", "System", "EER %", "minDCF"]
    header += [f"FNR % at FPR {100 * float(rate):g} %" for rate in rates]
    header += ["Target / non-target trials", "Speakers"]
    rows = []
    for key, name in [(key, name) for key in lists for name in systems]:
        result = systems[name].results.get(key)
        if result is not None:
            at = result.get("fnr_at") or {}
            cells = [_cell(result, "eer"), _cell(result, "min_dcf", unit=1, digits=3)]
            cells += [_cell(at.get(rate) or {}, "fnr", interval="interval") for rate in rates]
            cells.append((f"{result['num_target']:,} / {result['num_nontarget']:,}", ""))
            cells.append((str(result.get("num_speaker") or "-"), ""))
            rows.append(page.Row(key, name, cells))
    return header, rows


def _cell(values: dict, key: str, *, interval=None, unit=100, digits=2) -> tuple[str, str]:
    value, ends = values.get(key), values.get(interval or f"{key}_interval")
    text = "-" if value is None else f"{unit * value:.{digits}f}"
    if not ends:
        return text, ""
    return text, "[{:.{d}f}, {:.{d}f}]".format(*(unit * x for x in ends), d=digits)


def _verdict(key: str, systems: dict[str, System]) -> str:
    """Say whether the systems' EER intervals on one trial list overlap."""
    results = {name: x.results[key] for name, x in systems.items() if key in x.results}
    if len(results) < 2:
        return "One system, nothing to compare."
    if len({(x["num_target"], x["num_nontarget"]) for x in results.values()}) > 1:
        return "No winner is claimed: the systems were not measured on the same trials."
    bare = [name for name, x in results.items() if not x.get("eer_interval")]
    if bare:
        return f"No winner is claimed: there is no interval for {_join(bare)}."
    best, *others = sorted(results, key=lambda name: results[name]["eer"])
    bound = results[best]["eer_interval"][1]
    level = [name for name in others if results[name]["eer_interval"][0] <= bound]
    worse = [name for name in others if name not in level]
    if not level:
        return f"{best} has the lowest EER, and its interval lies below that of {_join(worse)}."
    text = f"No winner is claimed: the intervals of {_join([best, *level])} overlap."
    return text + (f" The interval of {best} lies below that of {_join(worse)}." if worse else "")


def _join(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _measures(systems: dict[str, System]) -> str:
    """Say how the numbers were measured, once for each set of parameters in use."""
    users = {}
    for name, system in systems.items():
        used = system.parameters
        text = (
            "minDCF at target prior {p_target:g}, costs {c_miss:g} (miss) and {c_fa:g} (false "
            "accept)."
        ).format(**used)
        if used["bootstrap"]:
            text += (
                f" Brackets: {100 * used['interval']:g} % intervals from {used['bootstrap']} "
                "bootstrap replicates over speakers."
            )
        users.setdefault(text, []).append(name)
    if len(users) == 1:
        return next(iter(users))
    return " ".join(f"{_join(names)}: {text}" for text, names in users.items())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``wespeaker-qmargin report``."""
    parser.epilog = (
        "example:\n"
        "  wespeaker-qmargin report --systems CosFace=exp/cosface Q-Margin=exp/qmargin \\\n"
        "      --out exp/report.html --title 'Mini recipe'"
    )
    add = parser.add_argument
    add("--systems", nargs="+", required=True, metavar="NAME=EXP_DIR", help="what to compare")
    add("--out", required=True, help="the page to write; results.md goes beside it")
    add("--title", default="Speaker verification", help="heading of the page")
    add("--note", default="", help="a remark to show first, as that the data is synthetic")
    add("--probe", nargs="+", default=[], metavar="DIR", help="what probe --out DIR has left")
    add("--study", nargs="+", default=[], metavar="DIR", help="exp_dir of a grid study, collected")
    add("--compare", nargs="+", default=[], metavar="FILE", help="what compare --out FILE wrote")
    add("--experts", nargs="+", default=[], metavar="DIR", help="what experts --out DIR has left")


def run(args: argparse.Namespace) -> None:
    """Write the report and say where it is."""
    systems = {}
    for text in args.systems:
        name, equals, exp_dir = text.partition("=")
        if not (name and equals and exp_dir):
            raise ValueError(f"--systems: expected NAME=EXP_DIR, found {text!r}")
        if name in systems:
            raise ValueError(f"--systems: the name {name!r} comes twice")
        systems[name] = exp_dir
    options = {"probes": args.probe, "studies": args.study, "comparisons": args.compare}
    options["experts"] = args.experts
    table = build_report(systems, args.out, title=args.title, note=args.note, **options)
    print(f"{table.read_text(encoding='utf-8')}\n{args.out}\n{table}")
