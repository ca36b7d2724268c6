"""Rebuild the minivox corpus from clones of its public sources, and say how much of it is the same.

SPEC is a folder with minivox's ``metadata.tsv`` (which clip comes from which file) and
``MANIFEST.sha256``; a whole minivox will do. No speech is copied from it, all is made anew, by the
rules of its README and, where that is silent, by those that its clips were found to follow:

* decoded by ffmpeg to 16 kHz, mono, 16 bits;
* trimmed to the frames (20 ms) louder than both 30 dB below the 95th percentile and -60 dBFS, with
  0.1 s on either side; Common Voice then keeps 5.6 s, LibriSpeech's test utterances 8 s;
* LibriSpeech's training utterances are cut, after trimming, into one piece for every 3 s they
  last, 3 at most, of at most 3.45 s on average; a cut falls on the quietest 0.1 s within 0.8 s of
  the equal division;
* the noises are cut to 20 s, from second 1 to 42 on (``NOISES`` below);
* written by ``flac -8 --no-padding`` (the manifest's bytes are flac 1.4.2's) or, without that
  program, by libsndfile: the same samples in other bytes.

Which clips, speakers and names: as metadata.tsv says. wav.scp, utt2spk, spk2utt, utt2dur,
spk2gender, noise.scp and the trials ``ls`` and ``ls_same_gender`` (all pairs) are made. What
cannot be made is copied from SPEC if it is there, else left out: the room responses (simulated),
README.md, the trials ``cv`` and ``cv_cross_lang`` (a random draw), ``cv_same_lang`` (all pairs, so
it is made when SPEC lacks it, but the two sides of a trial may be exchanged).
"""

import argparse
import shutil
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path

import soundfile
from minivox_audio import LIMIT_S, RATE, Programs, clips, decoded, find_programs, write_flac
from minivox_compare import comparison, report

from wespeaker_qmargin.files import atomic_path, read_lines, write_table, write_text

EXAMPLE = """example:
  git clone https://github.com/omnilingo/rsample-100-cv-corpus-6.1-2020-12-11
  git clone https://github.com/resemble-ai/Resemblyzer
  python tools/make_minivox.py recipes/mini/minivox data/minivox --librispeech Resemblyzer \\
    --common-voice rsample-100-cv-corpus-6.1-2020-12-11
"""
NOISES = {  # name: (which clone, file, start in s)
    "noise-gsc-doing_the_dishes": ("speech_commands", "bgnoise/doing_the_dishes.wav", 1),
    "noise-gsc-dude_miaowing": ("speech_commands", "bgnoise/dude_miaowing.wav", 20),
    "noise-gsc-exercise_bike": ("speech_commands", "bgnoise/exercise_bike.wav", 23),
    "noise-gsc-running_tap": ("speech_commands", "bgnoise/running_tap.wav", 20),
    "noise-asc-boiler": ("arabic_commands", "background_noise/boiler.wav", 32),
    "noise-asc-washing_machine": ("arabic_commands", "background_noise/washing_machine.wav", 42),
}
NOISE_S = 20
COPIED = ["README.md", "metadata.tsv", "MANIFEST.sha256", "aug/rir.scp", "aug/rir/*.flac"]
COPIED += [f"test/trials/{name}.trials" for name in ("cv", "cv_cross_lang", "cv_same_lang")]


def read_metadata(path: Path) -> list[dict[str, str]]:
    """Return the rows of metadata.tsv.

    Raises:
        FileNotFoundError.  ValueError: a column is missing, or a source is none of minivox's.
    """
    header, *rows = [line.split("\t") for _, line in read_lines(path)]
    columns = {"utt", "spk", "split", "src", "lang", "gender", "dur", "rel", "orig"}
    if not columns <= set(header):
        raise ValueError(
            f"{path}: expected the columns {', '.join(sorted(columns))}, found {header}"
        )
    for row in rows:
        if len(row) != len(header):
            raise ValueError(f"{path}: {row[0]}: {len(row)} columns, expected {len(header)}")
    rows = [dict(zip(header, row)) for row in rows]
    for row in rows:
        if (row["src"], row["split"]) not in {*LIMIT_S, ("librispeech", "train")}:
            raise ValueError(f"{path}: {row['utt']}: unknown source {row['src']} {row['split']}")
    return rows


def source_path(row: dict[str, str], clones: dict[str, Path]) -> Path:
    """Return the file in the clones that a row of metadata.tsv was made from."""
    if row["src"] == "commonvoice6.1":
        return clones["common_voice"] / row["orig"]
    part, name = row["orig"].split("/")
    folder = clones["librispeech"] / "audio_data" / f"librispeech_{part}"
    # test-other has a folder for every speaker, train-clean-100 has not
    return folder / name.split("-")[0] / name if part == "test-other" else folder / name


def make_clips(rows, out: Path, clones, *, programs: Programs, jobs: int) -> dict[str, str]:
    """Make the audio of the rows of metadata.tsv under ``out``; return path -> why it failed."""
    recordings = defaultdict(list)
    for row in rows:
        recordings[row["src"], row["split"], source_path(row, clones)].append(row)

    def make(recording) -> dict[str, str]:
        (source, split, path), wanted = recording
        try:
            made = clips(decoded(path, programs.ffmpeg), source, split)
        except (ValueError, OSError) as error:
            return {row["rel"]: str(error) for row in wanted}
        bad = {}
        for row in wanted:
            is_piece = (source, split) == ("librispeech", "train")
            piece = int(row["utt"].rpartition("-")[2]) if is_piece else 0
            if piece < len(made):
                write_flac(out / row["rel"], made[piece], programs.flac)
            else:
                bad[row["rel"]] = f"{path}: has no piece {piece}"
        return bad

    with ThreadPoolExecutor(jobs) as pool:
        return {k: v for bad in pool.map(make, recordings.items()) for k, v in bad.items()}


def make_noises(out: Path, clones, programs: Programs) -> dict[str, str]:
    """Make the noises whose clone is given, and noise.scp of them; return path -> why not."""
    made, bad = {}, {}
    for name, (clone, file, start) in NOISES.items():
        path = f"aug/noise/{name}.flac"
        if clones[clone] is None:
            bad[path] = f"left out: no --{clone.replace('_', '-')}"
            continue
        try:
            wav = decoded(clones[clone] / file, programs.ffmpeg)
        except (ValueError, OSError) as error:
            bad[path] = str(error)
            continue
        write_flac(out / path, wav[start * RATE : (start + NOISE_S) * RATE], programs.flac)
        made[name] = path
    if made:
        write_table(out / "aug" / "noise.scp", made)
    else:
        bad["aug/noise.scp"] = "no noise was made"
    return bad


def write_tables(rows: list[dict[str, str]], out: Path) -> None:
    """Write the Kaldi tables of the rows (all of one split), whose audio is there."""
    folder = out / rows[0]["split"]
    speakers = defaultdict(list)
    for row in rows:
        speakers[row["spk"]].append(row["utt"])
    gender = {row["spk"]: row["gender"] for row in rows}
    seconds = [round(soundfile.info(out / row["rel"]).duration, 3) for row in rows]
    tables = {
        "wav.scp": {row["utt"]: row["rel"] for row in rows},
        "utt2spk": {row["utt"]: row["spk"] for row in rows},
        "utt2dur": {row["utt"]: s for row, s in zip(rows, seconds)},
        "spk2utt": {spk: " ".join(speakers[spk]) for spk in sorted(speakers)},
        "spk2gender": {spk: gender[spk] for spk in sorted(speakers)},
    }
    for name, table in tables.items():
        write_table(folder / name, table)


def write_trials(rows: list[dict[str, str]], folder: Path) -> None:
    """Write the trials that are all pairs: ls, ls_same_gender, cv_same_lang."""
    for name, source, column in (
        ("ls", "librispeech", "src"),
        ("ls_same_gender", "librispeech", "gender"),
        ("cv_same_lang", "commonvoice6.1", "lang"),
    ):
        # the recording's name, not the utterance's, decides which side enrols
        chosen = sorted((r for r in rows if r["src"] == source), key=lambda row: row["orig"])
        lines = [
            f"{a['utt']} {b['utt']} {'target' if a['spk'] == b['spk'] else 'nontarget'}\n"
            for a, b in combinations(chosen, 2)
            if a["spk"] == b["spk"] or a[column] == b[column]
        ]
        write_text(folder / f"{name}.trials", "".join(sorted(lines)))


def copy_the_rest(spec: Path, out: Path) -> set[str]:
    """Copy from ``spec`` what is there of the files that cannot be made; return their paths."""
    copied = set()
    for pattern in COPIED:
        for path in spec.glob(pattern):
            with atomic_path(out / path.relative_to(spec)) as temporary:
                shutil.copyfile(path, temporary)
            copied.add(str(path.relative_to(spec)))
    trials = out / "test" / "trials" / "cv.trials"
    if trials.is_file():
        write_text(out / "test" / "trials.default", trials.read_text())
        copied.add("test/trials.default")
    return copied


def make_minivox(
    spec, out, *, clones: dict[str, Path | None], programs: Programs, jobs: int = 1, tolerance=2
) -> tuple[dict[str, str], dict[str, str], list[dict[str, str]]]:
    """Rebuild minivox in ``out``.

    Args:
        spec: folder with metadata.tsv and MANIFEST.sha256, or a whole minivox.
        clones: common_voice, librispeech; speech_commands and arabic_commands may be None.
        tolerance: samples (of 32768) by which a "close" clip may differ.

    Returns:
        (manifest path -> class, path -> why it was not made, rows of metadata.tsv).

    Raises:
        FileNotFoundError: no such clone or list.  ValueError: ``out`` is ``spec``, or a bad list.
    """
    spec, out = Path(spec), Path(out)
    if spec.resolve() == out.resolve():
        raise ValueError(f"{out}: would overwrite SPEC; give another folder")
    for name, clone in clones.items():
        if clone is not None and not clone.is_dir():
            raise FileNotFoundError(f"{clone}: no such folder; expected the clone for {name}")
    rows = read_metadata(spec / "metadata.tsv")
    read_lines(spec / "MANIFEST.sha256")  # missing: say so before the work
    bad = make_clips(rows, out, clones, programs=programs, jobs=jobs)
    bad.update(make_noises(out, clones, programs))
    made = [row for row in rows if row["rel"] not in bad]
    for split in ("train", "test"):
        if chosen := [row for row in made if row["split"] == split]:
            write_tables(chosen, out)
    write_trials([row for row in made if row["split"] == "test"], out / "test" / "trials")
    copied = copy_the_rest(spec, out)
    return comparison(rows, bad, copied, spec, out, tolerance=tolerance), bad, rows


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Return the command's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("spec", help="folder with metadata.tsv and MANIFEST.sha256")
    parser.add_argument("out", help="folder to write")
    parser.add_argument("--common-voice", type=Path, required=True, help="clone of the CV sample")
    parser.add_argument("--librispeech", type=Path, required=True, help="clone of Resemblyzer")
    parser.add_argument("--speech-commands", type=Path, help="clone of puri-gagan/speechdataset")
    parser.add_argument(
        "--arabic-commands",
        type=Path,
        help="clone of abdulkaderghandoura/arabic-speech-commands-dataset",
    )
    parser.add_argument("--ffmpeg", help="the program (default: in PATH, or imageio-ffmpeg's)")
    parser.add_argument("--flac", help="the program (default: in PATH, or libsndfile)")
    parser.add_argument("--jobs", type=int, default=1, help="recordings at a time")
    parser.add_argument("--tolerance", type=int, default=2, help="of a close sample, of 32768")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Rebuild, report; return 0 if every clip is there and none differs, else 2; 1: an error."""
    args = parse(argv)
    names = ("common_voice", "librispeech", "speech_commands", "arabic_commands")
    try:
        result, bad, rows = make_minivox(
            args.spec,
            args.out,
            clones={name: getattr(args, name) for name in names},
            programs=find_programs(args.ffmpeg, args.flac),
            jobs=args.jobs,
            tolerance=args.tolerance,
        )
    except (ValueError, OSError) as error:
        print(f"make_minivox: error: {error}", file=sys.stderr)
        return 1
    print(report(result, bad, rows))
    clips_made = [result.get(row["rel"]) for row in rows]
    return 0 if not {"differs", "missing", None} & set(clips_made) else 2


if __name__ == "__main__":
    sys.exit(main())
