"""WeSpeaker's YAML, plus ``base:`` and ``--key value``, as one frozen and checked configuration.

Every error names the key, what was expected, and the nearest known key; nothing is read from the
data before all of it has passed.
"""

import copy
import dataclasses
import re
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from wespeaker_qmargin import config_check
from wespeaker_qmargin.adapter import nearest
from wespeaker_qmargin.files import write_text


@dataclass(frozen=True)
class DataloaderArgs:
    """``dataloader_args``: batch size per process, and torch's DataLoader settings."""

    batch_size: int = 64
    num_workers: int = 0
    pin_memory: bool = False
    prefetch_factor: int | None = None
    drop_last: bool = True  # an epoch is a whole number of batches, here as upstream


@dataclass(frozen=True)
class DatasetArgs:
    """``dataset_args``: length filter, speed, crop, augmentation, features."""

    sample_num_per_epoch: int = 0  # 0: as many as there are utterances
    shuffle: bool = True
    shuffle_args: dict = field(default_factory=dict)  # upstream's buffer; the order here needs none
    filter: bool = True
    filter_args: dict = field(default_factory=dict)
    resample_rate: int = 16000
    speed_perturb: bool = True
    speed_perturb_mode: str = "random"
    speed_perturb_labels: str = "new"  # new: a speed is another speaker, as upstream; same
    num_frms: int = 200
    aug_prob: float = 0.6
    max_bad_share: float = 0.01  # of the list; more unreadable files than this end the training
    frontend: str = "fbank"
    fbank_args: dict = field(default_factory=dict)
    wave_args: dict | None = None  # frontend wave: the model hears the waveforms
    s3prl_args: dict | None = None
    tfmel_args: dict | None = None
    wavlm_args: dict | None = None
    w2vbert_args: dict | None = None
    whisper_encoder_args: dict | None = None
    cmvn: bool = True
    cmvn_args: dict = field(default_factory=dict)
    spec_aug: bool = False
    spec_aug_args: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Config:
    """The whole configuration; field names are the YAML's keys."""

    model: str
    exp_dir: str | None = None
    gpus: list | None = None
    num_avg: int = 10
    enable_amp: bool = False
    do_lm: bool = False
    seed: int = 42
    num_epochs: int = 150
    save_epoch_interval: int = 5
    log_batch_interval: int = 100
    dataloader_args: DataloaderArgs = field(default_factory=DataloaderArgs)
    dataset_args: DatasetArgs = field(default_factory=DatasetArgs)
    model_init: str | None = None
    model_args: dict = field(default_factory=dict)
    projection_args: dict = field(default_factory=lambda: {"project_type": "q_margin"})
    margin_scheduler: str = "MarginScheduler"
    margin_update: dict = field(default_factory=dict)
    loss: str = "CrossEntropyLoss"
    loss_args: dict = field(default_factory=dict)
    optimizer: str = "SGD"
    optimizer_args: dict = field(default_factory=dict)
    scheduler: str = "ExponentialDecrease"
    scheduler_args: dict = field(default_factory=dict)
    # where the data is: upstream's recipes give these on the command line
    data_type: str = "raw"
    train_data: str | None = None
    train_label: str | None = None
    reverb_data: str | None = None
    noise_data: str | None = None
    checkpoint: str | None = None
    # not upstream's
    allow_pipes: bool = False  # shell commands in the place of paths in lists of utterances
    alpha_update: dict = field(default_factory=dict)  # ramps.alpha_ramp
    scale_update: dict = field(default_factory=dict)  # ramps.scale_ramp
    starvation: dict = field(default_factory=dict)  # guard.StarvationGuard
    device: str = "auto"
    amp_dtype: str = "bf16"
    accum_steps: int = 1
    clip_grad_norm: float | None = None
    lr_ratio: dict = field(default_factory=dict)  # part of the model -> factor on the learning rate
    valid_speakers: int = 0  # held out of the training speakers, for an EER after every epoch
    save_state_interval: int = (
        1000  # after so many steps the next log line saves a state; 0: epochs only
    )


_ARGUMENTS_OF = {
    "model": "model_args",
    "optimizer": "optimizer_args",
    "scheduler": "scheduler_args",
    "loss": "loss_args",
    "margin_scheduler": "margin_update",
}


class _Loader(yaml.SafeLoader):
    """Safe YAML in which ``1e-4`` is a number (PyYAML follows YAML 1.1, where it is text)."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$"),
    list("-+0123456789"),
)


def load_config(path, overrides: Sequence[str] = (), *, check_paths: bool = True) -> Config:
    """Read a YAML with its ``base:`` files, apply ``--key value`` words, check everything.

    Args:
        path: WeSpeaker's YAML; ``base: other.yaml`` (relative to it) is read first, then overlaid,
            section by section; a changed ``model``, ``optimizer``, ``project_type`` ... leaves the
            base's arguments for it behind.
        overrides: words as on a command line: ``--num_epochs 3 --model_args.embed_dim 64``; the
            values are YAML; dashes and underscores in keys are the same.
        check_paths: False for a config whose training data need not be here any more.

    Raises:
        FileNotFoundError: the YAML, its base, or a file that it names does not exist.
        ValueError: an unknown key, a wrong type, a value out of range.
    """
    return make_config(read_config(path), overrides, check_paths=check_paths)


def make_config(
    content: dict, overrides: Sequence[str] = (), *, check_paths: bool = True
) -> Config:
    """Return the `Config` of a YAML's ``content``; the rest is as of `load_config`."""
    content = copy.deepcopy(content)
    for key, value in parse_overrides(overrides).items():
        _override(content, key, value)
    config = _build(Config, content, "")
    config_check.check(config, paths=check_paths)
    return config


def read_config(path) -> dict:
    """Return the content of a YAML, laid over its ``base:`` files, unchecked."""
    return _read_with_base(Path(path), ())


def read_yaml(path: Path) -> dict:
    """Return the keys and values of one YAML file; no tag in it builds an object.

    Raises:
        ValueError: no YAML, or not keys and values; in one line.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a UTF-8 text file ({error})") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date of no day
        raise ValueError(
            f"{path}: not a plain YAML file: {' '.join(str(error).split())}"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected keys and values, found {type(content).__name__}")
    return content


def _read_with_base(path: Path, seen: tuple[Path, ...]) -> dict:
    path = path.resolve()
    if path in seen:
        raise ValueError(f"base: goes in a circle: {' -> '.join(map(str, (*seen, path)))}")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such config file")
    content = read_yaml(path)
    base = content.pop("base", None)
    if base is None:
        return content
    return overlay(_read_with_base(path.parent / str(base), (*seen, path)), content)


def overlay(below: dict, above: dict) -> dict:
    """Return ``below`` with what ``above`` says, section by section.

    The arguments of one thing are not those of another: where ``above`` changes a name (``model``,
    ``optimizer``, ``project_type``, ...), its section starts anew.
    """
    merged = dict(below)
    for name, section in _ARGUMENTS_OF.items():
        if name in above and above[name] != below.get(name):
            merged.pop(section, None)
    for key, value in above.items():
        before = merged.get(key)
        both = isinstance(value, dict) and isinstance(before, dict)
        if both and "project_type" in value and value["project_type"] != before.get("project_type"):
            both = False
        merged[key] = overlay(before, value) if both else value
    return merged


def parse_overrides(words: Sequence[str]) -> dict[str, object]:
    """Turn ``["--a.b", "1e-4", "--flag"]`` into ``{"a.b": 0.0001, "flag": True}``."""
    found: dict[str, object] = {}
    words = list(words)
    while words:
        word = words.pop(0)
        if not word.startswith("--") or len(word) < 3:
            raise ValueError(f"expected --key value, found {word!r}")
        key, equals, value = word[2:].partition("=")
        if not equals:
            # a value may start with one dash (a negative number), an option starts with two
            value = "true" if not words or words[0].startswith("--") else words.pop(0)
        try:
            found[key.replace("-", "_")] = yaml.load(value, Loader=_Loader)
        except yaml.YAMLError as error:
            raise ValueError(f"--{key}: {value!r} is not a YAML value: {error}") from error
    return found


def _override(content: dict, dotted: str, value) -> None:
    *sections, key = dotted.split(".")
    for section in sections:
        content = content.setdefault(section, {})
        if not isinstance(content, dict):
            raise ValueError(f"--{dotted}: {section} is not a section")
    content[key] = value


def _build(cls, content: dict, prefix: str):
    known = {f.name for f in dataclasses.fields(cls)}
    for key in content:
        if key not in known:
            raise ValueError(f"{prefix}{key}: unknown key.{nearest(key, known)}")
    hints = typing.get_type_hints(cls)
    values = {k: _typed(prefix + k, v, hints[k]) for k, v in content.items()}
    missing = [
        f.name
        for f in dataclasses.fields(cls)
        if f.default is f.default_factory is dataclasses.MISSING and f.name not in values
    ]
    if missing:
        raise ValueError(f"{prefix}{missing[0]}: missing; the config must say it")
    return cls(**values)


def _typed(key: str, value, hint):
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            raise ValueError(f"{key}: expected a section of keys and values, got {value!r}")
        return _build(hint, value, f"{key}.")
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and types.NoneType in options:
        return None
    wanted = next(t for t in options if t is not types.NoneType)
    if wanted is list:
        return _gpu_list(key, value)
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if wanted is dict and value is None:
        return {}
    if (isinstance(value, bool) and wanted is not bool) or not isinstance(value, wanted):
        raise ValueError(f"{key}: expected {wanted.__name__}, got {value!r}")
    return value


def _gpu_list(key: str, value) -> list[int]:
    """Stock YAMLs hold ``gpus: "[0,1]"``, a text."""
    if isinstance(value, str):
        words = value.strip().removeprefix("[").removesuffix("]").split(",")
        numbers = [word.strip() for word in words if word.strip()]
        value = [int(x) for x in numbers] if all(map(str.isdecimal, numbers)) else value
    if isinstance(value, int) and not isinstance(value, bool):
        value = [value]
    if not isinstance(value, list) or not all(type(v) is int and v >= 0 for v in value):
        raise ValueError(f'{key}: expected GPU numbers like "[0,1]", got {value!r}')
    return value


def with_defaults(content: dict) -> dict:
    """Return what `to_dict` gave in an older version with the keys that are new since."""
    return to_dict(_build(Config, content, ""))


def to_dict(config: Config) -> dict:
    """Return the configuration as WeSpeaker's YAML would hold it."""
    return dataclasses.asdict(config)


def save_config(config: Config, path) -> None:
    """Write the resolved configuration as a YAML that we and WeSpeaker's scripts read."""
    write_text(path, yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True))
