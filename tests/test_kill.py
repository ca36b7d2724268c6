"""SIGKILL at random moments: nothing that was complete is lost, the next start goes on.

QMARGIN_KILLS: how often each command is killed (8); tools/soak.sh takes 200.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

KILLS = int(os.environ.get("QMARGIN_KILLS", 8))
HARNESS = Path(__file__).with_name("kill_harness.py")


def test_killed_commands_leave_what_undisturbed_ones_leave(tiny, tmp_path):
    command = [sys.executable, HARNESS, tiny, tmp_path / "work", "--kills", str(KILLS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout)
    counts = json.loads(done.stdout.splitlines()[-1])
    assert list(counts) == ["train", "extract", "score", "report"]
    assert all(x["kills"] >= KILLS for x in counts.values())
