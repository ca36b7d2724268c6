"""Reading embeddings: order, choice, means, and what is refused."""

import kaldiio
import numpy as np
import pytest

from wespeaker_qmargin.embeddings import (
    mean_vector,
    read_cohort,
    read_embeddings,
    speaker_means,
)


def write(folder, vectors, name="xvector"):
    """Write a Kaldi ark and scp; return the scp."""
    folder.mkdir(parents=True, exist_ok=True)
    scp = folder / f"{name}.scp"
    with kaldiio.WriteHelper(f"ark,scp:{folder / name}.ark,{scp}") as writer:
        for key, vector in vectors.items():
            writer(key, vector)
    return scp


@pytest.fixture
def vectors():
    rng = np.random.default_rng(0)
    return {f"u{i:02d}": rng.standard_normal(5).astype(np.float32) for i in (3, 1, 2, 0, 4)}


def test_all_and_chosen_in_file_order(tmp_path, vectors):
    scp = write(tmp_path, vectors)
    everything = read_embeddings(scp)
    assert everything.keys == list(vectors)
    assert everything.vectors.dtype == np.float32
    np.testing.assert_array_equal(everything.vectors, list(vectors.values()))
    chosen = read_embeddings(scp, ["u00", "u01", "u00"])
    assert chosen.keys == ["u01", "u00"]
    np.testing.assert_array_equal(chosen.vectors, [vectors["u01"], vectors["u00"]])
    assert len(read_embeddings(scp, []).vectors) == 0


def test_several_archives_and_double_precision(tmp_path, vectors):
    first = write(tmp_path, vectors, "xvector_0")
    second = write(tmp_path, {"v": np.arange(5.0)}, "xvector_1")
    third = write(tmp_path, {"w": np.ones(5, np.float32)}, "xvector_2")
    joined = tmp_path / "xvector.scp"
    joined.write_text(second.read_text() + first.read_text() + third.read_text())
    loaded = read_embeddings(joined)
    assert loaded.keys == ["v", *vectors, "w"]
    np.testing.assert_array_equal(loaded.vectors[0], np.arange(5))
    np.testing.assert_array_equal(loaded.vectors[-1], np.ones(5))


def test_missing_keys_are_counted_and_ten_named(tmp_path, vectors):
    wanted = [f"u{i:02d}" for i in range(20)]
    with pytest.raises(ValueError, match=r"keys without embedding: 15, the first: u05 .* u14$"):
        read_embeddings(write(tmp_path, vectors), wanted)


@pytest.mark.parametrize(
    "bad, words",
    [
        (np.array([1, 2, np.nan, 4, 5]), "bad .* holds NaN or infinity"),
        (np.array([1, 2, 1e300, 4, 5]), "bad .* holds NaN or infinity"),
        (np.ones(4), r"bad .* shape \(4,\); expected a vector of 5 numbers"),
        (np.ones((1, 5)), r"bad .* shape \(1, 5\); expected a vector of 5"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow")
def test_bad_vectors_name_key_and_file(tmp_path, vectors, bad, words):
    scp = write(tmp_path, {**vectors, "bad": bad})
    for read in (read_embeddings, mean_vector):
        with pytest.raises(ValueError, match=f"xvector.scp.*{words}"):
            read(scp)
    assert len(read_embeddings(scp, list(vectors)).keys) == 5  # never reads what nobody asked for


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_bad_vectors_are_skipped_and_counted(tmp_path, vectors, caplog, value):
    bad = {"bad0": np.full(5, value, np.float32), "bad1": np.array([0, 0, value, 0, 0])}
    # the first entry of all is bad, too
    scp = write(tmp_path, {"bad0": bad["bad0"], **vectors, "bad1": bad["bad1"]})
    with pytest.raises(
        ValueError, match=r"xvector.scp: embedding bad0 at .*ark.* holds NaN or inf"
    ):
        read_embeddings(scp)
    found = read_embeddings(scp, skip_bad=True)
    assert found.keys == list(vectors)
    np.testing.assert_array_equal(found.vectors, list(vectors.values()))
    assert "2 of 7 embeddings hold NaN or infinity: skipped, the first: bad0 bad1" in caplog.text
    mean = np.mean(list(vectors.values()), axis=0)
    np.testing.assert_allclose(mean_vector(scp, skip_bad=True), mean, rtol=1e-5)
    (tmp_path / "utt2spk").write_text("".join(f"{key} {key[0]}\n" for key in [*vectors, *bad]))
    by_speaker = speaker_means(scp, tmp_path / "utt2spk", skip_bad=True)
    assert by_speaker.keys == ["u"]  # of the speaker b nothing is left
    np.testing.assert_allclose(by_speaker.vectors[0], mean, rtol=1e-5)
    scp = write(tmp_path / "all", bad)
    for read in (read_embeddings, mean_vector):
        with pytest.raises(ValueError, match="2 of 2 embeddings hold NaN"):
            read(scp, skip_bad=True)


def test_missing_keys_are_skipped_where_asked(tmp_path, vectors):
    scp = write(tmp_path, vectors)
    assert read_embeddings(scp, ["u00", "none"], skip_missing=True).keys == ["u00"]
    with pytest.raises(ValueError, match="keys without embedding: 1, the first: none"):
        read_embeddings(scp, ["none"], skip_missing=True)


def test_a_cohort_that_holds_the_trials_is_told(tmp_path, vectors, caplog):
    scp = write(tmp_path, vectors)
    (tmp_path / "utt2spk").write_text("".join(f"{key} s\n" for key in vectors))
    assert read_cohort(scp, trial_keys={"other"}).keys == list(vectors)
    assert not caplog.records
    assert read_cohort(scp, trial_keys={"u01", "u00", "other"}).keys == list(vectors)
    assert "the cohort holds 2 utterances of the trials, the first: u00 u01;" in caplog.text
    assert read_cohort(scp, tmp_path / "utt2spk").keys == ["s"]


@pytest.mark.parametrize("place", ["gone.ark:9", "xvector.ark:99999", "xvector.ark:3", "text.txt"])
def test_unreadable_places_name_the_key(tmp_path, vectors, place):
    scp = write(tmp_path, vectors)
    (tmp_path / "text.txt").write_text("no numbers here")
    with open(scp, "a") as stream:
        stream.write(f"bad {tmp_path / place}\n")
    with pytest.raises(ValueError, match=r"xvector.scp.*bad"):
        read_embeddings(scp)


@pytest.mark.parametrize("cut", [1, 2, 19, 24])
def test_truncated_archive_is_refused(tmp_path, vectors, cut):
    scp = write(tmp_path, vectors)
    whole = (tmp_path / "xvector.ark").read_bytes()
    (tmp_path / "xvector.ark").write_bytes(whole[:-cut])
    with pytest.raises(ValueError, match=r"xvector.scp.*u04"):
        read_embeddings(scp)


def test_keys_that_come_twice(tmp_path, vectors):
    scp = write(tmp_path, vectors)
    lines = scp.read_text().splitlines()
    scp.write_text("\n".join([*lines, "u03 elsewhere.ark:5"]))
    with pytest.raises(ValueError, match=r"xvector.scp:6: key 'u03' comes twice"):
        read_embeddings(scp)


def test_mean_is_summed_in_double_precision(tmp_path):
    rng = np.random.default_rng(0)
    values = (1e4 + rng.standard_normal((3000, 2))).astype(np.float32)
    scp = write(tmp_path, {f"u{i}": x for i, x in enumerate(values)})
    exact = values.astype(np.float64).mean(axis=0)
    in_single = np.zeros(2, np.float32)
    for vector in values:
        in_single += vector
    assert np.abs(in_single / 3000 - exact).max() > 1e-4
    np.testing.assert_allclose(mean_vector(scp), exact, rtol=1e-14)
    np.save(tmp_path / "mean_vec.npy", exact)
    np.testing.assert_array_equal(mean_vector(tmp_path / "mean_vec.npy"), exact)


@pytest.mark.parametrize("content", [np.ones((2, 3)), np.array([1, np.inf])])
def test_bad_stored_mean(tmp_path, content):
    np.save(tmp_path / "mean.npy", content)
    with pytest.raises(ValueError, match=r"mean.npy: expected one finite vector"):
        mean_vector(tmp_path / "mean.npy")


@pytest.mark.parametrize("content", [b"", b"no array", b"\x93NUMPY", np.array(["a", "b"])])
def test_what_is_no_stored_mean(tmp_path, content):
    path = tmp_path / "mean.npy"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.save(path, content)
    with pytest.raises(ValueError, match=r"mean.npy: not a stored vector of numbers"):
        mean_vector(path)


def test_speaker_means(tmp_path, vectors):
    scp = write(tmp_path, vectors)
    speaker = {"u00": "b", "u01": "a", "u02": "b", "u03": "b", "u04": "a"}
    (tmp_path / "utt2spk").write_text("".join(f"{u} {s}\n" for u, s in speaker.items()))
    means = speaker_means(scp, tmp_path / "utt2spk")
    assert means.keys == ["b", "a"]  # u03 comes first
    for name, mean in zip(*means):
        own = [vectors[u] for u, s in speaker.items() if s == name]
        np.testing.assert_allclose(mean, np.mean(own, axis=0), rtol=1e-6)
    (tmp_path / "utt2spk").write_text("u00 b\nu01 a\n")
    with pytest.raises(ValueError, match=r"utt2spk: no speaker for keys of .*: 3, the first: u02"):
        speaker_means(scp, tmp_path / "utt2spk")
