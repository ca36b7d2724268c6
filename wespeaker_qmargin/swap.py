"""A WeSpeaker YAML with another head, written beside the one that is there, and what that changes.

    CONFIG.yaml -> CONFIG_qmargin.yaml (CONFIG_cosface.yaml, CONFIG_aam.yaml with --like)

Only the head's lines differ, and with --margin those of its schedule.
"""

import difflib
import math
from dataclasses import dataclass
from pathlib import Path

import yaml

from wespeaker_qmargin import adapter
from wespeaker_qmargin.config import overlay, read_config
from wespeaker_qmargin.consequences import explain, head_name, margins, q_margin_head
from wespeaker_qmargin.files import atomic_path
from wespeaker_qmargin.finetune import LIKE, number_or_auto
from wespeaker_qmargin.yaml_edit import edit, repeated_keys

_ALPHA = 1.5
_TRAINERS = {"project_type", "embed_dim", "num_class"}
_OPTIONS = {
    "q_margin": adapter.Q_MARGIN_ARGS,
    "add_margin": {*_TRAINERS, "scale"},
    "arc_margin": {*_TRAINERS, "scale", "easy_margin"},
}


@dataclass(frozen=True)
class Swap:
    """A YAML with another head.

    ``before`` and ``after`` are its text, ``old`` and ``new`` its content laid over its ``base:``;
    ``dropped`` are the options that only the old head has, ``repeated`` the keys that come twice.
    """

    path: Path
    before: str
    after: str
    old: dict
    new: dict
    dropped: dict
    repeated: list[str]


def swap(
    path,
    *,
    alpha: float | None = None,
    scale: float | str | None = None,
    margin: float | None = None,
    like: str | None = None,
) -> Swap:
    """Return the YAML at ``path`` with Q-Margin, or with the head ``like``; nothing is written.

    Args:
        alpha, scale: of Q-Margin. None: 1.5 and ``auto``; in a q_margin YAML, what it says.
        margin: >= 0, in cosine, that the schedule ends at; its epochs stay, and a margin that is
            fixed stays fixed. None: as it is.
        like: ``cosface`` or ``aam``, the control: that head at scale 32, or ``scale``.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no YAML; one without a head, with an unknown one, with the same one already;
            keys that come twice with different values; an option out of range.
    """
    path = Path(path)
    _check_options(alpha=alpha, scale=scale, margin=margin, like=like)
    old, text = _read(path)
    try:
        repeated, own = repeated_keys(text), yaml.safe_load(text)
        _check_head(own, old)
        options = _head_options(old["projection_args"], alpha=alpha, scale=scale, like=like)
        allowed = _OPTIONS[options["project_type"]]
        dropped = {k: v for k, v in own["projection_args"].items() if k not in allowed}
        changes = {"projection_args": {**options, **dict.fromkeys(dropped)}}
        if margin is not None:
            changes["margin_update"] = _margin_changes(own, old, margin)
        after = edit(text, changes)
        new = {**old, **_changed(path, own, changes)}
        swapped = Swap(path, text, after, old, new, dropped, repeated)
        explain(old, new)  # refuses what a head refuses
        if after == text:
            raise ValueError(f"is {head_name(new)} already; {_hint(new)}")
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from error
    return swapped


def _read(path: Path) -> tuple[dict, str]:
    try:
        return read_config(path), path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a UTF-8 text file ({error})") from error
    except ValueError as error:
        raise ValueError(" ".join(str(error).split())) from error  # a parser's message is a page


def _changed(path: Path, own: dict, changes: dict) -> dict:
    below = read_config(path.parent / str(own["base"])) if "base" in own else {}
    sections = {}
    for name, values in changes.items():
        above = {k: v for k, v in {**own[name], **values}.items() if v is not None}
        sections |= overlay({name: below.get(name)}, {name: above})
    return sections


def _check_options(*, alpha, scale, margin, like) -> None:
    if margin is not None and not (math.isfinite(margin) and margin >= 0):
        raise ValueError(f"--margin: expected a number >= 0, in cosine, got {margin}")
    if like is None:
        return
    if like not in LIKE or alpha is not None:
        raise ValueError(f"--like: expected {' or '.join(LIKE)}, without --alpha, got {like!r}")
    if scale is not None and not (isinstance(scale, int | float) and 0 < scale < math.inf):
        raise ValueError(f"--scale: of --like expected a number > 0, got {scale!r}")


def _check_head(own: dict, old: dict) -> None:
    if "projection_args" not in own:
        if "projection_args" in old:
            raise ValueError("projection_args: not in this file but in its base; swap that one")
        raise ValueError(
            "projection_args: missing, there is no head of speakers to swap (a self-supervised "
            "config has none: DINO, MoCo and SimCLR train without labels)"
        )
    if not isinstance(own["projection_args"], dict):
        raise ValueError(
            f"projection_args: expected keys and values, got {own['projection_args']!r}"
        )
    adapter.check_projection_args({"project_type": old["projection_args"].get("project_type")})


def _head_options(args: dict, *, alpha, scale, like) -> dict:
    given = {k: v for k, v in (("alpha", alpha), ("scale", scale)) if v is not None}
    if like is not None:
        return {**LIKE[like], **given}
    fresh = {} if args["project_type"] == "q_margin" else {"alpha": _ALPHA, "scale": "auto"}
    return {"project_type": "q_margin", **fresh, **given}


def _margin_changes(own: dict, old: dict, margin: float) -> dict:
    if not isinstance(own.get("margin_update"), dict):
        where = "not in this file but in its base" if "margin_update" in old else "missing"
        raise ValueError(f"margin_update: {where}; --margin has nothing to change")
    initial, final = margins(old)
    first = {"initial_margin": margin} if initial == final or initial > margin else {}
    return {**first, "final_margin": margin}


def _hint(content: dict) -> str:
    if q_margin_head(content) is None:
        return "nothing to change"
    return "say what to change: --alpha, --scale, --margin, or --like for its control"


def default_path(path, like: str | None = None) -> Path:
    """Return where the swapped YAML goes: ``x.yaml`` and ``x_aam.yaml`` to ``x_qmargin.yaml``."""
    path, stem = Path(path), Path(path).stem
    for word in ("qmargin", *LIKE):
        stem = stem.removesuffix(f"_{word}")
    return path.with_name(f"{stem}_{like or 'qmargin'}{path.suffix}")


def write(swapped: Swap, out) -> None:
    """Write the swapped YAML to ``out``, which must not exist.

    Raises:
        ValueError: ``out`` exists; its folder is another one and the YAML has a ``base:``.
        OSError: it cannot be written.
    """
    out = Path(out)
    if out.exists():
        raise ValueError(f"{out}: exists already and is not overwritten; choose another --out")
    base, home = yaml.safe_load(swapped.after).get("base"), swapped.path.resolve().parent
    if base and not Path(base).is_absolute() and out.resolve().parent != home:
        raise ValueError(f"{out}: base: {base} is relative to the file; keep the new one in {home}")
    try:
        with atomic_path(out) as temporary:
            temporary.write_bytes(swapped.after.encode("utf-8"))
    except OSError as error:
        raise OSError(f"{out}: not written ({error.strerror}); choose another --out") from error


def difference(swapped: Swap, out) -> str:
    """Return the unified diff."""
    texts = swapped.before.splitlines(), swapped.after.splitlines()
    lines = difflib.unified_diff(*texts, str(swapped.path), str(out), lineterm="")
    return "\n".join(lines)


def _told(swapped: Swap) -> list[str]:
    lines = []
    if swapped.dropped:
        options = ", ".join(f"{key} {value}" for key, value in swapped.dropped.items())
        kind = swapped.new["projection_args"]["project_type"]
        lines.append(f"Dropped: {options}; {kind} has no such option")
    if swapped.repeated:
        lines.append(f"Twice, with the same value, kept: {'; '.join(swapped.repeated)}")
    return lines


def add_arguments(parser) -> None:
    parser.epilog = (
        "examples:\n"
        "  wespeaker-qmargin swap conf/resnet.yaml                 # conf/resnet_qmargin.yaml\n"
        "  wespeaker-qmargin swap conf/resnet_lm.yaml --alpha 2 --margin 0.2 --out lm_a2.yaml\n"
        "  wespeaker-qmargin swap conf/resnet.yaml --like cosface  # conf/resnet_cosface.yaml\n"
        "recommended pairs of alpha and scale, all with s (alpha - 1) = 5: 1.25 and 20, 1.5 and\n"
        "10, 2 and 5; scale auto, written as it is, follows alpha"
    )
    add = parser.add_argument
    add("config", metavar="CONFIG.yaml", help="WeSpeaker's YAML, left as it is")
    add("--alpha", type=float, help="of Q-Margin [1.5]")
    add("--scale", type=number_or_auto, help="of Q-Margin [auto], or of --like [32]")
    add("--margin", type=float, help="that the schedule ends at [as it is]")
    add("--like", choices=LIKE, help="write this head instead, the control")
    add("--out", metavar="FILE", help="the new YAML [CONFIG_qmargin.yaml, CONFIG_LIKE.yaml]")


def run(args) -> None:
    """Write the new YAML; print the difference, what it changes for the training, and the path."""
    options = {key: getattr(args, key) for key in ("alpha", "scale", "margin", "like")}
    swapped = swap(args.config, **options)
    out = Path(args.out) if args.out else default_path(args.config, args.like)
    write(swapped, out)
    print(difference(swapped, out), end="\n\n")
    print("\n".join([*explain(swapped.old, swapped.new), *_told(swapped)]), end="\n\n")
    print(out)
