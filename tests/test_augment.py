"""Speed, noise at the SNR asked for, reverberation; sources and their refusals."""

import io
import logging
import multiprocessing
import pickle
import sys
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
import soundfile

from wespeaker_qmargin.augment import AudioSource, Augmenter, change_speed

RATE = 16000


def speech(samples: int = 32000, level: float = 0.05, seed: int = 0) -> np.ndarray:
    return (level * np.random.default_rng(seed).standard_normal(samples)).astype(np.float32)


def write_source(folder, files: dict[str, np.ndarray], rate: int = RATE):
    folder.mkdir()
    lines = []
    for number, (key, wav) in enumerate(files.items()):
        path = folder / f"{number}.wav"
        soundfile.write(path, wav, rate, subtype="FLOAT")
        lines.append(f"{key} {path}\n")
    (folder / "wav.scp").write_text("".join(lines))
    return folder


def write_lmdb(path, files: dict[str, bytes]):
    """As make_lmdb.py writes it, but with a pickle that would be noticed if it were opened."""
    lmdb = pytest.importorskip("lmdb")
    database = lmdb.open(str(path), map_size=1 << 24)
    with database, database.begin(write=True) as transaction:
        for key, value in files.items():
            transaction.put(key.encode(), value)
        transaction.put(b"__keys__", pickle.dumps(Bomb()))
    return path


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was opened",))


def wav_bytes(wav: np.ndarray, rate: int = RATE) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, wav, rate, format="WAV", subtype="PCM_16")
    return buffer.getvalue()


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def augmenter(noise=None, reverb=None, prob=1.0, sample_rate=RATE) -> Augmenter:
    noise, reverb = (path and AudioSource(path) for path in (noise, reverb))
    return Augmenter(noise, reverb, prob=prob, sample_rate=sample_rate)


@pytest.mark.parametrize("speed", [0.9, 1.1])
def test_speed_moves_pitch_and_length(speed):
    tone = np.sin(2 * np.pi * 500 * np.arange(RATE) / RATE).astype(np.float32)
    fast = change_speed(tone, speed)
    assert fast.dtype == np.float32 and len(fast) == round(RATE / speed)
    expected = np.sin(2 * np.pi * 500 * speed * np.arange(len(fast)) / RATE)
    np.testing.assert_allclose(fast[400:-400], expected[400:-400], atol=1e-3)
    assert change_speed(tone, 1.0) is tone


def dft_resample(wav: np.ndarray, length: int) -> np.ndarray:
    spectrum = np.fft.rfft(wav)[: length // 2 + 1]
    return np.fft.irfft(spectrum, length) * length / len(wav)


def test_speed_equals_the_ideal_resampler():
    wav = speech(8800, 0.1) * np.hanning(8800).astype(np.float32)
    spectrum = np.fft.rfft(wav)
    spectrum[3000:] = 0  # both resamplers roll off near half the rate
    wav = np.fft.irfft(spectrum).astype(np.float32)
    expected = dft_resample(wav, 8000)
    error = change_speed(wav, 1.1) - expected
    error = error[300:-300]
    assert 10 * np.log10(np.mean(expected**2) / np.mean(error**2)) > 60


@pytest.mark.parametrize("level", [0.2, 0.01, 0.0005])  # down to -66 dBFS
@pytest.mark.parametrize(
    "key, low, high",
    [
        ("noise/free-sound/a.wav", 0, 15),
        ("noise-fan-3", 0, 15),
        ("speech/us-gov/b.wav", 10, 30),
        ("musan/music/rfm/c.wav", 5, 15),
        ("babble/d.wav", 0, 15),
    ],
)
def test_snr_is_the_one_drawn_from_the_categorys_range(tmp_path, key, low, high, level):
    source = write_source(tmp_path / "noise", {key: speech(100000, 0.01, seed=1) ** 3})
    augment = augmenter(noise=source)
    wav, found = speech(level=level), []
    for seed in range(40):
        out = augment(wav, rng(seed))
        assert out.dtype == np.float32 and out.shape == wav.shape
        out = out.astype(np.float64)
        # the gain that is left if the sum was scaled down: noise is uncorrelated with speech
        gain = (out @ wav) / (wav @ wav.astype(np.float64))
        added = out / (gain if np.abs(out).max() > 0.999 else 1.0) - wav
        found.append(10 * np.log10(np.mean(np.square(wav, dtype=np.float64)) / np.mean(added**2)))
    assert low - 0.1 < min(found) and max(found) < high + 0.1
    assert min(found) < low + 0.15 * (high - low) and max(found) > high - 0.15 * (high - low)


def test_exact_snr_and_what_is_added(tmp_path):
    noise = speech(100000, 0.3, seed=1)
    augment = augmenter(noise=write_source(tmp_path / "noise", {"noise-a": noise}))
    wav = speech(level=0.01)
    draws = rng(7)
    out = augment(wav, draws)
    draws = rng(7)
    draws.random(), draws.integers(1), draws.integers(1)
    snr = draws.uniform(0, 15)
    added = (out - wav).astype(np.float64)
    found = 10 * np.log10(np.mean(np.square(wav, dtype=np.float64)) / np.mean(added**2))
    assert found == pytest.approx(snr, abs=0.01)
    # it is one piece of the file
    start = int(np.argmax(np.correlate(noise, added.astype(np.float32), "valid")))
    assert np.corrcoef(noise[start : start + len(wav)], added)[0, 1] > 0.9999


def test_short_noise_is_repeated(tmp_path):
    noise = speech(1000, seed=1)
    augment = augmenter(noise=write_source(tmp_path / "noise", {"noise-a": noise}))
    wav = speech(2600, 0.01)
    added = augment(wav, rng()) - wav
    np.testing.assert_allclose(added[:1000], added[1000:2000], atol=1e-6)
    np.testing.assert_allclose(added[:600], added[2000:], atol=1e-6)


def test_noise_at_another_rate_in_stereo(tmp_path):
    seconds = np.arange(3 * 44100) / 44100
    left, right = (0.1 * np.sin(2 * np.pi * f * seconds) for f in (1000, 3000))
    noise = write_source(tmp_path / "noise", {"noise-a": np.stack([left, right], 1)}, 44100)
    wav = speech(level=0.01)
    spectrum = np.abs(np.fft.rfft(augmenter(noise=noise)(wav, rng()) - wav))
    assert np.argmax(spectrum) == 1000 * len(wav) // RATE
    assert spectrum[3000 * len(wav) // RATE] < 0.01 * spectrum.max()


def test_a_silent_stretch_of_noise_is_passed_over(tmp_path):
    noise = np.zeros(200000)
    noise[150000:] = speech(50000, seed=1)
    augment = augmenter(noise=write_source(tmp_path / "noise", {"noise-a": noise}))
    for seed in range(20):
        assert np.abs(augment(speech(), rng(seed)) - speech()).max() > 1e-3


def test_silence_stays_silence(tmp_path):
    noise = write_source(tmp_path / "noise", {"noise-a": speech()})
    rir = write_source(tmp_path / "rir", {"rir-a": speech(800)})
    for augment in (augmenter(noise=noise), augmenter(reverb=rir)):
        assert not augment(np.zeros(3200, np.float32), rng()).any()


def test_reverb_is_convolution_with_unit_energy(tmp_path):
    rir = 7.0 * speech(3000) * np.exp(-np.arange(3000) / 400).astype(np.float32)
    augment = augmenter(reverb=write_source(tmp_path / "rir", {"rir-a": rir}))
    for wav in (speech(), speech(1000)):  # longer and shorter than the response
        expected = np.convolve(wav.astype(np.float64), rir / np.linalg.norm(rir))[: len(wav)]
        out = augment(wav, rng())
        assert out.dtype == np.float32 and out.shape == wav.shape
        np.testing.assert_allclose(out, expected, atol=1e-6)


def test_reverb_at_another_rate_in_stereo(tmp_path):
    rir = np.zeros((800, 2))
    rir[80, 0], rir[400, 1] = 0.5, 0.9  # a delay of 10 ms in the first channel
    source = write_source(tmp_path / "rir", {"rir-a": rir}, 8000)
    seconds = np.arange(RATE) / RATE
    wav = 0.1 * np.sin(2 * np.pi * 200 * seconds).astype(np.float32)
    out = augmenter(reverb=source)(wav, rng())
    lag = int(np.argmax(np.correlate(out[2000:10000], wav[1000:2000], "valid"))) + 1000
    assert lag % 80 == 0  # a multiple of the tone's period, so of 160 samples' delay too
    assert np.abs(out[:140]).max() < 0.01 * np.abs(out[400:]).max()


def test_only_what_would_clip_is_scaled(tmp_path):
    noise = write_source(tmp_path / "noise", {"noise-a": speech(seed=1)})
    augment = augmenter(noise=noise)
    loud, quiet = speech(level=0.4), speech(level=0.01)
    assert any(np.abs(augment(loud, rng(i))).max() == 1.0 for i in range(5))
    assert all(np.abs(augment(loud, rng(i))).max() <= 1.0 for i in range(20))
    assert all(np.abs(augment(quiet, rng(i))).max() < 0.5 for i in range(20))


def test_probability_and_even_odds(tmp_path):
    noise = write_source(tmp_path / "noise", {"noise-a": speech(400, 1e-3)})
    rir = write_source(tmp_path / "rir", {"rir-a": np.array([0.0, 1.0])})
    wav = speech(400)
    delayed = np.concatenate([[0], wav[:-1]])
    augment = augmenter(noise=noise, reverb=rir, prob=0.6)
    kinds, draws = [], rng()
    for _ in range(600):
        out = augment(wav, draws)
        kinds.append(
            "clean" if out is wav else "reverb" if np.allclose(out, delayed, atol=1e-6) else "noise"
        )
    assert 0.35 < kinds.count("clean") / 600 < 0.45
    assert 0.25 < kinds.count("reverb") / 600 < 0.35
    assert augmenter(noise=noise, prob=0.0)(wav, rng()) is wav
    assert augmenter()(wav, rng()) is wav
    assert not np.allclose(augmenter(noise=noise)(wav, rng()), delayed, atol=1e-6)
    assert np.allclose(augmenter(reverb=rir)(wav, rng()), delayed, atol=1e-6)
    with pytest.raises(ValueError, match=r"found prob=1\.5"):
        augmenter(prob=1.5)


def test_same_generator_same_result(tmp_path):
    files = {f"noise-{i}": speech(40000, seed=i) for i in range(5)}
    augment = augmenter(noise=write_source(tmp_path / "noise", files))
    again = pickle.loads(pickle.dumps(augment))
    wav = speech()
    assert np.array_equal(augment(wav, rng(3)), again(wav, rng(3)))
    assert not np.array_equal(augment(wav, rng(3)), augment(wav, rng(4)))
    assert np.array_equal(wav, speech())


def test_sources_scp_folder_and_lmdb_are_alike(tmp_path):
    wavs = {"music/b.wav": speech(seed=1), "noise/a.wav": speech(seed=2)}
    folder = write_source(tmp_path / "noise", wavs)
    database = write_lmdb(tmp_path / "db", {key: wav_bytes(wav) for key, wav in wavs.items()})
    for path in (folder, folder / "wav.scp", database):
        source = AudioSource(path)
        assert source.keys == list(wavs) and len(source) == 2
    for seed in range(4):
        found = [augmenter(noise=path)(speech(), rng(seed)) for path in (folder, database)]
        np.testing.assert_allclose(*found, atol=1e-3)  # the LMDB's are 16 bit


def read_once(augment: Augmenter, seed: int) -> np.ndarray:
    return augment(speech(), rng(seed))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_one_lmdb_serves_both_uses_and_other_processes(tmp_path, method):
    database = write_lmdb(tmp_path / "db", {"noise/a": wav_bytes(speech(seed=1))})
    augment = augmenter(noise=database, reverb=database)
    expected = [read_once(augment, seed) for seed in range(3)]
    context = multiprocessing.get_context(method)
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        found = list(pool.map(read_once, [augment] * 3, range(3), timeout=60))
    assert np.array_equal(found, expected)


def test_unknown_categories_are_told_once(tmp_path, caplog):
    files = {"noise/a": speech(), "babble/b": speech(), "cafe/c": speech()}
    with caplog.at_level(logging.WARNING):
        augment = augmenter(noise=write_source(tmp_path / "noise", files))
        for seed in range(5):
            augment(speech(), rng(seed))
    assert len(caplog.records) == 1
    assert "2 of 3 keys (the first: babble/b)" in caplog.text and "0 to 15 dB" in caplog.text


def test_what_is_refused(tmp_path):
    zeros = write_source(tmp_path / "zeros", {"rir-z": np.zeros(100)})
    with pytest.raises(ValueError, match=r"^rir-z: .*zeros/0\.wav: all samples are zero"):
        augmenter(reverb=zeros)(speech(), rng())
    with pytest.raises(ValueError, match=r"^rir-z: .*zeros/0\.wav: all samples are zero"):
        augmenter(noise=zeros)(speech(), rng())
    (zeros / "0.wav").write_bytes(b"no audio")
    with pytest.raises(ValueError, match=r"rir-z: .*0\.wav: "):
        augmenter(reverb=zeros)(speech(), rng())
    with pytest.raises(FileNotFoundError, match="nowhere"):
        AudioSource(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"wav\.scp, or an LMDB"):
        AudioSource(tmp_path)
    (zeros / "wav.scp").write_text("a sox x.mp3 |\n")
    with pytest.raises(ValueError, match="a: shell commands are not run"):
        AudioSource(zeros)


def test_empty_lmdb_and_missing_package(tmp_path, monkeypatch):
    database = write_lmdb(tmp_path / "db", {})
    with pytest.raises(ValueError, match="no audio in it"):
        AudioSource(database)
    monkeypatch.setitem(sys.modules, "lmdb", None)
    with pytest.raises(ImportError, match=r"pip install 'wespeaker-qmargin\[lmdb\]'"):
        AudioSource(database)


def test_a_broken_lmdb_is_refused(tmp_path):
    pytest.importorskip("lmdb")
    (tmp_path / "data.mdb").write_bytes(b"no database" * 999)
    with pytest.raises(ValueError, match="no LMDB that can be opened"):
        AudioSource(tmp_path)


def test_bad_files_are_passed_over_and_told(tmp_path):
    files = {"noise-z": np.zeros(800), "noise-a": speech(8000, seed=1), "noise-gone": speech()}
    noise = write_source(tmp_path / "noise", files)
    (noise / "2.wav").unlink()
    augment, told = augmenter(noise=noise), []
    for seed in range(30):
        problems = []
        out = augment(speech(level=0.01), rng(seed), problems=problems)
        again = augment(speech(level=0.01), rng(seed), problems=[])
        assert np.array_equal(out, again) and not np.array_equal(out, speech(level=0.01))
        told += problems
    assert set(told) == {
        f"noise-z: {noise}/0.wav: all samples are zero, or too few",
        f"noise-gone: {noise}/2.wav: No such file or directory",
    }


@pytest.mark.parametrize("broken", ["noise", "reverb"])
def test_a_source_of_bad_files_is_off_and_the_other_is_not(tmp_path, broken):
    bad = write_source(tmp_path / "bad", {"noise-z": np.zeros(800)})
    good = write_source(tmp_path / "good", {"noise-a": speech(800)})
    both = augmenter(**{"noise": good, "reverb": good, broken: bad})
    alone = augmenter(**{broken: bad})
    wav, told = speech(level=0.01), []
    for seed in range(20):
        out = both(wav, rng(seed), problems=told)
        assert np.isfinite(out).all() and not np.array_equal(out, wav)
        assert alone(wav, rng(seed), problems=told) is wav
    off = [text for text in set(told) if "this source is off" in text]
    assert len(off) == 1 and off[0].startswith(f"{bad}: 20 files drawn in a row are unusable")
    assert len(set(told)) == 2


@pytest.mark.parametrize("rate", [8000, 16000, 44100, 48000])
@pytest.mark.parametrize("samples", [1, 2, 3, 7, 1000])
def test_the_shortest_noise_gives_the_snr_or_is_refused(tmp_path, rate, samples):
    files = {"noise-a": 0.1 + 0.05 * np.random.default_rng(0).random((samples, 2))}
    augment = augmenter(noise=write_source(tmp_path / "noise", files, rate))
    wav, problems = speech(level=0.01), []
    out = augment(wav, rng(3), problems=problems).astype(np.float64)
    if problems:
        assert samples < 3 and rate > 16000 and np.array_equal(out, wav)
        return
    ratio = np.mean(np.square(wav, dtype=np.float64)) / np.mean((out - wav) ** 2)
    assert -0.1 < 10 * np.log10(ratio) < 15.1


@pytest.mark.parametrize("level", [1e-44, 1e-38, 1e-20, 1.0, 1e6])
def test_noise_of_any_level_gives_the_snr(tmp_path, level):
    noise = write_source(tmp_path / "noise", {"noise-a": speech(64000, seed=1) / 0.2})
    wav = (level * np.random.default_rng(1).standard_normal(64000)).astype(np.float32)
    soundfile.write(noise / "0.wav", wav, RATE, subtype="FLOAT")
    out = augmenter(noise=noise)(speech(level=0.01), rng(1)).astype(np.float64)
    added = out - speech(level=0.01)
    ratio = np.mean(np.square(speech(level=0.01), dtype=np.float64)) / np.mean(added**2)
    draws = rng(1)
    draws.random(), draws.integers(1), draws.integers(1)
    assert 10 * np.log10(ratio) == pytest.approx(draws.uniform(0, 15), abs=0.1)


def test_a_response_that_begins_after_the_crop_is_refused(tmp_path):
    rir = np.zeros(8000)
    rir[7000] = 1.0
    augment = augmenter(reverb=write_source(tmp_path / "rir", {"rir-a": rir}))
    assert augment(speech(8000), rng()).any()
    with pytest.raises(ValueError, match="or all that fit into the crop"):
        augment(speech(6000), rng())
