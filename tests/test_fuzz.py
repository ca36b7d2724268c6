"""Every parser of users' files against random ones: only documented errors come out.

QMARGIN_FUZZ: cases a parser (500); tools/soak.sh takes 10,000.
"""

import os

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wespeaker_qmargin.config import load_config, parse_overrides
from wespeaker_qmargin.files import read_scores, read_table, read_trials
from wespeaker_qmargin.lists import read_utterances
from wespeaker_qmargin.study import read_study
from wespeaker_qmargin.swap import swap

CASES = int(os.environ.get("QMARGIN_FUZZ", 500))
DOCUMENTED = (ValueError, FileNotFoundError, OSError)
fuzz = settings(
    max_examples=CASES,
    deadline=None,
    derandomize=CASES == 500,  # CI meets the same cases every time, a soak others
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    database=None,
)

PIECES = """a b c target nontarget 1 0 -1 nan inf 1e400 0.5 -0.0 1_000 ١ 1.0.0 u1 s1 { } [ ] | & * !
{"key": "wav": "spk" "u1", null ~ .. /dev/null file:///x s3://x rm| a,b a:b a.tar - ? 2020-13-01"""
WORDS = st.one_of(
    st.sampled_from([*PIECES.split(), "\ufeff", "\x00", "\x85", "!!python/object:os.system x"]),
    st.text(max_size=8),
)
LINES = st.lists(WORDS, max_size=6).map(" ".join)
TEXTS = st.tuples(st.lists(LINES, max_size=6), st.sampled_from(["\n", "\r\n", "\n\n", "\t\n"])).map(
    lambda x: x[1].join(x[0])
)
FILES = st.one_of(TEXTS.map(lambda x: x.encode("utf-8", "surrogatepass")), st.binary(max_size=200))


def mutations(valid: str):
    """Texts that are ``valid`` but for a few pieces cut out, doubled or overwritten."""
    cut = st.tuples(st.integers(0, len(valid)), st.integers(0, 12), WORDS)

    def apply(cuts):
        text = valid
        for place, length, word in cuts:
            text = text[:place] + word + text[place + length :]
        return text.encode("utf-8", "surrogatepass")

    return st.lists(cut, min_size=1, max_size=4).map(apply)


def outcome(function, *args, **kwargs) -> None:
    try:
        function(*args, **kwargs)
    except DOCUMENTED as error:
        assert str(error), "an error says something"
        assert not isinstance(error, UnicodeError), f"not in the reader's words: {error!r}"


TRIALS = "a b target\na c nontarget\n1 a b\n"
SCORES = "a b 0.5 target\na c -1.25 nontarget\n"
TABLE = "u1 s1\nu2 s2\n"
RAW = '{"key": "u1", "wav": "x.wav", "spk": "s1"}\n{"key": "u2", "wav": "y.wav", "spk": "s2"}\n'


@pytest.mark.parametrize(
    ("reader", "valid"),
    [(read_trials, TRIALS), (read_scores, SCORES), (read_table, TABLE)],
    ids=["trials", "scores", "utt2spk"],
)
@fuzz
@given(data=st.data())
def test_tables(tmp_path, reader, valid, data):
    path = tmp_path / "file"
    path.write_bytes(data.draw(st.one_of(FILES, mutations(valid))))
    outcome(reader, path)


@fuzz
@given(content=st.one_of(FILES, mutations(RAW)))
def test_raw_lists(tmp_path, content):
    path = tmp_path / "raw.list"
    path.write_bytes(content)
    outcome(read_utterances, "raw", path)


@fuzz
@given(scp=st.one_of(FILES, mutations("u1 a.wav\nu2 b.wav\n")), table=mutations(TABLE))
def test_kaldi_folders(tmp_path, scp, table):
    (tmp_path / "wav.scp").write_bytes(scp)
    (tmp_path / "utt2spk").write_bytes(table)
    outcome(read_utterances, "kaldi", tmp_path)


@fuzz
@given(content=st.one_of(FILES, mutations("a.tar\nb.tar\n")))
def test_shard_lists(tmp_path, content):
    path = tmp_path / "shard.list"
    path.write_bytes(content)
    outcome(read_utterances, "shard", path)


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 10**20),
    st.floats(),
    st.sampled_from(["q_margin", "q_margn", "1e-4", "[0,1]", "auto", "", "/nowhere", "XVEC"]),
    st.text(max_size=6),
)
VALUES = st.recursive(
    SCALARS,
    lambda x: st.one_of(
        st.lists(x, max_size=2), st.dictionaries(st.text(max_size=6), x, max_size=2)
    ),
    max_leaves=4,
)


@fuzz
@given(data=st.data())
def test_configs(tiny, data):
    """A value of a config that works is replaced by anything."""
    content = yaml.safe_load(tiny.read_text())
    place, key = content, data.draw(st.sampled_from(sorted(content)))
    while isinstance(place[key], dict) and place[key] and data.draw(st.booleans()):
        place = place[key]
        key = data.draw(st.sampled_from([*sorted(place), "alpha", "max_t"]))
        place.setdefault(key, None)
    place[key] = data.draw(VALUES)
    path = tiny.with_name("fuzzed.yaml")
    path.write_text(yaml.safe_dump(content))
    outcome(load_config, path)


@fuzz
@given(data=st.data())
def test_texts_as_configs(tiny, data):
    path = tiny.with_name("fuzzed.yaml")
    path.write_bytes(data.draw(st.one_of(FILES, mutations(tiny.read_text()))))
    outcome(load_config, path)
    outcome(read_study, path)
    outcome(swap, path)


@fuzz
@given(words=st.lists(st.one_of(WORDS, st.sampled_from(["--a", "--a.b", "--seed", "--"]))))
def test_overrides(words):
    outcome(parse_overrides, words)
