"""Models that are neither WeSpeaker's nor ours: ``model: package.module:Class`` in a config.

Any nn.Module will do that turns features (B, T, F), or with ``dataset_args.frontend: wave``
waveforms (B, T) in [-1, 1], into embeddings (B, D); of a tuple the last item counts. ``model_args``
are its constructor's; they must say ``embed_dim``, which is D. A config that names such a class is
to be trusted as a program is: its module runs.
"""

import importlib
import inspect

from torch import Tensor, nn


def imported_class(name: str) -> type[nn.Module]:
    """Return the class that ``package.module:Class`` names; importing runs that module.

    Raises:
        ValueError: no such module, or no nn.Module of that name in it.
    """
    module_name, _, class_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"model: {name}: cannot import {module_name} ({error}); install it, or put the folder "
            "that it is in on PYTHONPATH"
        ) from error
    classes = {
        k: v for k, v in vars(module).items() if isinstance(v, type) and issubclass(v, nn.Module)
    }
    if class_name not in classes:
        raise ValueError(
            f"model: {name}: {module_name} has no nn.Module {class_name!r}; it has "
            f"{', '.join(classes) or 'none'}"
        )
    return classes[class_name]


def constructor_arguments(name: str, args: dict) -> dict:
    """Return ``args`` without what the class does not take of ``feat_dim`` and ``embed_dim``.

    Those are the sizes of its input and output, which a class may know itself.

    Raises:
        ValueError: ``args`` do not say ``embed_dim``.
    """
    if "embed_dim" not in args:
        raise ValueError(f"model_args.embed_dim: missing; the size of {name}'s embeddings")
    takes = inspect.signature(imported_class(name)).parameters
    return {k: v for k, v in args.items() if k in takes or k not in ("feat_dim", "embed_dim")}


def build_imported(name: str, args: dict) -> nn.Module:
    """Build the class ``name`` with the ``constructor_arguments`` of ``args``.

    Raises:
        ValueError: it has an attribute whose keys a checkpoint keeps for the front-end or the head.
    """
    model = imported_class(name)(**constructor_arguments(name, args))
    for taken in ("frontend", "projection"):
        if hasattr(model, taken):
            raise ValueError(
                f"model: {name} has an attribute {taken!r}; a checkpoint keeps that name for "
                "another part: wrap it in a class that holds it under another name"
            )
    return model


class WaveFrontend(nn.Module):
    """The front-end ``wave``: waveforms (B, T) as they are."""

    def __init__(self, *, sample_rate: int):
        super().__init__()

    def output_size(self) -> int:
        """Return the size of a frame: one sample."""
        return 1

    def forward(self, wavs: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
        """Return both as they are."""
        return wavs, lens
