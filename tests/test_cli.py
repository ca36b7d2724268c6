"""The console command: helps, exit statuses, one line for an error."""

import subprocess
import sys

import pytest

from wespeaker_qmargin import cli

COMMANDS = list(cli._COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example(command, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0
    assert f"wespeaker-qmargin {command}" in capsys.readouterr().out.split("example")[1]


def test_top_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert all(f"\n  {command} " in out for command in COMMANDS)


def test_errors_are_one_line_and_a_status(tmp_path, capsys):
    assert cli.main(["average", "--exp_dir", str(tmp_path), "--num", "2"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("wespeaker-qmargin average: error: ") and error.count("\n") == 1
    assert cli.main(["train", "--config", str(tmp_path / "none.yaml")]) == 1
    assert "no such config file" in capsys.readouterr().err


def test_unknown_arguments_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["average", "--exp_dir", str(tmp_path), "--numm", "2"])
    assert stop.value.code == 2 and "--numm" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["trian"])


def test_installed_command():
    done = subprocess.run(
        [sys.executable, "-m", "wespeaker_qmargin.cli", "--version"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stdout.strip()
