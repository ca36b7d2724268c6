"""What a run consists of: data, network, optimiser, schedules; where it stands; saving that."""

import ctypes
import dataclasses
import functools
import logging
import os
import platform
import random
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import gather_object

from wespeaker_qmargin import resume
from wespeaker_qmargin.augment import AudioSource, Augmenter
from wespeaker_qmargin.checkpoints import checkpoint_epoch
from wespeaker_qmargin.config import Config, save_config, to_dict, with_defaults
from wespeaker_qmargin.data import TrainSet, train_loader
from wespeaker_qmargin.files import write_text
from wespeaker_qmargin.head import QMarginProduct
from wespeaker_qmargin.lazy_sgd import LazySGD
from wespeaker_qmargin.lists import speaker_labels
from wespeaker_qmargin.model import (
    SpeakerNet,
    filter_banks,
    from_wespeaker,
    full_state,
    load_checkpoint,
    save_checkpoint,
)
from wespeaker_qmargin.order import EpochBatches
from wespeaker_qmargin.parallel import ClassParallelQMargin, keep_from_ddp, total_norm
from wespeaker_qmargin.provenance import provenance
from wespeaker_qmargin.schedule import Schedules, build_optimizer
from wespeaker_qmargin.validate import HeldOut, training_utterances

logger = logging.getLogger(__name__)


def make_accelerator(config: Config) -> Accelerator:
    """Return Accelerate's view of the devices that ``config`` asks for.

    Raises:
        ValueError: a GPU is asked for and there is none.
    """
    if config.gpus and "CUDA_VISIBLE_DEVICES" not in os.environ:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, config.gpus))
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: cuda was asked for, but torch finds no CUDA device")
    on_cpu = config.device == "cpu" or not torch.cuda.is_available()
    if on_cpu and config.gpus:
        logger.info("training on the CPU: gpus %s are not used", config.gpus)
    if on_cpu:
        _keep_freed_memory()
    precision = config.amp_dtype if config.enable_amp else "no"
    # a process may train twice: Accelerate would hold on to the first run's precision
    AcceleratorState._reset_state()
    return Accelerator(cpu=on_cpu, mixed_precision=precision)


def _keep_freed_memory() -> None:
    """Have malloc keep what is freed: each step needs it again, and new pages cost a fifth of it.

    (On a GPU torch's own allocator does so.) Only glibc's malloc is told; see mallopt(3).
    """
    if platform.libc_ver()[0] == "glibc":
        libc, trim_threshold, mmap_threshold = ctypes.CDLL(None), -1, -3
        libc.mallopt(trim_threshold, 2**31 - 1)
        libc.mallopt(mmap_threshold, 2**30)


def _seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def build_augmenter(config: Config) -> Augmenter | None:
    """Return what adds noise and reverberation as ``config`` says; None: nothing does."""
    args = config.dataset_args
    if args.aug_prob == 0 or not (config.noise_data or config.reverb_data):
        return None
    noise, reverb = (
        AudioSource(path) if path else None for path in (config.noise_data, config.reverb_data)
    )
    for name, source in (("noise_data", noise), ("reverb_data", reverb)):
        if source is None:
            logger.warning("%s is not given: training without it", name)
    return Augmenter(noise, reverb, prob=args.aug_prob, sample_rate=args.resample_rate)


def _step_lazily(head, optimizer: LazySGD, accelerator: Accelerator) -> None:
    """Have ``head`` give the row-sparse gradients that ``LazySGD`` is for.

    Raises:
        ValueError: the head has none.
    """
    shared = accelerator.num_processes > 1 and not isinstance(head, ClassParallelQMargin)
    if not isinstance(head, QMarginProduct) or head.alpha == 1 or head.impl == "dense" or shared:
        raise ValueError(
            "optimizer: LazySGD needs project_type q_margin with alpha > 1, an impl other than "
            "dense, and over several processes class_parallel: true; elsewhere use SGD, of which "
            "it is the faster form"
        )
    head.sparse_grad = True
    optimizer.keep_current(head)


class Experiment:
    """Everything that a run needs, opened, and at (epoch, step): fresh, or where ``state`` was.

    ``net`` is the bare ``SpeakerNet``, ``model`` what Accelerate made of it (DDP, autocast).
    ``epoch_iter`` optimiser steps make an epoch, ``step_batch`` utterances over all processes make
    a step.

    Args:
        state: what ``save`` wrote, or None.

    Raises:
        ValueError, FileNotFoundError: unusable data, a state of another run.
    """

    def __init__(self, config: Config, exp_dir: Path, accelerator: Accelerator, state: dict | None):
        self.config, self.exp_dir, self.accelerator = config, exp_dir, accelerator
        self.epoch, self.step, self.best_eer = 1, 0, None
        _seed_everything(config.seed)
        self._open_data()
        self._open_model()
        if state is not None:
            self._restore(state)
            return
        if config.checkpoint is not None:
            self._continue(Path(config.checkpoint))
        elif config.model_init is not None:
            load_checkpoint(self.net, config.model_init, head=False)
        _seed_everything(config.seed + accelerator.process_index)

    def _continue(self, checkpoint: Path) -> None:
        """Start from ``checkpoint``; from ``model_<N>.pt`` with epoch N + 1, as WeSpeaker does."""
        load_checkpoint(self.net, checkpoint)
        done = checkpoint_epoch(checkpoint) or 0
        if done >= self.config.num_epochs:
            raise ValueError(
                f"{checkpoint}: is of epoch {done}, and num_epochs is {self.config.num_epochs}: "
                "nothing is left to train; raise num_epochs, or give the file another name to "
                "start with epoch 1"
            )
        if done:
            logger.info("%s: going on with epoch %d, the optimiser anew", checkpoint, done + 1)
        self.epoch = done + 1

    def _open_data(self) -> None:
        config, args = self.config, self.config.dataset_args
        training, held_out = training_utterances(config)
        self.held_out = HeldOut(held_out)
        self.labels = speaker_labels(training)
        # a large-margin stage keeps the rows of the speed copies, so that its checkpoint fits
        copies = 3 if args.speed_perturb and args.speed_perturb_labels == "new" else 1
        self.num_class = len(self.labels) * copies
        if config.do_lm and args.speed_perturb:
            logger.info("do_lm: no speed perturbation, the head keeps its %d rows", self.num_class)
            args = dataclasses.replace(args, speed_perturb=False)
        self.train_set = TrainSet(
            training, self.labels, args, seed=config.seed, augmenter=build_augmenter(config)
        )
        self.step_batch = (
            config.dataloader_args.batch_size * config.accum_steps * self.accelerator.num_processes
        )
        self.epoch_iter = (args.sample_num_per_epoch or len(self.train_set)) // self.step_batch
        if self.epoch_iter == 0:
            raise ValueError(
                f"{len(self.train_set)} utterances an epoch make no step of {self.step_batch} "
                "(processes x batch_size x accum_steps): lower dataloader_args.batch_size, or "
                "raise dataset_args.sample_num_per_epoch"
            )

    def _open_model(self) -> None:
        self.net = SpeakerNet(self.config, self.num_class)
        optimizer = build_optimizer(self.net, self.config)
        if isinstance(optimizer, LazySGD):
            _step_lazily(self.net.projection, optimizer, self.accelerator)
        keep_from_ddp(self.net)
        self.schedules = Schedules(
            self.net,
            optimizer,
            self.config,
            epoch_iter=self.epoch_iter,
            step_batch=self.step_batch,
        )
        self.model, self.optimizer = self.accelerator.prepare(self.net, optimizer)

    def describe(self) -> None:
        """Write config.yaml, run.json and speakers.txt, and log the sizes."""
        save_config(self.config, self.exp_dir / "config.yaml")
        resume.write_json(provenance(self.accelerator.device), self.exp_dir / "run.json")
        write_text(self.exp_dir / "speakers.txt", "".join(f"{name}\n" for name in self.labels))
        sizes = [sum(p.numel() for p in m.parameters()) for m in (self.net, self.net.projection)]
        logger.info(
            "%d utterances of %d speakers, %d held out; %s, %.2f M parameters + head %.2f M%s: %s; "
            "%d epochs of %d steps of %d utterances; learning rate x %g; %s",
            len(self.train_set),
            len(self.labels),
            len(self.held_out.utterances),
            self.config.model,
            (sizes[0] - sizes[1]) / 1e6,
            sizes[1] / 1e6,
            " here" if isinstance(self.net.projection, ClassParallelQMargin) else "",
            self.net.projection,
            self.config.num_epochs,
            self.epoch_iter,
            self.step_batch,
            self.schedules.scale_ratio,
            self.accelerator.device,
        )

    def clip_gradients(self) -> torch.Tensor:
        """Clip all gradients to ``clip_grad_norm`` (0: not at all); return their norm before."""
        self.accelerator.unscale_gradients(self.optimizer)
        parameters, head = list(self.net.parameters()), self.net.projection
        sharded = [head.weight] if isinstance(head, ClassParallelQMargin) else []
        norm = total_norm(parameters, sharded)
        if self.config.clip_grad_norm:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.config.clip_grad_norm, norm)
        return norm

    @property
    def iteration(self) -> int:
        """Optimiser steps done."""
        return (self.epoch - 1) * self.epoch_iter + self.step

    def batches(self):
        """Return an iterator over what is left of this epoch's batches, on this process."""
        config, accelerator = self.config, self.accelerator
        batches = EpochBatches(
            len(self.train_set),
            config.dataloader_args.batch_size,
            seed=config.seed,
            epoch=self.epoch,
            num_batches=self.epoch_iter * config.accum_steps,
            rank=accelerator.process_index,
            world_size=accelerator.num_processes,
            start=self.step * config.accum_steps,
            block=self.train_set.block,
            shuffle=config.dataset_args.shuffle,
        )
        # on a CPU a worker has as much time for filter banks as this process
        in_worker = accelerator.device.type == "cpu" and config.dataset_args.frontend == "fbank"
        features = functools.partial(filter_banks, config.dataset_args) if in_worker else None
        args = config.dataloader_args
        return iter(train_loader(self.train_set, batches, args, features=features))

    def save_model(self, name: str) -> None:
        """Write the network as it is, to ``name`` in ``exp_dir``; every process calls."""
        save_checkpoint(self.net, self.exp_dir / name, write=self.accelerator.is_main_process)

    def _exchange_rows(self, state: dict, method: str) -> None:
        """Turn what an optimiser's state holds of a class-parallel weight into all rows, or back.

        ``method`` of the head does so: ``gather_rows`` (collective), ``own_rows``.
        """
        head = self.net.projection
        if not isinstance(head, ClassParallelQMargin):
            return
        order = [p for group in self.optimizer.param_groups for p in group["params"]]
        place = next((i for i, p in enumerate(order) if p is head.weight), None)
        if place in state["state"]:  # a new dict: the one that is there is the optimiser's own
            state["state"][place] = {
                name: getattr(head, method)(x) if torch.is_tensor(x) and x.dim() == 2 else x
                for name, x in state["state"][place].items()
            }

    def save(self, metrics_size: int | None) -> None:
        """Save the state of all processes; ``metrics_size``: bytes of metrics.jsonl so far."""
        generators = gather_object([resume.rng_state()])
        model, optimizer = full_state(self.net), self.optimizer.state_dict()
        self._exchange_rows(optimizer, "gather_rows")
        if not self.accelerator.is_main_process:
            return
        scaler = self.accelerator.scaler
        state = {
            "epoch": self.epoch,
            "step": self.step,
            "best_eer": self.best_eer,
            "model": model,
            "optimizer": optimizer,
            "scaler": None if scaler is None else scaler.state_dict(),
            "generators": generators,
            "config": to_dict(self.config),
            "step_batch": self.step_batch,
            "speakers": list(self.labels),
            "metrics_size": metrics_size,
            "narrowing": self.schedules.ramps.narrowing if self.schedules.ramps else 1.0,
        }
        resume.save_state(self.exp_dir, state)

    def _restore(self, state: dict) -> None:
        resume.check_same_run(
            state | {"config": with_defaults(state["config"])},
            config=to_dict(self.config),
            step_batch=self.step_batch,
            speakers=list(self.labels),
        )
        self.net.load_state_dict(from_wespeaker(state["model"]))
        self._exchange_rows(state["optimizer"], "own_rows")
        self.optimizer.load_state_dict(state["optimizer"])
        if state["scaler"] is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self.epoch, self.step, self.best_eer = state["epoch"], state["step"], state["best_eer"]
        if self.schedules.ramps is not None:
            self.schedules.ramps.narrowing = state["narrowing"]
        resume.set_rng_state(state["generators"], self.accelerator.process_index)
        logger.info("resuming at epoch %d, step %d", self.epoch, self.step)
