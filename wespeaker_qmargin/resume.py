"""The state that a run continues from: one file, whole or not there, and a lock on its folder."""

import fcntl
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from wespeaker_qmargin.files import remove_leftovers, write_text
from wespeaker_qmargin.tensors import write_tensors

# Keys that may differ between a run and its continuation: they change no number in it. The batch
# is compared over all processes.
_FREE_KEYS = {
    "exp_dir",
    "gpus",
    "device",
    "num_avg",
    "save_epoch_interval",
    "log_batch_interval",
    "save_state_interval",
    "train_data",
    "train_label",
    "reverb_data",
    "noise_data",
    "checkpoint",
    "model_init",
    "accum_steps",
    "allow_pipes",
    "dataloader_args.batch_size",
    "dataloader_args.num_workers",
    "dataloader_args.pin_memory",
    "dataloader_args.prefetch_factor",
    "dataset_args.max_bad_share",
    "starvation",
    "starvation.min_active",
    "starvation.action",
}


@contextmanager
def locked(exp_dir: Path) -> Iterator[None]:
    """Hold ``exp_dir`` for one process; the kernel lets go when it ends, however it ends.

    Half-written files of a run that was killed are removed.

    Raises:
        ValueError: another run holds it.
    """
    folder = exp_dir / "state"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as file:
        try:
            # not flock: the loader's workers would inherit it and outlive a killed run by seconds
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise ValueError(
                f"{exp_dir}: another run is training here; wait for it or use another exp_dir"
            ) from None
        for written in (exp_dir, exp_dir / "models", folder):
            remove_leftovers(written)
        yield


def write_json(values: dict, path) -> None:
    """Write ``values`` as an indented JSON file, atomically."""
    write_text(path, json.dumps(values, indent=1) + "\n")


def rng_state() -> dict:
    """Return the state of every global random generator of this process, as plain values."""
    name, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state().cpu() if torch.cuda.is_initialized() else None,
        "numpy": [name, keys.tolist(), *rest],
        "python": random.getstate(),
    }


def set_rng_state(states: list[dict], rank: int) -> None:
    """Put back what ``rng_state`` returned on this rank; a rank that is new keeps its own."""
    if rank >= len(states):
        return
    state = states[rank]
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    random.setstate(state["python"])


def _path(exp_dir: Path) -> Path:
    return exp_dir / "state" / "state.pt"


def save_state(exp_dir: Path, state: dict) -> None:
    """Write the state atomically; the one before stays until the new one is on disk."""
    write_tensors(_path(exp_dir), state)


def load_state(exp_dir: Path) -> dict | None:
    """Return the saved state, or None if there is none.

    Raises:
        ValueError: the file is damaged.
    """
    path = _path(exp_dir)
    if not path.exists():
        return None
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises half a dozen kinds for damaged files
        raise ValueError(f"{path}: damaged, cannot resume from it: {error}") from error


def check_same_run(saved: dict, *, config: dict, step_batch: int, speakers: list[str]) -> None:
    """Refuse to continue a run with settings that would make it another one.

    Args:
        saved: the state.
        config: the configuration now, as ``config.to_dict`` gives it.
        step_batch: utterances an optimiser step now, over all processes.
        speakers: names in the order of the head's rows now.
    """
    if saved["step_batch"] != step_batch:
        raise ValueError(
            f"--resume: the run had {saved['step_batch']} utterances a step, now it would have "
            f"{step_batch}; keep processes x batch_size x accum_steps"
        )
    if saved["speakers"] != speakers:
        raise ValueError(
            f"--resume: the training list has other speakers ({len(speakers)}) than the run's "
            f"({len(saved['speakers'])}); give it the list that it began with"
        )
    before, after = _flat(saved["config"]), _flat(config)
    changed = [
        f"{key}: {before.get(key)!r} -> {after.get(key)!r}"
        for key in sorted(before.keys() | after.keys())
        if key not in _FREE_KEYS and before.get(key) != after.get(key)
    ]
    if changed:
        raise ValueError(
            f"--resume: the config is not the run's ({'; '.join(changed[:5])}); put it back, or "
            "start another exp_dir"
        )


def _flat(values: dict, prefix: str = "") -> dict:
    flat = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
