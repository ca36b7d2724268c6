"""Write WeSpeaker shards: uncompressed tar files with KEY.spk and KEY.wav, and a list of them.

SHARDS_DIR gets PREFIX_000000000.tar, ... and PREFIX.json, which says what they were made from: a
second call with the same lists and options writes only what is missing. The same input makes the
same bytes, with any number of --jobs; --shuffle --seed S is the order of WeSpeaker's own tool.
"""

import argparse
import hashlib
import io
import json
import os
import random
import sys
import tarfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from wespeaker_qmargin.audio import Audio, AudioError, Utterance
from wespeaker_qmargin.files import atomic_path, write_text
from wespeaker_qmargin.lists import read_utterances

EXAMPLE = """example:
  python tools/make_shards.py --shuffle --jobs 8 data/vox2_dev/wav.scp data/vox2_dev/utt2spk \\
    data/vox2_dev/shards data/vox2_dev/shard.list
"""
SUFFIXES = ("wav", "flac", "ogg", "opus", "mp3")


def make_shards(
    wav_scp,
    utt2spk,
    shards_dir,
    shard_list,
    *,
    num_utts_per_shard: int = 1000,
    prefix: str = "shards",
    shuffle: bool = False,
    seed: int = 42,
    jobs: int = 1,
) -> int:
    """Write the shards of a wav.scp and a utt2spk with the same keys; return how many there are.

    The order is that of wav.scp, or with ``shuffle`` that of ``random.Random(seed).shuffle``.

    Raises:
        ValueError: audio that cannot be used, each file named (the other shards are written, the
        list is not); shards of other lists or options in ``shards_dir``.
    """
    if num_utts_per_shard < 1:
        raise ValueError(f"expected 1 or more utterances a shard, got {num_utts_per_shard}")
    utterances = read_utterances("kaldi", wav_scp, utt2spk)
    if shuffle:
        random.Random(seed).shuffle(utterances)
    shards_dir = Path(shards_dir).absolute()
    starts = range(0, len(utterances), num_utts_per_shard)
    paths = [shards_dir / f"{prefix}_{number:09d}.tar" for number in range(len(starts))]
    _claim(shards_dir, prefix, utterances, num_utts_per_shard)
    todo = [
        (path, utterances[start : start + num_utts_per_shard])
        for path, start in zip(paths, starts)
        if not path.is_file()
    ]
    with ProcessPoolExecutor(jobs) as pool:
        problems = [text for texts in pool.map(_write_shard, *zip(*todo)) for text in texts]
    if problems:
        raise ValueError(
            f"{len(problems)} utterances cannot be used: {'; '.join(problems[:10])}. Mend them and "
            "run this again (what is written stays), or take them out of both lists"
        )
    write_text(shard_list, "".join(f"{path}\n" for path in paths))
    return len(paths)


def _claim(folder: Path, prefix: str, utterances: Sequence[Utterance], size: int) -> None:
    """Refuse a folder that holds the shards of something else."""
    digest = hashlib.sha256(repr([tuple(u) for u in utterances]).encode()).hexdigest()
    made_from = json.dumps({"num_utts_per_shard": size, "utterances_sha256": digest}) + "\n"
    record = folder / f"{prefix}.json"
    if record.is_file():
        same = record.read_text() == made_from
    else:
        same = not any(folder.glob(f"{prefix}_*.tar"))
    if not same:
        raise ValueError(
            f"{folder}: holds {prefix}_*.tar of other lists or options; remove them and "
            f"{record.name}, or choose another folder or --prefix"
        )
    write_text(record, made_from)


def _write_shard(path: Path, utterances: Sequence[Utterance]) -> list[str]:
    """Write one shard; or return what is wrong with its utterances, and write nothing."""
    problems = [text for utterance in utterances if (text := _problem(utterance))]
    if not problems:
        with atomic_path(path) as temporary, tarfile.open(temporary, "w") as tar:
            for key, spk, source, _ in utterances:
                _add(tar, f"{key}.spk", spk.encode())
                _add(tar, key + os.path.splitext(source)[1], Path(source).read_bytes())
    return problems


def _problem(utterance: Utterance) -> str | None:
    if os.path.splitext(utterance.source)[1][1:] not in SUFFIXES:
        return f"{utterance.key}: {utterance.source}: expected a file of {', '.join(SUFFIXES)}"
    try:
        with Audio(utterance):
            return None
    except AudioError as error:
        return str(error)


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("wav_scp", "utt2spk", "shards_dir", "shard_list"):
        parser.add_argument(name)
    parser.add_argument("--num_utts_per_shard", type=int, default=1000, help="default: %(default)s")
    parser.add_argument("--prefix", default="shards", help="default: %(default)s")
    parser.add_argument("--shuffle", action="store_true", help="shuffle the utterances first")
    parser.add_argument("--seed", type=int, default=42, help="of --shuffle (default: %(default)s)")
    jobs = len(os.sched_getaffinity(0))
    parser.add_argument("--jobs", type=int, default=jobs, help="processes (default: %(default)s)")
    try:
        count = make_shards(**vars(parser.parse_args()))
    except (ValueError, OSError) as error:
        print(f"make_shards: error: {error}", file=sys.stderr)
        return 1
    print(f"{count} shards", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
