"""Scores against one-trial-at-a-time arithmetic in double precision."""

import argparse
import logging
import tracemalloc

import kaldiio
import numpy as np
import pytest

from wespeaker_qmargin import cli, score
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


def test_blocks_change_nothing(monkeypatch):
    embeddings, cohort = draw(60, 0, "u"), draw(50, 1, "c")
    trials = draw_trials(embeddings.keys)
    results = []
    for block in (1 << 24, 50 * 7, 1):
        monkeypatch.setattr(score, "_BLOCK", block)
        plain = score.score_trials(trials, embeddings)
        statistics = score.cohort_statistics(embeddings, cohort, top_n=20)
        normalised = score.normalise_scores(trials, plain, statistics)
        results.append((plain, *statistics[1:], normalised))
    for other in results[1:]:
        for whole, part in zip(results[0], other, strict=True):
            np.testing.assert_allclose(part, whole, rtol=1e-6, atol=1e-6)


def test_duplicates_in_the_cohort_count_each_time():
    embeddings, cohort = draw(20, 0, "u"), draw(12, 1, "c")
    twice = Embeddings([f"d{i}" for i in range(24)], np.repeat(cohort.vectors, 2, axis=0))
    usual = score.cohort_statistics(embeddings, cohort, top_n=5)
    doubled = score.cohort_statistics(embeddings, twice, top_n=10)
    np.testing.assert_allclose(doubled.means, usual.means, atol=1e-6)
    np.testing.assert_allclose(doubled.stds, usual.stds, atol=1e-6)
    trials = draw_trials(embeddings.keys)
    expected = one_by_one(trials, embeddings, 0, twice, 5)
    plain = score.score_trials(trials, embeddings)
    statistics = score.cohort_statistics(embeddings, twice, top_n=5)
    normalised = score.normalise_scores(trials, plain, statistics)
    np.testing.assert_allclose(normalised, expected[:, 1], rtol=1e-5, atol=1e-4)


def test_the_enrolled_in_the_cohort_is_one_cosine_of_1():
    embeddings, cohort = draw(20, 0, "u"), draw(12, 1, "c")
    joined = Embeddings(["own", *cohort.keys], np.vstack([embeddings.vectors[:1], cohort.vectors]))
    trials = Trials(["u000", "u004"], ["u001", "u002"], None)
    expected = one_by_one(trials, embeddings, 0, joined, 5)[:, 1]
    statistics = score.cohort_statistics(embeddings, joined, top_n=5)
    plain = score.score_trials(trials, embeddings)
    normalised = score.normalise_scores(trials, plain, statistics)
    np.testing.assert_allclose(normalised, expected, rtol=1e-5)
    without = score.cohort_statistics(embeddings, cohort, top_n=5)
    assert statistics.means[0] > without.means[0] + 0.05


def test_a_cohort_of_one_is_refused():
    with pytest.raises(ValueError, match="the 1 highest cohort scores of u000 are all equal"):
        score.cohort_statistics(draw(5, 0, "u"), draw(1, 1, "c"), top_n=300)


def test_a_cohort_vector_of_zeros_is_named():
    cohort = draw(9, 1, "c")
    cohort.vectors[4] = 0
    with pytest.raises(ValueError, match="c004 has length 0"):
        score.cohort_statistics(draw(5, 0, "u"), cohort, top_n=3)


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
        ({"missing": "ignore"}, "missing must be error or skip, got 'ignore'"),
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


def command(data, *words, **changes):
    """Run the command; return its exit status."""
    given = options(data, **changes)
    given = {name: value for name, value in given.items() if value is not None}
    trials = given.pop("trials")
    flags = [str(w) for name, value in given.items() for w in (f"--{name}", value)]
    return cli.main(["score", *flags, "--trials", *map(str, trials), *words])


def test_missing_embeddings_are_skipped_and_counted(data, capsys, caplog):
    whole = score.score_files(**options(data, out=data / "whole"))
    lost = [f"u000 lost{i:02d} target" for i in range(12)]
    lines = ["lost00 u001 nontarget", *(data / "b").read_text().splitlines(), *lost]
    (data / "b").write_text("\n".join(lines))
    assert command(data) == 1
    assert "keys without embedding: 12, the first: lost00 " in capsys.readouterr().err
    assert not (data / "scores").exists()
    assert command(data, "--missing", "skip") == 0
    assert (
        "b: 13 of 213 trials have no finite embedding on one side or both; 12 keys, the first: "
        "lost00 lost01 lost02 lost03 lost04 lost05 lost06 lost07 lost08 lost09: skipped"
    ) in caplog.text
    assert "a.kaldi:" not in caplog.text
    for path in whole:
        assert (data / "scores" / path.name).read_text() == path.read_text()


def test_a_list_without_any_embedding_is_refused(data, capsys):
    (data / "b").write_text("lost1 lost2 target\n")
    assert command(data, "--missing", "skip") == 1
    assert "b: 1 of 1 trials have no finite embedding" in capsys.readouterr().err
    assert not (data / "scores").exists()


def test_bad_embeddings_are_skipped_and_counted(data, capsys, caplog):
    whole = score.score_files(**options(data, out=data / "whole", norm=None, **NO_COHORT))
    with open(data / "b", "a") as stream:
        stream.write("\nu000 broken target")
    assert command(data, norm=None, **NO_COHORT) == 1
    assert "embedding broken at " in capsys.readouterr().err
    assert not (data / "scores").exists()
    assert command(data, "--missing", "skip", norm=None, **NO_COHORT) == 1  # is another thing
    assert command(data, "--skip-bad", norm=None, **NO_COHORT) == 0
    assert "1 of 61 embeddings hold NaN or infinity: skipped, the first: broken" in caplog.text
    assert "b: 1 of 201 trials have no finite embedding" in caplog.text
    for path in whole:
        assert (data / "scores" / path.name).read_text() == path.read_text()


NO_COHORT = {"cohort": None, "cohort_utt2spk": None}


def test_bad_embeddings_of_mean_and_cohort(data, capsys, caplog):
    usual = score.score_files(**options(data, out=data / "usual"))
    train = draw(90, 1, "c")
    target = f"ark,scp:{data}/train/xvector.ark,{data}/train/xvector.scp"
    with kaldiio.WriteHelper(target) as writer:
        writer("bad", np.full(DIM, np.inf, np.float32))
        for key, vector in zip(*train):
            writer(key, vector)
    with open(data / "utt2spk", "a") as stream:
        stream.write("bad s0\n")
    assert command(data) == 1
    assert "embedding bad at " in capsys.readouterr().err
    assert command(data, "--skip_bad") == 0
    assert caplog.text.count("1 of 91 embeddings hold NaN or infinity") == 2
    for path in usual:
        found = read_scores(data / "scores" / path.name).scores
        np.testing.assert_allclose(found, read_scores(path).scores, rtol=1e-6)


def test_a_cohort_of_the_trials_is_told(data, caplog):
    changes = {"cohort": data / "test" / "xvector.scp", "cohort_utt2spk": None, "top_n": 20}
    score.score_files(**options(data, **changes, skip_bad=True))
    assert "the cohort holds 60 utterances of the trials, the first: u000 u001" in caplog.text


def test_forms_of_a_list_score_alike(data):
    plain = "u000 u001 target\nu002 u003 nontarget\n"
    forms = {
        "words": plain,
        "digits": plain.replace("nontarget", "0").replace("target", "1"),
        "first": "1 u000 u001\n0 u002 u003\n",
        "tabs": plain.replace(" ", "\t"),
        "crlf": plain.replace("\n", "\r\n"),
        "bom": "\ufeff" + plain,
        "blank": plain + "\n\n",
        "open": plain.rstrip(),
    }
    for name, text in forms.items():
        (data / name).write_bytes(text.encode())
    paths = score.score_files(**options(data, trials=[data / name for name in forms]))
    plain_files, normalised = paths[: len(forms)], paths[len(forms) :]
    for group in (plain_files, normalised):
        assert len({path.read_text() for path in group}) == 1
    assert len(plain_files) == len(normalised) == len(forms)


def test_a_third_word_stops_the_command(data, capsys):
    (data / "b").write_text("u000 u001 target\nu002 u003 impostor\n")
    assert command(data) == 1
    assert (
        "b:2: expected target or nontarget (or 1, 0), found 'impostor'" in capsys.readouterr().err
    )
    assert not (data / "scores").exists()
