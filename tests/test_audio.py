"""Reading audio: formats, channels, rates, pieces, and every kind of broken file."""

import io
import tarfile

import numpy as np
import pytest
import soundfile

from wespeaker_qmargin.audio import (
    Audio,
    AudioError,
    LmdbValue,
    TarMember,
    TooShort,
    Utterance,
    load_audio,
    resample,
)

FORMATS = {  # suffix: subtype
    "wav": "PCM_16",
    "flac": "PCM_16",
    "ogg": "VORBIS",
    "opus": "OPUS",
    "mp3": "MPEG_LAYER_III",
}


def noise(samples: int, seed: int = 0) -> np.ndarray:
    return (0.1 * np.random.default_rng(seed).standard_normal(samples)).astype(np.float32)


def write(path, wav, rate=16000, **options) -> Utterance:
    if path.suffix == ".opus":
        options = {"format": "OGG", "subtype": "OPUS"}
    soundfile.write(path, wav, rate, **options)
    return Utterance("utt", "spk", str(path))


@pytest.mark.parametrize("suffix", FORMATS)
def test_any_piece_equals_that_piece_of_the_whole(tmp_path, suffix):
    utterance = write(tmp_path / f"a.{suffix}", noise(48000))
    with Audio(utterance) as audio:
        assert (audio.rate, audio.num_samples) == (16000, 48000)
        whole = audio.read()
    assert whole.dtype == np.float32 and whole.shape == (48000,)
    assert np.corrcoef(whole, noise(48000))[0, 1] > 0.7
    rng = np.random.default_rng(1)
    for start in [0, 1, 47999, *rng.integers(0, 40000, 12)]:
        count = int(rng.integers(1, 48001 - start))
        with Audio(utterance) as audio:
            piece = audio.read(int(start), count)
        # mp3's decoder rounds differently after a rewind
        np.testing.assert_allclose(piece, whole[start : start + count], rtol=0, atol=1e-6)


def test_first_channel_and_rate(tmp_path):
    left, right = noise(44100), noise(44100, seed=1)
    utterance = write(tmp_path / "a.wav", np.stack([left, right], axis=1), 44100, subtype="FLOAT")
    assert np.array_equal(load_audio(utterance, 44100), left)
    at_16k = load_audio(utterance, 16000)
    assert at_16k.dtype == np.float32 and len(at_16k) == 16000
    tone = np.sin(2 * np.pi * 1000 * np.arange(44100) / 44100).astype(np.float32)
    expected = np.sin(2 * np.pi * 1000 * np.arange(16000) / 16000)
    found = resample(tone, 44100, 16000)
    np.testing.assert_allclose(found[500:-500], expected[500:-500], atol=1e-3)
    assert resample(tone, 44100, 44100) is tone


def test_vad_pieces_are_joined(tmp_path):
    wav = noise(32000)
    utterance = write(tmp_path / "a.wav", wav, subtype="FLOAT")
    utterance = utterance._replace(vad=((0.1, 0.5), (1.0, 1.25), (1.9, 9.0), (3.0, 4.0)))
    expected = np.concatenate([wav[1600:8000], wav[16000:20000], wav[30400:]])
    with Audio(utterance) as audio:
        assert audio.num_samples == len(expected)
        assert np.array_equal(audio.read(), expected)
        for start, count in [(0, 6400), (6000, 900), (6399, 4002), (6400, 4000), (11999, 1)]:
            assert np.array_equal(audio.read(start, count), expected[start : start + count])
    with pytest.raises(AudioError, match="no speech"):
        Audio(utterance._replace(vad=((2.5, 3.0),)))


def test_tar_members_are_read_in_place(tmp_path):
    wav = noise(16000)
    buffer = io.BytesIO()
    soundfile.write(buffer, wav, 16000, format="WAV", subtype="FLOAT")
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in ("x.wav", "y.wav"):
            info = tarfile.TarInfo(name)
            info.size = len(buffer.getvalue())
            tar.addfile(info, io.BytesIO(buffer.getvalue()))
        offset = tar.getmember("y.wav").offset_data
    with tarfile.open(tmp_path / "a.tar") as tar:
        offset = tar.getmember("y.wav").offset_data
    member = TarMember(str(tmp_path / "a.tar"), offset, len(buffer.getvalue()), "y.wav")
    assert np.array_equal(load_audio(Utterance("y", None, member), 16000), wav)
    with pytest.raises(AudioError, match=r"^y: .*a\.tar: y\.wav: truncated"):
        load_audio(Utterance("y", None, member._replace(size=3000)), 16000)
    with pytest.raises(AudioError, match=r"y\.wav: .*Expected audio"):
        load_audio(Utterance("y", None, member._replace(offset=offset + 7)), 16000)


def test_lmdb_values_are_read(tmp_path):
    lmdb = pytest.importorskip("lmdb")
    buffer = io.BytesIO()
    soundfile.write(buffer, noise(800), 16000, format="WAV", subtype="FLOAT")
    database = lmdb.open(str(tmp_path / "db"), map_size=1 << 20)
    with database, database.begin(write=True) as transaction:
        transaction.put(b"good", buffer.getvalue())
        transaction.put(b"bad", b"RIFF")
    good = Utterance("good", None, LmdbValue(str(tmp_path / "db"), "good"))
    assert np.array_equal(load_audio(good, 16000), noise(800))
    bad = Utterance("bad", None, LmdbValue(str(tmp_path / "db"), "bad"))
    with pytest.raises(AudioError, match=r"db: bad: .*Expected audio"):
        load_audio(bad, 16000)


def cut(path, share: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])


@pytest.mark.parametrize("suffix", ["wav", "flac", "mp3"])
@pytest.mark.parametrize("share", [0.5, 0.97])
def test_truncated(tmp_path, suffix, share):
    utterance = write(tmp_path / f"a.{suffix}", noise(48000))
    cut(tmp_path / f"a.{suffix}", share)
    with pytest.raises(AudioError, match=rf"^utt: .*a\.{suffix}: (truncated|broken)"):
        load_audio(utterance, 16000)


def test_wav_from_a_pipe_is_no_truncated_file(tmp_path):
    path = tmp_path / "a.wav"
    utterance = write(path, noise(16000))
    whole = load_audio(utterance, 16000)
    data = bytearray(path.read_bytes())
    at = data.index(b"data") + 4
    for size in (b"\xff\xff\xff\xff", b"\x00\xf0\xff\x7f"):
        data[at : at + 4] = size
        path.write_bytes(data)
        assert np.array_equal(load_audio(utterance, 16000), whole)


def bad_files(folder):
    (folder / "folder.wav").mkdir()
    (folder / "empty.wav").write_bytes(b"")
    (folder / "text.wav").write_text("this is no audio\n" * 99)
    write(folder / "header.wav", noise(0))
    write(folder / "nan.wav", np.array([0.1, np.nan] * 400), subtype="FLOAT")
    write(folder / "short.wav", noise(159))
    write(folder / "pipe.flac", noise(16000))
    flac = bytearray((folder / "pipe.flac").read_bytes())
    flac[21] &= 0xF0  # total samples, 36 bits: unknown
    flac[22:26] = bytes(4)
    (folder / "pipe.flac").write_bytes(flac)


@pytest.mark.parametrize(
    "name, reason",
    [
        ("missing.wav", "No such file"),
        ("folder.wav", "Is a directory"),
        ("empty.wav", "the file is empty"),
        ("text.wav", "Format not recognised.*Expected audio: wav, flac, ogg, opus or mp3"),
        ("header.wav", "holds no samples"),
        ("nan.wav", "NaN or infinite"),
        ("short.wav", r"too short: 0\.010 s, at least 0\.025 s"),
        ("pipe.flac", "does not say how long"),
    ],
)
def test_bad_files_are_named_with_the_reason(tmp_path, name, reason):
    bad_files(tmp_path)
    with pytest.raises(AudioError, match=rf"^key7: .*{name}: .*{reason}") as caught:
        load_audio(Utterance("key7", None, str(tmp_path / name)), 16000, min_samples=400)
    assert isinstance(caught.value, TooShort) == (name == "short.wav")
    assert "\n" not in str(caught.value)


def test_the_shortest_allowed_length_is_allowed(tmp_path):
    utterance = write(tmp_path / "a.wav", noise(200), 8000)
    assert len(load_audio(utterance, 16000, min_samples=400)) == 400
    with pytest.raises(TooShort):
        load_audio(utterance, 16000, min_samples=401)
