"""Make plain ``python wespeaker/bin/train.py`` know our heads in this environment; undo it."""

import argparse
import sys
import sysconfig
from pathlib import Path

from wespeaker_qmargin import files
from wespeaker_qmargin.launch import prepare, say

_HOOK = "_wespeaker_qmargin_hook"
_SOURCE = Path(__file__).with_name("import_hook.py")
# Every start of Python runs this line: it imports nothing, not even the hook, before WeSpeaker is
# asked for. site.py takes one line only, and in a virtual environment runs it twice.
_PTH = (
    'import sys; "WaitForWeSpeaker" in str(sys.meta_path) or '
    'sys.meta_path.insert(0, type("WaitForWeSpeaker", (), {"find_spec": '
    "lambda self, name, path=None, target=None: "
    f'__import__("{_HOOK}").find_spec(self) if name == "wespeaker" else None}})())\n'
)


def enable(site: Path) -> None:
    """Write the import hook into the folder ``site`` of packages; what is there is replaced.

    Raises:
        OSError: the folder is not there, or not ours to write.
    """
    if not site.is_dir():
        raise FileNotFoundError(f"{site}: no such folder")
    module, path_file = _hook_files(site)
    files.write_text(module, _SOURCE.read_text(encoding="utf-8"))
    # last: without the module, no import of wespeaker would go well
    files.write_text(path_file, _PTH)


def disable(site: Path) -> bool:
    """Remove the hook from ``site``; return whether there was one."""
    module, path_file = _hook_files(site)
    compiled = list((site / "__pycache__").glob(f"{_HOOK}.*.pyc"))
    found = [path for path in (path_file, module, *compiled) if path.exists()]
    for path in found:
        path.unlink()
    if compiled and not any((site / "__pycache__").iterdir()):
        (site / "__pycache__").rmdir()
    return bool(found)


def status(site: Path) -> str:
    """Return one word: ``enabled``, ``disabled``, or ``stale`` (by another version, or half)."""
    module, path_file = _hook_files(site)
    if not module.exists() and not path_file.exists():
        return "disabled"
    whole = module.exists() and path_file.exists()
    same = whole and (path_file.read_text(), module.read_text()) == (_PTH, _SOURCE.read_text())
    return "enabled" if same else "stale"


def _hook_files(site: Path) -> tuple[Path, Path]:
    return site / f"{_HOOK}.py", site / f"{_HOOK}.pth"


def wake() -> None:
    """Register, for the program that is importing WeSpeaker; the hook calls it."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    script = Path(main) if main and Path(main).is_file() else None
    try:
        say(prepare(script))
    except (ValueError, OSError, ImportError) as error:
        raise ImportError(f"{error} (to do without: wespeaker-qmargin disable)") from error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the commands ``enable``, ``disable`` and ``status``."""
    parser.epilog = (
        "The hook wakes when WeSpeaker is imported, and then does what the launcher "
        "(python -m wespeaker_qmargin.launch) does.\n\n"
        "example:\n  wespeaker-qmargin enable\n"
        "  python wespeaker/bin/train.py --config conf/resnet.yaml ...\n"
        "  wespeaker-qmargin status\n  wespeaker-qmargin disable"
    )
    parser.add_argument(
        "--site",
        type=Path,
        default=Path(sysconfig.get_paths()["purelib"]),
        help="folder of packages that Python reads .pth files in (default: this environment's)",
    )


def run(args: argparse.Namespace) -> None:
    """Run the command ``args.command``."""
    if args.command == "enable":
        enable(args.site)
    elif args.command == "disable":
        disable(args.site)
    state = status(args.site)
    note = ": run `wespeaker-qmargin enable` again, or disable" if state == "stale" else ""
    print(f"{state} in {args.site}{note}")
