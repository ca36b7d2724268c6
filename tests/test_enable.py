"""The import hook: it wakes for WeSpeaker only, costs nothing else, and goes without a trace."""

import hashlib
import os
import subprocess
import sys
import sysconfig
import textwrap
import timeit
import venv
from pathlib import Path

import pytest

from wespeaker_qmargin import cli, enable

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    """(python, site-packages) of a virtual environment that sees this one's packages."""
    folder = tmp_path_factory.mktemp("env")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    found = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
        capture_output=True,
        text=True,
    )
    site = Path(found.stdout.strip())
    seen = {ROOT, *(Path(sysconfig.get_paths()[k]) for k in ("purelib", "platlib"))}
    (site / "outer.pth").write_text("".join(f"{path}\n" for path in sorted(seen)))
    return python, site


def python(scratch, *words, **environment):
    names = ("WESPEAKER_ROOT", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    clean = {k: v for k, v in os.environ.items() if k not in names}
    return subprocess.run(
        [scratch[0], *words], capture_output=True, text=True, env={**clean, **environment}
    )


def contents(folder: Path) -> dict[str, str]:
    """Every path below ``folder`` -> hash of what it holds."""
    hashes = {}
    for path in sorted(folder.rglob("*")):
        content = path.read_bytes() if path.is_file() else b"a folder"
        hashes[str(path.relative_to(folder))] = hashlib.sha256(content).hexdigest()
    return hashes


USER = """
    import sys
    from wespeaker.models.projections import get_projection
    args = {"project_type": "q_margin", "embed_dim": 4, "num_class": 3, "scale": 32.0}
    print(type(get_projection(args)).__name__)
"""


@pytest.fixture
def user(tmp_path):
    """A program that knows nothing of us."""
    path = tmp_path / "user.py"
    path.write_text(textwrap.dedent(USER))
    return path


def test_enable_makes_a_plain_program_know_the_heads_and_disable_leaves_no_trace(scratch, user):
    _, site = scratch
    before = contents(site)
    assert enable.status(site) == "disabled"
    enable.enable(site)
    assert enable.status(site) == "enabled"
    done = python(scratch, user)
    assert done.stdout == "QMarginProduct\n", done.stderr
    first = done.stderr.splitlines()[0]
    assert first.startswith("wespeaker-qmargin ") and "head q_margin" in first
    assert any(name.endswith(".pyc") for name in contents(site)), "Python compiled the hook"
    enable.enable(site)
    assert enable.disable(site)
    assert contents(site) == before
    assert not enable.disable(site) and enable.status(site) == "disabled"


@pytest.fixture
def enabled(scratch):
    enable.enable(scratch[1])
    yield scratch
    enable.disable(scratch[1])


def test_without_the_hook_the_head_is_unknown(scratch, user):
    """Upstream's fall-through: any name it does not know is a plain softmax."""
    program = user.read_text().replace("import sys", LIGHT)
    user.write_text(program)
    assert python(scratch, user).stdout == "Linear\n"


# wespeaker's own __init__ needs what this environment lacks: a bare package does for the heads
LIGHT = """\
import importlib.util, sys, types
package = types.ModuleType("wespeaker")
package.__path__ = importlib.util.find_spec("wespeaker").submodule_search_locations
sys.modules["wespeaker"] = package
"""


def test_start_of_python_loads_nothing_more(enabled):
    code = "import sys; print(len(sys.meta_path), *sorted(sys.modules))"
    with_hook = python(enabled, "-c", code).stdout.split()
    enable.disable(enabled[1])
    without = python(enabled, "-c", code).stdout.split()
    assert with_hook[1:] == without[1:] and int(with_hook[0]) == int(without[0]) + 1


def test_start_of_python_takes_no_longer(enabled):
    """The line itself, timed where it runs: the best of many is not another program's fault."""
    line = (enabled[1] / "_wespeaker_qmargin_hook.pth").read_text()
    seconds = min(timeit.repeat(lambda: exec(line, {}), number=1, repeat=50))
    sys.meta_path[:] = [f for f in sys.meta_path if type(f).__name__ != "WaitForWeSpeaker"]
    assert seconds < 1e-3


def test_wespeaker_that_does_not_fit_stops_with_the_way_out(enabled, user, tmp_path):
    models = tmp_path / "wespeaker" / "models"
    models.mkdir(parents=True)
    (tmp_path / "wespeaker" / "__init__.py").write_text("")
    (models / "__init__.py").write_text("")
    (models / "projections.py").write_text("def get_projection(conf, device): ...")
    done = python(enabled, user, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "get_projection(conf, device) instead of get_projection(conf)" in last
    assert "wespeaker-qmargin disable" in last


def test_missing_wespeaker_is_missing(enabled):
    code = f"""if True:
        import sys
        sys.path = [p for p in sys.path if "site-packages" not in p or p == {str(enabled[1])!r}]
        import wespeaker
    """
    done = python(enabled, "-c", code)
    assert done.stderr.strip().endswith("No module named 'wespeaker'")


def test_package_that_was_uninstalled_under_the_hook(enabled, tmp_path):
    (tmp_path / "wespeaker").mkdir()
    (tmp_path / "wespeaker" / "__init__.py").write_text("name = 'plain'")
    code = """if True:
        import sys
        sys.modules["wespeaker_qmargin.enable"] = None
        import wespeaker
        print(wespeaker.name, wespeaker.__loader__.__class__.__name__)
    """
    done = python(enabled, "-c", code, PYTHONPATH=str(tmp_path))
    assert done.stdout == "plain SourceFileLoader\n", done.stderr
    assert "enabled here, but cannot be imported" in done.stderr


def test_asking_whether_wespeaker_is_there_does_not_put_the_hook_to_sleep(enabled, user):
    user.write_text(
        "import importlib.util\nassert importlib.util.find_spec('wespeaker')\n" + user.read_text()
    )
    done = python(enabled, user)
    assert done.stdout == "QMarginProduct\n", done.stderr


def test_session_without_a_script(enabled, user):
    done = python(enabled, "-c", user.read_text())
    assert done.stdout == "QMarginProduct\n", done.stderr


def test_our_own_programs_are_left_to_themselves(enabled):
    code = """if True:
        from wespeaker_qmargin import adapter
        head = adapter.get_projection({"project_type": "softmax", "embed_dim": 4, "num_class": 3})
        upstream = adapter.wespeaker_module("models.projections").get_projection
        print(hasattr(upstream, "_qmargin_upstream"))
    """
    done = python(enabled, "-c", code)
    assert (done.stdout, done.stderr) == ("False\n", ""), done.stderr


def test_hook_of_another_version_is_stale(tmp_path, capsys):
    site = str(tmp_path)
    assert cli.main(["status", "--site", site]) == 0
    assert cli.main(["enable", "--site", site]) == 0
    (tmp_path / "_wespeaker_qmargin_hook.py").write_text("import sys")
    assert cli.main(["status", "--site", site]) == 0
    assert cli.main(["disable", "--site", site]) == 0
    said = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert said == ["disabled", "enabled", "stale", "disabled"]
    assert list(tmp_path.iterdir()) == []


def test_folder_that_is_not_there(tmp_path, capsys):
    assert cli.main(["enable", "--site", str(tmp_path / "none")]) == 1
    assert "no such folder" in capsys.readouterr().err


@pytest.mark.checkout
def test_plain_upstream_script(enabled):
    script = Path(os.environ["WESPEAKER_ROOT"]) / "wespeaker" / "bin" / "export_jit.py"
    done = python(enabled, script, "--help", PYTHONPATH=os.environ["WESPEAKER_ROOT"])
    assert done.returncode == 0 and "--config" in done.stdout, done.stderr
    assert "head q_margin" in done.stderr
