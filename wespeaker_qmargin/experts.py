"""What an adaptation did to an encoder, and what its experts do: drift, similarity, usage.

For every hidden state the linear CKA before and after, for every feed-forward module how far its
weights went, for every mixture which expert hears what.
"""

import argparse
import json
import logging
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from wespeaker_qmargin.audio import Utterance
from wespeaker_qmargin.data import WholeSet
from wespeaker_qmargin.extract import open_experiment
from wespeaker_qmargin.figures import experts_svg
from wespeaker_qmargin.files import write_text
from wespeaker_qmargin.frontend import SAMPLE_RATE, SslFrontend
from wespeaker_qmargin.lists import read_utterances
from wespeaker_qmargin.model import SpeakerNet
from wespeaker_qmargin.moe import MoEFeedForward, UsageCounter, moe_layers, without_expert
from wespeaker_qmargin.upcycle import feed_forwards

logger = logging.getLogger(__name__)

SEGMENTS = ("silence", "unvoiced", "voiced")
_SILENCE_DB, _VOICED = -35.0, 0.5  # below the loudest frame; peak of the autocorrelation
_PITCH_HZ = (60, 400)


class Cka:
    """Linear CKA of two sets of features of the same frames, summed a batch at a time.

    ``||Y'X||_F^2 / (||X'X||_F ||Y'Y||_F)`` of X (T, D1), Y (T, D2) with their means taken off: 1
    where one is a rotation and scaling of the other.  Reference: Kornblith et al. 2019, equation 4.
    """

    def __init__(self):
        self._sums, self._count = None, 0

    def add(self, one: Tensor, other: Tensor) -> None:
        """Count frames (T, D1) and (T, D2)."""
        x, y = one.double(), other.double()
        found = [x.sum(0), y.sum(0), x.T @ x, y.T @ y, y.T @ x]
        self._sums = [a + b for a, b in zip(self._sums, found)] if self._sums else found
        self._count += len(x)

    def value(self) -> float:
        """Return the similarity, in [0, 1]; NaN of nothing."""
        if not self._count:
            return float("nan")
        x, y, xx, yy, yx = self._sums
        x, y = x / self._count, y / self._count
        xx, yy, yx = (
            total - self._count * torch.outer(a, b)
            for total, a, b in ((xx, x, x), (yy, y, y), (yx, y, x))
        )
        return (yx.square().sum() / (xx.norm() * yy.norm())).item()


def segments(wav: np.ndarray, num_frames: int) -> np.ndarray:
    """Return the kind of every frame of an encoder, an index into ``SEGMENTS``.

    By the energy of 40 ms around the frame's centre (silence: 35 dB below the loudest) and the
    largest normalised autocorrelation at 60 to 400 Hz (voiced: above 0.5).
    """
    step, half = len(wav) / num_frames, SAMPLE_RATE // 50
    padded = np.pad(wav.astype(np.float64), half)
    centres = np.round((np.arange(num_frames) + 0.5) * step).astype(int)
    pieces = padded[centres[:, None] + np.arange(2 * half)]
    pieces = pieces - pieces.mean(axis=1, keepdims=True)
    spectrum = np.abs(np.fft.rfft(pieces, 4 * half)) ** 2
    correlation = np.fft.irfft(spectrum)[:, : 2 * half]
    energy = correlation[:, 0]
    lags = slice(SAMPLE_RATE // _PITCH_HZ[1], SAMPLE_RATE // _PITCH_HZ[0])
    # a lag's correlation is of so many fewer samples
    fewer = 1 - np.arange(2 * half)[lags] / (2 * half)
    peak = (correlation[:, lags] / fewer).max(axis=1) / np.maximum(energy, 1e-12)
    silent = energy <= energy.max() * 10 ** (_SILENCE_DB / 10)
    return np.where(silent, 0, np.where(peak > _VOICED, 2, 1))


def analyse(
    exp_dir, before, data: Mapping[str, Sequence[Utterance]], *, model: str = "avg", drop: int = 0
) -> dict:
    """Compare the network of ``exp_dir`` with the one that it was adapted from.

    Args:
        exp_dir: an experiment with a WavLM or w2v-BERT front-end.
        before: the experiment that it started from.
        data: name -> utterances; each is embedded whole by both.
        model: checkpoint of ``exp_dir``: avg, best, an epoch.
        drop: utterances of each set that are embedded again without each expert; 0: none.

    Returns:
        ``{"drift": {feed-forward: [one an expert]}, "data": {name: {"cka": [one a hidden state],
        "experts": {module: {"load", "importance", "entropy", "by_segment": {kind: load},
        "dropped": [cosine distance]}}}}}``. A drift is ``||after - before||_F / ||before||_F``.

    Raises:
        ValueError: another front-end, other hidden states before, data that cannot be read.
    """
    after, old = _open(exp_dir, model), _open(before, "avg")
    if after.frontend.num_layers != old.frontend.num_layers:
        raise ValueError(
            f"{exp_dir} has {after.frontend.num_layers} hidden states, {before} "
            f"{old.frontend.num_layers}: not the same encoder"
        )
    found = {name: _hear(after, old, utterances, drop) for name, utterances in data.items()}
    return {"drift": _drift(after, old), "data": found}


def _open(exp_dir, model: str) -> SpeakerNet:
    net = open_experiment(exp_dir, model)
    if not isinstance(net.frontend, SslFrontend):
        raise ValueError(f"{exp_dir}: expected a front-end wavlm or w2vbert, with hidden states")
    return net


def _drift(after: SpeakerNet, before: SpeakerNet) -> dict[str, list[float]]:
    modules, drift = dict(after.named_modules()), {}
    dense = (x for x in feed_forwards(before) if ".experts." not in x.name)
    starts = {x.name: [x.module] for x in dense if x.name.startswith("frontend.")}
    starts |= {name: list(layer.experts) for name, layer in moe_layers(before).items()}
    for name, olds in starts.items():
        now = modules.get(name, torch.nn.Module())
        news = list(now.experts) if isinstance(now, MoEFeedForward) else [now]
        counts = len(news), len(olds)
        pairs = list(product(news, olds) if 1 in counts else zip(news, olds))
        unlike = any(_weights(old).keys() - _weights(new).keys() for new, old in pairs)
        if unlike or len(pairs) < max(counts):
            logger.warning("%s: its weights before and after are not the same ones: no drift", name)
        else:
            drift[name] = [_moved(_weights(new), _weights(old)) for new, old in pairs]
    return drift


def _weights(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def _moved(new: dict[str, Tensor], old: dict[str, Tensor]) -> float:
    """Of the weights that were there before; what was added beside them takes no part."""
    moved = sum((new[name] - weight).square().sum() for name, weight in old.items())
    return (moved / sum(weight.square().sum() for weight in old.values())).sqrt().item()


class _Listener:
    """An observer that counts the usage of all tokens, and of each kind of segment."""

    def __init__(self):
        self.all = UsageCounter()
        self.by_segment = {kind: UsageCounter() for kind in SEGMENTS}
        self.kinds: Tensor | None = None  # of the tokens of the utterance that is coming

    def __call__(self, probabilities: Tensor, chosen: Tensor) -> None:
        self.all(probabilities, chosen)
        for index, kind in enumerate(SEGMENTS):
            at = self.kinds == index
            self.by_segment[kind](probabilities[at], chosen[at])

    def values(self) -> dict:
        usage = self.all.usage()
        parts = {kind: counter.usage() for kind, counter in self.by_segment.items()}
        return {
            **{"load": usage.load.tolist(), "importance": usage.importance.tolist()},
            "entropy": usage.entropy,
            "by_segment": {k: None if x is None else x.load.tolist() for k, x in parts.items()},
        }


@torch.no_grad()
def _hear(after: SpeakerNet, before: SpeakerNet, utterances, drop: int) -> dict:
    similarity = [Cka() for _ in range(after.frontend.num_layers)]
    layers = moe_layers(after)
    listeners = {name: _Listener() for name in layers}
    dropped = {name: [[] for _ in layer.experts] for name, layer in layers.items()}
    heard = 0
    for _, wav, problem in WholeSet(utterances, SAMPLE_RATE, min_samples=after.min_samples):
        if problem is not None:
            logger.warning("not used: %s", problem)
            continue
        kinds = segments(wav.numpy(), int(after.frontend.num_frames(len(wav))))
        for name, layer in layers.items():
            listeners[name].kinds, layer.observer = torch.from_numpy(kinds), listeners[name]
        (new, _), (old, _) = after.frontend(wav[None]), before.frontend(wav[None])
        for layer in layers.values():
            layer.observer = None
        for one, x, y in zip(similarity, old, new):
            one.add(x[0], y[0])
        if heard < drop:
            _drop_each(after, wav, layers, dropped)
        heard += 1
    if not heard:
        raise ValueError(f"none of {len(utterances)} utterances can be used")
    values = {name: listener.values() for name, listener in listeners.items()}
    for name, distances in dropped.items():
        values[name]["dropped"] = [float(np.mean(x)) if x else None for x in distances]
    return {"cka": [one.value() for one in similarity], "experts": values}


def _drop_each(net: SpeakerNet, wav: Tensor, layers: dict, dropped: dict) -> None:
    whole = net.embed(wav[None])[0]
    for name, layer in layers.items():
        for expert in range(len(layer.experts) if len(layer.experts) > 1 else 0):
            with without_expert(layer, expert):
                other = net.embed(wav[None])[0]
            # 1 - cosine, without its rounding where they are near
            apart = normalize(whole.double(), dim=0) - normalize(other.double(), dim=0)
            dropped[name][expert].append(apart.square().sum().item() / 2)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``wespeaker-qmargin experts``."""
    parser.epilog = (
        "example:\n"
        "  wespeaker-qmargin experts --exp_dir exp/adapted --from exp/dense --out exp/adapted \\\n"
        "      --data clean=data/test band=data/test_8k"
    )
    add = parser.add_argument
    add("--exp_dir", required=True, help="experiment with a wavlm or w2vbert front-end")
    add("--from", dest="before", required=True, help="experiment it was adapted from")
    add("--data", nargs="+", required=True, metavar="NAME=FOLDER", help="Kaldi folders")
    add("--sample", type=int, default=200, help="utterances of each, drawn [200]")
    add("--drop", type=int, default=20, help="of these, embedded without each expert [20]")
    add("--model", default="avg", help="avg, best, or an epoch [avg]")
    add("--out", required=True, help="folder for experts.json and experts.svg")


def run(args: argparse.Namespace) -> None:
    """Write experts.json and its figure."""
    data = {}
    for text in args.data:
        name, equals, folder = text.partition("=")
        if not (name and equals and folder):
            raise ValueError(f"--data: expected NAME=FOLDER, found {text!r}")
        found = read_utterances("kaldi", folder)
        chosen = np.random.default_rng(0).permutation(len(found))[: args.sample]
        data[name] = [found[i] for i in sorted(chosen)]
    report = analyse(args.exp_dir, args.before, data, model=args.model, drop=args.drop)
    out = Path(args.out)
    write_text(out / "experts.json", json.dumps(report, indent=1) + "\n")
    write_text(out / "experts.svg", experts_svg(report))
    print(out / "experts.json")
