"""Augmentation of one waveform, float32 (T,) in [-1, 1]: speed, noise, reverberation.

Every function takes its random numbers from the generator it is given and from nowhere else.
"""

import logging
from pathlib import Path

import numpy as np
import scipy.fft

from wespeaker_qmargin.audio import Audio, AudioError, Utterance, resample
from wespeaker_qmargin.files import read_table
from wespeaker_qmargin.lists import local_path
from wespeaker_qmargin.sources import LmdbValue, open_lmdb

logger = logging.getLogger(__name__)

# dB; Snyder et al. 2018 (X-vectors), as WeSpeaker has them
_SNR_RANGES = {"noise": (0.0, 15.0), "speech": (10.0, 30.0), "music": (5.0, 15.0)}
_OTHER_SNR_RANGE = (0.0, 15.0)
_MAX_TRIES = 20


def change_speed(wav: np.ndarray, speed: float) -> np.ndarray:
    """Return ``wav`` played ``speed`` times as fast, pitch included: ``round(T / speed)`` samples.

    Equals SoX's effects ``speed`` and ``rate``, which upstream calls.
    """
    return resample(wav, speed, 1.0)


class AudioSource:
    """Noise or impulse responses by number: a ``wav.scp``, a folder with one, or upstream's LMDB.

    Holds names only and opens what it reads each time (0.1 ms for an LMDB), so it can be
    pickled, forked and opened twice. ``keys`` are in the file's order (an LMDB's: sorted).

    Raises:
        FileNotFoundError: nothing there.  ValueError: no wav.scp and no LMDB, or an empty one; a
            shell command or URL in the place of a path.
        ImportError: an LMDB, and the package ``lmdb`` is not installed.
    """

    def __init__(self, path):
        self.path = Path(path)
        if not self.path.exists():
            raise FileNotFoundError(f"{path}: no such file or folder")
        self._paths = None
        if (self.path / "data.mdb").is_file():
            self.keys = self._lmdb_keys()
        elif self.path.is_file() or (self.path / "wav.scp").is_file():
            table = read_table(self.path if self.path.is_file() else self.path / "wav.scp")
            self.keys = list(table)
            self._paths = [local_path(f"{path}: {key}", wav) for key, wav in table.items()]
        else:
            raise ValueError(
                f"{path}: expected a wav.scp, a folder with wav.scp, or an LMDB (data.mdb)"
            )
        if not self.keys:
            raise ValueError(f"{path}: no audio in it")

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> Utterance:
        """Return what `Audio` and `load_audio` read."""
        key = self.keys[index]
        source = LmdbValue(str(self.path), key) if self._paths is None else self._paths[index]
        return Utterance(key, None, source)

    def _lmdb_keys(self) -> list[str]:
        with open_lmdb(str(self.path)) as database, database.begin() as transaction:
            # upstream also stores a pickled list of keys; unpickling runs code, a cursor does not
            keys = transaction.cursor().iternext(keys=True, values=False)
            return [key.decode() for key in keys if key != b"__keys__"]


class Augmenter:
    """With probability ``prob``, reverberation or noise (even odds where both are given).

    Reverberation: convolution with a random impulse response of unit energy, cut to T samples.
    Noise: a random piece of a random file, repeated where it is shorter than T, at an SNR drawn
    from the range of its category: ``noise`` 0-15 dB, ``speech`` 10-30 dB, ``music`` 5-15 dB.
    The category is how the key or one of its path parts begins (``music/rfm/a.wav``,
    ``noise-fan-3``); others: 0-15 dB.

    Two things differ from upstream. There 1e-4 is added to both powers, so that faint speech
    (-45 dBFS) gets 4 dB more noise than asked for; here the SNR is that of the powers. There the
    result always gets a peak of 1; here it is scaled down to that only where it would clip: CMN
    takes a gain out of fbanks anyway, but a front-end that is fed the wave, and the dither,
    would tell augmented samples from clean ones by their level.

    Args:
        noise, reverb: `AudioSource` or None.
        prob: in [0, 1].
        sample_rate: of the waveforms (Hz); noise and responses at other rates are resampled.
    """

    def __init__(
        self,
        noise: AudioSource | None,
        reverb: AudioSource | None,
        *,
        prob: float,
        sample_rate: int,
    ):
        if not 0.0 <= prob <= 1.0:
            raise ValueError(f"expected a probability in [0, 1], found prob={prob}")
        self._noise, self._reverb = noise, reverb
        self._kinds = [
            (effect, source)
            for effect, source in ((self._add_reverb, reverb), (self._add_noise, noise))
            if source is not None
        ]
        self._prob, self._sample_rate = prob, sample_rate
        if noise is not None:
            self._warn_of_unknown_categories()

    def __call__(
        self, wav: np.ndarray, rng: np.random.Generator, *, problems: list[str] | None = None
    ) -> np.ndarray:
        """Return ``wav`` (T,), or a new waveform of its length.

        A file that is broken or silent is passed over for another one of its source. Where 20 in a
        row are, that source is off for this waveform: it gets the other effect, or stays clean.

        Args:
            problems: gets the ``key: path: reason`` of all that; None: such a file is an error.

        Raises:
            AudioError: a noise or impulse response that is broken or silent (``problems`` None).
        """
        if not self._kinds or rng.random() >= self._prob:
            return wav
        kinds = list(self._kinds)
        while kinds:
            effect, source = kinds.pop(rng.integers(len(kinds)))
            for _ in range(_MAX_TRIES):
                try:
                    out = effect(wav, source[rng.integers(len(source))], rng)
                    return out / max(1.0, float(np.abs(out).max()))
                except AudioError as error:
                    if problems is None:
                        raise
                    problems.append(str(error))
            problems.append(
                f"{source.path}: {_MAX_TRIES} files drawn in a row are unusable: this source is "
                "off for the samples where that happens"
            )
        return wav

    def _add_reverb(self, wav: np.ndarray, response: Utterance, rng) -> np.ndarray:
        with Audio(response) as audio:
            rir = resample(audio.read(), audio.rate, self._sample_rate)
            if not rir[: len(wav)].any():
                raise audio.error("all samples are zero, or all that fit into the crop")
        energy = float(np.square(rir, dtype=np.float64).sum())
        rir = rir[: len(wav)] / np.float32(np.sqrt(energy))
        size = scipy.fft.next_fast_len(len(wav) + len(rir) - 1, real=True)
        spectrum = scipy.fft.rfft(wav, size) * scipy.fft.rfft(rir, size)
        return scipy.fft.irfft(spectrum, size)[: len(wav)]

    def _add_noise(self, wav: np.ndarray, utterance: Utterance, rng) -> np.ndarray:
        snr = rng.uniform(*(_snr_range(utterance.key) or _OTHER_SNR_RANGE))
        noise = self._noise_piece(utterance, len(wav), rng)
        gain = np.sqrt(_power(wav) / _power(noise)) * 10.0 ** (-snr / 20.0)
        # in float64: the gain of a noise as faint as 1e-40 is beyond float32
        return wav + (gain * noise.astype(np.float64)).astype(np.float32)

    def _noise_piece(self, utterance: Utterance, length: int, rng) -> np.ndarray:
        with Audio(utterance) as audio:
            count = min(audio.num_samples, -(-length * audio.rate // self._sample_rate) + 1)
            start = int(rng.integers(audio.num_samples - count + 1))
            piece = self._fit(audio.read(start, count), audio.rate, length)
            if not piece.any():
                # a silent stretch: take the piece that begins with the loudest sample instead
                whole = audio.read()
                piece = self._fit(whole[np.abs(whole).argmax() :][:count], audio.rate, length)
                if not piece.any():
                    raise audio.error("all samples are zero, or too few")
        return piece

    def _fit(self, piece: np.ndarray, rate: int, length: int) -> np.ndarray:
        return np.resize(resample(piece, rate, self._sample_rate), length)

    def _warn_of_unknown_categories(self) -> None:
        unknown = [key for key in self._noise.keys if _snr_range(key) is None]
        if unknown:
            logger.warning(
                "%s: %d of %d keys (the first: %s) begin with none of %s; their SNR is %g to %g dB",
                self._noise.path,
                len(unknown),
                len(self._noise),
                unknown[0],
                ", ".join(_SNR_RANGES),
                *_OTHER_SNR_RANGE,
            )


def _power(wav: np.ndarray) -> float:
    return float(np.square(wav, dtype=np.float64).mean())


def _snr_range(key: str) -> tuple[float, float] | None:
    for part in key.split("/"):
        for category, snr_range in _SNR_RANGES.items():
            if part.startswith(category):
                return snr_range
    return None
