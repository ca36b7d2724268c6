"""What is wrong with audio files: each is decoded once, whole, in several processes.

As training and extraction read it: the first channel, at the file's own rate.
"""

import functools
import hashlib
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from wespeaker_qmargin.audio import Audio, AudioError, Utterance
from wespeaker_qmargin.sources import describe

_FULL_SCALE = 0.999
_CHUNK = 64  # files that a process takes at a time


class Finding(NamedTuple):
    """Something wrong: its kind, the key (or speaker, or line) and one line that says it all."""

    kind: str
    key: str
    text: str


class Limits(NamedTuple):
    """What is short, silent and clipped.

    ``min_seconds``: the default is the 100 frames that training asks for. ``silent_dbfs``: half the
    distance from the lowest to the highest sample, in dB of full scale; a constant has none.
    ``clipped_share``: of the samples, at 0.999 of full scale or beyond.
    """

    min_seconds: float = 1.0
    silent_dbfs: float = -60.0
    clipped_share: float = 0.001


class Measured(NamedTuple):
    """One audio file: ``digest`` of its samples, ``swing`` from the lowest to the highest."""

    key: str
    problem: str | None = None
    rate: int = 0
    channels: int = 0
    num_samples: int = 0
    swing: float = 0.0
    clipped: int = 0
    digest: bytes = b""


def measure(utterance: Utterance) -> Measured:
    """Decode an utterance, in memory that does not grow with its length."""
    low, high, clipped, digest = np.inf, -np.inf, 0, hashlib.blake2b(digest_size=16)
    try:
        with Audio(utterance) as audio:
            for block in audio.blocks():
                low, high = min(low, float(block.min())), max(high, float(block.max()))
                clipped += int(np.count_nonzero(np.abs(block) >= _FULL_SCALE))
                digest.update(block)
            shape = audio.rate, audio.num_channels, audio.num_samples
    except AudioError as error:
        return Measured(utterance.key, str(error))
    return Measured(utterance.key, None, *shape, high - low, clipped, digest.digest())


def measure_all(utterances: Sequence[Utterance], jobs: int) -> list[Measured]:
    """Measure every utterance, in ``jobs`` processes; the order is that of ``utterances``.

    Raises:
        ChildProcessError: one of the processes was killed.
    """
    bar = functools.partial(
        tqdm, total=len(utterances), desc="check-data", unit="file", disable=None
    )
    if jobs == 1:
        return list(bar(map(measure, utterances)))
    chunk = max(1, min(_CHUNK, len(utterances) // (4 * jobs)))
    done: list[Measured] = []
    with ProcessPoolExecutor(jobs) as pool:
        try:
            done.extend(bar(pool.map(measure, utterances, chunksize=chunk)))
        except BrokenProcessPool as error:
            raise ChildProcessError(
                "a process that read audio was killed (out of memory, or by a fault of the "
                f"decoder) at {utterances[len(done)].key} or up to {chunk * jobs} files later: "
                "--jobs 1 ends at the very file"
            ) from error
    return done


def audio_findings(
    utterances: Sequence[Utterance], measured: Sequence[Measured], limits: Limits
) -> list[Finding]:
    """Return what the audio by itself shows: bad, short, silent, clipped, duplicate.

    Of utterances with the same samples and one speaker the first is fine; where the speakers
    differ none is, since at least one of the labels is wrong.
    """
    findings, same = [], defaultdict(list)
    for utterance, values in zip(utterances, measured):
        kinds = _judge(values, limits)
        name = f"{utterance.key}: {describe(utterance.source)}"
        findings += [
            Finding(kind, utterance.key, values.problem or f"{name}: {reason}")
            for kind, reason in kinds.items()
        ]
        if kinds.keys().isdisjoint({"bad", "silent"}):
            same[values.digest].append(utterance)
    for group in same.values():
        findings += _duplicates(group)
    return findings


def _judge(values: Measured, limits: Limits) -> dict[str, str]:
    """Return kind -> reason of what one file shows by itself."""
    if values.problem is not None:
        return {"bad": values.problem}
    kinds, seconds = {}, values.num_samples / values.rate
    if seconds < limits.min_seconds:
        kinds["short"] = f"too short: {seconds:.3f} s, expected {limits.min_seconds:g} s or more"
    if values.swing / 2 <= 10 ** (limits.silent_dbfs / 20):
        channel = f" in the first of {values.channels} channels" * (values.channels > 1)
        kinds["silent"] = f"no sample is louder than {limits.silent_dbfs:g} dBFS{channel}"
    share = values.clipped / values.num_samples
    if share > limits.clipped_share:
        kinds["clipped"] = f"{100 * share:.2f} % of the samples are at full scale"
    return kinds


def _duplicates(group: list[Utterance]) -> list[Finding]:
    first = group[0]
    if len({utterance.spk for utterance in group}) == 1:
        return [
            Finding("duplicate", u.key, f"{u.key}: {describe(u.source)}: the same as {first.key}")
            for u in group[1:]
        ]
    found = []
    for u in group:
        other = next(o for o in group if o.spk != u.spk)
        text = f"the same as {other.key}, but speaker {u.spk} here, {other.spk} there"
        found.append(Finding("duplicate", u.key, f"{u.key}: {describe(u.source)}: {text}"))
    return found
