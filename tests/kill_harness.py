"""Kill a training, an extraction, a scoring and a report at random moments, start each again, and
compare what is left with what an undisturbed one leaves.

    python tests/kill_harness.py CONFIG WORK --kills 8 --seed 0

CONFIG trains in seconds (conftest's ``tiny``); WORK is a new folder. Prints one line of JSON:
for each command how often it was killed, how often while it ran, and that the results are equal.
Everything is imported once, each attempt is a fork of this process.
"""

import argparse
import json
import os
import random
import signal
import time
from pathlib import Path

import torch

from wespeaker_qmargin.checkpoints import average_epochs, read_checkpoint
from wespeaker_qmargin.cli import main as command
from wespeaker_qmargin.config import load_config
from wespeaker_qmargin.embeddings import read_embeddings
from wespeaker_qmargin.files import read_scores


def fork(words: list, log: Path) -> int:
    """Start the command in a fork; return its process number."""
    pid = os.fork()
    if pid == 0:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        status = 70
        try:
            status = command(list(map(str, words)))
        finally:
            os._exit(status)
    return pid


def finish(words: list, log: Path) -> float:
    """Run the command to its end; return the seconds it took."""
    start = time.monotonic()
    status = os.waitstatus_to_exitcode(os.waitpid(fork(words, log), 0)[1])
    if status:
        raise SystemExit(f"{words[0]} ended with {status}: {log.read_text()[-2000:]}")
    return time.monotonic() - start


def disturb(make_words, check, folder: Path, *, kills: int, rng: random.Random) -> dict:
    """Kill the command ``kills`` times; where it ends before, begin anew in another folder.

    ``make_words(number)``: the command of the number-th folder; ``check(number, complete)`` looks
    at what it has left so far.
    """
    number, done, log = 0, 0, folder / "log"
    seconds = finish(make_words(number), log)
    check(number, True)
    number += 1
    while done < kills:
        pid = fork(make_words(number), log)
        time.sleep(rng.uniform(0, seconds))
        os.kill(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status not in (0, -signal.SIGKILL):
            raise SystemExit(f"ended with {status}: {log.read_text()[-2000:]}")
        done += status == -signal.SIGKILL
        check(number, status == 0)
        number += status == 0
    finish(make_words(number), log)
    check(number, True)
    return {"kills": done, "finished": number}


def check_training(exp: Path, reference: Path, complete: bool) -> None:
    """Every file that has its final name is whole; at the end all are those of ``reference``."""
    for path in (exp / "models").glob("model_*.pt"):
        ours, theirs = (
            read_checkpoint(folder / "models" / path.name) for folder in (exp, reference)
        )
        assert ours.keys() == theirs.keys(), path
        assert all(torch.equal(x, theirs[key]) for key, x in ours.items()), path
    if (exp / "state" / "state.pt").exists():
        torch.load(exp / "state" / "state.pt", weights_only=True)
    if complete:
        records = [
            (folder / "metrics.jsonl").read_text().splitlines() for folder in (exp, reference)
        ]
        steps, expected = ([json.loads(x)["step"] for x in lines] for lines in records)
        assert steps == expected, "no step is missing, none stands there twice"
        names = [sorted(x.name for x in (f / "models").iterdir()) for f in (exp, reference)]
        assert names[0] == names[1]


def check_same(ours: Path, theirs: Path, read, complete: bool) -> None:
    """The file is not there, or whole."""
    assert ours.exists() or not complete
    if ours.exists():
        assert read(ours) == read(theirs)


def run(config: Path, work: Path, *, kills: int, seed: int) -> dict:
    """Disturb all commands; return the counts."""
    rng, found = random.Random(seed), {}
    words = ["train", "--config", config, "--resume", "--save_state_interval", 2, "--exp_dir"]

    def train(number):
        return [*words, work / f"train_{number}"]

    def trained(number, complete):
        check_training(work / f"train_{number}", work / "train_0", complete)

    found["train"] = disturb(train, trained, work, kills=kills, rng=rng)
    exp = work / "train_0"
    average_epochs(exp, 2)
    data = load_config(config).train_data

    def extract(number):
        out = work / f"embeddings_{number}"
        return ["extract", "--exp_dir", exp, "--data_type", "kaldi", "--data", data, "--out", out]

    def embedded(path):
        return {key: x.tobytes() for key, x in zip(*read_embeddings(path))}

    def extracted(number, complete):
        scps = [work / f"embeddings_{i}" / "xvector.scp" for i in (number, 0)]
        check_same(*scps, embedded, complete)

    found["extract"] = disturb(extract, extracted, work, kills=kills, rng=rng)
    keys = sorted(embedded(work / "embeddings_0" / "xvector.scp"))
    pairs = [(a, b) for i, a in enumerate(keys) for b in keys[i + 1 :]]
    lines = (f"{a} {b} {'target' if a[:2] == b[:2] else 'nontarget'}\n" for a, b in pairs)
    (work / "all.trials").write_text("".join(lines))

    def score(number):
        scp = work / "embeddings_0" / "xvector.scp"
        out = work / f"scores_{number}"
        return ["score", "--embeddings", scp, "--trials", work / "all.trials", "--out", out]

    def scored(number, complete):
        files = [work / f"scores_{i}" / "all.trials.score" for i in (number, 0)]
        check_same(*files, lambda x: (x.read_bytes(), len(read_scores(x).scores)), complete)

    found["score"] = disturb(score, scored, work, kills=kills, rng=rng)
    (exp / "scores").mkdir()
    path = exp / "scores" / "all.trials.score"
    path.write_bytes((work / "scores_0" / path.name).read_bytes())
    results = exp / "scores" / "results.json"
    finish(["metrics", path, "--bootstrap", 0, "--out", results], work / "log")

    def report(number):
        return ["report", "--systems", f"A={exp}", "--out", work / f"report_{number}.html"]

    def reported(number, complete):
        files = [work / f"report_{i}.html" for i in (number, 0)]
        check_same(*files, Path.read_bytes, complete)

    found["report"] = disturb(report, reported, work, kills=kills, rng=rng)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--kills", type=int, default=8, help="of each command [8]")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)  # a fork of a process with threads would wait for them
    args.work.mkdir(parents=True)
    print(json.dumps(run(args.config, args.work, kills=args.kills, seed=args.seed)))


if __name__ == "__main__":
    main()
