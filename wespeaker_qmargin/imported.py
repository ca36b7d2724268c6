"""Models and heads that are neither WeSpeaker's nor ours: ``package.module:Class`` in a config.

Any nn.Module will do that turns features (B, T, F), or with ``dataset_args.frontend: wave``
waveforms (B, T) in [-1, 1], into embeddings (B, D); of a tuple the last item counts. ``model_args``
are its constructor's; they must say ``embed_dim``, which is D.

A head (``project_type``) is built as ``Class(embed_dim, num_class, **others)`` of projection_args
and is called as WeSpeaker's are: ``(embeddings, labels)`` -> scores (B, C) for the criterion, or
``(scores, loss)``; its ``update(margin)``, if it has one, is called before every step.

A config that names such a class is to be trusted as a program is: its module runs.
"""

import importlib
import inspect
import re

from torch import Tensor, nn


def imported_class(name: str, key: str = "model") -> type[nn.Module]:
    """Return the class that ``package.module:Class`` names; importing runs that module.

    Raises:
        ValueError: no such module, or no nn.Module of that name in it.
    """
    if not re.fullmatch(r"[^\W\d]\w*(\.\w+)*:\w+", str(name)):
        raise ValueError(f"{key}: expected package.module:Class, found {name!r}")
    module_name, _, class_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"{key}: {name}: cannot import {module_name} ({error}); install it, or put the folder "
            "that it is in on PYTHONPATH"
        ) from error
    classes = {
        k: v for k, v in vars(module).items() if isinstance(v, type) and issubclass(v, nn.Module)
    }
    if class_name not in classes:
        raise ValueError(
            f"{key}: {name}: {module_name} has no nn.Module {class_name!r}; it has "
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


def head_arguments(args: dict) -> dict:
    """Return what of ``projection_args`` the head's class gets beside its two sizes.

    Raises:
        ValueError: no such class, an argument that it does not take.
    """
    name = args["project_type"]
    takes = inspect.signature(imported_class(name, "project_type")).parameters
    ours = ("project_type", "embed_dim", "num_class", "do_lm")
    options = {k: v for k, v in args.items() if k not in ours or (k == "do_lm" and k in takes)}
    if not any(p.kind is p.VAR_KEYWORD for p in takes.values()):
        for key in options.keys() - takes.keys():
            raise ValueError(f"projection_args.{key}: not an argument of {name}")
    return options


def build_imported_head(args: dict) -> nn.Module:
    """Build the head whose class ``args["project_type"]`` names."""
    head = imported_class(args["project_type"], "project_type")
    return head(args["embed_dim"], args["num_class"], **head_arguments(args))


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
