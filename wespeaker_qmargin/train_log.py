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
            "epoch %d step %d/%d loss %.4f acc %.3f active %.3f support %.1f margin %.3f "
            "lr %.3g grad %.3g %.0f utt/s eta %s",
            values["epoch"],
            values["step"],
            self._total_steps,
            values["loss"],
            values["accuracy"],
            values["active"],
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
    """Means over the steps since the last log line, without a device sync at any of them.

    Args:
        head: its ``statistics()`` are used if it has them (Q-Margin); for another head accuracy is
            read from the scores, margin included, and every sample and class counts as active.
    """

    def __init__(self, head, accelerator):
        self._head, self._accelerator = head, accelerator
        self._has_statistics = hasattr(head, "statistics")
        if self._has_statistics:
            head.reset_statistics()
        zero = torch.zeros((), device=accelerator.device)
        self._loss, self._correct, self._grad_norm = zero, zero, zero
        self._num_class, self._samples, self._steps = 0, 0, 0
        self._start = time.monotonic()

    def add_batch(self, loss, scores, labels) -> None:
        """Count a batch: mean loss, scores (B, C), labels (B,)."""
        self._loss = self._loss + loss.detach() * len(labels)
        self._samples += len(labels)
        self._num_class = scores.shape[1]
        if not self._has_statistics:
            self._correct = self._correct + (scores.argmax(dim=1) == labels).sum()

    def add_step(self, grad_norm) -> None:
        """Count an optimiser step: gradient norm before clipping."""
        self._grad_norm = self._grad_norm + grad_norm.detach()
        self._steps += 1

    def values(self) -> dict[str, float]:
        """Return the means over all processes; ``utts_per_s`` is their sum."""
        if self._has_statistics:
            own = self._head.statistics()
        else:
            accuracy = self._correct.item() / self._samples
            own = {"accuracy": accuracy, "active": 1.0, "support": float(self._num_class)}
        seconds = time.monotonic() - self._start
        means = {
            "loss": self._loss.item() / self._samples,
            "accuracy": own["accuracy"],
            "active": own["active"],
            "support": own["support"],
            "grad_norm": self._grad_norm.item() / self._steps,
            "utts_per_s": self._samples / seconds,
        }
        packed = torch.tensor(
            list(means.values()), dtype=torch.float64, device=self._accelerator.device
        )
        reduced = self._accelerator.reduce(packed, reduction="mean").tolist()
        means = dict(zip(means, reduced))
        means["utts_per_s"] *= self._accelerator.num_processes
        return means
