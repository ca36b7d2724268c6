"""Lists as Kaldi and upstream write them, and what is wrong with a list."""

import io
import json
import tarfile

import numpy as np
import pytest
import soundfile

from wespeaker_qmargin.audio import Utterance, load_audio
from wespeaker_qmargin.lists import read_utterances, speaker_labels
from wespeaker_qmargin.sources import Command, TarMember


def wav_bytes(seed: int) -> bytes:
    buffer = io.BytesIO()
    wav = 0.1 * np.random.default_rng(seed).standard_normal(1600)
    soundfile.write(buffer, wav, 16000, format="WAV")
    return buffer.getvalue()


def write_shard(path, members: list[tuple[str, bytes]], mode: str = "w") -> None:
    with tarfile.open(path, mode) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def upstream_members(keys, suffix="wav", seed=0) -> list[tuple[str, bytes]]:
    """What make_shard_list.py puts into a tar: first KEY.spk, then KEY.wav."""
    members = []
    for number, key in enumerate(keys):
        members.append((f"{key}.spk", key.split("/")[0].encode()))
        members.append((f"{key}.{suffix}", wav_bytes(seed + number)))
    return members


def write_lines(path, *lines: str):
    path.write_text("".join(line + "\n" for line in lines))
    return path


def test_kaldi_folder(tmp_path):
    write_lines(
        tmp_path / "wav.scp", "b-1 x/b 1.wav", "a-1 /abs/a1.flac", "a-2 file:///abs/a%202.wav"
    )
    utterances = read_utterances("kaldi", tmp_path)
    assert utterances[0] == Utterance("b-1", None, "x/b 1.wav", None)
    assert utterances[2].source == "/abs/a 2.wav"
    write_lines(tmp_path / "utt2spk", "a-1 a", "a-2 a", "b-1 b")
    utterances = read_utterances("kaldi", tmp_path)
    assert [(u.key, u.spk) for u in utterances] == [("b-1", "b"), ("a-1", "a"), ("a-2", "a")]
    assert speaker_labels(utterances) == {"a": 0, "b": 1}
    assert read_utterances("kaldi", tmp_path / "wav.scp", tmp_path / "utt2spk") == utterances
    assert read_utterances("kaldi", tmp_path / "wav.scp")[0].spk is None


def test_paths_of_every_kind_and_either_line_ending(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    paths = ["a b  c.wav", "è/音.wav", "a,b:c;d.wav", "../x.wav", "/abs~/x.wav", "./~x.wav"]
    lines = [f"u{number} {path}" for number, path in enumerate(paths)] + ["h ~/x y.wav"]
    expected = [*paths, "/home/me/x y.wav"]
    for ending in ("\n", "\r\n"):
        text = "\ufeff" + ending.join(lines)  # a byte-order mark, no final line end
        (tmp_path / "wav.scp").write_bytes(text.encode())
        assert [u.source for u in read_utterances("kaldi", tmp_path)] == expected
        raw = [{"key": key, "wav": path} for key, path in (line.split(" ", 1) for line in lines)]
        (tmp_path / "raw").write_bytes(ending.join(map(json.dumps, raw)).encode())
        assert [u.source for u in read_utterances("raw", tmp_path / "raw")] == expected


def test_the_order_of_the_keys_changes_no_label(tmp_path):
    wavs, speakers = [f"u{i} {i}.wav" for i in range(9)], [f"u{i} s{i % 3}" for i in range(9)]
    found = []
    for order in (1, -1):
        write_lines(tmp_path / "wav.scp", *wavs[::order])
        write_lines(tmp_path / "utt2spk", *speakers[::-order])
        utterances = read_utterances("kaldi", tmp_path)
        labels = speaker_labels(utterances)
        found.append({u.key: (u.source, labels[u.spk]) for u in utterances})
    assert found[0] == found[1]
    # the same line twice is one utterance
    write_lines(tmp_path / "wav.scp", *wavs, wavs[0])
    assert len(read_utterances("kaldi", tmp_path)) == 9


def test_shell_commands_are_taken_only_where_they_are_allowed(tmp_path):
    write_lines(tmp_path / "wav.scp", "a cat 'x y.wav' |", "b /x.wav")
    raw = write_lines(tmp_path / "raw", '{"key": "a", "wav": "cat \'x y.wav\' |"}')
    for data_type, path in (("kaldi", tmp_path), ("raw", raw)):
        with pytest.raises(ValueError, match="shell commands are not run"):
            read_utterances(data_type, path)
        first, *rest = read_utterances(data_type, path, allow_pipes=True)
        assert first.source == Command("cat 'x y.wav'")
        assert all(u.source == "/x.wav" for u in rest)


def test_speakers_are_one_line(tmp_path):
    write_lines(tmp_path / "wav.scp", "u x.wav")
    write_lines(tmp_path / "utt2spk", "u a\u2028b")
    with pytest.raises(ValueError, match=r"utt2spk: u: expected a text as 'spk', one line"):
        read_utterances("kaldi", tmp_path)


def test_an_utt2spk_given_wins_over_the_folders(tmp_path):
    write_lines(tmp_path / "wav.scp", "u x.wav")
    write_lines(tmp_path / "utt2spk", "u a")
    other = write_lines(tmp_path / "other", "u z")
    assert read_utterances("kaldi", tmp_path, other)[0].spk == "z"


def test_raw_list(tmp_path):
    path = write_lines(
        tmp_path / "raw.list",
        json.dumps({"key": "é/1", "spk": "é", "wav": "é/1.wav"}, ensure_ascii=False),
        json.dumps({"key": "b", "spk": "b", "wav": "b.wav", "vad": [["0.5", "1.25"], [2, 3.5]]}),
    )
    first, second = read_utterances("raw", path)
    assert first == Utterance("é/1", "é", "é/1.wav", None)
    assert second.vad == ((0.5, 1.25), (2.0, 3.5))
    utt2spk = write_lines(tmp_path / "utt2spk", "é/1 é", "b b")
    assert read_utterances("raw", path, utt2spk) == [first, second]
    write_lines(utt2spk, "é/1 é", "b other")
    with pytest.raises(ValueError, match=r"b: speaker 'b' in .*raw\.list, 'other' in .*utt2spk"):
        read_utterances("raw", path, utt2spk)


def test_shards(tmp_path):
    write_shard(tmp_path / "0.tar", upstream_members(["s1/v/a", "s2/v/b"]))
    # other members are ignored, folders too, and an order of one's own is read all the same
    members = upstream_members(["s3/c.1"], suffix="flac", seed=5)[::-1]
    write_shard(tmp_path / "1.tar", [*members, ("s3/c.1.txt", b"hello")])
    with tarfile.open(tmp_path / "1.tar", "a") as tar:
        folder = tarfile.TarInfo("folder.wav")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
    path = write_lines(tmp_path / "shard.list", str(tmp_path / "0.tar"), f"file://{tmp_path}/1.tar")
    utterances = read_utterances("shard", path)
    assert [(u.key, u.spk) for u in utterances] == [
        ("s1/v/a", "s1"),
        ("s2/v/b", "s2"),
        ("s3/c.1", "s3"),
    ]
    assert all(isinstance(u.source, TarMember) for u in utterances)
    for utterance, seed in zip(utterances, (0, 1, 5)):
        expected, _ = soundfile.read(io.BytesIO(wav_bytes(seed)), dtype="float32")
        assert np.array_equal(load_audio(utterance, 16000), expected)


def test_keys_that_are_in_one_list_only(tmp_path):
    write_lines(tmp_path / "wav.scp", *(f"u{i:02d} {i}.wav" for i in range(15)))
    write_lines(tmp_path / "utt2spk", "u00 s", "v1 s", "v2 s")
    with pytest.raises(ValueError, match=r"wav\.scp|utt2spk") as caught:
        read_utterances("kaldi", tmp_path)
    message = str(caught.value)
    assert "14 keys (u01, u02" in message and "u10, ...)" in message and "u11" not in message
    write_lines(tmp_path / "wav.scp", "u00 0.wav")
    with pytest.raises(ValueError, match=r"utt2spk: 2 keys \(v1, v2\) not in"):
        read_utterances("kaldi", tmp_path)


RAW = '{"key": "a", "wav": "a.wav", "spk": "s"}'


@pytest.mark.parametrize(
    "data_type, lines, message",
    [
        ("kaldi", ["a"], r"list:1: expected 'key value'"),
        ("kaldi", ["a 1.wav", "a 2.wav"], r"list:2: key 'a' comes twice"),
        ("kaldi", ["a sox x.wav - |"], "a: shell commands are not run"),
        ("kaldi", ["a https://x.org/a.wav"], "a: expected a local path"),
        ("kaldi", [], "the file is empty"),
        ("kaldi", ["a\u00a0b 1.wav"], "expected a key without blanks"),
        ("raw", [RAW, "{"], r"list:2: not JSON"),
        ("raw", ["[" * 100000], r"list:1: not JSON"),
        ("raw", ['{"key": ' + "1" * 5000 + "}"], r"list:1: not JSON"),
        ("raw", ['{"key": "a b", "wav": "a"}'], r"list:1: expected a key without blanks"),
        ("raw", ['{"key": "a\\nb", "wav": "a"}'], r"list:1: expected a key without blanks"),
        ("raw", ['{"key": "", "wav": "a"}'], r"list:1: expected an object with texts"),
        ("raw", ['{"key": "a", "wav": ""}'], r"list:1: expected an object with texts"),
        ("raw", ['{"key": "a", "wav": "a", "spk": "s\\nt"}'], r"list:1: expected a text as 'spk'"),
        ("raw", ['{"key": "a", "wav": "a", "spk": ""}'], r"list:1: expected a text as 'spk'"),
        ("raw", [RAW[:-1] + ', "vad": [[NaN, 1]]}'], r"list:1: expected 'vad'"),
        ("raw", [RAW[:-1] + ', "vad": [[0, Infinity]]}'], r"list:1: expected 'vad'"),
        ("raw", [RAW[:-1] + ', "vad": [[0, 1' + "0" * 400 + "]]}"], r"list:1: expected 'vad'"),
        ("raw", ['["a"]'], r"list:1: expected an object with texts 'key' and 'wav'"),
        ("raw", ['{"key": "a", "spk": "s"}'], r"list:1: expected an object with texts"),
        ("raw", ['{"key": "a", "wav": "a", "spk": 3}'], r"list:1: expected a text as 'spk'"),
        ("raw", [RAW, RAW], r"list:2: key 'a' was in line 1"),
        ("raw", [RAW[:-1] + ', "vad": [[2, 1]]}'], r"list:1: expected 'vad'"),
        ("raw", [RAW[:-1] + ', "vad": []}'], r"list:1: expected 'vad'"),
        ("raw", [RAW[:-1] + ', "vad": [["a", "b"]]}'], r"list:1: expected 'vad'"),
        ("raw", [RAW.replace("a.wav", "cat x |")], r"list:1: shell commands"),
        ("shard", ["http://x.org/1.tar"], r"list:1: expected a local path"),
        ("shard", ["pipe:cat 1.tar |"], r"list:1: shell commands"),
        ("feat", [RAW], "data_type 'feat': expected one of kaldi, raw, shard"),
    ],
)
def test_bad_lines(tmp_path, data_type, lines, message):
    with pytest.raises(ValueError, match=message):
        read_utterances(data_type, write_lines(tmp_path / "list", *lines))


def test_missing_lists(tmp_path):
    for data_type in ("kaldi", "raw", "shard"):
        with pytest.raises(FileNotFoundError, match="nowhere"):
            read_utterances(data_type, tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"wav\.scp"):
        read_utterances("kaldi", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"list:1: no such shard: /gone\.tar"):
        read_utterances("shard", write_lines(tmp_path / "list", "/gone.tar"))


@pytest.mark.parametrize("share", [0.3, 0.55, 0.8])
def test_truncated_shard(tmp_path, share):
    write_shard(tmp_path / "0.tar", upstream_members(["a", "b", "c"]))
    data = (tmp_path / "0.tar").read_bytes()
    end = data.rindex(b"RIFF") + len(wav_bytes(0))  # of the last member; zeros follow
    (tmp_path / "0.tar").write_bytes(data[: int(end * share)])
    with pytest.raises(ValueError, match=r"0\.tar: .*expected a whole, uncompressed tar"):
        read_utterances("shard", write_lines(tmp_path / "list", str(tmp_path / "0.tar")))


def test_last_member_truncated(tmp_path):
    write_shard(tmp_path / "0.tar", upstream_members(["a", "b"]))
    data = (tmp_path / "0.tar").read_bytes()
    end = data.rindex(b"RIFF") + len(wav_bytes(0))
    (tmp_path / "0.tar").write_bytes(data[: end - 100])
    with pytest.raises(ValueError, match=r"0\.tar: .*expected a whole, uncompressed tar"):
        read_utterances("shard", write_lines(tmp_path / "list", str(tmp_path / "0.tar")))


@pytest.mark.parametrize(
    "members, message",
    [
        (upstream_members(["a", "b"])[:-1], r"1 key \(b\) with audio or \.spk missing"),
        (upstream_members(["a", "b"])[1:], r"1 key \(a\) with audio or \.spk missing"),
        (upstream_members(["a", "a"]), r"a\.spk: the key comes twice"),
        ([("readme.txt", b"hello")], "no utterance in it"),
        (upstream_members(["a b"]), "expected a key without blanks, found 'a b'"),
        ([("a.spk", b"s\nt"), ("a.wav", wav_bytes(0))], "a: expected a text as 'spk', one line"),
        ([("a.spk", b""), ("a.wav", wav_bytes(0))], "a: expected a text as 'spk', one line"),
    ],
)
def test_bad_shards(tmp_path, members, message):
    write_shard(tmp_path / "0.tar", members)
    with pytest.raises(ValueError, match=r"0\.tar: " + message):
        read_utterances("shard", write_lines(tmp_path / "list", str(tmp_path / "0.tar")))


def test_compressed_shard_and_key_in_two_shards(tmp_path):
    write_shard(tmp_path / "0.tar", upstream_members(["a"]), mode="w:gz")
    path = write_lines(tmp_path / "list", str(tmp_path / "0.tar"))
    with pytest.raises(ValueError, match="expected a whole, uncompressed tar"):
        read_utterances("shard", path)
    write_shard(tmp_path / "0.tar", upstream_members(["a"]))
    write_lines(path, str(tmp_path / "0.tar"), str(tmp_path / "0.tar"))
    with pytest.raises(ValueError, match=r"list:2: key 'a' is in the shard of line 1 too"):
        read_utterances("shard", path)


def test_speakers_must_be_known():
    utterances = [Utterance("a", "s", "a.wav"), Utterance("b", None, "b.wav")]
    with pytest.raises(ValueError, match=r"no speaker is known of 1 key \(b\): give an utt2spk"):
        speaker_labels(utterances)
    names = ["spk10", "spk2", "Z", "a"]
    utterances = [Utterance(str(i), name, "x") for i, name in enumerate(names * 2)]
    assert list(speaker_labels(utterances)) == sorted(names)
