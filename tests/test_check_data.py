"""A folder with every fault in it; the report, the cleaned copy, the exit status."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import soundfile

from wespeaker_qmargin import check_audio, cli
from wespeaker_qmargin.audio import Utterance
from wespeaker_qmargin.check_audio import Limits, measure, measure_all
from wespeaker_qmargin.check_data import check_data, summary, write_clean
from wespeaker_qmargin.files import read_table, read_trials
from wespeaker_qmargin.lists import read_utterances, speaker_labels

SECONDS = 1.2


def sound(seed: int, seconds: float = SECONDS, rate: int = 16000) -> np.ndarray:
    return 0.1 * np.random.default_rng(seed).standard_normal(int(seconds * rate))


def write_folder(folder: Path, extra: dict[str, str | np.ndarray] | None = None, spk=None) -> Path:
    """Three speakers s0, s1, s2 with two good utterances each, and ``extra``: a wave or a path."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = {f"s{i // 2}-{i % 2}": sound(i) for i in range(6)} | (extra or {})
    scp, utt2spk = [], []
    for key, wav in entries.items():
        path = wav
        if not isinstance(wav, str):
            path = f"{folder}/{key}.wav"
            soundfile.write(path, wav, 16000)
        scp.append(f"{key} {path}\n")
        utt2spk.append(f"{key} {(spk or {}).get(key, key.split('-')[0])}\n")
    (folder / "wav.scp").write_text("".join(scp))
    (folder / "utt2spk").write_text("".join(utt2spk))
    return folder


def kinds(report) -> dict[str, set[str]]:
    found = {}
    for kind, key, _ in report.findings:
        found.setdefault(kind, set()).add(key)
    return found


def text_of(report, kind: str, key: str) -> str:
    (text,) = [f.text for f in report.findings if (f.kind, f.key) == (kind, key)]
    return text


def check(*words) -> int:
    try:
        return cli.main(["check-data", *map(str, words)])
    except SystemExit as stop:
        return stop.code


def test_a_good_folder(tmp_path, capsys):
    folder = write_folder(tmp_path / "data")
    assert check(folder, "--jobs", 1, "--out", tmp_path / "copy") == 0
    out = capsys.readouterr().out
    assert "6 utterances of 3 speakers, 0.00 h\n  6 at 16000 Hz\n" in out
    assert out.endswith("\n6 utterances are usable\n")
    for name in ("wav.scp", "utt2spk"):
        assert (tmp_path / "copy" / name).read_text() == (folder / name).read_text()
    assert (tmp_path / "copy" / "spk2utt").read_text().splitlines()[1] == "s1 s1-0 s1-1"
    assert (tmp_path / "copy" / "problems.tsv").read_text() == ""


def every_fault(folder: Path) -> Path:
    loud = np.clip(40 * sound(20), -1, 1)
    half = np.stack([np.zeros(19200), sound(21)], axis=1)
    faint = 0.5 + 0.0005 * sound(22)  # an offset is no sound
    extra = {
        "s0-gone": f"{folder}/gone.wav",
        "s0-pipe": "cat x.wav |",
        "s0-url": "https://x.org/a.wav",
        "s0-short": sound(23, 0.99),
        "s1-zeros": np.zeros(32000),
        "s1-faint": faint,
        "s1-half": half,
        "s2-clipped": loud,
        "s2-same": sound(4),
        "lone-0": sound(24),
    }
    write_folder(folder, extra)
    (folder / "s0-text.wav").write_text("no audio\n" * 99)
    soundfile.write(folder / "s0-cut.flac", sound(25), 16000)
    data = (folder / "s0-cut.flac").read_bytes()
    (folder / "s0-cut.flac").write_bytes(data[: len(data) // 2])
    (folder / "s0-empty.wav").write_bytes(b"")
    for name in ("s0-text.wav", "s0-cut.flac", "s0-empty.wav"):
        with open(folder / "wav.scp", "a") as file:
            file.write(f"{Path(name).stem} {folder}/{name}\n")
        with open(folder / "utt2spk", "a") as file:
            file.write(f"{Path(name).stem} s0\n")
    return folder


def test_every_kind_of_audio_fault_is_found(tmp_path):
    report = check_data(every_fault(tmp_path / "data"))
    assert kinds(report) == {
        "bad": {"s0-gone", "s0-pipe", "s0-url", "s0-text", "s0-cut", "s0-empty"},
        "short": {"s0-short"},
        "silent": {"s1-zeros", "s1-faint", "s1-half"},
        "clipped": {"s2-clipped"},
        "duplicate": {"s2-same"},
        "speaker": {"lone"},
    }
    good = {f"s{i}-{j}" for i in range(3) for j in (0, 1)}
    assert set(report.kept) == good | {"s2-clipped", "lone-0"}
    folder = tmp_path / "data"
    assert text_of(report, "bad", "s0-gone").startswith(f"s0-gone: {folder}/gone.wav: No such file")
    assert text_of(report, "silent", "s1-half").endswith("in the first of 2 channels")
    assert text_of(report, "duplicate", "s2-same").endswith("the same as s2-0")
    assert "0.990 s, expected 1 s or more" in text_of(report, "short", "s0-short")
    assert text_of(report, "speaker", "lone") == "speaker lone: 1 usable of 1 utterances"
    assert all("\n" not in finding.text for finding in report.findings)


def test_the_cleaned_copy_reads_and_is_clean(tmp_path, capsys):
    folder = every_fault(tmp_path / "data")
    (folder / "trials").mkdir()
    lines = "s0-0 s0-1 target\r\ns0-0 s1-zeros nontarget\r\ns0-0 s1-0 nontarget\r\n"
    (folder / "trials" / "a.kaldi").write_bytes(lines.encode())
    (tmp_path / "other").write_text("1 s2-0 s2-1\n0 nobody s2-0\n0 s2-0 nobody\n")
    copy = tmp_path / "copy"
    assert check(folder, "--jobs", 2, "--out", copy, "--show", 1) == 3
    out = capsys.readouterr().out
    assert "and 5 more" in out and "8 utterances are usable" in out
    utterances = read_utterances("kaldi", copy)
    assert len(utterances) == 8 and set(speaker_labels(utterances)) == {"s0", "s1", "s2", "lone"}
    assert (copy / "trials" / "a.kaldi").read_text() == "s0-0 s0-1 target\ns0-0 s1-0 nontarget\n"
    rows = [row.split("\t") for row in (copy / "problems.tsv").read_text().splitlines()]
    assert len(rows) == 13 and all(len(row) == 3 for row in rows)
    assert check(copy, "--jobs", 1) == 0
    assert check(folder, "--trials", tmp_path / "other", "--out", copy, "--jobs", 1) == 3
    assert "nobody: in 2 trials of" in capsys.readouterr().out
    assert (copy / "trials" / "other").read_text() == "s2-0 s2-1 target\n"


def test_drop_chooses_what_the_copy_leaves_out(tmp_path, capsys):
    folder = every_fault(tmp_path / "data")
    keep = check_data(folder, drop=())
    assert set(read_table(folder / "wav.scp")) - set(keep.kept) == kinds(keep)["bad"]
    less = check_data(folder, drop=("clipped", "speaker"))
    assert {"s2-clipped", "lone-0"}.isdisjoint(less.kept) and "s2-same" in less.kept
    assert check(folder, "--drop", "loud") == 2
    capsys.readouterr()


def test_limits(tmp_path):
    extra = {"s0-x": sound(9, 0.5), "s1-x": 1e-3 * sound(10), "s2-x": np.ones(32000) * sound(11, 2)}
    folder = write_folder(tmp_path / "data", extra)
    report = check_data(folder, limits=Limits(0.5, -80.0, 0.0))
    assert kinds(report) == {}
    report = check_data(folder, limits=Limits(0.51, -60.0, 0.0))
    assert kinds(report) == {"short": {"s0-x"}, "silent": {"s1-x"}}


def test_clipped_share_is_counted(tmp_path):
    wav = sound(0, 1.0)
    wav[:16] = 1.0
    folder = write_folder(tmp_path / "data", {"s0-x": wav})
    assert kinds(check_data(folder, limits=Limits(clipped_share=15.5 / 16000)))["clipped"]
    assert kinds(check_data(folder, limits=Limits(clipped_share=16.5 / 16000))) == {}
    assert measure(Utterance("k", None, f"{folder}/s0-x.wav")).clipped == 16


def test_the_same_audio_under_two_speakers_is_left_out_with_both(tmp_path):
    folder = write_folder(tmp_path / "data", {"s1-copy": sound(0), "s0-copy": sound(0)})
    # another format, the same samples
    wav, rate = soundfile.read(folder / "s0-copy.wav")
    soundfile.write(folder / "s0-copy.flac", wav, rate)
    text = (folder / "wav.scp").read_text().replace("s0-copy.wav", "s0-copy.flac")
    (folder / "wav.scp").write_text(text)
    report = check_data(folder)
    assert kinds(report)["duplicate"] == {"s0-0", "s1-copy", "s0-copy"}
    text = text_of(report, "duplicate", "s0-0")
    assert text.endswith("the same as s1-copy, but speaker s0 here, s1 there")
    assert {f.key for f in report.findings if f.kind == "speaker"} == {"s0"}


def test_without_speakers(tmp_path):
    folder = write_folder(tmp_path / "data", {"s1-copy": sound(0)})
    (folder / "utt2spk").unlink()
    report = check_data(folder)
    assert kinds(report) == {"duplicate": {"s1-copy"}} and report.speakers is None
    write_clean(report, tmp_path / "copy")
    names = sorted(path.name for path in (tmp_path / "copy").iterdir())
    assert names == ["problems.tsv", "wav.scp"]


def test_faulty_lines_do_not_hide_the_rest(tmp_path):
    folder = write_folder(tmp_path / "data", {"s0-text": "x"})
    with open(folder / "wav.scp", "a") as file:
        file.write(f"alone\ns0-0 {folder}/s0-0.wav\ns1-0 {folder}/s0-0.wav\nonly-wav a.wav\n")
        file.write("a\u00a0b c.wav\n")
    with open(folder / "utt2spk", "ab") as file:
        file.write(b"only-spk s9\r\ns2-0 s0\r\n")
    report = check_data(folder)
    found = kinds(report)
    assert found["list"] == {
        *("wav.scp:8", "wav.scp:12", "s0-0", "s1-0", "s2-0", "only-wav", "only-spk")
    }
    assert found["bad"] == {"s0-text"}
    # the same line twice is kept once; a key with two values is not
    assert report.kept == ["s0-0", "s0-1", "s1-1", "s2-1"]
    write_clean(report, tmp_path / "copy")
    assert len(read_utterances("kaldi", tmp_path / "copy")) == 4


def test_trials_of_missing_keys_and_unreadable_lists(tmp_path):
    folder = write_folder(tmp_path / "data")
    (folder / "trials").write_text("s0-0 s0-1 target\ns0-0 s9-9 nontarget\ns8-8 s9-9 nontarget\n")
    bad = tmp_path / "bad"
    bad.write_text("s0-0 s0-1 maybe\n")
    report = check_data(folder)
    assert kinds(report) == {"trial": {"s8-8", "s9-9"}}
    assert text_of(report, "trial", "s9-9").startswith("s9-9: in 2 trials of ")
    write_clean(report, tmp_path / "copy")
    assert read_trials(tmp_path / "copy" / "trials").enroll == ["s0-0"]
    report = check_data(folder, trials=[bad])
    assert f"{bad}:1: " in text_of(report, "trial", "bad")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        check_data(folder, trials=[tmp_path / "nowhere"])


def test_what_ends_without_a_report(tmp_path, capsys):
    folder = write_folder(tmp_path / "data")
    assert check(tmp_path / "nowhere") == 1
    assert "nowhere/wav.scp: no such file" in capsys.readouterr().err
    assert check(folder, "--jobs", 1, "--out", folder) == 1
    assert "is the folder that was checked" in capsys.readouterr().err
    assert check(folder, "--jobs", 1, "--min_seconds", 9, "--out", tmp_path / "copy") == 1
    assert "no utterance is left" in capsys.readouterr().err
    assert not (tmp_path / "copy").exists()
    assert check(folder, "--jobs", 0) == 1
    (tmp_path / "t").mkdir()
    for name in ("a", "t/a"):
        (tmp_path / name).write_text("s0-0 s0-1 target\n")
    words = ("--trials", tmp_path / "a", tmp_path / "t" / "a", "--out", tmp_path / "copy")
    assert check(folder, *words) == 1
    assert "two lists of the same name" in capsys.readouterr().err
    assert not (tmp_path / "copy").exists()


def test_pipes_run_only_where_they_are_allowed(tmp_path, capsys):
    folder = write_folder(tmp_path / "data")
    path = f"{folder}/s0-0.wav"
    (folder / "utt2spk").unlink()
    (folder / "wav.scp").write_text(
        f"good cat {path} |\nfails cat {path}; echo broken >&2; exit 1 |\n"
        f"mark touch {tmp_path}/ran; cat {folder}/s0-1.wav |\n"
    )
    assert kinds(check_data(folder)) == {"bad": {"good", "fails", "mark"}}
    assert not (tmp_path / "ran").exists()
    report = check_data(folder, allow_pipes=True)
    assert kinds(report) == {"bad": {"fails"}} and (tmp_path / "ran").exists()
    assert text_of(report, "bad", "fails").endswith("the command ended with status 1: broken")
    write_clean(report, tmp_path / "copy")
    assert f"good cat {path} |\n" in (tmp_path / "copy" / "wav.scp").read_text()
    for option in ("--allow-pipes", "--allow_pipes"):
        assert check(folder, option, "--jobs", 1) == 3
    capsys.readouterr()


def test_processes_find_what_one_finds_in_the_same_order(tmp_path):
    folder = every_fault(tmp_path / "data")
    one, three = (check_data(folder, jobs=jobs) for jobs in (1, 3))
    assert one == three and summary(one) == summary(three)


def killed(utterance):
    if utterance.key == "u30":
        os.kill(os.getpid(), signal.SIGKILL)
    return measure(utterance)


def test_a_killed_process_ends_the_check_and_is_named(monkeypatch):
    monkeypatch.setattr(check_audio, "measure", killed)
    utterances = [Utterance(f"u{i}", None, "/gone.wav") for i in range(60)]
    with pytest.raises(ChildProcessError, match=r"was killed .* at u\d+ or up to \d+ files later"):
        measure_all(utterances, 2)


def test_long_audio_is_measured_in_blocks(tmp_path, monkeypatch):
    whole = sound(0, 10.0)
    whole[-1] = 0.9
    found = []
    for size in (2**20, 1000):
        monkeypatch.setattr("wespeaker_qmargin.audio._BLOCK", size)
        for suffix in ("wav", "mp3"):
            soundfile.write(tmp_path / f"a.{suffix}", whole, 16000)
            found.append(measure(Utterance("a", None, f"{tmp_path}/a.{suffix}")))
    assert found[0] == found[2] and found[0].num_samples == 160000
    assert found[1].num_samples == found[3].num_samples
    assert found[0].swing > 1.2


def test_a_large_list_is_quick(tmp_path):
    folder = write_folder(tmp_path / "data")
    lines = "".join(f"k{i} /gone/{i}.wav\n" for i in range(20000))
    (folder / "wav.scp").write_text(lines)
    (folder / "utt2spk").write_text("".join(f"k{i} s{i // 10}\n" for i in range(20000)))
    start = time.monotonic()
    report = check_data(folder, jobs=2)
    assert len(kinds(report)["bad"]) == 20000 and report.kept == []
    assert time.monotonic() - start < 30


def test_clipped_and_lone_are_told_and_kept(tmp_path, capsys):
    extra = {"lone-0": np.clip(40 * sound(20), -1, 1)}
    folder, copy = write_folder(tmp_path / "data", extra), tmp_path / "copy"
    assert check(folder, "--jobs", 1, "--out", copy) == 0
    out = capsys.readouterr().out
    assert "at full scale" in out and "speaker lone: 1 usable of 1" in out
    assert "lone-0" in read_table(copy / "wav.scp")
    assert check(folder, "--jobs", 1, "--out", copy, "--drop", "clipped") == 3
    assert "lone-0" not in read_table(copy / "wav.scp")
