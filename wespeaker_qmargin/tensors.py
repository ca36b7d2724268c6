"""Checkpoints on disk."""

import torch

from wespeaker_qmargin.files import atomic_path


def write_tensors(path, content) -> None:
    """Write what ``torch.load`` with ``weights_only`` reads, atomically.

    Raises:
        OSError: it cannot be written whole, as on a full disk (torch has a RuntimeError for that).
    """
    with atomic_path(path) as temporary:
        try:
            torch.save(content, temporary)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise OSError(f"{path}: cannot be written; is the disk full? ({reason})") from error
