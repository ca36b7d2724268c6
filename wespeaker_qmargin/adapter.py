"""The border with WeSpeaker: its classes without its heavy imports, our head in its registry.

This is the only module that imports wespeaker, and it does so when something is asked for.
"""

import difflib
import importlib
import importlib.util
import os
import subprocess
import sys
import types
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from torch import nn

from wespeaker_qmargin.head import QMarginProduct

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
_Q_MARGIN_OPTIONS = ("alpha", "scale", "impl", "top_k", "mixed_precision")
Q_MARGIN_ARGS = {"project_type", "embed_dim", "num_class", *_Q_MARGIN_OPTIONS}
_HARMLESS_ARGS = {"easy_margin": False, "margin": None, "do_lm": None}

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


_FRONTENDS = {
    "s3prl": ("s3prl", "S3prlFrontend"),
    "tfmel": ("tfmel", "TFMelFrontend"),
    "w2vbert": ("w2vbert", "W2VBertFrontend"),
    "whisper_encoder": ("whisper_encoder", "whisper_encoder"),
}


class _DeferredPackage(types.ModuleType):
    """A package whose ``__init__`` runs when one of its own names is first asked for.

    Its sub-modules import at once: they need ``__path__`` only.
    """

    def __getattr__(self, name: str):
        # import machinery and inspection ask every module for dunder names; only a star import's
        # __all__ means that somebody wants the package's content
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self.__class__ = types.ModuleType
        try:
            self.__spec__.loader.exec_module(self)
        except BaseException:
            self.__class__ = _DeferredPackage
            raise
        return getattr(self, name)


def _defer(name: str) -> None:
    if name in sys.modules:
        return
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            f"no module {name}: run tools/setup.sh, or set WESPEAKER_ROOT to a WeSpeaker checkout"
        )
    module = _DeferredPackage(name)
    module.__spec__, module.__loader__, module.__file__ = spec, spec.loader, spec.origin
    module.__path__, module.__package__ = spec.submodule_search_locations, name
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)


def wespeaker_module(name: str) -> types.ModuleType:
    """Import ``wespeaker.<name>`` without running the ``__init__`` of wespeaker and its frontend.

    Those pull s3prl, whisper and umap (11-14 s) and fail where torchaudio cannot load. They still
    run, in full, as soon as a name of theirs is used (``wespeaker.load_model``). A checkout named
    by ``WESPEAKER_ROOT`` wins over an installed package.
    """
    root = os.environ.get("WESPEAKER_ROOT")
    if root and "wespeaker" not in sys.modules:
        if not (Path(root) / "wespeaker" / "models").is_dir():
            raise FileNotFoundError(
                f"WESPEAKER_ROOT={root}: not a WeSpeaker checkout, it has no wespeaker/models"
            )
        if root not in sys.path:
            sys.path.insert(0, root)
    _defer("wespeaker")
    _defer("wespeaker.frontend")
    return importlib.import_module(f"wespeaker.{name}")


def wespeaker_source() -> dict[str, str | None]:
    """Return where the WeSpeaker in use comes from: ``path``, ``version``, ``commit``."""
    package = Path(wespeaker_module("models").__path__[0]).parent
    commit = subprocess.run(
        ["git", "-C", str(package.parent), "log", "-1", "--format=%H", "--", package.name],
        capture_output=True,
        text=True,
    ).stdout.strip()
    try:
        installed = version("wespeaker-unofficial")
    except PackageNotFoundError:
        installed = None
    is_installed = "site-packages" in package.parts
    return {
        "path": str(package),
        "version": installed if is_installed else None,
        "commit": None if is_installed else commit or None,
    }


def nearest(word: str, known) -> str:
    """Return " Did you mean 'x'?" for the known word that is nearest, or an empty string."""
    match = difflib.get_close_matches(str(word), [str(k) for k in known], n=1, cutoff=0.6)
    return f" Did you mean {match[0]!r}?" if match else ""


def check_projection_args(args: dict) -> None:
    """Raise ValueError for an unknown head, or another head's option given to q_margin."""
    kind = args.get("project_type")
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
            f"{', '.join(_Q_MARGIN_OPTIONS)})."
            f"{nearest(key, Q_MARGIN_ARGS)}"
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
        options = {key: args[key] for key in _Q_MARGIN_OPTIONS if key in args}
        return QMarginProduct(args["embed_dim"], args["num_class"], **options, margin=0.0)
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
    """Put ``project_type: q_margin`` into WeSpeaker's ``get_projection``.

    Every loaded module that imported the function by name gets the new one too. From then on an
    unknown ``project_type`` raises instead of becoming a plain softmax. Calling it twice changes
    nothing; ``unregister`` undoes it.
    """
    current = wespeaker_module("models.projections").get_projection
    if hasattr(current, "_qmargin_upstream"):
        return

    def get_projection(conf):
        return _checked_projection(current, conf)

    get_projection._qmargin_upstream = current
    _rebind(current, get_projection)


def unregister() -> None:
    """Give WeSpeaker its own ``get_projection`` back, everywhere."""
    current = wespeaker_module("models.projections").get_projection
    if hasattr(current, "_qmargin_upstream"):
        _rebind(current, current._qmargin_upstream)


def _rebind(old, new) -> None:
    for module in list(sys.modules.values()):
        names = [k for k, v in list(getattr(module, "__dict__", {}).items()) if v is old]
        for name in names:
            setattr(module, name, new)


def get_speaker_model(name: str) -> type[nn.Module]:
    """Return WeSpeaker's backbone class ``name`` (ResNet34, ECAPA_TDNN_c512, XVEC, ...).

    Raises:
        ValueError: no backbone of that name; the nearest ones are named.
    """
    prefixes = sorted(_MODEL_MODULES, key=len, reverse=True)
    prefix = next((p for p in prefixes if str(name).startswith(p)), None)
    if prefix is None:
        raise ValueError(
            f"model: unknown backbone {name!r}; names start with one of "
            f"{', '.join(_MODEL_MODULES)}.{nearest(name, _MODEL_MODULES)}"
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
    narrow ResNet34.
    """
    factory = get_speaker_model(name)
    classes = {
        k: v for k, v in vars(sys.modules[factory.__module__]).items() if isinstance(v, type)
    }
    args = {k: classes.get(v, v) if isinstance(v, str) else v for k, v in args.items()}
    return factory(**args)


def get_frontend(name: str) -> type[nn.Module]:
    """Return WeSpeaker's front-end class for ``dataset_args.frontend`` (not ``fbank``)."""
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
