"""What a report says as one HTML page without external assets, and as Markdown."""

import base64
from html import escape
from typing import NamedTuple

from markdown import Markdown

STYLE = """
body { font: 15px/1.5 system-ui, "Segoe UI", Roboto, Helvetica, Arial, sans-serif; color: #1d2733;
  background: #fff; max-width: 1120px; margin: 2.5rem auto 4rem; padding: 0 1.5rem; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 .3rem; }
h2 { font-size: 1.15rem; margin: 2.6rem 0 .7rem; padding-bottom: .3rem;
  border-bottom: 1px solid #dbe1e8; }
p, ul { max-width: 52rem; } ul { padding-left: 1.2rem; } .quiet { color: #5f6b7a; }
.note { background: #fff6e0; border-left: 4px solid #e69f00; padding: .6rem .9rem; }
.wide { overflow-x: auto; margin-bottom: 1rem; } table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .4rem .9rem .4rem 0; vertical-align: top; }
th { font-weight: 600; } thead th { border-bottom: 2px solid #1d2733; vertical-align: bottom; }
tbody tr:first-child > * { border-top: 1px solid #dbe1e8; }
td { font-variant-numeric: tabular-nums; } td.system { min-width: 8rem; }
.interval { display: block; color: #5f6b7a; font-size: .88em; white-space: nowrap; }
pre { background: #f5f7f9; padding: .7rem .9rem; overflow-x: auto; font-size: .85em; }
.figures { display: flex; flex-wrap: wrap; gap: 1rem 2rem; }
.figures img { flex: 1 1 400px; max-width: 520px; min-width: 0; }
.figures img.full { max-width: none; flex-basis: 100%; }
img.full { width: 100%; min-width: 44rem; }
.provenance { font-size: .88rem; table-layout: fixed; } .provenance th:first-child { width: 8rem; }
.provenance td { overflow-wrap: anywhere; border-top: 1px solid #eef1f5; }
@media print { body { margin: 0; max-width: none; } img { break-inside: avoid; } }
"""


# syntax of Markdown that a name in a table must not have: HTML, links, images
_FOREIGN = ("html", "entity", "autolink", "automail", "link", "reference", "short_reference")
_FOREIGN += ("image_link", "image_reference", "short_image_ref")


class Row(NamedTuple):
    """A row of the results table; each cell is a value and its interval (or "")."""

    trials: str
    system: str
    cells: list[tuple[str, str]]


class Summary(NamedTuple):
    """What both forms of the report say."""

    title: str
    note: str
    header: list[str]
    rows: list[Row]  # those of one trial list follow one another
    verdicts: dict[str, str]  # trial list -> sentence
    measures: str


class Section(NamedTuple):
    """Something to show after the results.

    ``text`` is Markdown (without HTML); ``images``: name, which ends in .svg or .png -> content.
    """

    title: str
    text: str
    images: dict[str, bytes]
    wide: bool = False  # an image a line, as wide as the page


def html_page(
    summary: Summary,
    *,
    det: dict[str, str],
    training: str | None,
    provenance: dict[str, dict],
    sections: list[Section] = (),
) -> str:
    """Return the page.

    Args:
        det: trial list -> SVG text.
        training: SVG text, or None where nothing was trained.
        provenance: system -> key -> value of any JSON type.
    """
    det_images = "".join(_image(svg, f"DET curves on {key}") for key, svg in det.items())
    parts = [
        _results(summary),
        f"<h2>DET curves</h2><div class=figures>{det_images}</div>"
        "<p class=quiet>Normal-deviate axes; the marker is the equal error rate.</p>",
    ]
    if training is not None:
        parts.append(
            f"<h2>Training</h2><div class=wide>{_image(training, 'Training curves', 'full')}</div>"
            "<p class=quiet>Losses of different heads or scales are not comparable.</p>"
        )
    parts += map(_section, sections)
    parts.append(f"<h2>Provenance</h2>{_provenance(provenance)}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(summary.title)}</title><style>{STYLE}</style></head>\n<body>"
        f"<h1>{escape(summary.title)}</h1>\n{_note(summary.note)}"
        + "\n".join(parts)
        + "</body></html>\n"
    )


def markdown(summary: Summary, sections: list[Section] = ()) -> str:
    """Return note, results table, verdicts, measures and sections as Markdown."""
    table = [summary.header, ["---"] * len(summary.header)]
    for trials, system, cells in summary.rows:
        table.append([trials, system, *(" ".join(filter(None, cell)) for cell in cells)])
    lines = [f"# {_one_line(summary.title)}", ""]
    if summary.note:
        lines += [f"**{_one_line(summary.note)}**", ""]
    lines += [
        "| " + " | ".join(_one_line(x).replace("|", "\\|") for x in row) + " |" for row in table
    ]
    lines += ["", *(f"- {key}: {_one_line(text)}" for key, text in summary.verdicts.items())]
    lines += ["", summary.measures, ""]
    lines += [f"## {_one_line(x.title)}\n\n{x.text}" for x in sections]
    return "\n".join(lines)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _note(text: str) -> str:
    return f"<p class=note>{escape(text)}</p>\n" if text else ""


def _image(content: str | bytes, alt: str, kind: str = "", mime: str = "svg+xml") -> str:
    # as an image an SVG keeps its ids and styles to itself
    content = content.encode() if isinstance(content, str) else content
    data = base64.b64encode(content).decode()
    return f'<img class="{kind}" alt="{escape(alt)}" src="data:image/{mime};base64,{data}">'


def _section(section: Section) -> str:
    renderer = Markdown(extensions=["tables", "fenced_code"])
    renderer.preprocessors.deregister("html_block")
    for syntax in _FOREIGN:
        renderer.inlinePatterns.deregister(syntax)
    text = renderer.convert(section.text)
    text = text.replace("<table>", "<div class=wide><table>").replace("</table>", "</table></div>")
    images = "".join(
        _image(content, name, "full" * section.wide, "png" if name.endswith(".png") else "svg+xml")
        for name, content in section.images.items()
    )
    return f"<h2>{escape(section.title)}</h2>{text}<div class=figures>{images}</div>"


def _results(summary: Summary) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in summary.header)
    head = head.replace(" %", "&nbsp;%")
    bodies = []
    for key in summary.verdicts:
        rows = [row for row in summary.rows if row.trials == key]
        lines = [_result_line(row, len(rows) if i == 0 else 0) for i, row in enumerate(rows)]
        bodies.append(f"<tbody>{''.join(lines)}</tbody>")
    verdicts = "".join(
        f"<li><strong>{escape(key)}</strong>: {escape(text)}</li>"
        for key, text in summary.verdicts.items()
    )
    return (
        f"<h2>Results</h2><div class=wide><table><thead><tr>{head}</tr></thead>{''.join(bodies)}"
        f"</table></div><ul>{verdicts}</ul><p class=quiet>{escape(summary.measures)}</p>"
    )


def _result_line(row: Row, span: int) -> str:
    first = f"<th rowspan={span}>{escape(row.trials)}</th>" if span else ""
    cells = "".join(
        f"<td>{escape(value)} <span class=interval>{escape(interval)}</span></td>"
        for value, interval in row.cells
    )
    return f"<tr>{first}<td class=system>{escape(row.system)}</td>{cells}</tr>"


def _provenance(systems: dict[str, dict]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in systems)
    lines = []
    for key in dict.fromkeys(key for values in systems.values() for key in values):
        texts = [_text(values.get(key)) for values in systems.values()]
        if len(set(texts)) == 1:
            cells = f"<td colspan={len(texts)}>{escape(texts[0])}</td>"
        else:
            cells = "".join(f"<td>{escape(text)}</td>" for text in texts)
        lines.append(f"<tr><th>{escape(key)}</th>{cells}</tr>")
    return (
        f"<table class=provenance><thead><tr><th></th>{head}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table>"
    )


def _text(value) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(x)}" for key, x in value.items())
    if isinstance(value, list):
        return " ".join(map(_text, value))
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else str(value)
