"""The border with WeSpeaker: its classes for us, our head, model and front-end in its registry."""

import difflib
import functools
import sys
import warnings

import torch
from torch import nn

from wespeaker_qmargin.functional import zero_loss_gap
from wespeaker_qmargin.head import QMarginProduct, auto_scale
from wespeaker_qmargin.imported import (
    WaveFrontend,
    build_imported,
    build_imported_head,
    head_arguments,
    imported_class,
)
from wespeaker_qmargin.mhfa import MHFA
from wespeaker_qmargin.parallel import ClassParallelQMargin
from wespeaker_qmargin.upstream import after_loading, wespeaker_module
from wespeaker_qmargin.w2vbert import W2VBertFrontend
from wespeaker_qmargin.wavlm import WavLMFrontend

# project_type -> class that upstream builds for it (projections.py:24-69); "softmax" has no branch
# of its own there: it is served by the fall-through that also takes every misspelt name.
_UPSTREAM_HEADS = {
    "add_margin": "AddMarginProduct",
    "arc_margin": "ArcMarginProduct",
    "arc_margin_intertopk_subcenter": "ArcMarginProduct_intertopk_subcenter",
    "sphere": "SphereProduct",
    "sphereface2": "SphereFace2",
    "ham_margin": "HyperbolicAMSoftmax",
    "softmax": "Linear",
}
HEADS = (*_UPSTREAM_HEADS, "q_margin")
# Keys of projection_args that q_margin reads, and those of other heads that a user may leave in his
# YAML because they ask for nothing (value, or None for any value).
Q_MARGIN_OPTIONS = ("alpha", "scale", "impl", "top_k", "mixed_precision")
Q_MARGIN_ARGS = {"project_type", "embed_dim", "num_class", "class_parallel", *Q_MARGIN_OPTIONS}
_HARMLESS_ARGS = {"easy_margin": False, "margin": None, "do_lm": None}

_OWN_MODELS = {"MHFA": MHFA}
_MODEL_MODULES = {
    "XVEC": "tdnn",
    "ECAPA_TDNN": "ecapa_tdnn",
    "ResNet": "resnet",
    "REPVGG": "repvgg",
    "CAMPPlus": "campplus",
    "ERes2Net": "eres2net",
    "Res2Net": "res2net",
    "Gemini": "gemini_dfresnet",
    "whisper_PMFA": "whisper_PMFA",
    "ReDimNet2": "redimnet2",
    "ReDimNet": "redimnet",
    "SimAM_ResNet": "samresnet",
    "XI_VEC": "xi_vector",
    "W2VBert_Adapter_MFA": "w2vbert_adapter_mfa",
}


# ours: they give the hidden states of all layers
SSL_FRONTENDS = {"wavlm": WavLMFrontend, "w2vbert": W2VBertFrontend}
_FRONTENDS = {
    "s3prl": ("s3prl", "S3prlFrontend"),
    "tfmel": ("tfmel", "TFMelFrontend"),
    "whisper_encoder": ("whisper_encoder", "whisper_encoder"),
}


def nearest(word: str, known) -> str:
    """Return " Did you mean 'x'?" for the known word that is nearest, or an empty string."""
    match = difflib.get_close_matches(str(word), [str(k) for k in known], n=1, cutoff=0.6)
    return f" Did you mean {match[0]!r}?" if match else ""


def check_projection_args(args: dict) -> None:
    """Raise ValueError for an unknown head, or another head's option given to q_margin."""
    kind = args.get("project_type")
    if ":" in str(kind):
        head_arguments(args)
        return
    if kind not in HEADS:
        raise ValueError(
            f"project_type: unknown head {kind!r}; known: {', '.join(HEADS)}.{nearest(kind, HEADS)}"
        )
    if kind != "q_margin":
        return
    for key, value in args.items():
        if key in Q_MARGIN_ARGS or (key in _HARMLESS_ARGS and _HARMLESS_ARGS[key] in (None, value)):
            continue
        if key in _HARMLESS_ARGS:
            raise ValueError(
                f"projection_args.{key}: {value!r} has no meaning for q_margin: remove it"
            )
        raise ValueError(
            f"projection_args.{key}: not an option of q_margin (it has "
            f"{', '.join(Q_MARGIN_OPTIONS)}, class_parallel)."
            f"{nearest(key, Q_MARGIN_ARGS)}"
        )


def scale_warning(alpha: float, scale: float, margin: float) -> str | None:
    """Return what a scale far from ``auto`` means, as one kept from CosFace; else None."""
    auto = auto_scale(alpha)
    if auto / 1.5 <= scale <= auto * 1.5:
        return None
    gap = zero_loss_gap(alpha=alpha, scale=scale, margin=margin)
    return (
        f"projection_args.scale {scale:g} at alpha {alpha:g}: s (alpha - 1) = "
        f"{scale * (alpha - 1):.3g}, a sample counts as won from a cosine gap of {gap:.3g} on. To "
        f"train with the recommended s (alpha - 1) = 5, write 'scale: auto' ({auto:g})"
    )


def get_projection(args: dict) -> nn.Module:
    """Build the head that ``args`` (WeSpeaker's ``projection_args``) asks for, with margin 0.

    Needs ``embed_dim`` and ``num_class`` in ``args``. Raises ValueError if the head is unknown,
    here or to the WeSpeaker that is installed.
    """
    return _checked_projection(_upstream_get_projection(), args)


def _checked_projection(upstream, args: dict) -> nn.Module:
    check_projection_args(args)
    kind = args["project_type"]
    if kind == "q_margin":
        options = {key: args[key] for key in Q_MARGIN_OPTIONS if key in args}
        kind = ClassParallelQMargin if args.get("class_parallel") else QMarginProduct
        return kind(args["embed_dim"], args["num_class"], **options, margin=0.0)
    if ":" in kind:
        return build_imported_head(args)
    head = upstream(args)
    if type(head).__name__ != _UPSTREAM_HEADS[kind]:
        raise ValueError(
            f"project_type {kind!r}: this WeSpeaker does not know it and built "
            f"{type(head).__name__} instead of {_UPSTREAM_HEADS[kind]}; use a newer WeSpeaker"
        )
    return head


def _upstream_get_projection():
    function = wespeaker_module("models.projections").get_projection
    return getattr(function, "_qmargin_upstream", function)


def register() -> None:
    """Put ``project_type: q_margin``, ``model: MHFA`` and ``frontend: wavlm`` into WeSpeaker.

    Every loaded module that imported ``get_projection`` or ``get_speaker_model`` by name gets the
    new one too. From then on an unknown ``project_type`` raises instead of becoming a plain
    softmax. Calling it twice changes nothing; ``unregister`` undoes it.
    """
    global _registered
    _registered = True
    _wrap("models.projections", "get_projection", _checked_projection)
    _wrap("models.speaker_model", "get_speaker_model", _own_or_upstream)
    _add_frontends(sys.modules["wespeaker.frontend"])


def unregister() -> None:
    """Give WeSpeaker its own functions and front-ends back, everywhere."""
    global _registered
    _registered = False
    for module, name in (
        ("models.projections", "get_projection"),
        ("models.speaker_model", "get_speaker_model"),
    ):
        current = getattr(wespeaker_module(module), name)
        if hasattr(current, "_qmargin_upstream"):
            _rebind(current, current._qmargin_upstream)
    known = vars(sys.modules["wespeaker.frontend"]).get("frontend_class_dict", {})
    for name, frontend in SSL_FRONTENDS.items():
        if known.get(name) is frontend:
            del known[name]


_registered = False


def _wrap(module: str, name: str, function) -> None:
    """Let ``function(upstream, argument)`` stand for upstream's ``name``, everywhere."""
    current = getattr(wespeaker_module(module), name)
    if hasattr(current, "_qmargin_upstream"):
        return

    @functools.wraps(current)
    def wrapper(argument):
        return function(current, argument)

    wrapper._qmargin_upstream = current
    _rebind(current, wrapper)


def _own_or_upstream(upstream, name: str):
    return _OWN_MODELS[name] if name in _OWN_MODELS else upstream(name)


def _add_frontends(package) -> None:
    """Add ours to what upstream's trainer knows, where that package is really loaded."""
    known = vars(package).get("frontend_class_dict")
    if _registered and known is not None:
        for name, frontend in SSL_FRONTENDS.items():
            known.setdefault(name, frontend)  # a w2vbert of its own stays


after_loading.append(_add_frontends)


def _rebind(old, new) -> None:
    for module in list(sys.modules.values()):
        names = [k for k, v in list(getattr(module, "__dict__", {}).items()) if v is old]
        for name in names:
            setattr(module, name, new)


def get_speaker_model(name: str) -> type[nn.Module]:
    """Return WeSpeaker's backbone class ``name`` (ResNet34, ECAPA_TDNN_c512, XVEC, ...), or MHFA.

    ``package.module:Class`` is a class of anybody's, see ``imported``.

    Raises:
        ValueError: no backbone of that name; the nearest ones are named.
    """
    if name in _OWN_MODELS:
        return _OWN_MODELS[name]
    if ":" in str(name):
        return imported_class(name)
    prefixes = sorted(_MODEL_MODULES, key=len, reverse=True)
    prefix = next((p for p in prefixes if str(name).startswith(p)), None)
    if prefix is None:
        raise ValueError(
            f"model: unknown backbone {name!r}; names start with one of "
            f"{', '.join((*_MODEL_MODULES, *_OWN_MODELS))}."
            f"{nearest(name, (*_MODEL_MODULES, *_OWN_MODELS))}"
        )
    module = wespeaker_module(f"models.{_MODEL_MODULES[prefix]}")
    if not hasattr(module, name):
        known = [k for k in vars(module) if k.startswith(prefix)]
        raise ValueError(
            f"model: WeSpeaker's {module.__name__} has no {name!r}; it has {', '.join(known)}."
            f"{nearest(name, known)}"
        )
    return getattr(module, name)


def build_speaker_model(name: str, args: dict) -> nn.Module:
    """Build backbone ``name`` with ``args`` (WeSpeaker's ``model_args``).

    A text that names a class of the backbone's own module stands for that class, so that
    ``model: ResNet`` with ``block: BasicBlock, num_blocks: [3, 4, 6, 3], m_channels: 16`` is a
    narrow ResNet34. (Not so for a class of anybody's.)
    """
    if ":" in name:
        return build_imported(name, args)
    factory = get_speaker_model(name)
    classes = {
        k: v for k, v in vars(sys.modules[factory.__module__]).items() if isinstance(v, type)
    }
    args = {k: classes.get(v, v) if isinstance(v, str) else v for k, v in args.items()}
    return factory(**args)


@torch.no_grad()
def fewest_frames(backbone: nn.Module, bands: int) -> int:
    """Return how many frames a backbone needs for a finite embedding; 1 if it is more than 64."""
    modes = [(module, module.training) for module in backbone.modules()]
    backbone.eval()
    with warnings.catch_warnings():  # of the deviation of a single frame
        warnings.simplefilter("ignore")
        fewest = next((n for n in range(1, 65) if _gives_finite(backbone, n, bands)), 1)
    for module, training in modes:
        module.training = training
    return fewest


def _gives_finite(backbone: nn.Module, frames: int, bands: int) -> bool:
    device = next(backbone.parameters()).device
    ramp = torch.arange(frames * bands, device=device).sin().view(1, frames, bands)
    try:
        output = backbone(ramp)
    except (RuntimeError, ValueError):  # a kernel is wider
        return False
    return bool((output[-1] if isinstance(output, tuple) else output).isfinite().all())


def get_frontend(name: str) -> type[nn.Module]:
    """Return the front-end class for ``dataset_args.frontend`` (not ``fbank``).

    WavLM, w2v-BERT and ``wave`` are ours, the others WeSpeaker's.
    """
    if name == "wave":
        return WaveFrontend
    if name in SSL_FRONTENDS:
        return SSL_FRONTENDS[name]
    module, class_name = _FRONTENDS[name]
    return getattr(wespeaker_module(f"frontend.{module}"), class_name)


def get_scheduler(name: str) -> type:
    """Return WeSpeaker's learning-rate or margin scheduler class ``name``."""
    module = wespeaker_module("utils.schedulers")
    known = [
        k
        for k, v in vars(module).items()
        if isinstance(v, type) and k not in ("BaseClass", "object")
    ]
    if name not in known:
        raise ValueError(
            f"unknown scheduler {name!r}; known: {', '.join(known)}.{nearest(name, known)}"
        )
    return getattr(module, name)
