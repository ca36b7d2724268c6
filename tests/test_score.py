"""Scores against one-trial-at-a-time arithmetic in double precision."""

import argparse
import logging
import tracemalloc

import kaldiio
import numpy as np
import pytest

from wespeaker_qmargin import score
from wespeaker_qmargin.embeddings import Embeddings
from wespeaker_qmargin.files import Trials, read_scores

DIM = 16


def draw(num, seed, prefix):
    vectors = 0.5 + np.random.default_rng(seed).standard_normal((num, DIM))
    return Embeddings([f"{prefix}{i:03d}" for i in range(num)], vectors.astype(np.float32))


def draw_trials(keys, num=200, seed=2):
    sides = np.random.default_rng(seed).integers(0, len(keys), (num, 2))
    enroll, test = ([keys[i] for i in side] for side in sides.T)
    return Trials(enroll, test, np.arange(num) % 3 == 0)


def cosine(a, b):
    return a @ b / np.sqrt(a @ a * (b @ b))


def one_by_one(trials, embeddings, mean, cohort, top_n):
    """Plain and normalised score of each trial, and the four columns, by loops."""
    centred = dict(zip(embeddings.keys, embeddings.vectors.astype(np.float64) - mean))
    others = cohort.vectors.astype(np.float64) - mean
    rows = []
    for pair in zip(trials.enroll, trials.test):
        a, b = (centred[key] for key in pair)
        plain = cosine(a, b)
        tops = [sorted(cosine(x, other) for other in others)[-top_n:] for x in (a, b)]
        (mean_a, std_a), (mean_b, std_b) = ((np.mean(x), np.std(x)) for x in tops)
        normalised = ((plain - mean_a) / std_a + (plain - mean_b) / std_b) / 2
        rows.append([plain, normalised, *map(np.linalg.norm, (a, b)), mean_a, mean_b])
    return np.array(rows)


@pytest.fixture(params=[1 << 24, 64])
def block(request, monkeypatch):
    """The usual block and one so small that every loop turns many times."""
    monkeypatch.setattr(score, "_BLOCK", request.param)


@pytest.mark.parametrize("top_n", [7, 40])
@pytest.mark.parametrize("subtract", [True, False])
def test_scores_equal_one_by_one(block, top_n, subtract):
    embeddings, cohort = draw(50, 0, "u"), draw(40, 1, "c")
    mean = cohort.vectors.mean(axis=0) if subtract else None
    trials = draw_trials(embeddings.keys)
    expected = one_by_one(trials, embeddings, mean if subtract else 0, cohort, top_n)
    plain = score.score_trials(trials, embeddings, mean)
    np.testing.assert_allclose(plain, expected[:, 0], atol=1e-7)
    statistics = score.cohort_statistics(embeddings, cohort, top_n=top_n, mean=mean)
    normalised = score.normalise_scores(trials, plain, statistics)
    # float32 cosines are good to 6e-8, and the smallest standard deviations here are near 0.01
    np.testing.assert_allclose(normalised, expected[:, 1], rtol=5e-6, atol=1e-5)


def test_cohort_statistics_stay_small(monkeypatch):
    monkeypatch.setattr(score, "_BLOCK", 1 << 16)
    embeddings, cohort = draw(500, 0, "u"), draw(3000, 1, "c")
    tracemalloc.start()
    statistics = score.cohort_statistics(embeddings, cohort, top_n=300)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 500 * 3000 * 4 / 4
    units = [x.vectors / np.linalg.norm(x.vectors, axis=1)[:, None] for x in (embeddings, cohort)]
    tops = np.sort(units[0] @ units[1].T, axis=1)[:, -300:]
    np.testing.assert_allclose(statistics.means, tops.mean(axis=1), atol=1e-6)
    np.testing.assert_allclose(statistics.stds, tops.std(axis=1), atol=1e-6)
    np.testing.assert_allclose(
        statistics.norms, np.linalg.norm(embeddings.vectors, axis=1), rtol=1e-6
    )


def test_large_top_n_is_told_and_clipped(caplog):
    embeddings, cohort = draw(5, 0, "u"), draw(9, 1, "c")
    clipped = score.cohort_statistics(embeddings, cohort, top_n=300)
    assert "top_n 300" in caplog.text and "9 are used" in caplog.text
    whole = score.cohort_statistics(embeddings, cohort, top_n=9)
    np.testing.assert_array_equal(clipped.means, whole.means)


def test_degenerate_vectors_are_named():
    embeddings, cohort = draw(5, 0, "u"), draw(9, 1, "c")
    trials = draw_trials(embeddings.keys)
    mean = embeddings.vectors[3]
    for call in (
        lambda: score.score_trials(trials, embeddings, mean),
        lambda: score.cohort_statistics(embeddings, cohort, top_n=3, mean=mean),
        lambda: score.cohort_statistics(cohort, embeddings, top_n=3, mean=mean),
    ):
        with pytest.raises(ValueError, match="u003 has length 0"):
            call()
    same = Embeddings(cohort.keys, np.repeat(cohort.vectors[:1], 9, axis=0))
    for others, top_n in ((same, 9), (cohort, 1)):
        with pytest.raises(ValueError, match=f"the {top_n} highest cohort scores of u000 are all"):
            score.cohort_statistics(embeddings, others, top_n=top_n)


def test_lengths_of_two_models_and_bad_top_n():
    embeddings, cohort = draw(5, 0, "u"), draw(9, 1, "c")
    short = Embeddings(cohort.keys, cohort.vectors[:, :8])
    with pytest.raises(ValueError, match="16 numbers, the cohort's 8"):
        score.cohort_statistics(embeddings, short, top_n=3)
    with pytest.raises(ValueError, match=r"16 numbers, but the mean has shape \(8,\)"):
        score.score_trials(draw_trials(embeddings.keys), embeddings, np.ones(8))
    with pytest.raises(ValueError, match="top_n must be 1 or more"):
        score.cohort_statistics(embeddings, cohort, top_n=0)
    with pytest.raises(ValueError, match="trials without embedding: 1, the first: nobody"):
        score.score_trials(Trials(["nobody"], ["u000"], None), embeddings)


@pytest.fixture
def data(tmp_path):
    """Embeddings of a test set, a training set and its speakers, and two trial lists."""
    for name, embeddings in (("test", draw(60, 0, "u")), ("train", draw(90, 1, "c"))):
        (tmp_path / name).mkdir()
        target = f"ark,scp:{tmp_path / name}/xvector.ark,{tmp_path / name}/xvector.scp"
        with kaldiio.WriteHelper(target) as writer:
            for key, vector in zip(*embeddings):
                writer(key, vector)
            if name == "test":
                writer("broken", np.full(DIM, np.nan, np.float32))  # no trial names it
    (tmp_path / "utt2spk").write_text("".join(f"c{i:03d} s{i % 30}\n" for i in range(90)))
    for name, seed in (("a.kaldi", 3), ("b", 4)):
        trials = draw_trials(draw(60, 0, "u").keys, seed=seed)
        words = np.where(trials.is_target, "target", "nontarget")
        lines = (" ".join(line) for line in zip(trials.enroll, trials.test, words))
        (tmp_path / name).write_text("\n".join(lines))
    return tmp_path


def options(data, **changes):
    given = {
        "embeddings": data / "test" / "xvector.scp",
        "trials": [data / "a.kaldi", data / "b"],
        "out": data / "scores",
        "mean": data / "train" / "xvector.scp",
        "norm": "asnorm",
        "cohort": data / "train" / "xvector.scp",
        "cohort_utt2spk": data / "utt2spk",
        "top_n": 10,
    }
    return {**given, **changes}


def average_speakers(vectors):
    return Embeddings([], np.stack([vectors[i::30].mean(axis=0) for i in range(30)]))


@pytest.mark.parametrize(
    "norm, top_n, system", [("asnorm", 10, "asnorm10"), ("snorm", 30, "snorm")]
)
def test_files_have_upstream_names_and_columns(data, norm, top_n, system):
    names = ["a.kaldi.score", "b.score", f"train_{system}_a.kaldi.score", f"train_{system}_b.score"]
    paths = score.score_files(**options(data, norm=norm))
    assert paths == [data / "scores" / name for name in names]
    assert sorted(x.name for x in (data / "scores").iterdir()) == sorted(names)
    train = draw(90, 1, "c")
    mean = train.vectors.astype(np.float64).mean(axis=0)
    np.testing.assert_allclose(np.load(data / "train" / "mean_vec.npy"), mean, rtol=1e-12)
    for seed, plain, normalised in ((3, paths[0], paths[2]), (4, paths[1], paths[3])):
        trials = draw_trials(draw(60, 0, "u").keys, seed=seed)
        cohort = average_speakers(train.vectors)
        expected = one_by_one(trials, draw(60, 0, "u"), mean, cohort, top_n)
        for path, column in ((plain, 0), (normalised, 1)):
            found = read_scores(path)
            assert (found.enroll, found.test) == trials[:2]
            np.testing.assert_array_equal(found.is_target, trials.is_target)
            np.testing.assert_allclose(found.scores, expected[:, column], rtol=5e-6, atol=1e-5)
        rows = [line.split() for line in normalised.read_text().splitlines()]
        assert {row[3] for row in rows} == {"target", "nontarget"}
        more = np.array([row[4:] for row in rows], dtype=float)
        np.testing.assert_allclose(more, expected[:, 2:], rtol=1e-5, atol=1e-6)
        assert {len(line.split()) for line in plain.read_text().splitlines()} == {4}


def test_eight_significant_digits(data):
    path = score.score_files(**options(data, norm=None, cohort=None, cohort_utt2spk=None))[0]
    embeddings = draw(60, 0, "u")
    mean = np.load(data / "train" / "mean_vec.npy")
    exact = score.score_trials(draw_trials(embeddings.keys, seed=3), embeddings, mean)
    np.testing.assert_allclose(read_scores(path).scores, exact, rtol=5e-8)
    assert len(set(read_scores(path).scores)) == len(set(exact))


def test_each_option_changes_the_scores(data):
    def scores_of(**changes):
        return read_scores(score.score_files(**options(data, **changes))[-1]).scores

    usual = scores_of()
    stored = scores_of(mean=data / "train" / "mean_vec.npy")
    np.testing.assert_array_equal(stored, usual)
    for change in ({"mean": None}, {"norm": "snorm"}, {"cohort_utt2spk": None}, {"top_n": 11}):
        assert np.abs(scores_of(**change) - usual).max() > 1e-3


def test_unlabelled_and_label_first_lists(data):
    (data / "a.kaldi").write_text("u000 u001\nu002 u003\n")
    (data / "b").write_text("1 u000 u001\n0 u002 u003\n")
    paths = score.score_files(**options(data))
    for plain, normalised in (paths[::2], paths[1::2]):
        assert read_scores(plain).enroll == read_scores(normalised).enroll == ["u000", "u002"]
    assert read_scores(paths[2]).is_target is None
    assert read_scores(paths[3]).is_target.tolist() == [True, False]
    assert read_scores(paths[0]).scores == pytest.approx(read_scores(paths[1]).scores)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"norm": "znorm"}, "norm must be asnorm or snorm, got 'znorm'"),
        ({"norm": None}, "norm and cohort go together"),
        ({"cohort": None, "cohort_utt2spk": None}, "norm and cohort go together"),
        ({"norm": None, "cohort": None}, "cohort_utt2spk needs them"),
        ({"trials": []}, "expected one trial list"),
        ({"top_n": 0}, "top_n must be 1 or more"),
        ({"top_n": 1}, "are all equal"),
    ],
)
def test_bad_options_leave_nothing(data, changes, words):
    with pytest.raises(ValueError, match=words):
        score.score_files(**options(data, **changes))
    assert not (data / "scores").exists()


def test_missing_embeddings_leave_no_score_file(data):
    with open(data / "b", "a") as stream:
        stream.writelines(f"\nu000 lost{i:02d} target" for i in range(12))
    with pytest.raises(
        ValueError, match=r"xvector.scp: keys without .*: 12, the first: lost00 .*09$"
    ):
        score.score_files(**options(data))
    assert not (data / "scores").exists()


def test_two_lists_of_one_name_are_refused(data):
    (data / "more").mkdir()
    (data / "more" / "b").write_text((data / "b").read_text())
    with pytest.raises(ValueError, match=r"would both be scored into b.score"):
        score.score_files(**options(data, trials=[data / "b", data / "more" / "b"]))


def test_mean_file_that_cannot_be_written_is_told(data, caplog):
    (data / "train" / "mean_vec.npy").mkdir()  # a folder is in the way
    paths = score.score_files(**options(data))
    assert all(path.exists() for path in paths)
    assert "mean_vec.npy is not written" in caplog.text


def test_command(data, capsys, caplog):
    caplog.set_level(logging.INFO)
    parser = argparse.ArgumentParser()
    score.add_arguments(parser)
    assert "wespeaker-qmargin score" in parser.epilog
    given = options(data, out=data / "by_command")
    words = [w for name, value in given.items() if name != "trials" for w in (f"--{name}", value)]
    words += ["--trials", *given["trials"]]
    score.run(parser.parse_args([str(word) for word in words]))
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 4
    for path, other in zip(printed, score.score_files(**options(data))):
        assert read_scores(path).scores.tolist() == read_scores(other).scores.tolist()
