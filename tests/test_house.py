"""The package's own rules: import arrows point one way, one importer of wespeaker, file sizes."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "wespeaker_qmargin"
# every module may import those above it only
LAYERS = [
    "functional",
    "screen",
    "sparse",
    "lazy_rows",
    "lazy_sgd",
    "choice",
    "head",
    "ramps",
    "ranks",
    "sharded",
    "parallel",
    "mhfa",
    "imported",
    "features",
    "ssl_weights",
    "wavlm_original",
    "router",
    "moe",
    "upcycle",
    "frontend",
    "wavlm",
    "w2vbert_features",
    "w2vbert",
    "files",
    "tensors",
    "checkpoints",
    "upstream",
    "adapter",
    "sources",
    "audio",
    "check_audio",
    "torchaudio_standin",
    "compat_torchaudio",
    "meters",
    "checkout",
    "compat_scripts",
    "compat",
    "swallowed",
    "launch",
    "enable",
    "import_hook",
    "lists",
    "augment",
    "order",
    "data",
    "check_data",
    "guard",
    "config_check",
    "config",
    "model",
    "embeddings",
    "roc",
    "score",
    "llr",
    "calibrate",
    "metrics_table",
    "metrics",
    "compare",
    "provenance",
    "schedule",
    "resume",
    "train_log",
    "validate",
    "prototypes",
    "transfer",
    "experiment",
    "train",
    "finetune",
    "yaml_edit",
    "consequences",
    "swap",
    "extract",
    "figures",
    "plan",
    "study",
    "grid",
    "experts",
    "leads",
    "verdict",
    "probe_report",
    "probe_grid",
    "probe",
    "audit",
    "page",
    "evidence",
    "report",
    "cli",
]
MODULES = sorted(p.stem for p in PACKAGE.glob("*.py") if p.stem != "__init__")


def imports(module: str) -> set[str]:
    tree = ast.parse((PACKAGE / f"{module}.py").read_text())
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_every_module_has_its_layer():
    assert sorted(LAYERS) == MODULES


@pytest.mark.parametrize("module", MODULES)
def test_arrows_point_down(module):
    below = set(LAYERS[: LAYERS.index(module)])
    own = {n.split(".")[1] for n in imports(module) if n.startswith("wespeaker_qmargin.")}
    assert own & set(LAYERS) <= below, f"{module} imports {own - below}"


def test_only_the_adapter_imports_wespeaker():
    users = [m for m in MODULES if any(n.split(".")[0] == "wespeaker" for n in imports(m))]
    assert users == []  # upstream.py does it by importlib
    using = [m for m in MODULES if "wespeaker_qmargin.upstream" in imports(m)]
    assert using == ["adapter", "launch", "provenance"]


@pytest.mark.parametrize("module", ["files", "roc", "score", "metrics", "report", "embeddings"])
def test_no_torch_of_their_own(module):
    assert not any(n.split(".")[0] == "torch" for n in imports(module))


@pytest.mark.parametrize("module", MODULES)
def test_files_and_functions_are_short(module):
    text = (PACKAGE / f"{module}.py").read_text()
    assert len(text.splitlines()) <= 320
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and not module.startswith("test"):
            body = node.end_lineno - node.lineno + 1
            doc = ast.get_docstring(node)
            assert body - (len(doc.splitlines()) + 1 if doc else 0) <= 45, node.name
