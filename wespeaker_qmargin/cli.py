"""The console command ``wespeaker-qmargin``: one sub-command a stage, no logic of its own."""

import argparse
import importlib
import logging
import sys

from wespeaker_qmargin import __version__

# command: (module, what it does)
_COMMANDS = {
    "check-data": (
        "check_data",
        "check the audio and the lists of a data folder; clean the lists",
    ),
    "plan": ("plan", "say what alpha, scale and margin mean, before anything is trained"),
    "probe": ("probe", "say how many samples a checkpoint has won already, before fine-tuning"),
    "train": ("train", "train a backbone with a head, as a WeSpeaker YAML says"),
    "finetune": ("finetune", "train a checkpoint further, on other speakers: new prototypes first"),
    "swap": ("swap", "write a YAML beside yours whose head is Q-Margin; say what that changes"),
    "average": ("checkpoints", "average the last checkpoints into avg_model.pt"),
    "audit": ("audit", "list hard and mislabelled training utterances, to listen to"),
    "extract": ("extract", "write embeddings of whole utterances as xvector.ark/scp"),
    "score": ("score", "score trials by cosine, with AS-Norm or S-Norm"),
    "metrics": ("metrics", "EER, minDCF, FNR at FPR, with speaker-level intervals"),
    "calibrate": ("calibrate", "turn scores into log-likelihood ratios, by quality measures too"),
    "grid": ("grid", "many trainings of one study, each once; one table, heat maps"),
    "compare": ("compare", "is one system better than another: paired intervals, p, seeds"),
    "experts": ("experts", "what an adaptation did to an encoder, what its experts hear"),
    "report": ("report", "one HTML page: results, DET curves, training curves"),
    "enable": ("enable", "make plain `python wespeaker/bin/train.py` know Q-Margin here"),
    "disable": ("enable", "undo enable"),
    "status": ("enable", "say whether it is enabled"),
}


def main(words: list[str] | None = None) -> int:
    """Run one command; return its exit status."""
    words = sys.argv[1:] if words is None else words
    parser = argparse.ArgumentParser(
        prog="wespeaker-qmargin",
        description="Q-Margin in WeSpeaker: train, extract, score, measure, report.",
        epilog="commands:\n"
        + "\n".join(f"  {name:12} {text}" for name, (_, text) in _COMMANDS.items())
        + "\n\nexample:\n  wespeaker-qmargin train --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("command", choices=_COMMANDS, metavar="command")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    chosen = parser.parse_args(words)
    module_name, text = _COMMANDS[chosen.command]
    # only the chosen stage is imported: --help of the whole stays fast
    module = importlib.import_module(f"wespeaker_qmargin.{module_name}")
    stage = argparse.ArgumentParser(
        prog=f"wespeaker-qmargin {chosen.command}",
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.add_arguments(stage)
    args, rest = stage.parse_known_args(chosen.arguments)
    if rest and not hasattr(args, "overrides"):
        stage.error(f"unknown arguments: {' '.join(rest)}")
    args.overrides, args.command = rest, chosen.command
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("wespeaker_qmargin").setLevel(logging.INFO)
    try:
        module.run(args)
    except (ValueError, OSError, ImportError) as error:
        # of an error in a loader's worker torch makes a whole traceback; its last line is ours
        message = str(error).strip().splitlines()[-1:] or [type(error).__name__]
        print(f"wespeaker-qmargin {chosen.command}: error: {message[0]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
