"""How minivox's clips were made of recordings: decoded, trimmed, cut at pauses, written as FLAC."""

import io
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import numpy as np
import soundfile

from wespeaker_qmargin.files import atomic_path

RATE = 16000
FRAME = 320
MARGIN = 5  # frames kept on either side of the speech
LIMIT_S = {("commonvoice6.1", "train"): 5.6, ("commonvoice6.1", "test"): 5.6}
LIMIT_S[("librispeech", "test")] = 8.0
PIECES = 3
PIECE_S = 10.35 / PIECES  # not 3.45: the rounding decides the last sample


class Programs(NamedTuple):
    """ffmpeg, and flac or None (libsndfile writes then)."""

    ffmpeg: str
    flac: str | None


def find_programs(ffmpeg: str | None = None, flac: str | None = None) -> Programs:
    """Return the programs named, else those in PATH, else imageio-ffmpeg's ffmpeg and no flac.

    Raises:
        FileNotFoundError: a program that was named is not there, or there is no ffmpeg at all.
    """
    for name in filter(None, (ffmpeg, flac)):
        if shutil.which(name) is None:
            raise FileNotFoundError(f"{name}: no such program")
    found = ffmpeg or shutil.which("ffmpeg")
    if found is None:
        try:
            from imageio_ffmpeg import get_ffmpeg_exe
        except ImportError:
            raise FileNotFoundError(
                "no ffmpeg in PATH: install it, or `pip install imageio-ffmpeg`, or name --ffmpeg"
            ) from None
        found = get_ffmpeg_exe()
    return Programs(found, flac or shutil.which("flac"))


def decoded(path: Path, ffmpeg: str) -> np.ndarray:
    """Return the audio of a file as int16 (T,) at 16 kHz, mono.

    Raises:
        FileNotFoundError: no such file.  ValueError: ffmpeg's reason why it cannot be read.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; is the clone whole?")
    command = [ffmpeg, "-v", "error", "-nostdin", "-i", str(path)]
    command += ["-ar", str(RATE), "-ac", "1", "-f", "s16le", "-"]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode or len(done.stdout) < 2 * FRAME:  # 2 bytes a sample
        reason = done.stderr.decode(errors="replace").strip() or "too short"
        raise ValueError(f"{path}: ffmpeg: {reason}")
    return np.frombuffer(done.stdout, dtype="<i2")


def frame_power(wav: np.ndarray) -> np.ndarray:
    """Return the mean square of every whole 20 ms frame, float64, full scale = 1."""
    frames = wav[: len(wav) // FRAME * FRAME].reshape(-1, FRAME) / 32768.0
    return (frames**2).mean(axis=1)


def speech_span(wav: np.ndarray) -> tuple[int, int]:
    """Return (first, stop) samples of ``wav`` int16 (T,) without leading and trailing silence.

    Raises:
        ValueError: no frame is above -60 dBFS.
    """
    level = 10 * np.log10(frame_power(wav) + 1e-10)
    loud = np.flatnonzero(level > max(np.percentile(level, 95) - 30, -60))
    if not len(loud):
        raise ValueError("nothing is louder than -60 dBFS")
    return max(0, loud[0] - MARGIN) * FRAME, min(len(wav), (loud[-1] + 1 + MARGIN) * FRAME)


def cut_at_pauses(wav: np.ndarray) -> list[np.ndarray]:
    """Return 1 to 3 consecutive pieces of a trimmed utterance, cut where it is quietest."""
    count = min(PIECES, max(1, len(wav) // (3 * RATE)))
    wav = wav[: int(count * PIECE_S * RATE)]
    power = np.convolve(frame_power(wav), np.ones(5) / 5, "same")
    reach = int(0.8 * RATE)
    cuts = [0]
    for k in range(1, count):
        middle = len(wav) * k / count
        low, high = int((middle - reach) / FRAME), int((middle + reach) / FRAME)
        cuts.append((low + int(np.argmin(power[low:high]))) * FRAME)
    return [wav[a:b] for a, b in zip(cuts, [*cuts[1:], len(wav)])]


def clips(wav: np.ndarray, source: str, split: str) -> list[np.ndarray]:
    """Return what minivox keeps of a decoded recording: one clip, or LibriSpeech's train pieces."""
    first, stop = speech_span(wav)
    if (source, split) == ("librispeech", "train"):
        return cut_at_pauses(wav[first:stop])
    return [wav[first:stop][: int(LIMIT_S[source, split] * RATE)]]


def write_flac(path: Path, wav: np.ndarray, flac: str | None) -> None:
    """Write int16 (T,) at 16 kHz, by the program ``flac`` or, where it is None, by libsndfile."""
    with atomic_path(path) as temporary:
        if flac is None:
            soundfile.write(temporary, wav, RATE, "PCM_16", format="FLAC")
            return
        buffer = io.BytesIO()
        soundfile.write(buffer, wav, RATE, "PCM_16", format="WAV")
        command = [flac, "-8", "--silent", "--no-padding", "-f", "-o", str(temporary), "-"]
        done = subprocess.run(command, input=buffer.getvalue(), capture_output=True, check=False)
        if done.returncode:
            raise ValueError(f"{path}: flac: {done.stderr.decode(errors='replace').strip()}")
