"""Edits of a YAML's text: the content that was asked for, and every other byte as it was."""

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from wespeaker_qmargin.yaml_edit import edit, repeated_keys

BLOCK = """\
# a config
gpus: "[0,1]"   # a text
head:
  # which one
  kind: 'old' # old, new
  scale: 32.0  # s

  easy: False
  lrs: [0.1,
        1e-4]  # two lines
lr:   1.0e-4
"""


@pytest.mark.parametrize(
    "values, expected",
    [
        ({"kind": "new"}, BLOCK.replace("'old' #", "'new' #")),
        ({"scale": "auto"}, BLOCK.replace("32.0", "auto")),
        ({"scale": 32}, BLOCK),  # is there already, as it is written
        ({"easy": None}, BLOCK.replace("  easy: False\n", "")),
        ({"lrs": None}, BLOCK.replace("  lrs: [0.1,\n        1e-4]  # two lines\n", "")),
        ({"nothing": None}, BLOCK),
        (
            {"kind": "old", "alpha": 1.5},
            BLOCK.replace("# old, new\n", "# old, new\n  alpha: 1.5\n"),
        ),
        ({"lrs": [0.1, "1e-4"], "k": True}, BLOCK.replace("lines\n", "lines\n  k: True\n")),
        (
            {"kind": "new", "a": 1, "scale": 2.0, "b": 3, "easy": None},
            BLOCK.replace("'old' # old, new\n", "'new' # old, new\n  a: 1\n")
            .replace("32.0  # s\n", "2.0  # s\n  b: 3\n")
            .replace("  easy: False\n", ""),
        ),
    ],
)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_block_sections(values, expected, newline):
    as_file = BLOCK.replace("\n", newline)
    assert edit(as_file, {"head": values}) == expected.replace("\n", newline)


@pytest.mark.parametrize(
    "values, expected",
    [
        ({"kind": "new", "alpha": 2.0}, 'head: {a: 1, kind: "new", alpha: 2.0, b: [1, 2]} # c\n'),
        ({"kind": "old", "b": None, "z": 0}, 'head: {a: 1, kind: "old", z: 0} # c\n'),
        ({"a": None}, 'head: {kind: "old", b: [1, 2]} # c\n'),
        ({"b": None}, 'head: {a: 1, kind: "old"} # c\n'),
        ({"a": None, "kind": "new", "z": 0, "b": None}, 'head: {kind: "new", z: 0} # c\n'),
        ({"a": None, "kind": None, "b": 5}, "head: {b: 5} # c\n"),
    ],
)
def test_flow_sections(values, expected):
    assert edit('head: {a: 1, kind: "old", b: [1, 2]} # c\n', {"head": values}) == expected


@pytest.mark.parametrize("text", ["head:\n  a: 1", "\ufeffhead:\n  a: 1\n", "---\nhead:\n  a: 1\n"])
def test_ends_and_beginnings_of_files(text):
    edited = edit(text, {"head": {"a": 2, "b": 3}})
    assert edited == text.replace("a: 1", "a: 2\n  b: 3")
    edited = edit(text.replace("\n", "\r\n"), {"head": {"a": 2, "b": 3}})
    assert edited == text.replace("a: 1", "a: 2\n  b: 3").replace("\n", "\r\n")


def test_small_and_large_numbers_stay_numbers():
    edited = edit("head:\n  a: 1\n", {"head": {"a": 1e-5, "b": 2.0, "c": 1e20}})
    assert yaml.safe_load(edited) == {"head": {"a": 1e-5, "b": 2.0, "c": 1e20}}


def test_two_sections_at_once():
    text = "a:\n  x: 1\nb: {y: 2}\nc: 3\n"
    assert edit(text, {"b": {"y": 4}, "a": {"x": 5}}) == "a:\n  x: 5\nb: {y: 4}\nc: 3\n"


@pytest.mark.parametrize(
    "text",
    [
        "head: &h\n  a: 1\nother: *h\n",  # would change both
        "base: &b {a: 1}\nhead:\n  <<: *b\n  c: 2\n",  # not to be removed here
        "head:\n  a: &x 1\nother: *x\n",
    ],
)
def test_what_cannot_be_changed_alone_is_refused(text):
    with pytest.raises(ValueError, match="head: written with anchors, merges or otherwise"):
        edit(text, {"head": {"a": None if "<<" in text else 5}})


@pytest.mark.parametrize("text", ["a: 1\n", "head: 3\n", "head:\na: 1\n", "head: {}\n"])
def test_no_such_section(text):
    with pytest.raises(ValueError, match="head: expected a section"):
        edit(text, {"head": {"a": 5}})


NAMES = st.sampled_from(["kind", "scale", "easy", "K", "mp", "alpha", "margin"])
VALUES = st.one_of(
    st.booleans(), st.integers(-9, 99), st.floats(1e-6, 1e6), st.sampled_from(["auto", "q_margin"])
)
WRITTEN = st.sampled_from(["32.0", "False", "'text'", '"a # b"', "[1, 2]", "{p: 1}", "1e-4", "x"])


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.dictionaries(NAMES, WRITTEN, min_size=1),
    st.dictionaries(NAMES, st.one_of(st.none(), VALUES)),
    st.sampled_from(["", "  # why", " # a: b"]),
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
)
def test_other_lines_keep_their_bytes(written, changes, comment, newline, flow):
    kept = [key for key in written if changes.get(key, ...) is not None]
    if not kept:
        return
    if flow:
        inside = [f"head: {{{', '.join(f'{k}: {v}' for k, v in written.items())}}}{comment}"]
    else:
        inside = ["head:", *(f"    {k}:  {v}{comment}" for k, v in written.items())]
    text = newline.join(["# top", "gpus: '[0]'", *inside, "", "lr: 1.0e-4 # last", ""])
    edited = edit(text, {"head": changes})

    content = yaml.safe_load(text)["head"]
    wanted = {k: v for k, v in {**content, **changes}.items() if v is not None}
    assert yaml.safe_load(edited)["head"] == wanted
    assert [k for k in yaml.safe_load(edited)["head"] if k in kept] == kept  # their order
    same = {k for k in kept if k not in changes or content[k] == changes[k]}
    before, after = text.split(newline), edited.split(newline)
    assert after[:2] == before[:2] and after[-3:] == before[-3:]
    if not flow:
        lines = [line for line in before if line.strip().split(":")[0] in same]
        assert [line for line in after if line in lines] == lines
        assert all(line.endswith(comment) for line in after if line.strip().split(":")[0] in kept)


def test_keys_that_come_twice():
    text = "a: 1\ns:\n  x: True\n  y: [{z: 1, z: 1}]\n  x: true\n"
    assert repeated_keys(text) == ["x, lines 3 and 5", "z, lines 4 and 4"]
    assert repeated_keys("a: {x: 1}\nb: {x: 1}\n") == []
    assert edit(text, {"s": {"x": False}}).count("x: False") == 2
    with pytest.raises(ValueError, match="x: comes twice with different values, lines 2 and 4"):
        repeated_keys("s:\n  x: 1\n  y: 1\n  x: 2\n")
