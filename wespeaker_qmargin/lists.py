"""Lists of utterances: Kaldi folders, WeSpeaker's raw lists (JSON lines) and its tar shards.

Nothing is decoded here and no audio file is opened (of a shard only the tar headers and speaker
names are read, once), so what is wrong with a list is told before anything starts. Relative
audio paths count from the current folder, as in WeSpeaker; ``~`` at their beginning is the home
folder.
"""

import functools
import json
import math
import os
import tarfile
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from wespeaker_qmargin.audio import Utterance
from wespeaker_qmargin.files import read_lines, read_table
from wespeaker_qmargin.sources import Command, TarMember

_SHARD_AUDIO = {"flac", "mp3", "m4a", "ogg", "opus", "wav", "wma"}


def read_utterances(
    data_type: str, path, utt2spk=None, *, allow_pipes: bool = False
) -> list[Utterance]:
    """Read a list of utterances, in the list's own order.

    Args:
        data_type: ``kaldi``: a folder with ``wav.scp`` (and ``utt2spk``, if it is there), or a
            ``wav.scp`` file. ``raw``: JSON lines with ``key``, ``wav``, ``spk`` and perhaps
            ``vad``. ``shard``: a list of tar files with ``KEY.spk`` and ``KEY.wav`` (or flac,
            ...).
        path: that folder or list.
        utt2spk: file with the speaker of each key; must name the same keys as the list, and the
            same speakers where the list names them too.
        allow_pipes: take shell commands (``sox a.sph -t wav - |``) in the place of paths. They run
            with your rights whenever the utterance is read: only for lists of your own.

    Raises:
        FileNotFoundError: a list, folder or shard is not there.
        ValueError: a bad line, with file and line; keys that are only in one of two lists; a key
            that comes twice, is empty or has blanks in it; an empty list; a URL, or (not with
            ``allow_pipes``) a shell command in the place of a path.
    """
    readers = {
        "kaldi": functools.partial(_read_kaldi, allow_pipes=allow_pipes),
        "raw": functools.partial(_read_raw, allow_pipes=allow_pipes),
        "shard": _read_shards,
    }
    if data_type not in readers:
        raise ValueError(f"data_type {data_type!r}: expected one of {', '.join(readers)}")
    utterances = readers[data_type](path)
    if utt2spk is None and data_type == "kaldi" and (Path(path) / "utt2spk").is_file():
        utt2spk = Path(path) / "utt2spk"
    if utt2spk is not None:
        utterances = _with_speakers(utterances, path, utt2spk)
    return utterances


def speaker_labels(utterances: Iterable[Utterance]) -> dict[str, int]:
    """Return speaker name -> class, classes counted over the sorted names (WeSpeaker's layout).

    Raises:
        ValueError: an utterance without speaker.
    """
    utterances = list(utterances)
    unknown = [utterance.key for utterance in utterances if utterance.spk is None]
    if unknown:
        raise ValueError(f"no speaker is known of {_some(unknown)}: give an utt2spk file")
    speakers = sorted({utterance.spk for utterance in utterances})
    return {speaker: label for label, speaker in enumerate(speakers)}


def _some(keys) -> str:
    keys = list(keys)
    shown = ", ".join(map(str, keys[:10]))
    return f"{len(keys)} key{'s' * (len(keys) != 1)} ({shown}{', ...' * (len(keys) > 10)})"


def _with_speakers(utterances: list[Utterance], path, utt2spk) -> list[Utterance]:
    speakers = read_table(utt2spk)
    keys = {utterance.key for utterance in utterances}
    for only, here, there in (
        (keys - speakers.keys(), path, utt2spk),
        (speakers.keys() - keys, utt2spk, path),
    ):
        if only:
            raise ValueError(f"{here}: {_some(sorted(only))} not in {there}")
    for key, spk in speakers.items():
        _check_speaker(f"{utt2spk}: {key}", spk)
    for key, spk, *_ in utterances:
        if spk is not None and spk != speakers[key]:
            raise ValueError(f"{key}: speaker {spk!r} in {path}, {speakers[key]!r} in {utt2spk}")
    return [utterance._replace(spk=speakers[utterance.key]) for utterance in utterances]


def _read_kaldi(path, *, allow_pipes: bool) -> list[Utterance]:
    path = Path(path)
    scp = path / "wav.scp" if path.is_dir() else path
    table = read_table(scp)
    for key in table:
        _check_key(scp, key)
    return [
        Utterance(key, None, audio_source(f"{scp}: {key}", wav, allow_pipes=allow_pipes))
        for key, wav in table.items()
    ]


def audio_source(where: str, text: str, *, allow_pipes: bool) -> str | Command:
    """Return what ``local_path`` does, or the `Command` that ``text`` is, if they are allowed."""
    if allow_pipes and text.endswith("|"):
        return Command(text[:-1].strip())
    return local_path(where, text)


def local_path(where: str, text: str) -> str:
    """Return ``text`` if it is a path (or a ``file://`` URL: its path); ``where`` is for the error.

    ``~`` and ``~user`` at its beginning become the home folder.

    Raises:
        ValueError: a shell command (``... |``) or another URL.
    """
    if text.endswith("|"):
        raise ValueError(
            f"{where}: shell commands are not run, found {text!r}; write the audio to a file "
            "first, or allow pipes if you trust the list"
        )
    if "://" not in text:
        return os.path.expanduser(text)
    if not text.startswith("file://"):
        raise ValueError(f"{where}: expected a local path, found {text!r}; download it first")
    return url2pathname(urlsplit(text).path)


def _read_raw(path, *, allow_pipes: bool) -> list[Utterance]:
    utterances, lines = [], {}
    for number, line in read_lines(path):
        where = f"{path}:{number}"
        utterance = _parse_raw(where, line, allow_pipes)
        first = lines.setdefault(utterance.key, number)
        if first != number:
            raise ValueError(f"{where}: key {utterance.key!r} was in line {first} already")
        utterances.append(utterance)
    return utterances


def _parse_raw(where: str, line: str, allow_pipes: bool) -> Utterance:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({error}), found {line[:80]!r}") from error
    if not isinstance(entry, dict) or not all(
        isinstance(entry.get(k), str) and entry[k] for k in ("key", "wav")
    ):
        raise ValueError(
            f"{where}: expected an object with texts 'key' and 'wav', found {line[:80]!r}"
        )
    _check_key(where, entry["key"])
    spk = entry.get("spk")
    if spk is not None:
        _check_speaker(where, spk)
    vad = _parse_vad(where, entry["vad"]) if "vad" in entry else None
    source = audio_source(where, entry["wav"], allow_pipes=allow_pipes)
    return Utterance(entry["key"], spk, source, vad)


def _check_key(where: str, key: str) -> None:
    # every other list (xvector.scp, trials, scores) separates keys by blanks
    if key.split() != [key]:
        raise ValueError(f"{where}: expected a key without blanks, found {key!r}")


def _check_speaker(where: str, spk) -> None:
    # speakers.txt, the order of a head's rows, has one a line
    if not isinstance(spk, str) or len(spk.splitlines()) != 1:
        raise ValueError(f"{where}: expected a text as 'spk', one line, found {spk!r}")


def _parse_vad(where: str, segments) -> tuple[tuple[float, float], ...]:
    try:
        # make_raw_list.py leaves the times as text
        vad = tuple((float(start), float(end)) for start, end in segments)
    except (TypeError, ValueError, OverflowError):
        vad = ()
    if not vad or not all(0 <= start < end < math.inf for start, end in vad):
        raise ValueError(
            f"{where}: expected 'vad' as [start, end] pairs in seconds, found {str(segments)[:80]}"
        )
    return vad


def _read_shards(path) -> list[Utterance]:
    utterances, shards = [], {}
    for number, line in read_lines(path):
        where = f"{path}:{number}"
        shard = local_path(where, line)
        if not Path(shard).is_file():
            raise FileNotFoundError(f"{where}: no such shard: {shard}")
        for utterance in _index_shard(shard):
            first = shards.setdefault(utterance.key, number)
            if first != number:
                raise ValueError(
                    f"{where}: key {utterance.key!r} is in the shard of line {first} too"
                )
            utterances.append(utterance)
    return utterances


def _index_shard(shard: str) -> list[Utterance]:
    speakers, audio = {}, {}
    try:
        with tarfile.open(shard, "r:") as tar:
            for member in tar:
                key, _, suffix = member.name.rpartition(".")
                table = speakers if suffix == "spk" else audio
                if not member.isfile() or suffix not in {"spk", *_SHARD_AUDIO}:
                    continue
                if key in table:
                    raise ValueError(f"{shard}: {member.name}: the key comes twice")
                table[key] = TarMember(shard, member.offset_data, member.size, member.name)
                if suffix == "spk":
                    table[key] = tar.extractfile(member).read().decode().strip()
    except (tarfile.TarError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{shard}: {error}; expected a whole, uncompressed tar file, as make_shard_list.py "
            "writes it"
        ) from error
    if speakers.keys() != audio.keys():
        raise ValueError(
            f"{shard}: {_some(sorted(speakers.keys() ^ audio.keys()))} with audio or .spk missing"
        )
    if not audio:
        raise ValueError(f"{shard}: no utterance in it")
    for key in audio:
        _check_key(shard, key)
        _check_speaker(f"{shard}: {key}", speakers[key])
    return [Utterance(key, speakers[key], member) for key, member in audio.items()]
