"""Which WeSpeaker and which of its scripts are meant, and whether they are the ones we know.

Everything here reads source; nothing of WeSpeaker's is imported.
"""

import ast
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

_WAY_OUT = (
    "set WESPEAKER_ROOT to a WeSpeaker checkout (the folder that has wespeaker/ in it), or put "
    "that folder on PYTHONPATH"
)
# What the launcher wraps: file -> function -> its parameters without default.
_WRAPPED = {
    "models/projections.py": {"get_projection": ["conf"]},
    "models/speaker_model.py": {"get_speaker_model": ["model_name"]},
    "utils/utils.py": {"parse_config_or_kwargs": ["config_file"]},
    "dataset/dataset.py": {"Dataset": ["data_type", "data_list_file", "configs", "spk2id_dict"]},
    "dataset/processor.py": {
        "url_opener": ["data"],
        "tar_file_and_group": ["data"],
        "parse_raw": ["data"],
        "parse_feat": ["data"],
        "filter": ["data"],
    },
}
# import name -> name in the package registry, where they differ
_PIP_NAMES = {
    "sklearn": "scikit-learn",
    "silero_vad": "silero-vad",
    "umap": "umap-learn",
    "whisper": "openai-whisper",
    "yaml": "pyyaml",
}


@dataclass(frozen=True)
class Script:
    """A program and what it imports, directly or through WeSpeaker.

    ``modules`` are WeSpeaker's, named without ``wespeaker.``; ``packages`` the top-level names of
    everything else. The front-ends' own imports are left out: most programs use none of them.
    """

    path: Path | None
    text: str
    modules: frozenset[str]
    packages: frozenset[str]


def find_package(script: Path | None = None) -> Path:
    """Return the ``wespeaker`` folder that an import would find: WESPEAKER_ROOT's, then sys.path's.

    If there is none, it is the one that ``script`` lies in.

    Raises:
        FileNotFoundError: there is none at all, or WESPEAKER_ROOT is not a checkout.
        ValueError: ``script`` lies in another WeSpeaker than the one an import finds.
    """
    own = _package_around(script)
    found = _importable_package() or own
    if found is None:
        raise FileNotFoundError(f"no WeSpeaker found: {_WAY_OUT}")
    if own is not None and own.resolve() != found.resolve():
        raise ValueError(
            f"two WeSpeakers: {script} belongs to {own}, but `import wespeaker` finds {found}; set "
            f"WESPEAKER_ROOT={own.parent} to use the first, or name a script of the second"
        )
    return found


def _package_around(script: Path | None) -> Path | None:
    folders = [] if script is None else script.resolve().parents
    return next((f for f in folders if f.name == "wespeaker" and (f / "models").is_dir()), None)


def _importable_package() -> Path | None:
    root = os.environ.get("WESPEAKER_ROOT")
    if root:
        package = Path(root).absolute() / "wespeaker"
        if not (package / "models").is_dir():
            raise FileNotFoundError(
                f"WESPEAKER_ROOT={root}: not a WeSpeaker checkout, it has no wespeaker/models"
            )
        return package
    spec = importlib.util.find_spec("wespeaker")
    # a folder that holds a checkout of that name looks like a namespace package
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent


def find_script(name: str) -> Path:
    """Return the path ``name``, or the script of that bare name in the WeSpeaker in use.

    Raises:
        FileNotFoundError: neither; what is there instead is named.
    """
    if Path(name).is_file():
        return Path(name)
    if Path(name).name != name:
        raise FileNotFoundError(f"{name}: no such script")
    folder = find_package() / "bin"
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{name}: no such file here, and {folder.parent} has no bin/ (an installed WeSpeaker "
            f"has models, heads and metrics only): {_WAY_OUT}"
        )
    if not (folder / name).is_file():
        known = ", ".join(sorted(p.name for p in folder.glob("*.py")))
        raise FileNotFoundError(f"{name}: no such file here nor in {folder}, which has {known}")
    return folder / name


def check_functions(package: Path) -> None:
    """Raise ValueError unless all that is going to be wrapped is there, with the same parameters.

    An installed WeSpeaker has no ``dataset``: that part is then left out.
    """
    faults = []
    for file, functions in _WRAPPED.items():
        if file.startswith("dataset/") and not (package / "dataset").is_dir():
            continue
        found = _required_parameters(package / file)
        for name, expected in functions.items():
            if name not in found:
                faults.append(f"{file} has no {name}({', '.join(expected)})")
            elif found[name] != expected:
                faults.append(
                    f"{file}: {name}({', '.join(found[name])}) instead of "
                    f"{name}({', '.join(expected)})"
                )
    if faults:
        raise ValueError(
            f"{package}: not a WeSpeaker that this version knows, nothing was registered: "
            + "; ".join(faults)
        )


def _required_parameters(file: Path) -> dict[str, list[str]]:
    if not file.is_file():
        return {}
    functions = [n for n in ast.parse(file.read_bytes()).body if isinstance(n, ast.FunctionDef)]
    required = {}
    for function in functions:
        names = [a.arg for a in function.args.posonlyargs + function.args.args]
        required[function.name] = names[: len(names) - len(function.args.defaults)]
    return required


def read_script(path: Path | None, package: Path) -> Script:
    """Return what is known of the program at ``path``; None is an interactive session."""
    if path is None:
        return Script(None, "", frozenset(), frozenset({"torchaudio"}))
    queue, modules, packages = [_imported(path, "")], set(), set()
    while queue:
        for name in queue.pop():
            top, _, rest = name.partition(".")
            if top != "wespeaker":
                packages.add(top)
            elif rest not in modules and (file := _module_file(package, rest)):
                modules.add(rest)
                if rest.partition(".")[0] != "frontend":
                    queue.append(_imported(file, name if file.stem == "__init__" else _up(name)))
    text = path.read_text(encoding="utf-8")
    return Script(path, text, frozenset(modules), frozenset(packages))


def _up(name: str) -> str:
    return name.rpartition(".")[0]


def _module_file(package: Path, name: str) -> Path | None:
    base = package.joinpath(*name.split(".")) if name else package
    return next((f for f in (base.with_suffix(".py"), base / "__init__.py") if f.is_file()), None)


def _imported(file: Path, package: str) -> list[str]:
    """The absolute names that the top level of ``file`` imports; ``package`` is its own."""
    names = []
    for node in ast.parse(file.read_bytes()).body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package
            for _ in range(node.level - 1):
                base = _up(base)
            parts = [base] if node.level else []
            origin = ".".join([*parts, node.module] if node.module else parts)
            names += [origin, *(f"{origin}.{alias.name}" for alias in node.names)]
    return names


def check_packages(script: Script) -> None:
    """Raise ModuleNotFoundError that names all packages which ``script`` needs and are missing."""
    missing = sorted(p for p in script.packages if not _is_there(p, script.path))
    if missing:
        names = " ".join(_PIP_NAMES.get(name, name) for name in missing)
        raise ModuleNotFoundError(f"{script.path.name} needs more packages: pip install {names}")


def _is_there(name: str, script: Path | None) -> bool:
    try:
        if importlib.util.find_spec(name) is not None:
            return True
    except (ImportError, ValueError):
        return False
    beside = script.resolve().parent / name
    return beside.is_dir() or beside.with_suffix(".py").is_file()
