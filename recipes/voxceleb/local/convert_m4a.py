"""Convert m4a files (VoxCeleb2) to wav or flac: 16 kHz, mono, 16 bits, by ffmpeg.

OUT_DIR gets the folders of IN_DIR. A file appears under its name only when it is whole; what is
there already is not converted again. A file that ffmpeg cannot read, or of which it decodes less
than the file says it holds, is named at the end; the others are converted all the same.
"""

import argparse
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import soundfile
from measure import SAMPLE_RATE, SPEAKERS, Found, find_audio, find_folders
from unpack import default_jobs

logger = logging.getLogger(__name__)

EXAMPLE = """example:
  python recipes/voxceleb/local/convert_m4a.py data/raw_data/voxceleb2_m4a \\
    data/raw_data/voxceleb2_wav --jobs 16
"""
BATCH = 16  # files that one ffmpeg converts: its start costs as much as two utterances
CODECS = {".wav": ("pcm_s16le", "wav"), ".flac": ("flac", "flac")}
MISSING_S = 0.25  # seconds that may be missing of what the m4a declares: it counts whole frames
DURATION = re.compile(r"^ *Duration: (?:(\d+):(\d+):([\d.]+)|N/A)", re.MULTILINE)


def find_ffmpeg(path=None) -> str:
    """Return the ffmpeg to run: ``path``, or the one in PATH, or that of imageio-ffmpeg.

    Raises:
        FileNotFoundError: there is none, with the ways to get one.
    """
    if path is not None:
        found = shutil.which(path)
        if found is None:
            raise FileNotFoundError(f"{path}: no such program; expected ffmpeg")
        return found
    found = shutil.which("ffmpeg")
    if found is not None:
        return found
    try:
        from imageio_ffmpeg import get_ffmpeg_exe
    except ImportError:
        raise FileNotFoundError(
            "VoxCeleb2's m4a files need ffmpeg, and there is none in PATH: install your system's "
            "package ffmpeg, or `pip install imageio-ffmpeg`, or name one with --ffmpeg"
        ) from None
    return get_ffmpeg_exe()


def convert(pairs: Sequence[tuple[str, str]], *, ffmpeg: str, jobs: int = 1) -> dict[str, str]:
    """Convert (m4a path, new path ending in .wav or .flac) pairs.

    Args:
        pairs: new files that are there are replaced.
        jobs: ffmpeg processes at a time.

    Returns:
        m4a path -> why it could not be converted.

    Raises:
        OSError: the disk is full, or ffmpeg cannot be started.
    """
    batches = [pairs[i : i + BATCH] for i in range(0, len(pairs), BATCH)]
    bad = {}
    with ThreadPoolExecutor(jobs) as pool:
        for number, failed in enumerate(pool.map(partial(_convert_batch, ffmpeg), batches), 1):
            bad.update(failed)
            if number % 1000 == 0:
                done = number * BATCH
                logger.info("%d of %d files converted, %d bad", done, len(pairs), len(bad))
    return bad


def convert_missing(
    found: Found, folder: Path, *, audio_format: str = "wav", ffmpeg=None, jobs: int = 1
) -> tuple[dict[str, str], dict[str, str]]:
    """Convert what ``found`` has as m4a only, to ``folder/dev/aac/SPEAKER/VIDEO/00001.wav``.

    Args:
        found: of `find_audio`; audio that is in ``folder`` already belongs to it.
        audio_format: ``wav`` or ``flac``.
        ffmpeg: of `find_ffmpeg`; without m4a to convert none is needed.

    Returns:
        (key -> audio file, key -> why it could not be converted).
    """
    before = {}
    if folder.is_dir():
        before = find_audio(find_folders(folder, SPEAKERS), jobs=jobs).audio
    audio = {**before, **found.audio}
    new = {
        key: str((folder / "dev" / "aac" / key).with_suffix(f".{audio_format}"))
        for key in found.m4a
        if key not in audio
    }
    if not new:
        return audio, {}
    logger.info("%d of %d m4a files to convert", len(new), len(found.m4a))
    pairs = [(found.m4a[key], path) for key, path in new.items()]
    failed = convert(pairs, ffmpeg=find_ffmpeg(ffmpeg), jobs=jobs)
    bad = {key: f"{key}: {m4a}: {failed[m4a]}" for key in new if (m4a := found.m4a[key]) in failed}
    audio.update((key, path) for key, path in new.items() if key not in bad)
    return audio, bad


def _convert_batch(ffmpeg: str, pairs) -> dict[str, str]:
    for folder in {os.path.dirname(new) for _, new in pairs}:
        os.makedirs(folder, exist_ok=True)
    bad = {}
    done = _decode(ffmpeg, pairs)
    if done is None and len(pairs) > 1:  # one bad file ends ffmpeg: find it
        for pair in pairs:
            bad.update(_convert_batch(ffmpeg, [pair]))
        return bad
    for (m4a, new), declared in zip(pairs, done or [None]):
        part = _part(new)
        if done is None:
            bad[m4a] = _reason(ffmpeg, m4a)
        elif declared is not None and (found := _seconds(part)) < declared - MISSING_S:
            bad[m4a] = f"it decodes to {found:.2f} of {declared:.2f} s; {_reason(ffmpeg, m4a)}"
        else:
            os.replace(part, new)
            continue
        if os.path.exists(part):
            os.remove(part)
    return bad


def _decode(ffmpeg: str, pairs) -> list[float | None] | None:
    """Return the seconds that each m4a declares (None where it does not), or None: it failed."""
    command = [ffmpeg, "-nostdin", "-hide_banner", "-y"]
    for m4a, _ in pairs:
        command += ["-i", f"file:{m4a}"]
    for number, (_, new) in enumerate(pairs):
        codec, container = CODECS[os.path.splitext(new)[1]]
        command += ["-map", f"{number}:a:0", "-ac", "1", "-ar", str(SAMPLE_RATE)]
        command += ["-sample_fmt", "s16", "-c:a", codec, "-bitexact", "-f", container]
        command += [f"file:{_part(new)}"]
    result = subprocess.run(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    log = result.stderr.decode(errors="replace")
    if "No space left on device" in log:
        raise OSError(
            f"{os.path.dirname(pairs[0][1])}: no space left on the disk; make room and "
            "run this again (what is converted stays)"
        )
    declared = [
        3600 * float(hours) + 60 * float(minutes) + float(seconds) if seconds else None
        for hours, minutes, seconds in DURATION.findall(log)
    ]
    return declared if result.returncode == 0 and len(declared) == len(pairs) else None


def _part(new: str) -> str:
    folder, base = os.path.split(new)
    return os.path.join(folder, f".{base}.part")


def _seconds(path: str) -> float:
    try:
        return soundfile.info(path).duration
    except soundfile.LibsndfileError:
        return 0.0


def _reason(ffmpeg: str, m4a: str) -> str:
    command = [ffmpeg, "-nostdin", "-v", "error", "-i", f"file:{m4a}", "-f", "null", "-"]
    result = subprocess.run(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    lines = [
        re.sub(r"^(\[.*?\] *)+", "", line)
        for line in result.stderr.decode(errors="replace").splitlines()
    ]
    return "; ".join(dict.fromkeys(filter(None, lines)))[:300] or "ffmpeg gives no reason"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("in_dir", type=Path)
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--format", choices=("wav", "flac"), default="wav")
    parser.add_argument("--jobs", type=int, default=default_jobs(), help="default: %(default)s")
    parser.add_argument("--ffmpeg", help="the program (default: in PATH, or imageio-ffmpeg's)")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    if not args.in_dir.is_dir():
        sys.exit(f"convert_m4a.py: {args.in_dir}: no such folder")
    pairs = [
        (str(m4a), str(args.out_dir / m4a.relative_to(args.in_dir).with_suffix(f".{args.format}")))
        for m4a in sorted(args.in_dir.rglob("*.m4a"))
    ]
    todo = [pair for pair in pairs if not os.path.exists(pair[1])]
    try:
        bad = convert(todo, ffmpeg=find_ffmpeg(args.ffmpeg), jobs=args.jobs)
    except OSError as error:
        sys.exit(f"convert_m4a.py: {error}")
    print(f"{len(todo) - len(bad)} converted, {len(pairs) - len(todo)} were there, {len(bad)} bad")
    for m4a, reason in bad.items():
        print(f"bad: {m4a}: {reason}")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
