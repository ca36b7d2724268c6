"""Time and memory of scoring and measuring at VoxCeleb size.

    python tools/bench_scoring.py [--trials 581480 --utterances 150000 --dim 256]

Synthetic embeddings go to a temporary folder as Kaldi ark and scp. Then fresh processes score
(reading, mean subtraction, cosine, AS-Norm, writing) and measure (1,000 bootstrap replicates), and
each reports its own peak memory.
"""

import argparse
import multiprocessing
import resource
import sys
import tempfile
import time
from pathlib import Path


def write_data(folder: Path, args: argparse.Namespace) -> None:
    """Write embeddings of test utterances and cohort speakers, utt2spk and trials."""
    import kaldiio
    import numpy as np

    rng = np.random.default_rng(0)
    voices = rng.standard_normal((args.speakers, args.dim), dtype=np.float32)
    for name, count in (("test", args.utterances), ("train", args.cohort)):
        (folder / name).mkdir()
        target = f"ark,scp:{folder / name}/xvector.ark,{folder / name}/xvector.scp"
        with kaldiio.WriteHelper(target) as writer:
            for i in range(count):
                noise = 3 * rng.standard_normal(args.dim, dtype=np.float32)
                writer(f"{name}-{i:06d}.wav", noise + voices[i % args.speakers])
    enroll = rng.integers(0, args.utterances, args.trials)
    enroll[: args.utterances] = np.arange(args.utterances)[: args.trials]  # each one is needed
    test = rng.integers(0, args.utterances, args.trials)
    rounds = args.utterances // args.speakers * args.speakers
    test[::2] = (enroll + args.speakers * rng.integers(1, 50, args.trials))[::2] % rounds
    same = enroll % args.speakers == test % args.speakers
    with open(folder / "bench.trials", "w") as stream:
        for a, b, is_target in zip(enroll, test, same):
            label = "target" if is_target else "nontarget"
            stream.write(f"test-{a:06d}.wav test-{b:06d}.wav {label}\n")
    with open(folder / "utt2spk", "w") as stream:
        for i in range(args.utterances):
            stream.write(f"test-{i:06d}.wav id{i % args.speakers:05d}\n")


def score(folder: Path, args: argparse.Namespace) -> None:
    """Score the trials with AS-Norm."""
    from wespeaker_qmargin.score import score_files

    start = time.perf_counter()
    paths = score_files(
        folder / "test" / "xvector.scp",
        [folder / "bench.trials"],
        out=folder / "scores",
        mean=folder / "train" / "xvector.scp",
        norm="asnorm",
        cohort=folder / "train" / "xvector.scp",
        top_n=args.top_n,
    )
    report(
        f"score: {args.trials} trials, {args.utterances} embeddings of {args.dim}, AS-Norm "
        f"{args.top_n} of {args.cohort}, {len(paths)} files",
        start,
    )


def measure(folder: Path, args: argparse.Namespace) -> None:
    """Measure the plain score file, with intervals."""
    from wespeaker_qmargin.metrics import evaluate, format_markdown

    start = time.perf_counter()
    measured = evaluate([folder / "scores" / "bench.trials.score"], utt2spk=folder / "utt2spk")
    report(f"measure: {args.trials} trials of {args.speakers} speakers, 1000 replicates", start)
    print(format_markdown(measured))


def report(what: str, start: float) -> None:
    """Print seconds since ``start`` and this process's peak memory."""
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    print(f"{what}: {seconds:.1f} s, peak RSS {peak:.2f} GB", flush=True)


def main() -> int:
    """Run each step in a process of its own, so that each peak is that step's alone."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=581480)
    parser.add_argument("--utterances", type=int, default=150000)
    parser.add_argument("--speakers", type=int, default=1251)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--cohort", type=int, default=5994)
    parser.add_argument("--top_n", type=int, default=300)
    args = parser.parse_args()
    fresh = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        for step in (write_data, score, measure):
            process = fresh.Process(target=step, args=(Path(folder), args))
            process.start()
            process.join()
            if process.exitcode:
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
