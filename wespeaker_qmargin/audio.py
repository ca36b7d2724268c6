"""Which samples of which file an utterance is, and reading them.

Reads what libsndfile reads (wav, flac, ogg, opus, mp3), the first channel only as WeSpeaker
does, as float32 in [-1, 1]. A file that ends early is told from a whole one in wav, flac and
mp3; an ogg or opus stream says nowhere how long it should be.
"""

import io
import re
from typing import NamedTuple

import numpy as np
import soundfile
import soxr

# libsndfile lands near the sample asked for in these, not on it: they are decoded from the start
_INEXACT_SEEK = {"VORBIS", "MPEG_LAYER_I", "MPEG_LAYER_II", "MPEG_LAYER_III"}
# sizes at or above this are what programs write into a pipe, where they cannot know the length
_STREAMED_WAV = 0x7FFFF000
# libsndfile's way to say that the length is unknown (a FLAC written into a pipe) is 2^63 - 1
_MAX_SAMPLES = 2**40


class AudioError(ValueError):
    """Audio that cannot be used; the text is ``key: path: reason``."""


class TooShort(AudioError):
    """Sound audio, but too little of it."""


class TarMember(NamedTuple):
    """A file of ``size`` bytes at ``offset`` of an uncompressed tar file."""

    path: str
    offset: int
    size: int
    name: str


class LmdbValue(NamedTuple):
    """An audio file that is the value of ``key`` in the LMDB at ``path``."""

    path: str
    key: str


class Utterance(NamedTuple):
    """One utterance and the audio file it is in: a path, a `TarMember` or an `LmdbValue`.

    ``spk`` is None where the lists name no speaker; ``vad`` is None, or (start, end) pairs in
    seconds: the utterance is then those pieces, one after the other.
    """

    key: str
    spk: str | None
    source: str | TarMember | LmdbValue
    vad: tuple[tuple[float, float], ...] | None = None


class Audio:
    """An utterance, opened: ``rate`` in Hz, ``num_samples`` at that rate, and `read`.

    Raises:
        AudioError: a missing, empty, truncated or non-audio file, or nothing left by the VAD.
    """

    def __init__(self, utterance: Utterance):
        self._name = f"{utterance.key}: {_describe(utterance.source)}"
        try:
            self._file = _open(utterance.source)
        except (OSError, soundfile.LibsndfileError) as error:
            raise self.error(_open_failure(utterance.source, error)) from error
        try:
            self._check_wav_length()
            self.rate = self._file.samplerate
            self._spans = self._find_spans(utterance.vad)
        except AudioError:
            self._file.close()
            raise
        self.num_samples = sum(stop - start for start, stop in self._spans)

    def __enter__(self) -> "Audio":
        return self

    def __exit__(self, *exception) -> None:
        self._file.close()

    def error(self, reason: str, kind: type[AudioError] = AudioError) -> AudioError:
        """Return (not raise) an error that names the utterance and its file."""
        return kind(f"{self._name}: {reason}")

    def require(self, num_samples: int, sample_rate: int) -> None:
        """Raise `TooShort` unless this lasts as long as ``num_samples`` at ``sample_rate``."""
        if self.num_samples * sample_rate < num_samples * self.rate:
            raise self.error(
                f"too short: {self.num_samples / self.rate:.3f} s, "
                f"at least {num_samples / sample_rate:.3f} s are needed",
                TooShort,
            )

    def read(self, start: int = 0, count: int | None = None) -> np.ndarray:
        """Return samples ``[start : start + count]`` (by default all) at ``rate``, float32."""
        stop = self.num_samples if count is None else start + count
        parts, position = [], 0
        for first, last in self._spans:
            begin = first + max(start - position, 0)
            end = min(last, first + stop - position)
            if begin < end:
                parts.append(self._decode(begin, end))
            position += last - first
        wav = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if not np.isfinite(wav).all():
            raise self.error("NaN or infinite samples")
        return wav

    def _decode(self, start: int, stop: int) -> np.ndarray:
        first = 0 if self._file.subtype in _INEXACT_SEEK else start
        try:
            self._file.seek(first)
            wav = self._file.read(stop - first, dtype="float32", always_2d=True)
        except soundfile.LibsndfileError as error:
            raise self.error(f"broken audio ({error.error_string})") from error
        if len(wav) < stop - first:
            raise self.error(f"truncated: it ends {stop - first - len(wav)} samples early")
        return np.ascontiguousarray(wav[start - first :, 0])

    def _check_wav_length(self) -> None:
        # libsndfile reads a wav cut short without a word, except in its log
        sizes = re.search(r"^data : (\d+) \(should be (\d+)\)", self._file.extra_info, re.MULTILINE)
        if sizes is not None:
            promised, found = map(int, sizes.groups())
            if found < promised < _STREAMED_WAV:
                raise self.error(f"truncated: {found} of {promised} bytes of samples are there")

    def _find_spans(self, vad) -> list[tuple[int, int]]:
        total = self._file.frames
        if total == 0:
            raise self.error("holds no samples")
        if total > _MAX_SAMPLES:
            raise self.error("the header does not say how long it is: write the file again")
        if vad is None:
            return [(0, total)]
        spans = [(int(a * self.rate), min(int(b * self.rate), total)) for a, b in vad]
        spans = [(start, stop) for start, stop in spans if start < stop]
        if not spans:
            raise self.error(
                f"no speech: all VAD segments end before, or start after, {total} samples"
            )
        return spans


def load_audio(utterance: Utterance, sample_rate: int, *, min_samples: int = 1) -> np.ndarray:
    """Return the whole utterance, float32 (T,) in [-1, 1] at ``sample_rate``.

    Raises:
        AudioError: ``key: path: reason``; `TooShort` when it is shorter than ``min_samples``.
    """
    with Audio(utterance) as audio:
        audio.require(min_samples, sample_rate)
        return resample(audio.read(), audio.rate, sample_rate)


def resample(wav: np.ndarray, rate: float, new_rate: float) -> np.ndarray:
    """Return ``wav`` (T,) float32 at another rate, ``round(T * new_rate / rate)`` samples.

    soxr's HQ recipe, the one that equals the ``rate`` effect of SoX (to 87-90 dB).
    """
    return wav if rate == new_rate else soxr.resample(wav, rate, new_rate, quality="HQ")


def open_lmdb(path: str):
    """Return the LMDB at ``path``, opened for reading.

    Close it after use: a process can open an LMDB only once, a forked worker not at all while its
    parent has it open, and opening takes 0.1 ms.

    Raises:
        ImportError: the package ``lmdb`` is not installed.
    """
    try:
        import lmdb
    except ImportError as error:
        raise ImportError(f"{path} is an LMDB: pip install 'wespeaker-qmargin[lmdb]'") from error
    return lmdb.open(path, readonly=True, lock=False, readahead=False)


def _open(source) -> soundfile.SoundFile:
    if isinstance(source, str):
        return soundfile.SoundFile(source)
    return soundfile.SoundFile(io.BytesIO(_stored_bytes(source)))


def _stored_bytes(source: TarMember | LmdbValue) -> bytes:
    if isinstance(source, TarMember):
        with open(source.path, "rb") as tar:
            tar.seek(source.offset)
            return tar.read(source.size)
    with open_lmdb(source.path) as database, database.begin() as transaction:
        return transaction.get(source.key.encode())


def _describe(source) -> str:
    return source if isinstance(source, str) else f"{source.path}: {source[-1]}"


def _open_failure(source, error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror
    try:
        if isinstance(source, str):
            # libsndfile's "System error" hides which one
            with open(source, "rb") as file:
                empty = not file.read(1)
        else:
            empty = not _stored_bytes(source)
    except OSError as reason:
        return reason.strerror
    if empty:
        return "the file is empty"
    return f"{error.error_string} Expected audio: wav, flac, ogg, opus or mp3."
