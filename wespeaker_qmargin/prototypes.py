"""The rows of a head before it is trained: whose they are, a checkpoint's own, class means."""

import itertools
import logging
from collections import defaultdict

import numpy as np
import torch
import torch.nn.functional as F
from accelerate.utils import gather_object
from torch import Tensor
from tqdm import tqdm

from wespeaker_qmargin.audio import AudioError, Utterance, load_audio
from wespeaker_qmargin.augment import change_speed
from wespeaker_qmargin.config import Config
from wespeaker_qmargin.data import _SPEEDS
from wespeaker_qmargin.lists import speaker_labels
from wespeaker_qmargin.model import SpeakerNet

logger = logging.getLogger(__name__)

# heads whose ``weight`` has one row a class, a direction in the space of the embeddings
ROW_HEADS = ("q_margin", "add_margin", "arc_margin", "sphere", "sphereface2")

Row = tuple[str, int]  # speaker, number of the speed
_CENTRE: Row = "", 0  # stands for all speakers: no name is empty
_CENTRE_UTTERANCES = 256


def row_names(training: list[Utterance], config: Config) -> list[Row]:
    """Return the (speaker, speed) of every row of the head that ``config`` trains, in order.

    Raises:
        ValueError: a head that has no row a class.
    """
    kind = config.projection_args["project_type"]
    if kind not in ROW_HEADS:
        raise ValueError(
            f"project_type {kind}: it has no row a class, which prototypes are; expected one of "
            f"{', '.join(ROW_HEADS)}"
        )
    args = config.dataset_args
    copies = num_speeds(args.speed_perturb, args.speed_perturb_labels)
    return [(name, speed) for speed in range(copies) for name in speaker_labels(training)]


def num_speeds(speed_perturb: bool, labels: str) -> int:
    """Return how many classes a speaker has, for the two keys of ``dataset_args``: 1 or 3."""
    return len(_SPEEDS) if speed_perturb and labels == "new" else 1


@torch.no_grad()
def class_means(
    net: SpeakerNet, utterances: list[Utterance], rows: list[Row], accelerator, *, per_class: int
) -> dict[Row, Tensor]:
    """Return the direction of each row, float64 (D,) of length 1.

    Equals ``normalize(mean(normalize(embedding)) - centre)``, over ``per_class`` utterances of the
    speaker, evenly spread over his in the list, whole and at the row's speed; ``centre`` is the
    same mean over 256 utterances of the list. What all embeddings have in common tells no speakers
    apart: with it in the prototypes, a released encoder began at twice the loss.

    An utterance that cannot be used is left out with a warning, and so is a row without any.
    Collective: every process embeds its share, all get the same.
    """
    rank, world = accelerator.process_index, accelerator.num_processes
    net.to(accelerator.device).eval()
    tasks = [(_CENTRE, u) for u in _spread(utterances, _CENTRE_UTTERANCES)]
    tasks = (tasks + _chosen(utterances, rows, per_class))[rank::world]
    mine = []
    for row, utterance in tqdm(tasks, desc="class means", unit="utt", disable=rank > 0 or None):
        vector = _unit_embedding(net, utterance, _SPEEDS[row[1]], accelerator.device)
        if vector is not None:
            mine.append((row, vector))
    vectors = defaultdict(list)
    for row, vector in itertools.chain.from_iterable(gather_object([mine])):
        vectors[row].append(vector)
    means = {row: torch.stack(of_row).mean(dim=0) for row, of_row in vectors.items()}
    centre = means.pop(_CENTRE, 0)
    return {row: F.normalize(mean - centre, dim=0) for row, mean in means.items()}


def _spread(items: list, number: int) -> list:
    number = min(number, len(items))
    return [items[place] for place in np.linspace(0, len(items) - 1, number).round().astype(int)]


def _chosen(utterances, rows: list[Row], per_class: int) -> list[tuple[Row, Utterance]]:
    by_speaker = defaultdict(list)
    for utterance in utterances:
        by_speaker[utterance.spk].append(utterance)
    return [(row, u) for row in rows for u in _spread(by_speaker[row[0]], per_class)]


def _unit_embedding(net, utterance: Utterance, speed: float, device) -> Tensor | None:
    try:
        wav = load_audio(utterance, net.dataset_args.resample_rate, min_samples=net.min_samples)
    except AudioError as error:
        logger.warning("%s", error)
        return None
    wav = torch.from_numpy(change_speed(wav, speed)).to(device)
    # float64: what tells speakers apart may be small beside what they share
    vector = F.normalize(net.embed(wav[None])[0].cpu().double(), dim=0)
    if vector.isfinite().all():
        return vector
    logger.warning("%s: its embedding is not finite", utterance.key)
    return None


def filled(
    weight: Tensor, names: list[Row], taken: dict[Row, Tensor], means: dict[Row, Tensor]
) -> Tensor:
    """Return a copy of ``weight`` (C, D) with the rows that are known.

    A mean gets the length that the other rows have: a learning rate turns long rows slower.
    """
    weight = weight.clone()
    for place, name in enumerate(names):
        if name in taken:
            weight[place] = taken[name]
    others = [place for place, name in enumerate(names) if name in taken] or range(len(names))
    length = weight[list(others)].norm(dim=1).mean()
    for place, name in enumerate(names):
        if name in means:
            weight[place] = length * means[name]
    return weight
