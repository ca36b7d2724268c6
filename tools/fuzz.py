"""One parser of users' files under atheris: coverage-guided bytes, only documented errors.

Needs `pip install atheris` (Linux, CPython 3.11 to 3.13). Counts of the last long run:
docs/soak.md.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["wespeaker_qmargin", "yaml"]):
    from wespeaker_qmargin.config import load_config
    from wespeaker_qmargin.files import read_scores, read_table, read_trials
    from wespeaker_qmargin.lists import read_utterances
    from wespeaker_qmargin.study import read_study
    from wespeaker_qmargin.swap import swap

EXAMPLE = """example:
  python tools/fuzz.py scores -runs=2000000 -max_len=500"""
YAML = (Path(__file__).parents[1] / "conf/mini_xvec.yaml").read_text(encoding="utf-8")
STUDY = """exp_dir: grid
config: x.yaml
test: {data: test, trials: [a.trials]}
seeds: [0, 1]
cells: {a: {margin_update: {final_margin: 0.2}}}
"""
PARSERS = {  # what reads a file, and a file that it takes, from which the fuzzer starts
    "trials": (read_trials, "a b target\na c nontarget\n"),
    "scores": (read_scores, "a b 0.5 target\na c -1.25 nontarget\n"),
    "table": (read_table, "u1 s1\nu2 s2\n"),
    "raw": (
        lambda path: read_utterances("raw", path),
        '{"key": "u1", "wav": "x.wav", "spk": "s1", "vad": [[0.5, 1]]}\n',
    ),
    "shard": (lambda path: read_utterances("shard", path), "a.tar\n"),
    "config": (load_config, YAML),
    "study": (read_study, STUDY),
    "swap": (swap, YAML),
}
DOCUMENTED = (ValueError, FileNotFoundError, OSError)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parser", choices=PARSERS)
    args, others = parser.parse_known_args()
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    path, corpus = folder / "file", folder / "corpus"
    parse, seed = PARSERS[args.parser]
    corpus.mkdir()
    (corpus / "seed").write_text(seed, encoding="utf-8")

    def one(content: bytes) -> None:
        path.write_bytes(content)
        try:
            parse(path)
        except DOCUMENTED as error:
            if not str(error) or isinstance(error, UnicodeError):
                raise AssertionError(f"not in the reader's words: {error!r}") from error

    atheris.Setup([sys.argv[0], *others, str(corpus)], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
