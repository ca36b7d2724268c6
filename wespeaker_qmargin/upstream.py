"""The WeSpeaker that is there, checkout or package, without its heavy imports.

Only `adapter` uses this: it is how it imports wespeaker, when something is asked for.
"""

import importlib
import importlib.util
import os
import subprocess
import sys
import types
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# called with a package of WeSpeaker's whose own ``__init__`` has run
after_loading: list = []


class _DeferredPackage(types.ModuleType):
    """A package whose ``__init__`` runs when one of its own names is first asked for.

    Its sub-modules import at once: they need ``__path__`` only.
    """

    def __getattr__(self, name: str):
        # import machinery and inspection ask every module for dunder names; only a star import's
        # __all__ means that somebody wants the package's content
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self.__class__ = types.ModuleType
        try:
            self.__spec__.loader.exec_module(self)
        except BaseException:
            self.__class__ = _DeferredPackage
            raise
        for complete in after_loading:
            complete(self)
        return getattr(self, name)


def _defer(name: str) -> None:
    if name in sys.modules:
        return
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            f"no module {name}: run tools/setup.sh, or set WESPEAKER_ROOT to a WeSpeaker checkout"
        )
    module = _DeferredPackage(name)
    module.__spec__, module.__loader__, module.__file__ = spec, spec.loader, spec.origin
    module.__path__, module.__package__ = spec.submodule_search_locations, name
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)


def wespeaker_module(name: str) -> types.ModuleType:
    """Import ``wespeaker.<name>`` without running the ``__init__`` of wespeaker and its frontend.

    Those pull s3prl, whisper and umap (11-14 s) and fail where torchaudio cannot load. They still
    run, in full, as soon as a name of theirs is used (``wespeaker.load_model``). A checkout named
    by ``WESPEAKER_ROOT`` wins over an installed package.
    """
    root = os.environ.get("WESPEAKER_ROOT")
    if root and "wespeaker" not in sys.modules:
        if not (Path(root) / "wespeaker" / "models").is_dir():
            raise FileNotFoundError(
                f"WESPEAKER_ROOT={root}: not a WeSpeaker checkout, it has no wespeaker/models"
            )
        if root not in sys.path:
            sys.path.insert(0, root)
    _defer("wespeaker")
    _defer("wespeaker.frontend")
    return importlib.import_module(f"wespeaker.{name}")


def wespeaker_source() -> dict[str, str | None]:
    """Return where the WeSpeaker in use comes from: ``path``, ``version``, ``commit``."""
    package = Path(wespeaker_module("models").__path__[0]).parent
    commit = subprocess.run(
        ["git", "-C", str(package.parent), "log", "-1", "--format=%H", "--", package.name],
        capture_output=True,
        text=True,
    ).stdout.strip()
    try:
        installed = version("wespeaker-unofficial")
    except PackageNotFoundError:
        installed = None
    is_installed = "site-packages" in package.parts
    return {
        "path": str(package),
        "version": installed if is_installed else None,
        "commit": None if is_installed else commit or None,
    }
