"""docs/behaviour.md line by line: each names tests that are there, and quotes what they see."""

import ast
import re

import pytest
from conftest import ROOT

PAGE = ROOT / "docs" / "behaviour.md"
ROWS = [
    (number, re.split(r"(?<!\\)\|", line.strip()[1:-1]))
    for number, line in enumerate(PAGE.read_text(encoding="utf-8").splitlines(), 1)
    if line.startswith("| ") and not line.startswith(("| input", "| ---"))
]
STATUS = re.compile(r"–|(.*\b[0123]\b.*)")
_FUNCTIONS: dict[str, set[str]] = {}


def functions(name: str) -> set[str]:
    if name not in _FUNCTIONS:
        tree = ast.parse((ROOT / "tests" / name).read_text(encoding="utf-8"))
        _FUNCTIONS[name] = {x.name for x in ast.walk(tree) if isinstance(x, ast.FunctionDef)}
    return _FUNCTIONS[name]


def test_the_page_has_all_sections():
    assert len(ROWS) > 150
    assert len(re.findall("^## ", PAGE.read_text(encoding="utf-8"), re.M)) == 19


@pytest.mark.parametrize(("number", "cells"), ROWS, ids=[f"line{n}" for n, _ in ROWS])
def test_a_line_has_its_test(number, cells):
    assert len(cells) == 4, "input, what happens, exit status, test"
    assert all(cell.strip() for cell in cells) and STATUS.fullmatch(cells[2].strip())
    tests = re.findall(r"`(test_\w+\.py)::(\w+)`", cells[3])
    assert tests and re.sub(r"`[\w.:]+`|,\s|\s", "", cells[3]) == ""
    for file, name in tests:
        assert name in functions(file), f"{file} has no {name}"


@pytest.mark.parametrize(("number", "cells"), ROWS, ids=[f"line{n}" for n, _ in ROWS])
def test_what_a_line_quotes_is_said(number, cells):
    """A message in quotes stands in the package, as far as it has no number in it."""
    for quoted in re.findall(r'"([^"{}]+)"', cells[1]):
        words = re.split(r"…|\d+", quoted)
        assert any(all(word in text for word in words) for text in SOURCES), quoted


def _flat(path) -> str:
    """The source with texts that are written over several lines joined."""
    return re.sub(r'"\s*\n\s*f?"', "", path.read_text(encoding="utf-8"))


SOURCES = [_flat(path) for path in (ROOT / "wespeaker_qmargin").glob("*.py")]
