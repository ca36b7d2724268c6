"""Which samples of which file an utterance is, and reading them.

Reads what libsndfile reads (wav, flac, ogg, opus, mp3), the first channel only as WeSpeaker
does, as float32 in [-1, 1]. A file that ends early is told from a whole one in wav, flac and
mp3; an ogg or opus stream says nowhere how long it should be.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import soundfile
import soxr

from wespeaker_qmargin.sources import Source, describe, open_source, why

# libsndfile lands near the sample asked for in these, not on it: they are decoded from the start
_INEXACT_SEEK = {"VORBIS", "MPEG_LAYER_I", "MPEG_LAYER_II", "MPEG_LAYER_III"}
# sizes at or above this are what programs write into a pipe, where they cannot know the length
_STREAMED_WAV = 0x7FFFF000
# libsndfile's way to say that the length is unknown (a FLAC written into a pipe) is 2^63 - 1
_MAX_SAMPLES = 2**40
_RATES = (1000, 768000)  # Hz; others are broken headers, and would ask for any amount of memory
_BLOCK = 2**20
_MAX_JUNK = 0.01  # of a wav, behind its samples
_FORMATS = "wav, flac, ogg, opus or mp3"


class AudioError(ValueError):
    """Audio that cannot be used; the text is ``key: path: reason``."""


class TooShort(AudioError):
    """Sound audio, but too little of it."""


class Utterance(NamedTuple):
    """One utterance and the audio file it is in.

    ``spk`` is None where the lists name no speaker; ``vad`` is None, or (start, end) pairs in
    seconds: the utterance is then those pieces, one after the other.
    """

    key: str
    spk: str | None
    source: Source
    vad: tuple[tuple[float, float], ...] | None = None


class Audio:
    """An utterance, opened: ``rate`` in Hz, ``num_samples`` at that rate, `read` and `blocks`.

    ``num_channels`` are in the file; the first is read.

    Raises:
        AudioError: a missing, empty, truncated or non-audio file, one that is not a file at all, a
            header with a wrong length or a rate outside 1 to 768 kHz, a command that fails, or
            nothing left by the VAD.
    """

    def __init__(self, utterance: Utterance):
        self._name = f"{utterance.key}: {describe(utterance.source)}"
        self._file, self._position = self._open(utterance.source), 0
        self.rate, self.num_channels = self._file.samplerate, self._file.channels
        try:
            self._check_header()
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

    def blocks(self) -> Iterator[np.ndarray]:
        """Yield what `read` returns in pieces of at most 2^20 samples, for any length."""
        for first, last in self._spans:
            self._seek(first)
            while self._position < last:
                yield self._next(min(_BLOCK, last - self._position))

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
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _decode(self, start: int, stop: int) -> np.ndarray:
        self._seek(start)
        return self._next(stop - start)

    def _seek(self, start: int) -> None:
        exact = self._file.seekable() and self._file.subtype not in _INEXACT_SEEK
        if start < self._position or (exact and start > self._position):
            self._position = start if exact else 0
            try:
                self._file.seek(self._position)
            except soundfile.LibsndfileError as error:
                raise self.error(f"broken audio ({error.error_string})") from error
        while self._position < start:
            self._next(min(_BLOCK, start - self._position))

    def _next(self, count: int) -> np.ndarray:
        """Decode the next ``count`` samples."""
        try:
            wav = self._file.read(count, dtype="float32", always_2d=True)
        except soundfile.LibsndfileError as error:
            raise self.error(f"broken audio ({error.error_string})") from error
        self._position += len(wav)
        if len(wav) < count:
            raise self.error(
                f"truncated: {self._position} of {self._file.frames} samples are there"
            )
        wav = np.ascontiguousarray(wav[:, 0])
        if not np.isfinite(wav).all():
            raise self.error("NaN or infinite samples")
        return wav

    def _open(self, source) -> soundfile.SoundFile:
        try:
            return soundfile.SoundFile(open_source(source))
        except (OSError, ValueError) as error:
            raise self.error(why(source, error)) from error
        except TypeError as error:  # soundfile's word on a name that ends in .raw
            raise self.error(f"headerless samples. Expected audio: {_FORMATS}.") from error
        except soundfile.LibsndfileError as error:
            raise self.error(f"{error.error_string} Expected audio: {_FORMATS}.") from error

    def _check_header(self) -> None:
        low, high = _RATES
        if not low <= self.rate <= high:
            raise self.error(f"expected a rate of {low} to {high} Hz, its header says {self.rate}")
        log = self._file.extra_info
        # libsndfile reads a wav cut short without a word, except in its log
        sizes = re.search(r"^data : (\d+) \(should be (\d+)\)", log, re.MULTILINE)
        if sizes is not None:
            promised, found = map(int, sizes.groups())
            if found < promised < _STREAMED_WAV:
                raise self.error(f"truncated: {found} of {promised} bytes of samples are there")
        # and a wav of which more is there than the header says
        sizes = re.search(
            r"^Length : (\d+)$.*^data : (\d+)$\s*(?:\*\*\* )?Unknown chunk.* at position (\d+)",
            log,
            re.MULTILINE | re.DOTALL,
        )
        if sizes is not None:
            length, promised, position = map(int, sizes.groups())
            if length - position > _MAX_JUNK * length:
                raise self.error(
                    f"its header says {promised} bytes of samples, but {length - position} bytes "
                    "follow them: write the file again"
                )

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
