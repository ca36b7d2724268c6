"""What another head in a configuration changes for the training, in words."""

from wespeaker_qmargin import adapter
from wespeaker_qmargin.functional import zero_loss_gap
from wespeaker_qmargin.head import QMarginProduct, auto_scale

# what a head does with the margin of margin_update
_MARGIN = {
    "add_margin": "subtracts it from the cosine",
    "arc_margin": "adds it to the angle, in radians",
    "arc_margin_intertopk_subcenter": "adds it to the angle, in radians",
    "sphereface2": "applies it to a similarity of its own",
    "ham_margin": "adds it to a hyperbolic distance",
    "sphere": "never reads it",
    "softmax": "never reads it",
    "q_margin": "counts it in cosine, as add_margin does, in the reference measure",
}
_OTHER_PROTOTYPES = {
    "softmax": "is a linear layer behind batch norm and ReLU",
    "arc_margin_intertopk_subcenter": "has K prototypes a speaker (3, where K is not written)",
}
_USUAL_MARGIN, _LARGE_MARGIN = 0.2, 0.5
_WON = (
    "  A sample is won, its loss and gradient exactly 0, once its cosine to its own speaker leads",
    "  all others by the gap exp(k m) / k, k = s (alpha - 1); two cosines differ by 2 at most. One",
    "  that is not won moves its own prototype and those with posterior > 0, no others.",
)


def explain(old: dict, new: dict) -> list[str]:
    """Return lines on what changes from configuration ``old`` to ``new``, and what does not.

    The two differ in ``projection_args`` and perhaps in ``margin_update``. Both are contents of a
    YAML with the head q_margin or one of WeSpeaker's.

    Raises:
        ValueError: options that q_margin refuses.
    """
    kinds = old["projection_args"]["project_type"], new["projection_args"]["project_type"]
    lines = [f"Head: {head_name(old)} -> {head_name(new)}{_product(new)}"]
    lines += ["Zero-loss gap before:", *_gaps(old), "Zero-loss gap after:", *_gaps(new), *_WON]
    if kinds[0] != kinds[1]:
        lines.append(f"Margin: {kinds[0]} {_MARGIN[kinds[0]]}; {kinds[1]} {_MARGIN[kinds[1]]}")
        lines += _loss(*kinds, new) + _prototypes(*kinds)
    lines.append(f"Unchanged: every other line ({_unchanged(old, new)})")
    if new.get("exp_dir"):
        lines.append(f"exp_dir is still {new['exp_dir']}: give the new run another")
    return lines


def head_name(content: dict) -> str:
    """Return the head's name with its alpha and scale as they are written."""
    args = content["projection_args"]
    words = [f"{key} {args[key]}" for key in ("alpha", "scale") if key in args]
    return " ".join([args["project_type"], *words])


def q_margin_head(content: dict) -> QMarginProduct | None:
    """Return the q_margin head that ``content`` asks for, for one class; None: it asks for another.

    Raises:
        ValueError: options that the head refuses.
    """
    args = content["projection_args"]
    if args["project_type"] != "q_margin":
        return None
    options = {key: args[key] for key in adapter.Q_MARGIN_OPTIONS if key in args}
    try:
        return QMarginProduct(1, 1, **options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"projection_args: {error}") from error


def margins(content: dict) -> tuple[float, float]:
    """Return the margins that the schedule of ``margin_update`` begins and ends with.

    Raises:
        ValueError: one that is no number.
    """
    update = content.get("margin_update") or {}
    try:
        initial = float(update.get("initial_margin", 0.0))
        final = float(update.get("final_margin", initial))
    except (AttributeError, TypeError, ValueError):
        raise ValueError(f"margin_update: expected numbers as margins, got {update}") from None
    return initial, final if update.get("update_margin", True) else initial


def _product(content: dict) -> str:
    head = q_margin_head(content)
    if head is None:
        return ""
    auto, product = auto_scale(head.alpha), head.scale * (head.alpha - 1)
    near = auto / 1.5 <= head.scale <= auto * 1.5
    advice = "" if near else f"; the recommended 5 is 'scale: auto' ({auto:g})"
    return f" (scale {head.scale:g}, s (alpha - 1) = {product:.3g}{advice})"


def _gaps(content: dict) -> list[str]:
    head = q_margin_head(content)
    if head is None or head.alpha == 1:
        return ["  infinite at any margin: every sample moves every prototype"]
    options = {"alpha": head.alpha, "scale": head.scale}
    lines = []
    for when, margin in _stages(content):
        gap = zero_loss_gap(**options, margin=margin)
        lines.append(f"  {gap:.3g} at margin {margin:g}, {when}{_reach(gap)}")
        if gap > 2:
            usual = zero_loss_gap(**options, margin=_USUAL_MARGIN)
            lines[-1] += f" ({usual:.3g} at margin {_USUAL_MARGIN})"
    return lines


def _stages(content: dict) -> list[tuple[str, float]]:
    initial, final = margins(content)
    stages = [("throughout", final)]
    if initial != final:
        update = content["margin_update"]
        stages = [
            (f"before epoch {update.get('increase_start_epoch')}", initial),
            (f"from epoch {update.get('fix_start_epoch')} on", final),
        ]
    if not content.get("do_lm") and final < _LARGE_MARGIN:
        stages.append(("a large-margin stage after this one", _LARGE_MARGIN))
    return stages


def _reach(gap: float) -> str:
    if gap > 2:
        return ": above 2, no sample is won"
    if gap > 1:
        return ": all rivals at a cosine < 0, hardly a sample is won"
    return ""


def _loss(old: str, new: str, content: dict) -> list[str]:
    if "q_margin" not in (old, new):
        return []
    written = content.get("loss", "CrossEntropyLoss")
    verdict = "brings its own" if new == "q_margin" else "brought its own"
    used = "is not used" if new == "q_margin" else "is used"
    return [f"Loss: q_margin {verdict}; 'loss: {written}' {used}"]


def _prototypes(old: str, new: str) -> list[str]:
    if old not in _OTHER_PROTOTYPES:
        return []
    return [
        f"Prototypes: {old} {_OTHER_PROTOTYPES[old]}, {new} one vector a speaker: of a checkpoint "
        "only the backbone fits (wespeaker-qmargin finetune makes new prototypes)"
    ]


def _unchanged(old: dict, new: dict) -> str:
    said = [str(new[key]) for key in ("model", "optimizer", "scheduler") if key in new]
    if "num_epochs" in new:
        said.append(f"{new['num_epochs']} epochs")
    if old.get("margin_update") == new.get("margin_update"):
        said.append("margin schedule")
    return ", ".join([*said, "learning rates", "data", "augmentation", "features"])
