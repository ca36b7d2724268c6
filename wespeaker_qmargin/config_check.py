"""What a configuration must meet before any data is read: choices, ranges, arguments, the head."""

import inspect
import logging
from pathlib import Path

import torch

from wespeaker_qmargin import adapter, features
from wespeaker_qmargin.guard import StarvationGuard
from wespeaker_qmargin.head import QMarginProduct
from wespeaker_qmargin.imported import constructor_arguments
from wespeaker_qmargin.lazy_sgd import LazySGD
from wespeaker_qmargin.ramps import alpha_ramp, scale_ramp
from wespeaker_qmargin.router import MoEOptions

logger = logging.getLogger(__name__)

_CHOICES = {
    "data_type": ("kaldi", "raw", "shard"),
    "device": ("auto", "cpu", "cuda"),
    "amp_dtype": ("bf16", "fp16"),
    "dataset_args.speed_perturb_mode": ("random", "expanded"),
    "dataset_args.speed_perturb_labels": ("new", "same"),
    "dataset_args.frontend": (
        *("fbank", "wave", "s3prl", "tfmel", "wavlm", "w2vbert", "whisper_encoder"),
    ),
}
# key: (lowest, highest), both allowed
_RANGES = {
    "num_avg": (1, None),
    "num_epochs": (1, None),
    "save_epoch_interval": (1, None),
    "log_batch_interval": (1, None),
    "accum_steps": (1, None),
    "valid_speakers": (0, None),
    "save_state_interval": (0, None),
    "clip_grad_norm": (0, None),
    "seed": (0, 2**32 - 1),
    "dataloader_args.batch_size": (1, None),
    "dataloader_args.num_workers": (0, None),
    "dataset_args.sample_num_per_epoch": (0, None),
    "dataset_args.resample_rate": (1000, None),
    "dataset_args.num_frms": (1, None),
    "dataset_args.aug_prob": (0, 1),
    "dataset_args.max_bad_share": (0, 1),
    "margin_update.initial_margin": (0, None),
    "margin_update.final_margin": (0, None),
    "optimizer_args.lr": (0, None),
    "scheduler_args.initial_lr": (0, None),
    "scheduler_args.final_lr": (0, None),
}
_PATHS = ("train_data", "train_label", "reverb_data", "noise_data", "model_init", "checkpoint")
# what the trainer gives to a callable, beside the section of the YAML
_GIVEN = {
    "margin_update": ("model", "epoch_iter"),
    "optimizer_args": ("params",),
    "scheduler_args": ("optimizer", "num_epochs", "epoch_iter", "scale_ratio"),
    "alpha_update": (),
    "scale_update": (),
    "starvation": ("schedules",),
    "dataset_args.fbank_args": ("wavs", "seeds", "sample_rate"),
    "dataset_args.spec_aug_args": ("features", "seeds"),
    "dataset_args.cmvn_args": ("features",),
    "dataset_args.filter_args": (),
    "dataset_args.wave_args": ("sample_rate",),
    "dataset_args.wavlm_args": ("sample_rate",),
    "dataset_args.wavlm_args.moe": (),
    "dataset_args.w2vbert_args.moe": (),
    "dataset_args.w2vbert_args": ("sample_rate",),
    "model_args": (),
    "loss_args": (),
}


def _get(config, dotted: str):
    value = config
    for part in dotted.split("."):
        value = value.get(part) if isinstance(value, dict) else getattr(value, part)
        if value is None:
            return None
    return value


def check(config, *, paths: bool = True) -> None:
    """Raise ValueError or FileNotFoundError for the first fault of a ``config.Config``."""
    for key, choices in _CHOICES.items():
        value = _get(config, key)
        if value not in choices:
            near = adapter.nearest(value, choices)
            raise ValueError(f"{key}: expected one of {', '.join(choices)}, got {value!r}.{near}")
    for key, (low, high) in _RANGES.items():
        value = _get(config, key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{key}: expected a number, got {value!r}")
        if not (low <= value and (high is None or value <= high)):
            limits = f">= {low}" if high is None else f"in [{low}, {high}]"
            raise ValueError(f"{key}: expected a number {limits}, got {value!r}")
    for key in _PATHS if paths else ():
        value = getattr(config, key)
        if value is not None and not Path(value).exists():
            raise FileNotFoundError(f"{key}: {value} does not exist")
    _check_callables(config)
    _check_head(config)


def _check_callables(config) -> None:
    dataset_args = config.dataset_args
    name, model_args = dataset_args.frontend, config.model_args
    if name != "fbank":
        model_args = {"feat_dim": -1, **model_args}  # the front-end's
    if ":" in config.model:
        model_args = constructor_arguments(config.model, model_args)
    _check_kwargs("model_args", adapter.get_speaker_model(config.model), model_args)
    if name in (*adapter.SSL_FRONTENDS, "wave"):
        section = f"{name}_args"
        arguments = getattr(dataset_args, section) or {}
        _check_kwargs(f"dataset_args.{section}", adapter.get_frontend(name), arguments)
        if arguments.get("moe"):
            _check_kwargs(f"dataset_args.{section}.moe", MoEOptions, arguments["moe"])
            MoEOptions(**arguments["moe"])
        if dataset_args.cmvn or dataset_args.spec_aug:
            raise ValueError(
                f"dataset_args: frontend {name} gives no filter banks: set cmvn and spec_aug to "
                "False"
            )
    _check_kwargs(
        "margin_update", adapter.get_scheduler(config.margin_scheduler), config.margin_update
    )
    _check_kwargs("scheduler_args", adapter.get_scheduler(config.scheduler), config.scheduler_args)
    optimizer = LazySGD
    if config.optimizer != "LazySGD":
        optimizer = _torch_class("optimizer", torch.optim, config.optimizer, torch.optim.Optimizer)
    _check_kwargs("optimizer_args", optimizer, config.optimizer_args)
    loss = _torch_class("loss", torch.nn, config.loss, torch.nn.Module)
    _check_kwargs("loss_args", loss, config.loss_args)
    _check_kwargs("dataset_args.fbank_args", features.fbank, dataset_args.fbank_args)
    _check_kwargs("dataset_args.spec_aug_args", features.spec_aug, dataset_args.spec_aug_args)
    _check_kwargs("dataset_args.cmvn_args", features.apply_cmvn, dataset_args.cmvn_args)
    _check_kwargs("dataset_args.filter_args", _length_filter, dataset_args.filter_args)


def _length_filter(min_num_frames: int = 100, max_num_frames: int = 800):
    """The keys of ``dataset_args.filter_args``."""


def _torch_class(key: str, module, name: str, base: type) -> type:
    found = getattr(module, name, None)
    if not (isinstance(found, type) and issubclass(found, base)):
        known = [k for k, v in vars(module).items() if isinstance(v, type) and issubclass(v, base)]
        raise ValueError(f"{key}: torch has no {name!r}.{adapter.nearest(name, known)}")
    return found


def _check_kwargs(section: str, function, values: dict) -> None:
    """Check ``values`` against the arguments of the callable that will get them."""
    given = _GIVEN[section]
    parameters = {
        k: p for k, p in inspect.signature(function).parameters.items() if k not in ("self", *given)
    }
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for key, value in values.items():
        if key in given:
            logger.info("%s.%s: %r is worked out by the trainer, not used", section, key, value)
        elif key not in parameters:
            near = adapter.nearest(key, parameters)
            raise ValueError(f"{section}.{key}: not an argument of {function.__name__}.{near}")
        else:
            default = parameters[key].default
            if _is_number(default) and not _is_number(value):
                raise ValueError(f"{section}.{key}: expected a number, got {value!r}")
    needed = [k for k, p in parameters.items() if p.default is p.empty and values.get(k) is None]
    if needed:
        raise ValueError(f"{section}.{needed[0]}: missing; {function.__name__} needs it")


def _is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_sparsity(config) -> None:
    """What only Q-Margin has: schedules of alpha and scale, the guard of the active share."""
    makers = {"alpha_update": alpha_ramp, "scale_update": scale_ramp, "starvation": StarvationGuard}
    for section, maker in makers.items():
        values = getattr(config, section)
        if not values:
            continue
        if config.projection_args["project_type"] != "q_margin":
            raise ValueError(f"{section}: is for project_type q_margin alone; remove it")
        _check_kwargs(section, maker, values)
        maker(**dict.fromkeys(_GIVEN[section]), **values)
    if config.alpha_update and config.optimizer == "LazySGD":
        raise ValueError("alpha_update: at alpha 1 all classes are active; LazySGD is not for that")


def _check_head(config) -> None:
    args = config.projection_args
    adapter.check_projection_args(args)
    final_margin = float(config.margin_update.get("final_margin", 0.0))
    if "margin" in args and args["margin"] != final_margin:
        logger.warning(
            "projection_args.margin %s is not used: margin_update.final_margin %s decides",
            args["margin"],
            final_margin,
        )
    _check_sparsity(config)
    if args["project_type"] != "q_margin":
        return
    class_parallel = args.get("class_parallel", False)
    if not isinstance(class_parallel, bool):
        raise ValueError(
            f"projection_args.class_parallel: expected true or false, got {class_parallel!r}"
        )
    if class_parallel and config.enable_amp and config.amp_dtype == "fp16":
        raise ValueError(
            "projection_args.class_parallel: with amp_dtype fp16 every rank would scale and skip "
            "steps on its own; use amp_dtype: bf16"
        )
    keywords = {k: args[k] for k in adapter.Q_MARGIN_OPTIONS if k in args}
    try:
        head = QMarginProduct(1, 1, **keywords, margin=final_margin)
    except (TypeError, ValueError) as error:
        raise ValueError(f"projection_args: {error}") from error
    warning = adapter.scale_warning(head.alpha, head.scale, final_margin)
    if warning:
        logger.warning("%s", warning)
