"""Trial lists and score files in every form that users have them."""

import numpy as np
import pytest

from wespeaker_qmargin.files import (
    read_cohort_columns,
    read_scores,
    read_table,
    read_trials,
    write_scores,
)

PAIRS = [("a", "b", True), ("a", "c", False), ("ü", "b", True)]


def lines(form):
    words = {True: ("target", "1"), False: ("nontarget", "0")}
    forms = {
        "words": lambda a, b, same: f"{a} {b} {words[same][0]}",
        "digits": lambda a, b, same: f"{a} {b} {words[same][1]}",
        "label first": lambda a, b, same: f"{words[same][1]} {a} {b}",
    }
    return [forms[form](*pair) for pair in PAIRS]


SHAPES = {
    "plain": lambda x: "\n".join(x) + "\n",
    "tabs": lambda x: "\n".join(x).replace(" ", "\t") + "\n",
    "several blanks": lambda x: "\n".join(x).replace(" ", "  ") + "\n",
    "CRLF": lambda x: "\r\n".join(x) + "\r\n",
    "byte-order mark": lambda x: "\ufeff" + "\n".join(x) + "\n",
    "blank last lines": lambda x: "\n".join(x) + "\n\n  \n",
    "no final newline": lambda x: "\n".join(x),
    "all at once": lambda x: "\ufeff" + "\r\n".join(x).replace(" ", "\t") + "\r\n\r\n\t",
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", ["words", "digits", "label first"])
def test_every_form_gives_the_same_trials(tmp_path, form, shape):
    (tmp_path / "trials").write_bytes(SHAPES[shape](lines(form)).encode())
    trials = read_trials(tmp_path / "trials")
    assert (trials.enroll, trials.test) == (["a", "a", "ü"], ["b", "c", "b"])
    assert trials.is_target.dtype == bool and trials.is_target.tolist() == [True, False, True]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_gives_the_same_scores(tmp_path, shape):
    rows = ["a b 0.5 target", "a c -1e-3 nontarget", "ü b 2 1"]
    (tmp_path / "scores").write_bytes(SHAPES[shape](rows).encode())
    scores = read_scores(tmp_path / "scores")
    assert (scores.enroll, scores.test) == (["a", "a", "ü"], ["b", "c", "b"])
    assert scores.scores.tolist() == [0.5, -1e-3, 2.0]
    assert scores.is_target.tolist() == [True, False, True] and scores.num_skipped == 0


def test_trials_without_labels(tmp_path):
    (tmp_path / "trials").write_text("a b\na c\n")
    assert read_trials(tmp_path / "trials").is_target is None


@pytest.mark.parametrize(
    "text, words",
    [
        ("a b target\na c tgt\n", "trials:2: expected target or nontarget .*, found 'tgt'"),
        ("a b target\na c Target\n", "trials:2: .* found 'Target'"),
        ("a b maybe\n", r"trials:1: expected 'enroll test target\|nontarget', found 'a b maybe'"),
        ("\n\n1 a b\n2 a c\n", "trials:4: expected target or nontarget .*, found '2'"),
        ("a b target\na c\n", "trials:2: expected .* as in the first line, found 'a c'"),
        ("a b\na c target\n", "trials:2: expected .* as in the first line, found 'a c target'"),
        ("a b target extra\n", "trials:1: .* found 'a b target extra'"),
        ("a\n", "trials:1: .* found 'a'"),
        ("1 a b\na c 0\n", "trials:2: .* found 'a'"),
        ("\n \n", "trials: the file is empty"),
        ("", "trials: the file is empty"),
    ],
)
def test_other_lines_are_named(tmp_path, text, words):
    (tmp_path / "trials").write_text(text)
    with pytest.raises(ValueError, match=words):
        read_trials(tmp_path / "trials")


def test_a_value_keeps_its_tabs_and_blanks(tmp_path):
    (tmp_path / "wav.scp").write_text("u1\ta b\tc.wav\nu2 \t d  e.wav \n")
    assert read_table(tmp_path / "wav.scp") == {"u1": "a b\tc.wav", "u2": "d  e.wav"}
    (tmp_path / "wav.scp").write_text("u1\t \n")
    with pytest.raises(ValueError, match="wav.scp:1: expected 'key value', found 'u1'"):
        read_table(tmp_path / "wav.scp")


def test_what_is_no_text_file(tmp_path):
    (tmp_path / "trials").write_bytes("a b target\n".encode("utf-16"))
    with pytest.raises(ValueError, match="trials: not a UTF-8 text file"):
        read_trials(tmp_path / "trials")
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(FileNotFoundError, match="no such file"):
            read_trials(path)


@pytest.mark.parametrize("bad", ["nan", "NaN", "inf", "-inf", "1e999"])
def test_bad_scores_are_named_or_skipped(tmp_path, caplog, bad):
    (tmp_path / "scores").write_text(f"a b 0.5 target\na c {bad} nontarget\na d 1 target\n")
    with pytest.raises(ValueError, match=f"scores:2: score {bad} of a c"):
        read_scores(tmp_path / "scores")
    scores = read_scores(tmp_path / "scores", skip_bad=True)
    assert scores.test == ["b", "d"] and scores.scores.tolist() == [0.5, 1.0]
    assert scores.is_target.tolist() == [True, True] and scores.num_skipped == 1
    assert "1 of 3 scores are not finite, the first in line 2" in caplog.text


@pytest.mark.parametrize(
    "text, words",
    [
        ("a b 0.5\na c\n", "scores:2: expected 'enroll test score .label.'"),
        ("a b 0.5 target\na c 0.1\n", "1 of 2 lines have a label; all or none"),
        ("a b 0.5 tgt\n", "scores:1: expected target or nontarget .* found 'tgt'"),
        ("a b target 0.5\n", "scores:1: 'target' is not a score"),
    ],
)
@pytest.mark.parametrize("skip_bad", [False, True])
def test_broken_score_lines_are_named(tmp_path, text, words, skip_bad):
    (tmp_path / "scores").write_text(text)
    with pytest.raises(ValueError, match=words):
        read_scores(tmp_path / "scores", skip_bad=skip_bad)


def test_written_scores_are_read_again(tmp_path):
    path = tmp_path / "new" / "a.score"
    (tmp_path / "trials").write_text("a b target\na c nontarget\n")
    trials = read_trials(tmp_path / "trials")
    columns = np.arange(8.0).reshape(4, 2)
    write_scores(path, trials, np.array([0.1, -1e-9]), columns)
    assert path.read_text().splitlines()[1] == "a c -1e-09 nontarget 1 3 5 7"
    np.testing.assert_array_equal(read_cohort_columns(path), columns.T)
    assert read_scores(path).is_target.tolist() == [True, False]
