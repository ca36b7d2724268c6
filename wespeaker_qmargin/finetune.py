"""Fine-tuning: a trained network on other speakers, its new prototypes first and then all of it.

Both stages are runs of ``train``, each in a folder with its resolved config.yaml:

    EXP_DIR/init.pt, transfer.json     what the run starts from, and what of it came from where
    EXP_DIR/prototypes/                the head alone; the backbone is frozen, in eval
    EXP_DIR/                           everything
"""

import dataclasses
import json
import logging
from pathlib import Path

from accelerate import PartialState

from wespeaker_qmargin.checkpoints import average_epochs
from wespeaker_qmargin.config import Config, make_config, overlay, read_config
from wespeaker_qmargin.experiment import make_accelerator
from wespeaker_qmargin.files import write_text
from wespeaker_qmargin.model import SpeakerNet, to_wespeaker
from wespeaker_qmargin.tensors import write_tensors
from wespeaker_qmargin.train import train
from wespeaker_qmargin.transfer import PROTOTYPES, Report, Source, find_source, transfer

logger = logging.getLogger(__name__)

# What a checkpoint's config.yaml says of the network, its input and its optimiser. The rest (its
# data, schedule, head) is another run's business.
_INHERITED = (
    "model",
    "model_args",
    "dataset_args",
    "dataloader_args",
    "optimizer",
    "optimizer_args",
    "clip_grad_norm",
    "enable_amp",
    "amp_dtype",
)
# Mošner et al., Odyssey 2026: + 10 epochs, 1e-4 -> 5e-5, margin fixed; prototypes x 5 as in their
# fine-tuned w2v-BERT
_DEFAULTS = {
    "projection_args": {"project_type": "q_margin"},
    "num_epochs": 10,
    "save_epoch_interval": 1,
    "scheduler": "ExponentialDecrease",
    "scheduler_args": {"initial_lr": 1e-4, "final_lr": 5e-5, "warm_up_epoch": 0},
    "lr_ratio": {"projection": 5.0},
}
_MARGIN = 0.2
LIKE = {
    "cosface": {"project_type": "add_margin", "scale": 32.0},
    "aam": {"project_type": "arc_margin", "scale": 32.0, "easy_margin": False},
}


def head_args(*, alpha=None, scale=None, like: str | None = None) -> dict | None:
    """Return the ``projection_args`` of these options, None if none is given.

    Args:
        alpha, scale: of Q-Margin.
        like: ``cosface`` or ``aam``, the control: WeSpeaker's at scale 32, or ``scale``.

    Raises:
        ValueError: an unknown ``like``; one with ``alpha``.
    """
    given = {k: v for k, v in (("alpha", alpha), ("scale", scale)) if v is not None}
    if like is None:
        return {"project_type": "q_margin", **given} if given else None
    if like not in LIKE or alpha is not None:
        raise ValueError(f"--like: expected {' or '.join(LIKE)}, without --alpha, got {like!r}")
    return {**LIKE[like], **given}


def _fixed_margin(margin: float) -> dict:
    return {
        "initial_margin": margin,
        "final_margin": margin,
        "increase_start_epoch": 1,
        "fix_start_epoch": 1,
        "update_margin": True,
    }


def finetune_config(
    source: Source,
    *,
    config=None,
    head: dict | None = None,
    margin: float | None = None,
    overrides=(),
    **keys,
) -> Config:
    """Return the configuration that the network of ``source`` is fine-tuned with.

    Later ones win: the network, features and optimiser of the source's own config; the schedule
    above with Q-Margin and margin 0.2, fixed; ``config``; ``head``, ``margin`` and ``keys``;
    ``overrides``.

    Args:
        config: path of a YAML. If it names a ``model``, the source's own config is not read.
        head: ``projection_args``.
        overrides: words ``--key value``.
        keys: of the configuration, as ``exp_dir``, ``train_data``.

    Raises:
        ValueError, FileNotFoundError: no config names the model; whatever `make_config` raises.
    """
    stated = {} if config is None else read_config(config)
    content = {} if "model" in stated else _inherited(source.config or {})
    content = overlay(content, {**_DEFAULTS, "margin_update": _fixed_margin(_MARGIN)})
    content = overlay(content, stated)
    if "model" not in content:
        raise ValueError(
            f"{source.checkpoint}: there is no config.yaml with it that says the model; state it "
            "with --config YAML (model, model_args, dataset_args)"
        )
    if head is not None:
        content = overlay(content, {"projection_args": head})
    if margin is not None:
        content["margin_update"] = _fixed_margin(margin)
    return make_config({**content, **keys}, overrides)


def _inherited(content: dict) -> dict:
    inherited = {key: content[key] for key in _INHERITED if key in content}
    if content.get("do_lm"):  # a stage that does not perturb, whatever it says
        inherited = overlay(inherited, {"dataset_args": {"speed_perturb": False}})
    return inherited


def finetune(
    config: Config,
    source: Source,
    *,
    prototypes: str = "means",
    per_class: int = 5,
    merge_experts: bool = False,
    prototype_epochs: int = 2,
    prototype_lr: float | None = None,
    resume_run: bool = False,
) -> tuple[Path, Report]:
    """Fine-tune the network of ``source`` as ``config`` says; return exp_dir and what was loaded.

    Args:
        prototypes, per_class, merge_experts: of ``transfer.transfer``.
        prototype_epochs: of the first stage; 0 leaves it out.
        prototype_lr: its learning rate, constant; None: ten times ``scheduler_args.initial_lr``.
        resume_run: go on where ``exp_dir`` stands.

    Raises:
        ValueError, FileNotFoundError: whatever ``transfer`` and ``train`` raise; an ``exp_dir``
            that holds a fine-tuning already, or to resume one of another source.
    """
    if prototype_epochs < 0:
        raise ValueError(f"prototype_epochs: expected a number >= 0, got {prototype_epochs}")
    accelerator, exp_dir = make_accelerator(config), Path(config.exp_dir)
    if prototype_epochs and accelerator.num_processes > 1:
        _refuse_class_parallel(config)
    start = exp_dir / "init.pt"
    begun = start.exists()
    accelerator.wait_for_everyone()  # before the main process writes it
    if begun:
        report = _report_of(exp_dir, source, resume_run)
    elif (exp_dir / "state" / "state.pt").exists():
        raise ValueError(f"{exp_dir}: holds a run that is no fine-tuning; choose another exp_dir")
    else:
        options = {"prototypes": prototypes, "per_class": per_class}
        options["merge_experts"] = merge_experts
        state, report = transfer(config, source, accelerator, **options)
        if accelerator.is_main_process:
            _save_start(exp_dir, state, report)
        accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        logger.info("%s", report)
    if prototype_epochs:
        first = prototype_config(config, prototype_epochs, prototype_lr)
        train(dataclasses.replace(first, checkpoint=str(start)), resume_run=resume_run)
        start = average_epochs(first.exp_dir, 1)
    train(dataclasses.replace(config, checkpoint=str(start)), resume_run=resume_run)
    return exp_dir, report


def prototype_config(config: Config, epochs: int, lr: float | None) -> Config:
    """Return the configuration of the stage that trains the head alone, at a constant ``lr``."""
    if lr is None:
        if "initial_lr" not in config.scheduler_args:
            raise ValueError("prototype_lr: missing; scheduler_args.initial_lr does not say one")
        lr = 10 * config.scheduler_args["initial_lr"]
    parameters = to_wespeaker(dict(SpeakerNet(config).named_parameters()))
    parts = sorted({name.split(".")[0] for name in parameters})
    return dataclasses.replace(
        config,
        exp_dir=str(Path(config.exp_dir) / "prototypes"),
        num_epochs=epochs,
        num_avg=1,
        scheduler="ExponentialDecrease",
        scheduler_args={"initial_lr": lr, "final_lr": lr, "warm_up_epoch": 0},
        margin_scheduler="MarginScheduler",
        margin_update=_fixed_margin(float(config.margin_update["final_margin"])),
        lr_ratio=dict.fromkeys(parts, 0.0),
    )


def _refuse_class_parallel(config: Config) -> None:
    if config.projection_args.get("class_parallel"):
        raise ValueError(
            "class_parallel over several processes: with a frozen backbone nothing is left for "
            "DistributedDataParallel; leave the first stage out with --prototype_epochs 0"
        )


def _save_start(exp_dir: Path, state: dict, report: Report) -> None:
    text = json.dumps(dataclasses.asdict(report), indent=1)
    write_text(exp_dir / "transfer.json", text + "\n")
    write_tensors(exp_dir / "init.pt", state)


def _report_of(exp_dir: Path, source: Source, resume_run: bool) -> Report:
    report = Report(**json.loads((exp_dir / "transfer.json").read_text(encoding="utf-8")))
    if not resume_run:
        raise ValueError(
            f"{exp_dir}: holds a fine-tuning of {report.checkpoint}; continue it with --resume, or "
            "choose another exp_dir"
        )
    if report.checkpoint != str(source.checkpoint):
        raise ValueError(
            f"--resume: {exp_dir} began with {report.checkpoint}, now it is {source.checkpoint}"
        )
    return report


def add_arguments(parser) -> None:
    parser.epilog = (
        "examples:\n"
        "  wespeaker-qmargin finetune --from exp/resnet34 --data data/mine --exp_dir exp/tuned\n"
        "  wespeaker-qmargin finetune --from exp/resnet34 --data data/mine --exp_dir exp/control "
        "--like cosface\n"
        "  wespeaker-qmargin finetune --from weights.pt --config conf/finetune/resemblyzer.yaml "
        "--data data/mine --exp_dir exp/other --scheduler_args.initial_lr 1e-3\n"
        "every key of the config can be given as --key value or --section.key value"
    )
    add = parser.add_argument
    add("--from", dest="source", required=True, metavar="PATH", help="exp_dir, model folder, file")
    add("--data", required=True, help="Kaldi folder, raw or shard list of the new speakers")
    add("--data_type", default="kaldi", choices=("kaldi", "raw", "shard"))
    add("--exp_dir", required=True, help="where everything goes")
    add("--config", help="YAML laid over the checkpoint's own; complete if it names a model")
    add("--alpha", type=float, help="of Q-Margin [1.5]")
    add("--scale", type=number_or_auto, help="of Q-Margin [auto], or of --like")
    add("--margin", type=float, help="of the scale, fixed [0.2]")
    add("--like", choices=LIKE, help="train this head instead, the control")
    add("--prototypes", default="means", choices=PROTOTYPES, help="of new speakers [means]")
    add("--per_class", type=int, default=5, help="utterances that a mean is of [5]")
    add(
        "--merge_experts",
        action="store_true",
        help="take the mean of a mixture's experts, for a dense network or another mixture",
    )
    add("--prototype_epochs", type=int, default=2, help="of the head alone, first; 0: none [2]")
    add("--prototype_lr", type=float, help="constant, in that stage [10 x initial_lr]")
    add("--resume", action="store_true", help="continue the fine-tuning in exp_dir")
    parser.set_defaults(overrides=[])


def number_or_auto(text: str) -> float | str:
    """Return the value of ``--scale``."""
    return text if text == "auto" else float(text)


def run(args) -> None:
    """Fine-tune, and print what was loaded and where the result is."""
    source = find_source(args.source)
    config = finetune_config(
        source,
        config=args.config,
        head=head_args(alpha=args.alpha, scale=args.scale, like=args.like),
        margin=args.margin,
        overrides=args.overrides,
        exp_dir=args.exp_dir,
        train_data=args.data,
        data_type=args.data_type,
    )
    exp_dir, report = finetune(
        config,
        source,
        prototypes=args.prototypes,
        per_class=args.per_class,
        merge_experts=args.merge_experts,
        prototype_epochs=args.prototype_epochs,
        prototype_lr=args.prototype_lr,
        resume_run=args.resume,
    )
    if PartialState().is_main_process:
        print(report)
        print(exp_dir)
