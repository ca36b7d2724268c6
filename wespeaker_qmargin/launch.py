"""Run a script of WeSpeaker's, unchanged, with our heads, models and front-ends known to it.

python -m wespeaker_qmargin.launch wespeaker/bin/train.py --config conf/resnet.yaml ...
torchrun --nproc_per_node=2 -m wespeaker_qmargin.launch wespeaker/bin/train.py ...
"""

import argparse
import os
import runpy
import sys
from collections.abc import Collection
from pathlib import Path

import wespeaker_qmargin
from wespeaker_qmargin import upstream
from wespeaker_qmargin.adapter import register
from wespeaker_qmargin.checkout import (
    check_functions,
    check_packages,
    find_package,
    find_script,
    read_script,
)
from wespeaker_qmargin.compat import PATCHES, apply_needed
from wespeaker_qmargin.swallowed import FIXES, watch


def prepare(
    path: Path | None, *, fixes: Collection[str] = (), no_compat: Collection[str] = ()
) -> str:
    """Make this process ready for the script ``path`` of WeSpeaker's (None: a session by hand).

    Returns one line that says what was done: what is registered, in which WeSpeaker, and which
    patches of `compat` are on.

    Raises:
        FileNotFoundError, ValueError: no WeSpeaker, two of them, or one whose functions are not
            those that are wrapped: then nothing is changed. An unknown fix or patch.
        ModuleNotFoundError: packages that the script imports are missing; all are named.
    """
    package = find_package(path)
    check_functions(package)
    script = read_script(path, package)
    if "wespeaker" not in sys.modules and str(package.parent) not in sys.path:
        sys.path.insert(0, str(package.parent))
    applied = apply_needed(script, without=no_compat)
    check_packages(script)
    register()
    watch(script, fixes=fixes)
    source = upstream.wespeaker_source()
    which = source["version"] or f"commit {(source['commit'] or 'unknown')[:7]}"
    return (
        f"wespeaker-qmargin {wespeaker_qmargin.__version__}: head q_margin, model MHFA and "
        f"front-end wavlm registered in WeSpeaker {source['path']} ({which}); "
        f"compat: {', '.join(applied) or 'none needed'}"
        + (f"; off: {', '.join(no_compat)}" if no_compat else "")
        + (f"; fix: {', '.join(fixes)}" if fixes else "")
    )


def say(line: str) -> None:
    """Tell the user, once however many ranks there are; stdout is the script's."""
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    patches = "\n".join(f"  {p.name:21}{p.cure}\n{'':23}for {p.where}" for p in PATCHES)
    parser = argparse.ArgumentParser(
        prog="python -m wespeaker_qmargin.launch",
        description="Run a script of WeSpeaker's with project_type q_margin, model MHFA and "
        "frontend wavlm known to it.",
        epilog=f"compatibility patches, each applied only where it is needed:\n{patches}\n\n"
        "example:\n  python -m wespeaker_qmargin.launch train.py --config conf/resnet.yaml",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--fix",
        action="append",
        default=[],
        choices=FIXES,
        help="lm-speed: no speed perturbation in large-margin fine-tuning, as WeSpeaker's log says",
    )
    parser.add_argument(
        "--no-compat",
        action="append",
        default=[],
        metavar="NAME",
        help="leave this patch off; again for more, or all",
    )
    parser.add_argument("script", help="a path, or a name such as train.py in WeSpeaker's bin/")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own")
    return parser


def main(words: list[str] | None = None) -> None:
    """Run the script that the command line names; its exit status is the process's."""
    args = _parser().parse_args(words)
    try:
        script = find_script(args.script)
        say(prepare(script, fixes=args.fix, no_compat=args.no_compat))
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"wespeaker_qmargin.launch: error: {error}")
    sys.argv = [str(script), *args.arguments]
    sys.path.insert(0, str(script.resolve().parent))
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
