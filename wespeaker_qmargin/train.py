"""Training: any WeSpeaker backbone and head, on a CPU, a GPU, several, several nodes.

Where a run stands is (epoch, step); schedules, order and augmentation are functions of it, so that
a resumed run is the uninterrupted one.
"""

import logging
from contextlib import ExitStack, nullcontext
from pathlib import Path

from wespeaker_qmargin import resume
from wespeaker_qmargin.config import Config, load_config
from wespeaker_qmargin.data import Batch
from wespeaker_qmargin.experiment import Experiment, make_accelerator
from wespeaker_qmargin.guard import ExpertGuard, FileGuard, LossGuard, StarvationGuard
from wespeaker_qmargin.train_log import Interval, TrainLog, log_file

logger = logging.getLogger(__name__)


def train(config: Config, *, resume_run: bool = False) -> Path:
    """Train as ``config`` says and return its ``exp_dir``.

    Leaves there: config.yaml (resolved), run.json, speakers.txt (one a line, in the order of the
    head's rows), metrics.jsonl, train.log, tensorboard/, models/model_<epoch>.pt (plain state
    dicts), best_model.pt (by validation EER, if there are ``valid_speakers``), state/ (to resume).

    Args:
        resume_run: continue the run that ``exp_dir`` holds (start it, if it holds none).

    Raises:
        ValueError: an ``exp_dir`` in use, unusable data, a loss that is not finite, too few active
            samples where ``starvation.action`` is ``stop``.
    """
    for key in ("exp_dir", "train_data"):
        if getattr(config, key) is None:
            raise ValueError(f"{key}: missing; write it in the config or pass --{key} PATH")
    exp_dir = Path(config.exp_dir)
    accelerator = make_accelerator(config)
    with ExitStack() as stack:
        if accelerator.is_main_process:
            stack.enter_context(resume.locked(exp_dir))
            stack.enter_context(log_file(exp_dir / "train.log"))
        state = resume.load_state(exp_dir)
        if state is not None and not resume_run:
            raise ValueError(
                f"{exp_dir}: holds a run (epoch {state['epoch']}, step {state['step']}); continue "
                "it with --resume, or choose another exp_dir"
            )
        experiment = Experiment(config, exp_dir, accelerator, state)
        log = None
        if accelerator.is_main_process:
            experiment.describe()
            log = TrainLog(
                exp_dir,
                total_steps=experiment.epoch_iter * config.num_epochs,
                first_step=experiment.iteration,
                metrics_size=0 if state is None else state["metrics_size"],
            )
            stack.callback(log.close)
        _Training(experiment, log).run()
    return exp_dir


class _Training:
    """The loop over epochs and steps; ``log`` is None beside the main process."""

    def __init__(self, experiment: Experiment, log: TrainLog | None):
        self.at, self.log = experiment, log
        self.config, self.accelerator = experiment.config, experiment.accelerator
        self.losses = LossGuard()
        self.experts = ExpertGuard(experiment.net)
        share = self.config.dataset_args.max_bad_share
        self.files = FileGuard(len(experiment.train_set), share)
        self.starvation = None
        if self.config.starvation:
            self.starvation = StarvationGuard(experiment.schedules, **self.config.starvation)

    def run(self) -> None:
        while self.at.epoch <= self.config.num_epochs:
            self._run_epoch()
            self._end_epoch()
        logger.info("finished: %s", self.at.exp_dir)

    def _run_epoch(self) -> None:
        at, config, batches = self.at, self.config, self.at.batches()
        at.model.train()
        interval, unsaved = self._new_interval(), 0
        while at.step < at.epoch_iter:
            self._run_step(batches, interval)
            at.step, unsaved = at.step + 1, unsaved + 1
            if self.log is not None:
                self.log.progress()
            last = at.step == at.epoch_iter
            if last or at.step % config.log_batch_interval == 0:
                self._log(interval)
                interval = self._new_interval()
                # only where a log line ends: the state needs no half-filled interval
                if not last and 0 < config.save_state_interval <= unsaved:
                    self._save_state()
                    unsaved = 0

    def _new_interval(self) -> Interval:
        self.experts.start()
        return Interval(self.accelerator)

    def _run_step(self, batches, interval: Interval) -> None:
        at, accum_steps = self.at, self.config.accum_steps
        at.schedules.step(at.iteration)
        for micro in range(accum_steps):
            batch = next(batches)
            self.files.note(batch.problems, batch.too_short, batch.bad_sources)
            synchronised = micro + 1 == accum_steps
            with nullcontext() if synchronised else self.accelerator.no_sync(at.model):
                self._forward_backward(batch, interval)
        interval.add_step(at.clip_gradients())
        at.optimizer.step()
        at.optimizer.zero_grad()

    def _forward_backward(self, batch: Batch, interval: Interval) -> None:
        wavs, labels = (
            tensor.to(self.accelerator.device, non_blocking=True)
            for tensor in (batch.wavs, batch.labels)
        )
        # the seeds stay on the CPU, where reading them waits for nothing
        loss, statistics = self.at.model(wavs, labels, batch.seeds.tolist())
        self.accelerator.backward(loss / self.config.accum_steps)
        self.losses.check()
        self.losses.watch(loss, statistics.support, batch.keys, self._where())
        interval.add_batch(loss, statistics)

    def _where(self) -> str:
        at = self.at
        alpha = getattr(at.net.projection, "alpha", "none")
        return (
            f"epoch {at.epoch}, step {at.iteration} (lr {at.schedules.lr:.3g}, margin "
            f"{at.schedules.margin:.3g}, alpha {alpha})"
        )

    def _log(self, interval: Interval) -> None:
        self.losses.check()
        values = {
            "epoch": self.at.epoch,
            "step": self.at.iteration,
            **interval.values(),
            "lr": self.at.schedules.lr,
            "margin": self.at.schedules.margin,
        }
        values["effective_batch"] = values["active"] * self.at.step_batch
        head = self.at.net.projection
        if self.at.schedules.ramps is not None:
            values |= {"alpha": head.alpha, "scale": head.scale}
        if self.log is not None:
            self.log.record(values | self.experts.values())
            self.log.train_line(values)
        if self.starvation and self.starvation.starves(values["active"], head, self.at.epoch):
            self._save_state()
            raise ValueError(
                f"starvation.action stop, at {self._where()}: lower alpha or raise the margin, and "
                "go on from models/ in a new exp_dir; or --resume without starvation"
            )

    def _end_epoch(self) -> None:
        at, config = self.at, self.config
        valid_eer = at.held_out.eer(at.net, self.accelerator, config)
        late = at.epoch > config.num_epochs - config.num_avg
        if late or at.epoch % config.save_epoch_interval == 0:
            at.save_model(f"models/model_{at.epoch}.pt")
        if valid_eer is not None:
            self._note_valid_eer(valid_eer)
        at.epoch, at.step = at.epoch + 1, 0
        self._save_state()

    def _note_valid_eer(self, valid_eer: float) -> None:
        at = self.at
        if at.best_eer is None or valid_eer < at.best_eer:
            at.best_eer = valid_eer
            at.save_model("best_model.pt")
        if self.log is not None:
            self.log.record({"epoch": at.epoch, "step": at.iteration, "valid_eer": valid_eer})
            percents = (100 * valid_eer, 100 * at.best_eer)
            logger.info("epoch %d validation EER %.2f %% (best %.2f %%)", at.epoch, *percents)

    def _save_state(self) -> None:
        self.losses.check()
        self.at.save(None if self.log is None else self.log.metrics_size())


def add_arguments(parser) -> None:
    parser.epilog = (
        "examples:\n"
        "  wespeaker-qmargin train --config conf/mini_xvec_qmargin.yaml --exp_dir exp/xvec "
        "--data_type kaldi --train_data data/mini/train\n"
        "  wespeaker-qmargin train --config exp/xvec/config.yaml --resume\n"
        "  torchrun --nproc_per_node 2 -m wespeaker_qmargin.cli train --config ... --gpus '[0,1]'\n"
        "every key of the config can be given as --key value or --section.key value"
    )
    parser.add_argument("--config", required=True, help="WeSpeaker YAML; may start from base:")
    parser.add_argument("--resume", action="store_true", help="continue the run in exp_dir")
    parser.set_defaults(overrides=[])


def run(args) -> None:
    train(load_config(args.config, args.overrides), resume_run=args.resume)
