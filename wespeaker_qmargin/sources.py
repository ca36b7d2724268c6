"""Where the bytes of an audio file are: a path, a tar member, an LMDB value, a command's output."""

import errno
import io
import os
import stat
import subprocess
from typing import NamedTuple


class TarMember(NamedTuple):
    """A file of ``size`` bytes at ``offset`` of an uncompressed tar file."""

    path: str
    offset: int
    size: int
    name: str


class LmdbValue(NamedTuple):
    """An audio file that is the value of ``key`` in the LMDB at ``path``."""

    path: str
    key: str


class Command(NamedTuple):
    """An audio file that a shell command writes to its standard output, ``text`` without ``|``."""

    text: str


Source = str | TarMember | LmdbValue | Command


def open_source(source: Source) -> str | io.BytesIO:
    """Return what libsndfile can open: the path, or the bytes that are stored elsewhere.

    Raises:
        OSError, ValueError: nothing there, or nothing in it; what `why` makes a reason of.
    """
    if isinstance(source, str):
        _require_file(source)
        return source
    return io.BytesIO(_stored_bytes(source))


def describe(source: Source) -> str:
    """Return the path (and member, key or command) in one printable line."""
    text = source if isinstance(source, str) else ": ".join(source[:1] + source[1:][-1:])
    return text if text.isprintable() else ascii(text)


def why(source: Source, error: OSError | ValueError) -> str:
    """Return the reason, in one line, why ``open_source`` raised ``error``."""
    if isinstance(error, UnicodeEncodeError):
        return "a path of characters that no file name can have"
    if not isinstance(error, OSError):
        return str(error)
    reason = error.strerror or str(error)
    if isinstance(error, FileNotFoundError) and isinstance(source, str) and source[:1] != "/":
        reason += f" in {os.getcwd()}, from where relative paths count"
    return reason


def _require_file(path: str) -> None:
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    # a FIFO would wait for its writer for ever, a device might have no end
    if not stat.S_ISREG(mode):
        raise ValueError("not a regular file (a FIFO, socket or device)")
    with open(path, "rb") as file:  # libsndfile calls any failure to open "System error"
        if not file.read(1):
            raise ValueError("the file is empty")


def _stored_bytes(source: TarMember | LmdbValue | Command) -> bytes:
    if isinstance(source, TarMember):
        with open(source.path, "rb") as tar:
            tar.seek(source.offset)
            data = tar.read(source.size)
    elif isinstance(source, Command):
        data = _run(source.text)
    else:
        data = _lmdb_value(source)
    if not data:
        raise ValueError("the file is empty")
    return data


def _run(command: str) -> bytes:
    # only where the user asked for it, see lists.audio_source
    done = subprocess.run(command, shell=True, stdin=subprocess.DEVNULL, capture_output=True)
    if done.returncode != 0:
        words = done.stderr.decode(errors="replace").strip().splitlines()
        raise ValueError(
            f"the command ended with status {done.returncode}" + (f": {words[-1]}" if words else "")
        )
    return done.stdout


def _lmdb_value(source: LmdbValue) -> bytes:
    with open_lmdb(source.path) as database, database.begin() as transaction:
        data = transaction.get(source.key.encode())
    if data is None:
        raise ValueError("no such key")
    return data


def open_lmdb(path: str):
    """Return the LMDB at ``path``, opened for reading.

    Close it after use: a process can open an LMDB only once, a forked worker not at all while its
    parent has it open, and opening takes 0.1 ms.

    Raises:
        ImportError: the package ``lmdb`` is not installed.  ValueError: no LMDB, or a broken one.
    """
    try:
        import lmdb
    except ImportError as error:
        raise ImportError(f"{path} is an LMDB: pip install 'wespeaker-qmargin[lmdb]'") from error
    try:
        return lmdb.open(path, readonly=True, lock=False, readahead=False)
    except lmdb.Error as error:  # its text begins with the path
        raise ValueError(f"no LMDB that can be opened: {error}") from error
