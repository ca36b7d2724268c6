"""A validation EER over speakers held out of the training speakers."""

import logging
from collections import defaultdict

import numpy as np
import torch
from accelerate.utils import gather_object

from wespeaker_qmargin.audio import Utterance
from wespeaker_qmargin.data import WholeSet
from wespeaker_qmargin.lists import read_utterances
from wespeaker_qmargin.roc import roc

logger = logging.getLogger(__name__)

_UTTERANCES = 8  # of a held-out speaker: enough trials, a few seconds an epoch


def split_speakers(
    utterances: list[Utterance], num_speakers: int, seed: int
) -> tuple[list[Utterance], list[Utterance]]:
    """Return (training utterances, validation utterances of ``num_speakers`` other speakers).

    The speakers are drawn by ``seed`` among those with two utterances or more; each gives eight
    utterances at most. ``num_speakers = 0`` holds nobody out.

    Raises:
        ValueError: fewer than two speakers would be left on either side.
    """
    if num_speakers == 0:
        return utterances, []
    by_speaker = defaultdict(list)
    for utterance in utterances:
        by_speaker[utterance.spk].append(utterance)
    usable = sorted(spk for spk, mine in by_speaker.items() if len(mine) > 1)
    if num_speakers < 2 or num_speakers > len(usable) or len(by_speaker) - num_speakers < 2:
        raise ValueError(
            f"valid_speakers: cannot hold out {num_speakers} of {len(by_speaker)} speakers "
            f"({len(usable)} have two utterances or more); at least 2 are needed on either side; "
            "0 switches validation off"
        )
    rng = np.random.default_rng(seed)
    chosen = set(rng.choice(usable, num_speakers, replace=False).tolist())
    training = [u for u in utterances if u.spk not in chosen]
    return training, [u for spk in sorted(chosen) for u in by_speaker[spk][:_UTTERANCES]]


def training_utterances(config) -> tuple[list[Utterance], list[Utterance]]:
    """Return the utterances that a run of ``config`` trains on, and those that it holds out."""
    where = config.data_type, config.train_data, config.train_label
    utterances = read_utterances(*where, allow_pipes=config.allow_pipes)
    return split_speakers(utterances, config.valid_speakers, config.seed)


class HeldOut:
    """The held-out ``utterances`` of a run; one that cannot be used is told once."""

    def __init__(self, utterances: list[Utterance]):
        self.utterances = utterances
        self._told: set[str] = set()

    @torch.no_grad()
    def eer(self, net, accelerator, config) -> float | None:
        """Return the EER over all pairs of the utterances, cosine after mean subtraction.

        Every process embeds its share, whole utterances; all return the same number. None if there
        are no utterances.
        """
        if not self.utterances:
            return None
        mine = self.utterances[accelerator.process_index :: accelerator.num_processes]
        whole = WholeSet(mine, config.dataset_args.resample_rate, min_samples=net.min_samples)
        net.eval()
        embedded = []
        with accelerator.autocast():
            for utterance, (_, wav, problem) in zip(mine, whole):
                if problem is None:
                    vector = net.embed(wav[None].to(accelerator.device))[0]
                    embedded.append((utterance.spk, vector.float().cpu().numpy()))
                elif problem not in self._told:
                    self._told.add(problem)
                    logger.warning("held out, not used: %s", problem)
        net.train()
        embedded = gather_object(embedded)
        if not embedded:
            total = len(self.utterances)
            raise ValueError(f"valid_speakers: none of {total} utterances can be used")
        return _all_pairs_eer(embedded)


def _all_pairs_eer(embedded: list[tuple[str, np.ndarray]]) -> float:
    speakers = np.array([spk for spk, _ in embedded])
    vectors = np.stack([vector for _, vector in embedded]).astype(np.float64)
    vectors -= vectors.mean(axis=0)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    first, second = np.triu_indices(len(speakers), k=1)
    same = speakers[first] == speakers[second]
    return roc((vectors @ vectors.T)[first, second], same).eer()
