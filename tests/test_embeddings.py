"""Reading embeddings: order, choice, means, and what is refused."""

import kaldiio
import numpy as np
import pytest

from wespeaker_qmargin.embeddings import mean_vector, read_embeddings, speaker_means


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
