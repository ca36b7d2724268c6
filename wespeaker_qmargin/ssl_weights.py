"""Pretrained encoders from where they lie: the Hugging Face hub, a folder, s3prl.

Whatever the source, the encoder is built without what only its pretraining needs (masked inputs,
layer drop, output adapter), in float32, and every one of its tensors comes from the checkpoint.
"""

import contextlib
import importlib
import random
import re
from pathlib import Path

import torch
from torch import nn

_OLDEST = (5, 24)  # what encoder layers return differed before
_CLASSES = {"wavlm": "WavLMModel", "wav2vec2-bert": "Wav2Vec2BertModel"}
# of a config: transformers would mask inputs in training, as pretraining does
WITHOUT_PRETRAINING = {
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
    "layerdrop": 0.0,
    "add_adapter": False,
}


def require(package: str, purpose: str, extra: str):
    """Import and return ``package``; raise ImportError that says how to get it."""
    try:
        return importlib.import_module(package)
    except (ImportError, OSError, AttributeError) as error:  # what s3prl and torchaudio raise
        raise ImportError(
            f"{purpose} needs the package {package.split('.')[0]}, which does not load here "
            f"({error}); install it: pip install 'wespeaker-qmargin[{extra}]'"
        ) from error


def require_transformers(purpose: str):
    """Import and return transformers; raise ImportError if it is absent or too old."""
    transformers = require("transformers", purpose, "ssl")
    if tuple(map(int, transformers.__version__.split(".")[:2])) < _OLDEST:
        raise ImportError(
            f"{purpose} needs transformers >= {_OLDEST[0]}.{_OLDEST[1]}, this is "
            f"{transformers.__version__}; upgrade it: pip install 'wespeaker-qmargin[ssl]'"
        )
    return transformers


def load_transformers(model_name: str, model_type: str) -> nn.Module:
    """Return the encoder of a folder that ``save_pretrained`` wrote, or of the Hugging Face hub.

    Args:
        model_name: a local folder, or a name on the hub.
        model_type: what its config.json must say: ``wavlm`` or ``wav2vec2-bert``.

    Raises:
        ImportError: no package transformers.
        FileNotFoundError: no such folder, no config.json or weights in it; no such name on the
            hub, or no way to it.
        ValueError: another kind of encoder; tensors missing or of another shape.
    """
    transformers = require_transformers(f"the encoder {model_name}")
    _check_place(model_name)
    with _quiet(transformers), _same_random_numbers():
        try:
            config = transformers.AutoConfig.from_pretrained(model_name)
            if config.model_type != model_type:
                raise ValueError(
                    f"{model_name}: expected a {model_type} encoder, found {config.model_type}; "
                    "choose the front-end that fits, or another model_name"
                )
            config.update(WITHOUT_PRETRAINING)
            # a tensor of another shape is reported below, with its name
            encoder, found = getattr(transformers, _CLASSES[model_type]).from_pretrained(
                model_name, config=config, output_loading_info=True, ignore_mismatched_sizes=True
            )
        except OSError as error:
            raise _not_found(model_name, error) from error
        except ValueError:
            raise
        except Exception as error:  # of safetensors, pickle, ...
            raise ValueError(f"{model_name}: does not load: {first_line(error)}") from error
    other_shape = {entry[0] for entry in found["mismatched_keys"]}
    for what, names in (("missing", found["missing_keys"]), ("of another shape", other_shape)):
        if names:
            raise ValueError(
                f"{model_name}: {len(names)} tensors are {what}, {min(names)} the first; use a "
                "complete checkpoint of the encoder that its config.json describes"
            )
    return encoder.float()


def hears_normalised(model_name: str) -> bool:
    """Return whether the checkpoint's feature extractor gives waves mean 0 and variance 1.

    Raises:
        FileNotFoundError: the checkpoint has no preprocessor_config.json.
    """
    transformers = require_transformers(f"the encoder {model_name}")
    try:
        return transformers.Wav2Vec2FeatureExtractor.from_pretrained(model_name).do_normalize
    except OSError as error:
        raise FileNotFoundError(
            f"{model_name}: no preprocessor_config.json, so whether the encoder hears normalised "
            "waves is not known; set normalize: True (WavLM Large) or False (Base, Base+)"
        ) from error


def _check_place(model_name: str) -> None:
    path = Path(model_name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise FileNotFoundError(
                f"{model_name}: no config.json in this folder; expected one that "
                "transformers' save_pretrained wrote, or a copy of the model's files on the hub"
            )
    elif path.exists():
        raise FileNotFoundError(
            f"{model_name}: a file, expected a folder or a name on the hub; the original "
            "WavLM-*.pt needs source: file"
        )
    elif not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model_name) or model_name.startswith("."):
        raise FileNotFoundError(f"{model_name}: no such folder")


def _not_found(model_name: str, error: OSError) -> FileNotFoundError:
    if Path(model_name).is_dir():
        return FileNotFoundError(f"{model_name}: does not load: {first_line(error)}")
    return FileNotFoundError(
        f"{model_name}: no such folder here, and the hub: {first_line(error)}. Without network: "
        f"'hf download {model_name} --local-dir DIR' where there is one, copy DIR here, and set "
        "model_name to its path"
    )


def first_line(error: Exception) -> str:
    """Return what a long message of another package begins with."""
    return str(error).strip().split("\n")[0] or type(error).__name__


@contextlib.contextmanager
def _quiet(transformers):
    """No progress bars and tables of tensors on stderr: what is wrong is raised."""
    log = transformers.utils.logging
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()


def load_s3prl(model_name: str) -> nn.Module:
    """Return an ``S3PRLUpstream`` that holds WavLM.

    Args:
        model_name: the original ``WavLM-*.pt``, or the name of one of s3prl's upstreams
            (``wavlm_base_plus``, ``wavlm_large``), which s3prl downloads.

    Raises:
        ImportError: s3prl does not load.
        ValueError: not one of its WavLM upstreams; a file that it cannot read.
    """
    s3prl = require("s3prl.nn", "source: s3prl", "s3prl")
    arguments = {"name": model_name}
    if Path(model_name).is_file():
        arguments = {"name": "wavlm_local", "path_or_url": str(model_name)}
    known = [name for name in s3prl.S3PRLUpstream.available_names(True) if "wavlm" in name]
    if arguments["name"] not in (*known, "wavlm_local"):
        raise ValueError(
            f"{model_name}: expected a file, or a WavLM of s3prl: {', '.join(known)}. Its "
            "other upstreams: WeSpeaker's own front-end, frontend: s3prl"
        )
    with _same_random_numbers():
        try:
            upstream = s3prl.S3PRLUpstream(**arguments)
        except Exception as error:  # of requests, torch, pickle, ...
            raise ValueError(f"{model_name}: s3prl cannot load it: {error}") from error
    model = upstream.upstream.model
    model.feature_grad_mult = 1.0  # 0 there, for feature extraction
    model.mask_emb.requires_grad_(False)
    return upstream


@contextlib.contextmanager
def _same_random_numbers():
    """Keep the global generators: transformers draws from them, s3prl seeds them.

    Heads and backbones that are built next would depend on the source, or not on the seed.
    """
    seed, state, python = torch.initial_seed(), torch.get_rng_state(), random.getstate()
    try:
        yield
    finally:
        torch.manual_seed(seed)  # the devices' generators, which start from it
        torch.set_rng_state(state)
        random.setstate(python)
