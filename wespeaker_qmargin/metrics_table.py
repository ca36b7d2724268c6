"""The results of ``wespeaker-qmargin metrics`` as text: an aligned table, or Markdown."""


def format_table(report: dict) -> str:
    """Return parameters, one aligned line a score file and one a group; rates in per cent."""
    parameters = "  ".join(f"{k} {v}" for k, v in report["parameters"].items())
    blocks = [f"parameters: {parameters}", _align(_result_rows(report))]
    groups = _group_rows(report)
    if len(groups) > 1:
        blocks += ["Groups, FNR and FPR at the threshold of the file's EER:", _align(groups)]
    return "\n\n".join(blocks)


def format_markdown(report: dict) -> str:
    """Return a Markdown table, one row a score file; rates in per cent."""
    lines = _result_rows(report)
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _result_rows(report: dict) -> list[list[str]]:
    header = ["scores", "targets", "non-targets", "speakers", "EER %", "upstream's EER %", "minDCF"]
    more = {}
    if report["parameters"]["llr"]:
        more = {"act_dcf": "actDCF", "cllr": "Cllr", "min_cllr": "minCllr"}
    if report["parameters"]["skip_bad"]:
        more["num_skipped"] = "lines skipped"
    rows = [
        [*header, *(f"FNR % at FPR {x:g}" for x in report["parameters"]["fpr"]), *more.values()]
    ]
    names = _distinct_names(report["results"])
    for name, result in zip(names, report["results"]):
        rows.append(
            [
                name,
                *_count_cells(result),
                _cell(result["eer"], result["eer_interval"]),
                _cell(result["eer_upstream"]),
                _cell(result["min_dcf"], result["min_dcf_interval"], unit=1, digits=4),
                *(_cell(x["fnr"], x["interval"]) for x in result["fnr_at"].values()),
                *(_cell(result[x], unit=1, digits=0 if x == "num_skipped" else 4) for x in more),
            ]
        )
    return rows


def _group_rows(report: dict) -> list[list[str]]:
    rows = [["scores", "group", "targets", "non-targets", "speakers", "EER %", "FNR %", "FPR %"]]
    for name, result in zip(_distinct_names(report["results"]), report["results"]):
        for group, values in (result["groups"] or {}).items():
            rates = [_cell(values[x], values[f"{x}_interval"]) for x in ("eer", "fnr", "fpr")]
            rows.append([name, group, *_count_cells(values), *rates])
    return rows


def _distinct_names(results: list[dict]) -> list[str]:
    """Return the short names, or the paths where two systems scored trials of one name."""
    names = [x["name"] for x in results]
    return names if len(set(names)) == len(names) else [x["scores"] for x in results]


def _count_cells(result: dict) -> list[str]:
    counts = (result[f"num_{x}"] for x in ("target", "nontarget", "speaker"))
    return ["-" if x is None else str(x) for x in counts]


def _cell(value, interval=None, *, unit: float = 100, digits: int = 2) -> str:
    if value is None:
        return "-"
    text = f"{unit * value:.{digits}f}"
    if interval is not None:
        text += " [{:.{d}f}, {:.{d}f}]".format(*(unit * x for x in interval), d=digits)
    return text


def _align(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
