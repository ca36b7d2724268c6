"""Where torchaudio is not what WeSpeaker was written for, and what then takes its place.

Each ``*_needed`` tries what WeSpeaker calls; each other function puts it right, in this process.
"""

import contextlib
import importlib
import importlib.abc
import importlib.util
import io
import sys
import types
import warnings

import soundfile
import torch

from wespeaker_qmargin import torchaudio_standin


def absent() -> bool:
    """Whether there is no torchaudio at all."""
    return "torchaudio" not in sys.modules and importlib.util.find_spec("torchaudio") is None


def use_standin() -> None:
    """Let `torchaudio_standin` be torchaudio."""
    sys.modules.update(torchaudio_standin.modules())


def extension_needed() -> bool:
    """Whether torchaudio is there and cannot be imported."""
    if absent():
        return False
    try:
        importlib.import_module("torchaudio")
    # OSError from the loader of libraries; RuntimeError and ImportError from its own checks
    except (OSError, ImportError, RuntimeError):
        _forget_torchaudio()
        return True
    return False


def _forget_torchaudio() -> None:
    for name in [n for n in sys.modules if n.split(".")[0] in ("torchaudio", "torio")]:
        del sys.modules[name]


def leave_out_extension() -> None:
    """Import torchaudio without its compiled part; its Python parts need nothing of it."""
    finder = _WithoutExtension()
    sys.meta_path.insert(0, finder)
    try:
        importlib.import_module("torchaudio")
    finally:
        sys.meta_path.remove(finder)


class _WithoutExtension(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name != "torchaudio._extension":
            return None
        return importlib.util.spec_from_loader(name, self)

    def exec_module(self, module: types.ModuleType) -> None:
        module._IS_TORCHAUDIO_EXT_AVAILABLE = False
        module._IS_ALIGN_AVAILABLE = module._IS_RIR_AVAILABLE = False
        module.fail_if_no_align = module.fail_if_no_rir = lambda function: function
        module.lazy_import_sox_ext = _NoSox


class _NoSox:
    def is_available(self) -> bool:
        return False

    def __getattr__(self, name: str):
        raise RuntimeError("this torchaudio has no SoX")


def load_needed() -> bool:
    """Whether ``torchaudio.load`` fails, or gives floats where the file's integers are asked for.

    2.9 and later read through torchcodec only, which has no integers: ``wespeaker.load_model``
    would then see waves 2^15 times too quiet.
    """
    try:
        wav, _ = _quietly(importlib.import_module("torchaudio").load, _short_wav(), normalize=False)
    except Exception:
        return True
    return wav.dtype != torch.int16


def replace_load() -> None:
    """Read by soundfile what torchaudio cannot read, and give back ``info``."""
    torchaudio = importlib.import_module("torchaudio")
    theirs = torchaudio.load
    try:
        _quietly(theirs, _short_wav())
    except Exception:
        torchaudio.load = torchaudio_standin.load
    else:
        torchaudio.load = _integers_by_soundfile(theirs)
    if not hasattr(torchaudio, "info"):
        torchaudio.info = torchaudio_standin.info


def _integers_by_soundfile(theirs):
    def load(uri, *args, normalize: bool = True, **options):
        function = theirs if normalize else torchaudio_standin.load
        return function(uri, *args, normalize=normalize, **options)

    return load


def _short_wav() -> io.BytesIO:
    file = io.BytesIO()
    soundfile.write(file, [0.0, 0.25, -0.25], 16000, format="WAV", subtype="PCM_16")
    file.seek(0)
    return file


def _quietly(function, *args, **options):
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        return function(*args, **options)


def sox_needed() -> bool:
    """Whether ``sox_effects.apply_effects_tensor`` is gone (2.9), or finds no libsox."""
    try:
        module = importlib.import_module("torchaudio.sox_effects")
        effects = [["speed", "0.9"], ["rate", "16000"]]
        _quietly(module.apply_effects_tensor, torch.zeros(1, 1600), 16000, effects)
    except Exception:
        return True
    return False


def replace_sox() -> None:
    """Change speed by soxr."""
    theirs = importlib.import_module("torchaudio")
    module = sys.modules.get("torchaudio.sox_effects")
    if module is None:
        module = torchaudio_standin.modules()["torchaudio.sox_effects"]
        theirs.sox_effects = sys.modules[module.__name__] = module
    module.apply_effects_tensor = torchaudio_standin.apply_effects_tensor


def backend_needed() -> bool:
    """Whether ``set_audio_backend`` is gone (2.9): s3prl calls it when it is imported."""
    return not hasattr(importlib.import_module("torchaudio"), "set_audio_backend")


def replace_backend() -> None:
    """Give back ``set_audio_backend``, which did nothing since 2.1."""
    importlib.import_module("torchaudio").set_audio_backend = torchaudio_standin.set_audio_backend
