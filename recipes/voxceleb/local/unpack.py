"""Unpack a zip or tar archive, also one that is distributed in parts.

The parts are read as one file; nothing is joined on the disk. Every file's checksum in the zip is
checked, every file appears under its name only when it is whole, and what is there already (with
the size that the archive names) is not unpacked again: an interrupted run is simply repeated.
"""

import argparse
import gzip
import io
import logging
import os
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate
from pathlib import Path, PurePosixPath

logger = logging.getLogger(__name__)

EXAMPLE = """example:
  python recipes/voxceleb/local/unpack.py vox1_dev_wav_parta? data/raw_data/voxceleb1/dev
"""
CHUNK = 256  # files that a thread takes at once
BROKEN = (
    zipfile.BadZipFile,
    tarfile.TarError,
    gzip.BadGzipFile,
    EOFError,
    zlib.error,
    NotImplementedError,  # a compression that zipfile does not know
    RuntimeError,  # a password is asked for
)


class JoinedFile(io.RawIOBase):
    """Files one after the other as one, read-only and seekable, as ``cat`` would join them."""

    def __init__(self, paths: Sequence):
        super().__init__()
        self._files = [open(path, "rb", buffering=0) for path in paths]  # noqa: SIM115
        sizes = [os.fstat(file.fileno()).st_size for file in self._files]
        self._starts = [0, *accumulate(sizes)]
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._starts[-1]}
        if base[whence] + offset < 0:
            raise OSError(f"there is nothing before byte 0 ({offset} from {base[whence]})")
        self._position = base[whence] + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer) -> int:
        view = memoryview(buffer).cast("B")
        filled = 0
        for file, start, stop in zip(self._files, self._starts, self._starts[1:]):
            if start <= self._position < stop and filled < len(view):
                file.seek(self._position - start)
                count = file.readinto(view[filled:])
                self._position += count
                filled += count
        return filled

    def close(self) -> None:
        for file in self._files:
            file.close()
        super().close()


def unpack(paths: Sequence, target, *, jobs: int = 1) -> int:
    """Unpack an archive into the folder ``target``; return how many files were written.

    Args:
        paths: its parts in order, or the one file.
        jobs: threads (for a zip; a compressed tar can only be read from its beginning).

    Raises:
        ValueError: an incomplete or broken archive, one of another kind, or one with paths that
            lead out of ``target``. What was unpacked until then stays.
    """
    names = ", ".join(str(path) for path in paths)
    with JoinedFile(paths) as stream:
        is_zip = stream.read(2) == b"PK"
        stream.seek(0)
        try:
            if is_zip:
                return _unpack_zip(stream, Path(target), jobs)
            with tarfile.open(fileobj=stream) as archive:
                return sum(_unpack_tar(archive, Path(target)))
        except BROKEN as error:
            raise ValueError(
                f"{names}: {str(error).splitlines()[0]}: the archive is incomplete or broken; "
                f"download it again (what is unpacked in {target} stays)"
            ) from error
        except ValueError as error:
            raise ValueError(f"{names}: {error}") from error


def _unpack_zip(stream, target: Path, jobs: int) -> int:
    with zipfile.ZipFile(stream) as archive:
        members = [member for member in archive.infolist() if not member.is_dir()]
        chunks = [members[i : i + CHUNK] for i in range(0, len(members), CHUNK)]

        def unpack_chunk(chunk) -> int:
            return sum(
                _write(target, member.filename, member.file_size, partial(archive.read, member))
                for member in chunk
            )

        written = 0
        with ThreadPoolExecutor(jobs) as pool:
            for number, count in enumerate(pool.map(unpack_chunk, chunks), 1):
                written += count
                if number % 100 == 0:
                    logger.info("%d of %d files", number * CHUNK, len(members))
    return written


def _unpack_tar(archive: tarfile.TarFile, target: Path) -> Iterator[bool]:
    for member in archive:
        if member.isfile():
            content = archive.extractfile(member)
            yield _write(target, member.name, member.size, content.read)


def _write(target: Path, name: str, size: int, read) -> bool:
    inside = PurePosixPath(name)
    if inside.is_absolute() or ".." in inside.parts:
        raise ValueError(f"{name}: a path that leads out of the folder; it is not unpacked")
    path = os.path.join(target, *inside.parts)
    if os.path.isfile(path) and os.path.getsize(path) == size:
        return False
    folder, base = os.path.split(path)
    os.makedirs(folder, exist_ok=True)
    part = os.path.join(folder, f".{base}.part")
    with open(part, "wb") as file:
        file.write(read())
    os.replace(part, path)
    return True


def default_jobs() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("archive", nargs="+", help="the archive, or its parts in order")
    parser.add_argument("target", help="folder that gets what is in it")
    parser.add_argument("--jobs", type=int, default=default_jobs(), help="default: %(default)s")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    try:
        print(f"{unpack(args.archive, args.target, jobs=args.jobs)} files unpacked")
    except (OSError, ValueError) as error:
        sys.exit(f"unpack.py: {error}")


if __name__ == "__main__":
    main()
