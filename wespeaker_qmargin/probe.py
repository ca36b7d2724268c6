"""Know before fine-tuning: how many samples a checkpoint has already won under which setting.

The model runs once over the data, in evaluation, as the coming ``finetune`` would read them and
with the prototypes that it would begin with.
"""

import argparse
import dataclasses
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

from wespeaker_qmargin.audio import Utterance
from wespeaker_qmargin.checkpoints import checkpoint_epoch
from wespeaker_qmargin.config import Config
from wespeaker_qmargin.data import TrainSet, WholeSet, train_loader
from wespeaker_qmargin.experiment import build_augmenter, make_accelerator
from wespeaker_qmargin.files import write_text
from wespeaker_qmargin.finetune import finetune_config, number_or_auto
from wespeaker_qmargin.guard import FileGuard
from wespeaker_qmargin.leads import GridStatistics
from wespeaker_qmargin.lists import speaker_labels
from wespeaker_qmargin.model import SpeakerNet, from_wespeaker
from wespeaker_qmargin.plan import Setting
from wespeaker_qmargin.probe_grid import grid
from wespeaker_qmargin.probe_report import Probe, draw, markdown, to_json
from wespeaker_qmargin.prototypes import num_speeds
from wespeaker_qmargin.transfer import Source, find_source, transfer
from wespeaker_qmargin.validate import training_utterances

logger = logging.getLogger(__name__)

_SAMPLE = 20000


def probe(
    config: Config,
    source: Source,
    settings: Sequence[Setting],
    *,
    sample: int | None = _SAMPLE,
    whole: bool = False,
    per_class: int = 5,
    batch_size: int | None = None,
) -> Probe:
    """Return what the settings would do with the network of ``source`` on the data of ``config``.

    Prototypes are those that ``transfer`` begins a fine-tuning with: the checkpoint's, by speaker
    name, else class means. Samples are the items that training would see (crops, speed, noise,
    reverberation, dither, SpecAugment as ``config`` says); with ``whole`` clean whole utterances,
    which look more won. Memory: a few numbers a sample, `GridStatistics`.

    Args:
        config: of the coming fine-tuning, from ``finetune_config``.
        settings: of the loss, from ``probe_grid.grid``.
        sample: utterances, drawn by ``config.seed``; None, or as many as there are: all.
        per_class: utterances that a class mean is of.
        batch_size: of a training step over all processes, for the effective batch; None: what
            ``config`` says for one process.

    Raises:
        ValueError, FileNotFoundError: whatever ``transfer`` raises; data with one speaker, no
            sample, too many unreadable files, several processes.
    """
    for name, number in (("sample", sample), ("batch_size", batch_size)):
        if number is not None and number < 1:
            raise ValueError(f"{name}: expected a number >= 1, got {number}")
    accelerator = make_accelerator(config)
    if accelerator.num_processes > 1:
        raise ValueError(f"probe runs in one process, found {accelerator.num_processes}")
    net, prototypes, report = _start(config, source, accelerator, per_class)
    training, _ = training_utterances(config)
    labels, args = speaker_labels(training), config.dataset_args
    copies = num_speeds(args.speed_perturb, args.speed_perturb_labels)
    chosen = _choose(training, sample, config.seed)
    statistics = GridStatistics(prototypes, settings, copies=copies)
    embeddings = (_whole if whole else _crops)(net, config, chosen, labels, accelerator)
    for batch in embeddings:
        statistics.add(*batch)
    samples = statistics.samples()
    return Probe(
        checkpoint=str(source.checkpoint),
        epoch=checkpoint_epoch(source.checkpoint),
        report=report,
        has_list=source.speakers is not None,
        conditions="whole and clean" if whole else _conditions(config),
        utterances=len(chosen),
        listed=len(training),
        speakers=list(labels),
        copies=copies,
        batch_size=batch_size or config.dataloader_args.batch_size * config.accum_steps,
        margin=float(config.margin_update["final_margin"]),
        samples=samples,
        cells=statistics.cells(samples),
    )


def _start(config: Config, source: Source, accelerator, per_class: int):
    """Return (network in evaluation, prototypes (C, D), `Report`) as fine-tuning begins."""
    state, report = transfer(config, source, accelerator, per_class=per_class)
    net, prototypes = SpeakerNet(config), state["projection.weight"].to(accelerator.device)
    body = {k: v for k, v in state.items() if not k.startswith("projection.")}
    net.load_state_dict(from_wespeaker(body))
    return net.to(accelerator.device).eval(), prototypes, report


def _choose(utterances: list[Utterance], sample: int | None, seed: int) -> list[Utterance]:
    if sample is None or sample >= len(utterances):
        return utterances
    chosen = np.random.default_rng(seed).choice(len(utterances), sample, replace=False)
    return [utterances[place] for place in np.sort(chosen)]  # in order: shards are read once


def _dataset_args(config: Config):
    """The large-margin stage of a recipe does not perturb, whatever it says."""
    if config.do_lm:
        return dataclasses.replace(config.dataset_args, speed_perturb=False)
    return config.dataset_args


def _conditions(config: Config) -> str:
    args = _dataset_args(config)
    speeds = "as other speakers" if args.speed_perturb_labels == "new" else "as the same speaker"
    sources = {"noise": config.noise_data, "reverberation": config.reverb_data}
    given = [name for name, path in sources.items() if path and args.aug_prob]
    return (
        f"crops of {args.num_frms} frames; speed perturbation: "
        f"{speeds if args.speed_perturb else 'none'}; "
        + (f"{' or '.join(given)} on {100 * args.aug_prob:g} %" if given else "no augmentation")
    )


@torch.no_grad()
def _crops(net, config: Config, utterances, labels, accelerator) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield embeddings (B, D) and classes (B,) of training items."""
    args = _dataset_args(config)
    train_set = TrainSet(
        utterances, labels, args, seed=config.seed, augmenter=build_augmenter(config)
    )
    files, size = FileGuard(len(utterances), args.max_bad_share), config.dataloader_args.batch_size
    batches = _batches(len(train_set), size)
    loader = train_loader(train_set, batches, config.dataloader_args)
    total = -(-len(train_set) // size)
    for batch in tqdm(loader, desc="probe", unit="batch", total=total, disable=None):
        files.note(batch.problems, batch.too_short, batch.bad_sources)
        with accelerator.autocast():
            embeddings = net.embed(batch.wavs.to(accelerator.device), batch.seeds.tolist())
        yield from _finite(embeddings, batch.labels, batch.keys)


def _batches(num_items: int, size: int) -> Iterator[list[tuple[int, int]]]:
    """Yield every item of epoch 0, once and in order."""
    for start in range(0, num_items, size):
        yield [(0, place) for place in range(start, min(start + size, num_items))]


@torch.no_grad()
def _whole(net, config: Config, utterances, labels, accelerator) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield embeddings (1, D) and classes (1,) of whole utterances."""
    args, files = config.dataset_args, FileGuard(len(utterances), config.dataset_args.max_bad_share)
    whole = WholeSet(utterances, args.resample_rate, min_samples=net.min_samples)
    loader = DataLoader(whole, batch_size=None, num_workers=config.dataloader_args.num_workers)
    progress = tqdm(loader, desc="probe", unit="utt", disable=None)
    for utterance, (key, wav, problem) in zip(utterances, progress):
        if problem is not None:
            files.note([problem], [])
            continue
        with accelerator.autocast():
            embeddings = net.embed(wav[None].to(accelerator.device))
        yield from _finite(embeddings, torch.tensor([labels[utterance.spk]]), [key])


def _finite(embeddings: Tensor, classes: Tensor, keys: Sequence[str]):
    good = embeddings.isfinite().all(dim=1)
    if not good.all():
        bad = [key for key, fine in zip(keys, good.tolist()) if not fine]
        logger.warning("embeddings that are not finite, left out: %s", ", ".join(bad))
    if good.any():
        yield embeddings[good], classes.to(good.device)[good]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``wespeaker-qmargin probe``."""
    parser.epilog = (
        "examples:\n"
        "  wespeaker-qmargin probe --checkpoint exp/resnet34 --data data/train --config lm.yaml\n"
        "  wespeaker-qmargin probe --checkpoint exp/a/models/model_{40,80,120,150}.pt "
        "--data data/train \\\n      --grid '10,1.5,0.2 5,2,0.2 5,1.5,0.2' --out exp/a/probe\n"
        "every key of the config can be given as --key value or --section.key value"
    )
    add = parser.add_argument
    several = {"nargs": "+", "action": "extend"}
    add("--checkpoint", **several, required=True, metavar="PATH", help="exp_dir, folder or file")
    add("--data", required=True, help="Kaldi folder, raw or shard list of the training speakers")
    add("--data_type", default="kaldi", choices=("kaldi", "raw", "shard"))
    add("--config", help="YAML of the coming fine-tuning, as finetune takes it")
    add("--whole", action="store_true", help="whole clean utterances, not crops as in training")
    add("--sample", type=_count, default=_SAMPLE, help=f"utterances, or all [{_SAMPLE}]")
    add("--grid", nargs="+", metavar="S,ALPHA,M", help="cells [k = s (alpha - 1) from 2.5 to 10]")
    add("--scales", nargs="+", type=number_or_auto, help="of further cells, or auto [auto]")
    add("--alphas", nargs="+", type=float, help="of further cells [1.25 1.5 2]")
    add("--margins", nargs="+", type=float, help="of further cells [the config's final margin]")
    add("--per_class", type=int, default=5, help="utterances that a class mean is of [5]")
    add("--batch_size", type=int, help="of a step over all processes, for the effective batch")
    add("--out", metavar="DIR", help="for probe.json, probe.md and probe.png")
    parser.set_defaults(overrides=[])


def _count(text: str) -> int | None:
    return None if text == "all" else int(text)


def _settings(args: argparse.Namespace, config: Config) -> list[Setting]:
    options = {"scales": args.scales, "alphas": args.alphas, "margins": args.margins}
    return grid(config, cells=" ".join(args.grid or ()).split(), **options)


def run(args: argparse.Namespace) -> None:
    """Print the tables; write what was asked for."""
    keys = {"train_data": args.data, "data_type": args.data_type}
    found, settings = [], None
    for path in args.checkpoint:
        source = find_source(path)
        config = finetune_config(source, config=args.config, overrides=args.overrides, **keys)
        settings = settings or _settings(args, config)
        options = {"sample": args.sample, "whole": args.whole, "per_class": args.per_class}
        found.append(probe(config, source, settings, batch_size=args.batch_size, **options))
    text = markdown(found)
    if args.out:
        folder = Path(args.out)
        write_text(folder / "probe.json", json.dumps(to_json(found), indent=1) + "\n")
        write_text(folder / "probe.md", text)
        draw(found, folder / "probe.png")
    print(text, end="")
