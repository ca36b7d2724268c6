"""Reading audio: formats, channels, rates, pieces, and every kind of broken file."""

import io
import os
import struct
import tarfile

import numpy as np
import pytest
import soundfile

from wespeaker_qmargin.audio import (
    Audio,
    AudioError,
    TooShort,
    Utterance,
    load_audio,
    resample,
)
from wespeaker_qmargin.sources import Command, LmdbValue, TarMember

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


SUBTYPES = [
    ("wav", "PCM_U8"),
    ("wav", "PCM_16"),
    ("wav", "PCM_24"),
    ("wav", "PCM_32"),
    ("wav", "FLOAT"),
    ("wav", "DOUBLE"),
    ("wav", "ULAW"),
    ("wav", "GSM610"),
    ("wav", "G721_32"),
    ("flac", "PCM_24"),
    ("au", "ALAW"),
]


@pytest.mark.parametrize("suffix, subtype", SUBTYPES)
def test_subtypes_are_read_at_one_scale(tmp_path, suffix, subtype):
    time = np.arange(16000) / 16000
    tone = (0.5 * np.sin(2 * np.pi * 440 * time)).astype(np.float32)
    utterance = write(tmp_path / f"a.{suffix}", tone, subtype=subtype)
    wav = load_audio(utterance, 16000)
    assert wav.dtype == np.float32 and len(wav) >= 16000
    assert np.abs(wav[:16000] - tone).mean() < 0.02
    with Audio(utterance) as audio:  # some of these cannot be rewound
        assert np.array_equal(audio.read(5000, 3000), wav[5000:8000])
    with Audio(utterance) as audio:
        assert np.array_equal(np.concatenate(list(audio.blocks())), wav)


@pytest.mark.parametrize("samples, rate", [(1, 16000), (399, 16000), (400, 16000), (800, 16000)])
@pytest.mark.parametrize("channels", [1, 2])
def test_short_audio_is_read_or_refused(tmp_path, samples, rate, channels):
    wav = np.repeat(noise(samples)[:, None], channels, axis=1)
    utterance = write(tmp_path / "a.wav", wav, rate, subtype="FLOAT")
    if samples < 400:
        with pytest.raises(TooShort):
            load_audio(utterance, 16000, min_samples=400)
    else:
        assert np.array_equal(load_audio(utterance, 16000, min_samples=400), noise(samples))


@pytest.mark.parametrize("suffix", FORMATS)
def test_blocks_are_the_whole(tmp_path, suffix, monkeypatch):
    monkeypatch.setattr("wespeaker_qmargin.audio._BLOCK", 700)
    utterance = write(tmp_path / f"a.{suffix}", noise(16000))
    utterance = utterance._replace(vad=((0.1, 0.3), (0.5, 0.9)))
    with Audio(utterance) as audio:
        blocks = list(audio.blocks())
    assert max(map(len, blocks)) == 700
    np.testing.assert_allclose(np.concatenate(blocks), load_audio(utterance, 16000), atol=1e-6)


def test_truncation_is_seen_by_blocks(tmp_path):
    utterance = write(tmp_path / "a.flac", noise(48000))
    cut(tmp_path / "a.flac", 0.5)
    with Audio(utterance) as audio, pytest.raises(AudioError, match="truncated|broken"):
        list(audio.blocks())


def with_length(path, data_size: int) -> Utterance:
    data = bytearray(path.read_bytes())
    at = data.index(b"data") + 4
    data[at : at + 4] = struct.pack("<I", data_size)
    path.write_bytes(data)
    return Utterance("utt", "spk", str(path))


@pytest.mark.parametrize("size", [0, 100, 16000, 24001, 24003])
def test_a_wav_longer_than_its_header_says_is_refused(tmp_path, size):
    write(tmp_path / "a.wav", noise(16000))
    utterance = with_length(tmp_path / "a.wav", size)
    with pytest.raises(AudioError, match=rf"its header says {size} bytes .* write the file again"):
        load_audio(utterance, 16000)


@pytest.mark.parametrize("size", [32001, 40000, 2**30])
def test_a_wav_shorter_than_its_header_says_is_refused(tmp_path, size):
    write(tmp_path / "a.wav", noise(16000))
    with pytest.raises(AudioError, match=f"truncated: 32000 of {size} bytes"):
        load_audio(with_length(tmp_path / "a.wav", size), 16000)


def test_a_wav_with_further_chunks_or_a_little_junk_is_read(tmp_path):
    utterance = write(tmp_path / "a.wav", noise(16000))
    whole, data = load_audio(utterance, 16000), (tmp_path / "a.wav").read_bytes()
    for tail in (b"LIST\x04\0\0\0abcd", b"id3 \x04\0\0\0abcd", b"\x01\xfe" * 50, bytes(64)):
        (tmp_path / "a.wav").write_bytes(data + tail)
        assert np.array_equal(load_audio(utterance, 16000), whole)


@pytest.mark.parametrize("rate", [0, 1, 999, 768001, 2**31 - 1])
def test_rates_that_no_audio_has_are_refused(tmp_path, rate):
    utterance = write(tmp_path / "a.wav", noise(1600))
    data = bytearray((tmp_path / "a.wav").read_bytes())
    data[24:28] = struct.pack("<I", rate)
    (tmp_path / "a.wav").write_bytes(data)
    with pytest.raises(AudioError, match="expected a rate of 1000 to 768000 Hz|Expected audio"):
        load_audio(utterance, 16000)


@pytest.mark.parametrize(
    "path, reason",
    [
        ("", "No such file"),
        ("a.wav\0b", r"'a\.wav\\x00b': embedded null byte"),
        ("a\nb.wav", r"'a\\nb\.wav': No such file"),
        ("\ud800.wav", r"'\\ud800\.wav': a path of characters that no file name can have"),
        ("x" * 300 + ".wav", "File name too long"),
        ("no/such.wav", "No such file or directory in .*, from where relative paths count"),
    ],
)
def test_odd_paths_are_refused_in_one_printable_line(tmp_path, monkeypatch, path, reason):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AudioError, match=rf"^utt: .*{reason}") as caught:
        load_audio(Utterance("utt", None, path), 16000)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "name", ["a b  c.wav", "è 音.wav", "a,b:c;d.wav", "-a.wav", "a|b&$(c).wav"]
)
def test_any_name_is_read(tmp_path, name):
    write(tmp_path / name, noise(800), subtype="FLOAT")
    assert np.array_equal(load_audio(Utterance("u", None, str(tmp_path / name)), 16000), noise(800))


def test_what_is_no_regular_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "a.wav")
    for path in (str(tmp_path / "a.wav"), "/dev/zero"):
        with pytest.raises(AudioError, match=r"not a regular file \(a FIFO, socket or device\)"):
            load_audio(Utterance("utt", None, path), 16000)
    (tmp_path / "loop.wav").symlink_to(tmp_path / "loop.wav")
    with pytest.raises(AudioError, match="symbolic links"):
        load_audio(Utterance("utt", None, str(tmp_path / "loop.wav")), 16000)
    (tmp_path / "a.raw").write_bytes(bytes(3200))
    with pytest.raises(AudioError, match="headerless samples"):
        load_audio(Utterance("utt", None, str(tmp_path / "a.raw")), 16000)


def test_permission_denied_is_named(tmp_path):
    utterance = write(tmp_path / "a.wav", noise(800))
    (tmp_path / "a.wav").chmod(0)
    user = os.geteuid()
    if user == 0:  # root may read everything
        os.seteuid(65534)
    try:
        with pytest.raises(AudioError, match=r"^utt: .*a\.wav: Permission denied"):
            load_audio(utterance, 16000)
    finally:
        os.seteuid(user)


def test_commands_write_audio_or_are_named_with_their_status(tmp_path):
    path = write(tmp_path / "a b.wav", noise(800), subtype="FLOAT").source
    good = Utterance("u", None, Command(f"cat '{path}'"))
    assert np.array_equal(load_audio(good, 16000), noise(800))
    for text, reason in (
        (f"cat '{path}'; echo one >&2; echo two >&2; exit 1", "ended with status 1: two"),
        ("exit 7", "ended with status 7"),
        ("kill -9 $$", "ended with status -9"),
        ("no-such-program", "ended with status 127"),
        ("true", "the file is empty"),
        ("echo text", "Expected audio"),
        ("cat", "the file is empty"),  # it is given no terminal to wait for
    ):
        with pytest.raises(AudioError, match=rf"^u: .*: .*{reason}") as caught:
            load_audio(Utterance("u", None, Command(text)), 16000)
        assert "\n" not in str(caught.value)


def test_lmdb_faults_are_audio_errors(tmp_path):
    lmdb = pytest.importorskip("lmdb")
    lmdb.open(str(tmp_path / "db"), map_size=1 << 20).close()
    for path, reason in ((tmp_path / "db", "no such key"), (tmp_path / "no", "no LMDB that can")):
        with pytest.raises(AudioError, match=rf"^u: {path}: k: {reason}"):
            load_audio(Utterance("u", None, LmdbValue(str(path), "k")), 16000)
