"""What a training run says: train.log, metrics.jsonl, TensorBoard and a progress bar."""

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

logger = logging.getLogger(__name__)


@contextmanager
def log_file(path: Path) -> Iterator[None]:
    """Append what the package logs, from INFO on, to ``path`` too."""
    package = logging.getLogger("wespeaker_qmargin")
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    level = package.level
    package.addHandler(handler)
    package.setLevel(min(level or logging.INFO, logging.INFO))
    try:
        yield
    finally:
        package.setLevel(level)
        package.removeHandler(handler)
        handler.close()


class TrainLog:
    """Writes the records of one run; made on the main process only.

    Args:
        exp_dir: gets metrics.jsonl and tensorboard/.
        total_steps, first_step: of the whole run, and where this process starts.
        metrics_size: bytes of metrics.jsonl that belong to the resumed state; what a killed run
            wrote after that state is cut off, so that no step stands there twice.
    """

    def __init__(self, exp_dir: Path, *, total_steps: int, first_step: int, metrics_size: int):
        self._path = exp_dir / "metrics.jsonl"
        with open(self._path, "ab") as file:
            file.truncate(metrics_size)
        self._board = SummaryWriter(str(exp_dir / "tensorboard"), purge_step=first_step)
        self._bar = tqdm(
            total=total_steps, initial=first_step, unit="step", disable=None, dynamic_ncols=True
        )
        self._total_steps, self._first_step = total_steps, first_step
        self._start = time.monotonic()

    def metrics_size(self) -> int:
        """Return the size of metrics.jsonl in bytes."""
        return self._path.stat().st_size

    def progress(self) -> None:
        """Count one step."""
        self._bar.update()

    def record(self, values: dict) -> None:
        """Write one record: a JSON line (a number that is not finite as null), and TensorBoard."""
        line = json.dumps({k: _json_number(v) for k, v in values.items()})
        with open(self._path, "a") as file:
            file.write(line + "\n")
        for key, value in values.items():
            if key not in ("epoch", "step"):
                self._board.add_scalar(key, value, values["step"])

    def train_line(self, values: dict) -> None:
        """Log one line of a training interval, with the time that is left."""
        done = values["step"] - self._first_step
        left = (
            (self._total_steps - values["step"]) * (time.monotonic() - self._start) / max(done, 1)
        )
        logger.info(
            "epoch %d step %d/%d loss %.4f acc %.3f active %.3f effective batch %.0f support %.1f "
            "margin %.3f lr %.3g grad %.3g %.0f utt/s eta %s",
            values["epoch"],
            values["step"],
            self._total_steps,
            values["loss"],
            values["accuracy"],
            values["active"],
            values["effective_batch"],
            values["support"],
            values["margin"],
            values["lr"],
            values["grad_norm"],
            values["utts_per_s"],
            time.strftime("%H:%M:%S", time.gmtime(left)),
        )

    def close(self) -> None:
        """Flush and let go of the files."""
        self._bar.close()
        self._board.close()


def _json_number(value):
    return None if isinstance(value, float) and not abs(value) < float("inf") else value


class Interval:
    """Means over the steps since the last log line, without a device sync at any of them."""

    def __init__(self, accelerator):
        self._accelerator = accelerator
        zero = torch.zeros((), device=accelerator.device)
        self._loss, self._grad_norm = zero, zero
        self._counts = torch.zeros(3, dtype=torch.long, device=accelerator.device)
        self._samples, self._steps, self._doublings = 0, 0, 0
        self._start = time.monotonic()

    def add_batch(self, loss, statistics) -> None:
        """Count a batch: its mean loss, and the ``Statistics`` of its samples."""
        support, active, correct, doublings = statistics
        self._loss = self._loss + loss.detach() * len(support)
        self._counts += torch.stack([correct.sum(), active.sum(), support.sum()])
        self._samples += len(support)
        self._doublings += doublings

    def add_step(self, grad_norm) -> None:
        """Count an optimiser step: gradient norm before clipping."""
        self._grad_norm = self._grad_norm + grad_norm.detach()
        self._steps += 1

    def values(self) -> dict[str, float]:
        """Return the means over all processes; ``utts_per_s`` and ``doublings`` are sums."""
        seconds = time.monotonic() - self._start
        accuracy, active, support = (self._counts / self._samples).tolist()
        means = {
            "loss": self._loss.item() / self._samples,
            "accuracy": accuracy,
            "active": active,
            "support": support,
            "grad_norm": self._grad_norm.item() / self._steps,
            "utts_per_s": self._samples / seconds,
            "doublings": self._doublings,
        }
        packed = torch.tensor(
            list(means.values()), dtype=torch.float64, device=self._accelerator.device
        )
        reduced = self._accelerator.reduce(packed, reduction="mean").tolist()
        means = dict(zip(means, reduced))
        for summed in ("utts_per_s", "doublings"):
            means[summed] *= self._accelerator.num_processes
        return means
