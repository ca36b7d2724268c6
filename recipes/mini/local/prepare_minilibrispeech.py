"""Download and prepare Mini LibriSpeech (openslr.org/31, CC BY 4.0): 5 h to train, 2 h to test.

Training speakers are train-clean-5, test speakers dev-clean-2. OUT_DIR gets the audio and the lists
that prepare_data.py reads. A broken download continues where it stopped; finished parts are kept.
"""

import argparse
import hashlib
import http.client
import shutil
import sys
import tarfile
import tempfile
import urllib.error
import urllib.request
import zlib
from pathlib import Path

from prepare_data import draw_trials, write_trials

from wespeaker_qmargin import files

EXAMPLE = """example:
  python recipes/mini/local/prepare_minilibrispeech.py recipes/mini/data/minilibrispeech
"""
URL = "https://www.openslr.org/resources/31"
PARTS = {"train": "train-clean-5", "test": "dev-clean-2"}
MD5 = {
    "train-clean-5": "5df7d4e78065366204ca6845bb08f490",
    "dev-clean-2": "6d7ab67ac6a1d2c993d050e16d61080d",
}


def prepare_minilibrispeech(out_dir, *, archive_dir=None, url: str = URL, md5=MD5) -> None:
    """Download, check, extract, and write the lists into ``out_dir``.

    Args:
        archive_dir: where the .tar.gz files lie, or go to (default: ``out_dir/archives``).
        url: the folder on the web that holds them.
        md5: part -> expected checksum of its archive.

    Raises:
        OSError: the download failed; the message says what to fetch by hand and where to put it.
        ValueError: an archive with another checksum or content.
    """
    out_dir = Path(out_dir)
    archive_dir = Path(archive_dir) if archive_dir else out_dir / "archives"
    for split, part in PARTS.items():
        folder = out_dir / "LibriSpeech" / part
        if not folder.is_dir():
            archive = archive_dir / f"{part}.tar.gz"
            _get_archive(archive, f"{url}/{part}.tar.gz", md5[part])
            _extract(archive, folder)
        wavs = {path.stem: path for path in sorted(folder.glob("*/*/*.flac"))}
        if not wavs:
            raise ValueError(f"{folder}: no SPEAKER/CHAPTER/*.flac; delete it and run again")
        utt2spk = {utt: path.parts[-3] for utt, path in wavs.items()}
        relative = {utt: path.relative_to(out_dir) for utt, path in wavs.items()}
        files.write_table(out_dir / split / "wav.scp", relative)
        files.write_table(out_dir / split / "utt2spk", utt2spk)
    trials = draw_trials(utt2spk, per_speaker=50, ratio=5)
    write_trials(out_dir / "test" / "trials" / "dev-clean-2.trials", trials)
    files.write_text(out_dir / "NOTE", "Mini LibriSpeech: train-clean-5 / dev-clean-2 speakers.\n")


def _get_archive(archive: Path, url: str, md5: str) -> None:
    if not archive.is_file():
        partial = archive.with_name(archive.name + ".part")
        try:
            _download(url, partial)
        except (OSError, http.client.HTTPException) as error:
            raise OSError(
                f"{url}: {error}. Run again to continue the download, or fetch that file yourself "
                f"and put it at {archive}"
            ) from error
        partial.replace(archive)
    with open(archive, "rb") as stream:
        digest = hashlib.md5()
        while block := stream.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != md5:
        raise ValueError(
            f"{archive}: md5 {digest.hexdigest()}, expected {md5}: the file is incomplete or "
            "another one; delete it and run again"
        )


def _download(url: str, partial: Path) -> None:
    """Fetch ``url`` into ``partial``, from where that file ends."""
    partial.parent.mkdir(parents=True, exist_ok=True)
    start = partial.stat().st_size if partial.is_file() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={start}-"} if start else {})
    try:
        response = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        if error.code == 416 and start:  # nothing lies after what is here
            return
        raise
    with response, open(partial, "ab" if response.status == 206 else "wb") as out:
        expected = out.tell() + int(response.headers.get("Content-Length") or 0)
        shutil.copyfileobj(response, out, 1 << 20)
        if out.tell() < expected:
            raise OSError(f"the connection ended after {out.tell()} of {expected} bytes")


def _extract(archive: Path, folder: Path) -> None:
    """Extract ``LibriSpeech/<part>`` of ``archive``; ``folder`` appears only when it is whole."""
    if not hasattr(tarfile, "data_filter"):
        raise OSError("this Python's tarfile cannot extract safely: use >= 3.10.12 or >= 3.11.4")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".extract-", dir=folder.parent) as temporary:
        try:
            with tarfile.open(archive) as tar:
                tar.extractall(temporary, filter="data")
        except (tarfile.TarError, EOFError, zlib.error) as error:
            raise ValueError(f"{archive}: {error}; delete it and run again") from error
        inside = Path(temporary) / "LibriSpeech" / folder.name
        if not inside.is_dir():
            raise ValueError(f"{archive}: holds no folder LibriSpeech/{folder.name}")
        inside.rename(folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out_dir")
    parser.add_argument("--archive_dir", help="where the .tar.gz are (default: OUT_DIR/archives)")
    parser.add_argument("--url", default=URL, help="a mirror's folder (default: %(default)s)")
    args = parser.parse_args()
    try:
        prepare_minilibrispeech(args.out_dir, archive_dir=args.archive_dir, url=args.url)
    except (OSError, ValueError) as error:
        sys.exit(f"prepare_minilibrispeech.py: {error}")
    print(f"Mini LibriSpeech is ready in {args.out_dir}")


if __name__ == "__main__":
    main()
