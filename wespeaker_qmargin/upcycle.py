"""A dense encoder's feed-forward modules become mixtures of experts; so do a checkpoint's tensors.

Found by structure, not by name: two linear layers D -> H -> D in one module. That is WavLM, HuBERT,
wav2vec 2.0, w2v-BERT (two in each layer), ViT and Swin of transformers.
"""

import inspect
import logging
import re
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from wespeaker_qmargin.imported import imported_class
from wespeaker_qmargin.moe import MoEFeedForward, moe_layers
from wespeaker_qmargin.router import MoEOptions

logger = logging.getLogger(__name__)

_MANY = 4  # FaceMoE: with 8 experts training collapsed


class FeedForward(NamedTuple):
    """A module with the linear layers D -> H -> D, where it is, and the index of its block."""

    name: str
    module: nn.Module
    dim: int
    block: int


def feed_forwards(encoder: nn.Module) -> list[FeedForward]:
    """Return the feed-forward modules of ``encoder`` in the order of its blocks.

    Those in one block, as w2v-BERT's two, have one index.
    """
    found, blocks = [], {}
    for name, module in encoder.named_modules():
        linear = [x for x in module.children() if type(x) is nn.Linear]
        others = [x for x in module.children() if x not in linear and list(x.parameters())]
        if len(linear) != 2 or others:
            continue
        first, last = linear
        if first.in_features == last.out_features and first.out_features == last.in_features:
            block = blocks.setdefault(name.rpartition(".")[0], len(blocks))
            found.append(FeedForward(name, module, first.in_features, block))
    return found


def upcycle(encoder: nn.Module, **options) -> list[str]:
    """Replace feed-forward modules of ``encoder`` by mixtures of copies of them, in place.

    Args:
        options: of `router.MoEOptions`; more than four experts are warned of.

    Returns:
        The names of the modules that were replaced.

    Raises:
        ValueError: an option out of range, an encoder without such modules, or with experts.

    Reference: Komatsuzaki et al. 2023, "Sparse upcycling".
    """
    made = MoEOptions(**options)
    if moe_layers(encoder):
        raise ValueError("this encoder has experts already: upcycle a dense one")
    chosen = _chosen(feed_forwards(encoder), made.layers, type(encoder).__name__)
    if made.experts > _MANY:
        logger.warning("moe.experts: %d; in FaceMoE 8 collapsed, 3 were best", made.experts)
    for slot in chosen:
        layer = MoEFeedForward(slot.module, slot.dim, made)
        layer.router.to(next(slot.module.parameters()).device)
        encoder.set_submodule(slot.name, layer.train(slot.module.training))
    watch_padding(encoder)
    return [slot.name for slot in chosen]


def replace_feed_forwards(
    encoder: nn.Module, *, module: str, layers: str | Sequence[int] = "all", **options
) -> list[str]:
    """Put ``Class(feed_forward, dim, **options)`` in the place of feed-forward modules.

    For adapters and the like. A class that takes over the children of the module it gets, under
    their names, keeps the keys of a checkpoint.

    Args:
        module: ``package.module:Class``; to be trusted as a program is.
        layers: of `router.MoEOptions`.

    Returns:
        The names of the modules that were replaced.

    Raises:
        ValueError: no such class, options that it does not take, unknown layers.
    """
    made = imported_class(module, "feed_forward.module")
    chosen = _chosen(feed_forwards(encoder), layers, type(encoder).__name__)
    for slot in chosen:
        try:
            replacement = made(slot.module, slot.dim, **options)
        except TypeError as error:
            raise ValueError(f"feed_forward: {module}: {error}") from error
        encoder.set_submodule(slot.name, replacement.train(slot.module.training))
    return [slot.name for slot in chosen]


def _chosen(found: list[FeedForward], layers, kind: str) -> list[FeedForward]:
    if not found:
        raise ValueError(
            f"{kind}: no feed-forward module of two linear layers D -> H -> D was found; known are "
            "WavLM, HuBERT, wav2vec 2.0, w2v-BERT, ViT and Swin of transformers >= 5.24"
        )
    count = 1 + max(slot.block for slot in found)
    last = re.fullmatch(r"last([1-9]\d*)", layers) if isinstance(layers, str) else None
    if layers == "all":
        wanted = set(range(count))
    elif last:
        wanted = set(range(count - int(last[1]), count))
    elif isinstance(layers, list | tuple) and all(type(x) is int for x in layers):
        wanted = set(layers)
    else:
        wanted = set()
    if not wanted or not wanted <= set(range(count)):
        raise ValueError(
            f"layers: expected all, lastM or a list of blocks in 0 ... {count - 1}, got {layers!r}"
        )
    return [slot for slot in found if slot.block in wanted]


def watch_padding(encoder: nn.Module) -> None:
    """Tell the mixtures of ``encoder`` which tokens are padding, at every forward.

    By the (B, T) ``attention_mask`` that transformers gives to the stack that holds the layers;
    encoders without one (ViT, Swin) have no padding.
    """
    for module in encoder.modules():
        if isinstance(getattr(module, "layers", None), nn.ModuleList) and moe_layers(module):
            module.register_forward_pre_hook(_note_padding, with_kwargs=True)


def _note_padding(stack: nn.Module, args: tuple, kwargs: dict) -> None:
    given = dict(zip(inspect.signature(stack.forward).parameters, args)) | kwargs
    mask = given.get("attention_mask")
    valid = mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None
    for layer in moe_layers(stack).values():
        layer.valid = valid


def fit_experts(
    state: dict[str, Tensor], layers: dict[str, MoEFeedForward], *, merge: bool = False
) -> tuple[dict[str, Tensor], list[MoEFeedForward]]:
    """Return a checkpoint's tensors as ``layers`` of a network want them, and the upcycled ones.

    A dense module's tensors go to every expert; the router is not among them. Experts' go where
    they are, or with ``merge`` their mean does, as if it were dense.

    Raises:
        ValueError: another number of experts, or experts in a dense network, without ``merge``.
    """
    state = dict(state)
    given = _experts_of(state)
    for name, count in given.items():
        wanted = len(layers[name].experts) if name in layers else 1
        if merge:
            _merge(state, name, count)
        elif wanted != count:
            raise ValueError(
                f"{name}: the checkpoint has {count} experts, the network {wanted}; set "
                f"moe.experts: {count}, or put the mean of the experts in their place, to be "
                "copied to all: --merge_experts"
            )
    upcycled = {name: x for name, x in layers.items() if name not in given or merge}
    for name, layer in upcycled.items():
        _spread(state, name, layer)
    return state, list(upcycled.values())


def _experts_of(state: dict[str, Tensor]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for key in state:
        name, found, rest = key.partition(".experts.")
        if found:
            counts[name] = max(counts.get(name, 0), 1 + int(rest.partition(".")[0]))
    return counts


def _merge(state: dict[str, Tensor], name: str, count: int) -> None:
    parts = [_pop(state, f"{name}.experts.{i}.") for i in range(count)]
    _pop(state, f"{name}.router.")
    for key, value in parts[0].items():
        mean = torch.stack([part[key].double() for part in parts]).mean(dim=0)
        state[f"{name}.{key}"] = mean.to(value.dtype)


def _spread(state: dict[str, Tensor], name: str, layer: MoEFeedForward) -> None:
    dense = _pop(state, f"{name}.")
    for i in range(len(layer.experts)):
        state |= {f"{name}.experts.{i}.{key}": value.clone() for key, value in dense.items()}


def _pop(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    keys = [key for key in state if key.startswith(prefix)]
    return {key.removeprefix(prefix): state.pop(key) for key in keys}
