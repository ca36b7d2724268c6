"""A checkpoint that another run, or somebody else, left, as the start of a run on other speakers.

find_source(path)     what there is: weights, their config.yaml, the speakers of the head's rows
match_tensors(...)    which tensors fit a network; refuses another architecture
transfer(...)         the whole state to start from, and a `Report` of where it comes from

Rows of a head are taken by speaker name, never by position; a speaker that is not in the checkpoint
gets the mean of his own embeddings.
"""

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from wespeaker_qmargin.checkpoints import find_checkpoint, read_checkpoint
from wespeaker_qmargin.config import Config, read_config
from wespeaker_qmargin.files import read_lines
from wespeaker_qmargin.model import SpeakerNet, from_wespeaker, full_state, to_wespeaker
from wespeaker_qmargin.moe import moe_layers
from wespeaker_qmargin.prototypes import (
    ROW_HEADS,
    Row,
    class_means,
    filled,
    num_speeds,
    row_names,
)
from wespeaker_qmargin.upcycle import fit_experts
from wespeaker_qmargin.validate import training_utterances

logger = logging.getLogger(__name__)

PROTOTYPES = ("means", "random")
_LEAST_SHARE = 0.9  # of the tensors; another depth or width of one family shares more than half


class Source(NamedTuple):
    """A checkpoint, what its config.yaml says (None: there is none), and its head's speakers."""

    checkpoint: Path
    config: dict | None
    speakers: list[str] | None


@dataclass(frozen=True)
class Report:
    """What of a checkpoint went into a network: names of tensors, numbers of prototypes.

    ``new`` are tensors that the checkpoint lacks, ``dropped`` those that the network lacks,
    ``mismatched`` those of another shape; the network keeps its own initial values for the first
    and the last. The head is counted in rows: taken over by speaker name, from class means,
    initialised at random; ``rows_dropped`` are those of the checkpoint that nobody needs.
    """

    checkpoint: str
    loaded: list[str]
    new: list[str]
    dropped: list[str]
    mismatched: list[str]
    rows_by_name: int = 0
    rows_from_means: int = 0
    rows_random: int = 0
    rows_dropped: int = 0

    def __str__(self) -> str:
        counts = [f"{len(self.loaded)} loaded"]
        counts += [_some(getattr(self, name), name) for name in ("new", "dropped", "mismatched")]
        return (
            f"{self.checkpoint}: tensors {', '.join(counts)}; prototypes {self.rows_by_name} by "
            f"speaker name, {self.rows_from_means} from class means, {self.rows_random} random, "
            f"{self.rows_dropped} dropped"
        )


def _some(names: list[str], what: str) -> str:
    shown = ", ".join(names[:3]) + ", ..." * (len(names) > 3)
    return f"{len(names)} {what}" + (f" ({shown})" if names else "")


def find_source(path) -> Source:
    """Return what lies at ``path``: an exp_dir, a WeSpeaker model folder, or a file of weights.

    A folder's weights are ``avg_model.pt`` in it or in its ``models/``. ``config.yaml`` and
    ``speakers.txt`` (names in the order of the head's rows, one a line) are read where they lie in
    that folder, or beside a file, or above its ``models/``.

    Raises:
        FileNotFoundError: nothing there.  ValueError: a speaker comes twice; no YAML.
    """
    path = Path(path)
    if path.is_dir():
        folder, own = path, path / "avg_model.pt"
        checkpoint = own if own.is_file() else find_checkpoint(path, "avg")
    elif path.is_file():
        checkpoint, folder = path, path.parent
        folder = folder.parent if folder.name == "models" else folder
    else:
        raise FileNotFoundError(f"{path}: no such file or folder")
    config, speakers = folder / "config.yaml", folder / "speakers.txt"
    return Source(
        checkpoint,
        read_config(config) if config.is_file() else None,
        _read_speakers(speakers) if speakers.is_file() else None,
    )


def _read_speakers(path: Path) -> list[str]:
    names = [line for _, line in read_lines(path)]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{path}: {', '.join(twice[:3])} comes twice; one line a row of the head")
    return names


def match_tensors(
    found: dict[str, Tensor], wanted: dict[str, Tensor], where, *, replaced: Sequence[str] = ()
) -> Report:
    """Return what of the tensors ``found`` fits the tensors ``wanted``, both without a head.

    Args:
        where: the file that ``found`` is of.
        replaced: modules in which ``wanted`` may have as many others as it likes: adapters.

    Raises:
        ValueError: less than 90 % of all names on either side are on both with one shape: another
            architecture; a tensor that is to be loaded is not finite.
    """
    common = [k for k in wanted if k in found]
    fitting = [k for k in common if found[k].shape == wanted[k].shape]
    report = Report(
        checkpoint=str(where),
        loaded=fitting,
        new=[k for k in wanted if k not in found],
        dropped=[k for k in found if k not in wanted],
        mismatched=[
            f"{k}: {tuple(found[k].shape)} instead of {tuple(wanted[k].shape)}"
            for k in common
            if found[k].shape != wanted[k].shape
        ],
    )
    adapters = {k for k in report.new if k.startswith(tuple(f"{name}." for name in replaced))}
    total = len((found.keys() | wanted.keys()) - adapters)
    if len(fitting) < _LEAST_SHARE * total:
        raise ValueError(
            f"{report.checkpoint}: only {len(fitting)} of {total} tensors fit the network "
            f"({', '.join(_some(getattr(report, x), x) for x in ('new', 'dropped', 'mismatched'))})"
            ": another architecture. State the one that it was trained with: a config with its "
            "model, model_args and dataset_args"
        )
    bad = [k for k in fitting if not found[k].isfinite().all()]
    if bad:
        raise ValueError(f"{report.checkpoint}: {_some(bad, 'tensors')} not finite")
    return report


def transfer(
    config: Config,
    source: Source,
    accelerator,
    *,
    prototypes: str = "means",
    per_class: int = 5,
    merge_experts: bool = False,
) -> tuple[dict[str, Tensor], Report]:
    """Return the state dict, under WeSpeaker's names, that a run of ``config`` is to start from.

    The backbone (with its front-end) is the checkpoint's; dense feed-forward modules go to all
    experts of a mixture, and with ``merge_experts`` the mean of a mixture's experts does. A row of
    the head is the checkpoint's row of the same speaker at the same speed, where it has one. The
    others are, with ``means``, the normalised mean of the unit embeddings of ``per_class`` whole
    utterances of the speaker, at the length that the other rows have; with ``random``, what
    ``config.seed`` draws.

    Collective: every process of ``accelerator`` calls and embeds its share; of a class-parallel
    head only the main process gets the rows.

    Raises:
        ValueError, FileNotFoundError: a checkpoint that is none or does not fit, speakers that
            disagree with the head's rows, unusable data.
    """
    if prototypes not in PROTOTYPES:
        raise ValueError(f"prototypes: expected {' or '.join(PROTOTYPES)}, got {prototypes!r}")
    if per_class < 1:
        raise ValueError(f"per_class: expected a number of utterances >= 1, got {per_class}")
    training, _ = training_utterances(config)
    names = row_names(training, config)
    torch.manual_seed(config.seed)
    net = SpeakerNet(config, len(names))
    layers = to_wespeaker(moe_layers(net))
    found, upcycled = fit_experts(read_checkpoint(source.checkpoint), layers, merge=merge_experts)
    found = _under_low_rank(found, to_wespeaker(net.state_dict()))
    replaced = [f"frontend.{name}" for name in getattr(net.frontend, "replaced", ())]
    wanted = _body(to_wespeaker(net.state_dict()))
    report = match_tensors(_body(found), wanted, source.checkpoint, replaced=replaced)
    fitting = {name: found[name] for name in report.loaded}
    net.load_state_dict(from_wespeaker(fitting), strict=False)
    for layer in upcycled:
        layer.draw_anew()
    known, means = head_rows(found, source), {}
    taken = {name: known[name] for name in names if _fits(known.get(name), config)}
    missing = [name for name in names if name not in taken]
    if missing and prototypes == "means":
        means = class_means(net, training, missing, accelerator, per_class=per_class)
    state = full_state(net)
    if state.get("projection.weight") is not None:
        state["projection.weight"] = filled(state["projection.weight"], names, taken, means)
    counts = {
        "rows_by_name": len(taken),
        "rows_from_means": len(means),
        "rows_random": len(names) - len(taken) - len(means),
        "rows_dropped": len(found.get("projection.weight", ())) - len(taken),
    }
    return state, dataclasses.replace(report, **counts)


def _under_low_rank(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a plain checkpoint's tensors under the names that peft's LoRA gives them."""
    names = {
        name.replace("base_model.model.", "").replace(".base_layer.", "."): name for name in wanted
    }
    return {name if name in wanted else names.get(name, name): x for name, x in found.items()}


def _body(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x for name, x in state.items() if not name.startswith("projection.")}


def head_rows(found: dict[str, Tensor], source: Source) -> dict[Row, Tensor]:
    """Return (speaker, speed) -> row of a checkpoint's head, where it is known whose rows they are.

    That is so with a speaker list, its config, and a head of one row a class; else nothing.

    Raises:
        ValueError: the list does not have a name for each row at each speed of the config.
    """
    weight = found.get("projection.weight")
    if weight is None or source.speakers is None or source.config is None:
        logger.info(
            "%s: no head, or no speakers.txt and config.yaml to tell whose its rows are",
            source.checkpoint,
        )
        return {}
    kind = (source.config.get("projection_args") or {}).get("project_type")
    if kind not in ROW_HEADS:
        logger.info("%s: a head of type %s is not taken over", source.checkpoint, kind)
        return {}
    args = source.config.get("dataset_args") or {}
    copies = num_speeds(args.get("speed_perturb", True), args.get("speed_perturb_labels", "new"))
    if source.config.get("do_lm") and len(weight) == num_speeds(True, "new") * len(source.speakers):
        copies = num_speeds(True, "new")  # WeSpeaker writes speed_perturb: False there
    names = [(name, speed) for speed in range(copies) for name in source.speakers]
    if len(names) != len(weight):
        raise ValueError(
            f"{source.checkpoint}: its head has {len(weight)} rows, but speakers.txt beside it "
            f"names {len(source.speakers)} speakers and its config.yaml {copies} speeds of each; "
            "put the right list there, or remove it for new prototypes"
        )
    return dict(zip(names, weight))


def _fits(row: Tensor | None, config: Config) -> bool:
    return row is not None and row.shape == (config.model_args["embed_dim"],)
