"""The training set and its batches; whole utterances for extraction.

An item is a pure function of (seed, epoch, index): its crop, its speed, its noise. With the
order of `wespeaker_qmargin.order` a resumed run sees what an uninterrupted one sees, with any
number of workers.
"""

import functools
import math
from collections.abc import Sequence
from itertools import chain, groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from wespeaker_qmargin.audio import (
    Audio,
    AudioError,
    TooShort,
    Utterance,
    load_audio,
    resample,
)
from wespeaker_qmargin.augment import Augmenter, change_speed
from wespeaker_qmargin.order import EpochBatches
from wespeaker_qmargin.sources import TarMember

_SPEEDS = (1.0, 0.9, 1.1)  # of the class blocks 0, 1, 2, as upstream lays them out
_MAX_TRIES = 200  # with nine of ten utterances too short, all of them fail once in 1e9 items
_TOLD = 3  # of the reasons, when none is left to try
_DOMAIN = 1  # keeps the items' random numbers apart from those of the order


class Sample(NamedTuple):
    """One training example; the fields are those of `Batch`."""

    wav: Tensor
    label: int
    seed: int
    key: str
    problems: list[str]
    too_short: list[str]
    bad_sources: list[str]


class Batch(NamedTuple):
    """``wavs`` float32 (B, T) in [-1, 1], ``labels`` and ``seeds`` int64 (B,), ``keys``.

    ``wavs`` may be filter banks (B, frames, bands) instead, see `collate`. ``seeds`` are for what
    is drawn later (dither, SpecAugment). ``problems`` and ``too_short`` tell what another item was
    taken for, as ``key: path: reason``: files that could not be read, and utterances below
    ``min_num_frames``; ``bad_sources``, noise and impulse responses that could not be used.
    """

    wavs: Tensor
    labels: Tensor
    seeds: Tensor
    keys: list[str]
    problems: list[str]
    too_short: list[str]
    bad_sources: list[str]


class TrainSet(Dataset):
    """Random crops of utterances; item (epoch, index) is a `Sample`.

    ``len`` is the number of items in an epoch, ``num_class`` of classes, ``num_samples`` the
    length T of a crop, ``block`` the number of items in each shard, in order (None without
    shards).

    Of a file only what the crop needs is read: an utterance is cropped first and resampled then.
    A crop longer than its utterance, or than ``max_num_frames``, repeats what there is. Any place
    is as likely as any other (upstream's crop within a crop favours the middle of long
    utterances).

    Args:
        utterances: with speakers.
        labels: speaker -> class in [0, number of speakers), from `speaker_labels`.
        dataset_args: has the attributes ``resample_rate``, ``num_frms``, ``frontend`` and its
            ``fbank_args`` (...) for the frame length and shift, ``filter``, ``filter_args``,
            ``speed_perturb``, ``speed_perturb_mode`` (``random``: a speed is drawn;
            ``expanded``: three items an utterance, one at each speed), ``speed_perturb_labels``
            (``new``: at another speed another speaker, class + number of speakers x 1 or 2;
            ``same``: not so).
        seed: >= 0.
        augmenter: called with each waveform, a generator and ``problems``, or None.

    Raises:
        ValueError: an empty list, an utterance whose speaker has no class, an unknown mode.
    """

    def __init__(
        self,
        utterances: Sequence[Utterance],
        labels: dict[str, int],
        dataset_args,
        *,
        seed: int,
        augmenter: Augmenter | None = None,
    ):
        args = dataset_args
        _check(utterances, labels, args)
        self._utterances, self._labels = utterances, labels
        self._seed, self._augmenter, self._rate = seed, augmenter, args.resample_rate
        self._perturb = args.speed_perturb
        self._expanded = self._perturb and args.speed_perturb_mode == "expanded"
        self._new_labels = self._perturb and args.speed_perturb_labels == "new"
        self.num_class = len(labels) * (len(_SPEEDS) if self._new_labels else 1)
        length, shift = _frame_milliseconds(args)
        self.num_samples = self._to_samples((args.num_frms - 1) * shift + length)
        self._min_samples, self._max_samples = self._to_samples(length), None
        if args.filter:
            frames = {"min_num_frames": 100, "max_num_frames": 800, **args.filter_args}
            self._min_samples = self._to_samples(frames["min_num_frames"] * shift)
            self._max_samples = self._to_samples(frames["max_num_frames"] * shift)

    def _to_samples(self, milliseconds: float) -> int:
        return int(milliseconds * self._rate // 1000)

    def __len__(self) -> int:
        return len(self._utterances) * (len(_SPEEDS) if self._expanded else 1)

    @property
    def block(self) -> list[int] | None:
        sources = [utterance.source for utterance in self._utterances]
        if not all(isinstance(source, TarMember) for source in sources):
            return None
        copies = len(self) // len(sources)
        shards = groupby(source.path for source in sources)
        return [copies * sum(1 for _ in members) for _, members in shards]

    def __getitem__(self, item: tuple[int, int]) -> Sample:
        """Return item ``(epoch, index)``, or one drawn in its place where it is unusable.

        Raises:
            ValueError: 200 in a row are.
        """
        epoch, index = item
        rng = np.random.default_rng([_DOMAIN, self._seed, epoch, index])
        seed = int(rng.integers(2**63))
        problems, too_short, bad_sources = [], [], []
        for _ in range(_MAX_TRIES):
            utterance, speed = self._choose(index, rng)
            try:
                wav = self._read_crop(utterance, _SPEEDS[speed], rng)
                break
            except TooShort as error:
                too_short.append(str(error))
            except AudioError as error:
                problems.append(str(error))
            index = int(rng.integers(len(self)))
        else:
            reasons = list(dict.fromkeys(problems + too_short))
            raise ValueError(
                f"{_MAX_TRIES} utterances drawn in a row are unusable ({len(too_short)} too short):"
                f" {'; '.join(reasons[:_TOLD])}{'; ...' * (len(reasons) > _TOLD)}"
            )
        if self._augmenter is not None:
            wav = self._augmenter(wav, rng, problems=bad_sources)
        label = self._labels[utterance.spk] + self._new_labels * speed * len(self._labels)
        lists = problems, too_short, bad_sources
        return Sample(torch.from_numpy(wav), label, seed, utterance.key, *lists)

    def _choose(self, index: int, rng: np.random.Generator) -> tuple[Utterance, int]:
        speed = 0
        if self._expanded:
            index, speed = divmod(index, len(_SPEEDS))
        elif self._perturb:
            speed = int(rng.integers(len(_SPEEDS)))
        return self._utterances[index], speed

    def _read_crop(self, utterance: Utterance, speed: float, rng) -> np.ndarray:
        with Audio(utterance) as audio:
            audio.require(self._min_samples, self._rate)
            # 2 more, because resampling rounds the length, twice
            needed = math.ceil(self.num_samples * speed * audio.rate / self._rate) + 2
            needed = min(needed, audio.num_samples)
            if self._max_samples is not None:
                needed = min(needed, self._max_samples * audio.rate // self._rate)
            start = int(rng.integers(audio.num_samples - needed + 1))
            wav = audio.read(start, needed)
        wav = change_speed(resample(wav, audio.rate, self._rate), speed)
        return np.resize(wav, self.num_samples)  # repeats what is shorter


def _check(utterances, labels, args) -> None:
    if not utterances:
        raise ValueError("the training set is empty")
    unknown = sorted({str(u.spk) for u in utterances if u.spk not in labels})
    if unknown:
        raise ValueError(
            f"{len(unknown)} speakers of the training set have no class: {', '.join(unknown[:10])}"
        )
    for name, choices in (
        ("speed_perturb_mode", ("random", "expanded")),
        ("speed_perturb_labels", ("new", "same")),
    ):
        if getattr(args, name) not in choices:
            raise ValueError(f"{name} {getattr(args, name)!r}: expected {' or '.join(choices)}")


def _frame_milliseconds(args) -> tuple[float, float]:
    """Length and shift of the frames in which the configuration counts."""
    settings = getattr(args, f"{args.frontend}_args") or {}
    # tfmel gives them in samples
    length, shift = (
        settings[name] * 1000 // args.resample_rate if name in settings else None
        for name in ("win_length", "hop_length")
    )
    return length or settings.get("frame_length", 25), shift or settings.get("frame_shift", 10)


def collate(samples: Sequence[Sample], *, features=None) -> Batch:
    """Stack samples into a `Batch`; ``features(wavs, seeds)`` takes the place of the waveforms."""
    wavs, labels, seeds, keys, *lists = zip(*samples)
    wavs = torch.stack(wavs)
    return Batch(
        wavs if features is None else features(wavs, seeds),
        torch.tensor(labels, dtype=torch.int64),
        torch.tensor(seeds, dtype=torch.int64),
        list(keys),
        *(list(chain.from_iterable(of_samples)) for of_samples in lists),
    )


def train_loader(
    train_set: TrainSet, batches: EpochBatches, dataloader_args, *, features=None
) -> DataLoader:
    """Return a loader of `Batch`.

    ``dataloader_args`` has the attributes ``num_workers``, ``pin_memory``, ``prefetch_factor``;
    ``features`` is `collate`'s.
    """
    num_workers = dataloader_args.num_workers
    return DataLoader(
        train_set,
        batch_sampler=batches,
        collate_fn=functools.partial(collate, features=features),
        num_workers=num_workers,
        pin_memory=dataloader_args.pin_memory,
        # torch takes no number here without workers
        prefetch_factor=dataloader_args.prefetch_factor if num_workers else None,
    )


class WholeSet(Dataset):
    """Whole utterances; item i is (key, wav float32 (T,) or None, what is wrong with it or None).

    Args:
        utterances: with or without speakers.
        sample_rate: of the waveforms, in Hz.
        min_samples: an utterance with fewer is refused: what one frame needs.
    """

    def __init__(self, utterances: Sequence[Utterance], sample_rate: int, *, min_samples: int):
        self._utterances, self._sample_rate = utterances, sample_rate
        self._min_samples = min_samples

    def __len__(self) -> int:
        return len(self._utterances)

    def __getitem__(self, index: int) -> tuple[str, Tensor | None, str | None]:
        utterance = self._utterances[index]
        try:
            wav = load_audio(utterance, self._sample_rate, min_samples=self._min_samples)
        except AudioError as error:
            return utterance.key, None, str(error)
        return utterance.key, torch.from_numpy(wav), None
