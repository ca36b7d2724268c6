"""tools/make_minivox.py: its rules on signals whose answer is known, its tables, its verdicts."""

import hashlib
import shutil
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import soundfile

from wespeaker_qmargin import files

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import make_minivox  # noqa: E402
import minivox_audio  # noqa: E402
import minivox_compare  # noqa: E402

HEADER = ["utt", "spk", "split", "src", "lang", "gender", "dur", "rel", "orig"]


def tone(seconds: float, level_db: float, seed: int = 0) -> np.ndarray:
    """White noise of a level, int16."""
    rng = np.random.default_rng(seed)
    wav = rng.standard_normal(round(seconds * 16000)) * 32768 * 10 ** (level_db / 20)
    return wav.round().clip(-32768, 32767).astype(np.int16)


# ------------------------------------------------------------------------------------- the rules


@pytest.mark.parametrize(
    "before, after, span",
    [(0.5, 0.7, (0.4, 2.6)), (0.04, 0.7, (0.0, 2.14)), (0.5, 0.05, (0.4, 2.55))],
)
def test_silence_is_trimmed(before, after, span):
    wav = np.concatenate([tone(before, -90), tone(2, -20), tone(after, -90)])
    first, stop = minivox_audio.speech_span(wav)
    assert (first / 16000, stop / 16000) == span


@pytest.mark.parametrize(
    "speech_db, rest_db, kept",
    [(-20, -45, True), (-20, -55, False), (-35, -55, True), (-35, -63, False)],
)
def test_what_is_silence(speech_db, rest_db, kept):
    # 30 dB below the loud frames, but never less than -60 dBFS: the last case is only 28 dB below
    wav = np.concatenate([tone(1, rest_db), tone(2, speech_db), tone(1, rest_db)])
    assert (minivox_audio.speech_span(wav) == (0, 64000)) == kept


def test_silence_only_is_refused():
    with pytest.raises(ValueError, match="nothing is louder than -60 dBFS"):
        minivox_audio.speech_span(tone(1, -80))


@pytest.mark.parametrize(
    "seconds, lengths",
    [(2.5, [40000]), (5.98, [55199]), (8.5, [None, 110399]), (20, [None, None, 165600])],
)
def test_number_and_length_of_pieces(seconds, lengths):
    wav = tone(seconds, -20)
    pieces = minivox_audio.cut_at_pauses(wav)
    assert len(pieces) == len(lengths)
    joined = np.concatenate(pieces)
    assert len(joined) == lengths[-1] and (joined == wav[: len(joined)]).all()


def test_cuts_fall_into_the_pauses():
    wav = tone(12, -20)
    for start in (2.9, 7.4):  # quiet for 0.1 s, within 0.8 s of 3.45 and 6.9
        wav[int(start * 16000) : int(start * 16000) + 1600] //= 100
    wav[int(5.0 * 16000) : int(5.2 * 16000)] = 0  # the deepest pause is near neither
    pieces = minivox_audio.cut_at_pauses(wav)
    cuts = np.cumsum([len(piece) for piece in pieces])[:2] / 16000
    assert cuts == pytest.approx([2.94, 7.44])


@pytest.mark.parametrize(
    "source, split, seconds",
    [("commonvoice6.1", "test", 5.6), ("librispeech", "test", 8), ("librispeech", "train", 3.45)],
)
def test_clips_are_limited(source, split, seconds):
    clips = minivox_audio.clips(tone(20, -20), source, split)
    assert len(clips) == (3 if split == "train" else 1)
    assert sum(map(len, clips)) == pytest.approx(len(clips) * seconds * 16000)


@pytest.mark.minivox
def test_tables_and_complete_trials_are_the_corpus_own(minivox, tmp_path):
    rows = make_minivox.read_metadata(minivox / "metadata.tsv")
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "wav").symlink_to(minivox / split / "wav")
        make_minivox.write_tables([row for row in rows if row["split"] == split], tmp_path)
    test = [row for row in rows if row["split"] == "test"]
    make_minivox.write_trials(test, tmp_path / "test" / "trials")
    for name in ("wav.scp", "utt2spk", "utt2dur", "spk2utt", "spk2gender"):
        for split in ("train", "test"):
            wanted = (minivox / split / name).read_text()
            assert (tmp_path / split / name).read_text() == wanted, (split, name)
    for name in ("ls", "ls_same_gender", "cv_same_lang"):
        made, wanted = (
            files.read_trials(f / "test" / "trials" / f"{name}.trials") for f in (tmp_path, minivox)
        )
        if name != "cv_same_lang":
            assert made.enroll == wanted.enroll and made.test == wanted.test
        assert unordered(made) == unordered(wanted)


def unordered(trials) -> set:
    sides = map(frozenset, zip(trials.enroll, trials.test))
    return set(zip(sides, trials.is_target.tolist()))


# --------------------------------------------------------------------------------- from end to end


def recordings() -> dict[str, np.ndarray]:
    """Common Voice: 2 test speakers of 2; LibriSpeech: 1 train (3 pieces), 2 test of 2."""
    names = [f"commonvoice/ab/clips/common_voice_ab_{n}.mp3" for n in (11, 12, 21, 22)]
    names += ["resemblyzer/audio_data/librispeech_train-clean-100/26-495-0000.flac"]
    for utt in ("367-1-0000", "367-1-0001", "1688-2-0000", "1688-2-0001"):
        spk = utt.split("-")[0]
        names.append(f"resemblyzer/audio_data/librispeech_test-other/{spk}/{utt}.flac")
    pad = tone(0.5, -90)
    seconds = [2, 2.5, 7, 1.8, 11, 2, 2.2, 3, 9]
    return {
        name: np.concatenate([pad, tone(s, -20, seed=i), pad])
        for i, (name, s) in enumerate(zip(names, seconds))
    }


def metadata() -> list[list[str]]:
    rows = []
    for n, gender, seconds in ((11, "m", 2.2), (12, "m", 2.7), (21, "u", 5.6), (22, "u", 2.0)):
        spk = f"cv-ab-{n // 10}"
        utt, orig = f"{spk}-{n}", f"ab/clips/common_voice_ab_{n}.mp3"
        rows.append([utt, spk, "test", "commonvoice6.1", "ab", gender, seconds, None, orig])
    for utt, seconds in (("367-1-0000", 2.2), ("367-1-0001", 2.4)):
        rows.append([f"ls-0{utt}", "ls-0367", "test", "librispeech", "en", "f", seconds])
        rows[-1] += [None, f"test-other/{utt}.flac"]
    for utt, seconds in (("1688-2-0000", 3.2), ("1688-2-0001", 8.0)):
        rows.append([f"ls-{utt}", "ls-1688", "test", "librispeech", "en", "m", seconds])
        rows[-1] += [None, f"test-other/{utt}.flac"]
    for piece in range(3):
        rows.append([f"ls-0026-495-0000-{piece}", "ls-0026", "train", "librispeech", "en", "m"])
        rows[-1] += [0, None, "train-clean-100/26-495-0000.flac"]
    for row in rows:
        row[7] = f"{row[2]}/wav/{row[1]}/{row[0]}.flac"
    return rows


@pytest.fixture
def place(tmp_path) -> Path:
    """Fake clones, and ``spec`` with metadata and the manifest of files that nothing equals."""
    for name, wav in recordings().items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        form = {"format": "MP3"} if name.endswith("mp3") else {}
        soundfile.write(tmp_path / name, wav, 16000, **form)
    (tmp_path / "spec").mkdir()
    lines = ["\t".join(map(str, row)) for row in (HEADER, *metadata())]
    (tmp_path / "spec" / "metadata.tsv").write_text("\n".join(lines) + "\n")
    paths = [row[7] for row in metadata()] + [
        "test/wav.scp",
        "test/trials/ls.trials",
        "aug/rir.scp",
    ]
    manifest = "".join(f"{'0' * 64}  ./{path}\n" for path in paths)
    (tmp_path / "spec" / "MANIFEST.sha256").write_text(manifest)
    return tmp_path


def build(place: Path, out: str, spec: str = "spec"):
    """Return (path -> class, path -> reason)."""
    clones = dict.fromkeys(("speech_commands", "arabic_commands"))
    clones |= {"common_voice": place / "commonvoice", "librispeech": place / "resemblyzer"}
    result, bad, _ = make_minivox.make_minivox(
        place / spec, place / out, clones=clones, programs=minivox_audio.find_programs()
    )
    return result, bad


def golden(place: Path) -> None:
    """Make ``whole``, a minivox of its own: built once, its manifest that of what was built."""
    build(place, "whole")
    manifest = ""
    for path in sorted((place / "whole").rglob("*")):
        if path.is_file() and path.name != "MANIFEST.sha256":
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            manifest += f"{digest}  ./{path.relative_to(place / 'whole')}\n"
    (place / "whole" / "MANIFEST.sha256").write_text(manifest)


def test_folder_from_lists_alone(place):
    result, bad = build(place, "out")
    assert [result[row[7]] for row in metadata()[4:8]] == ["length"] * 4
    assert result["aug/rir.scp"] == "missing" and result["test/wav.scp"] == "differs"
    assert all("left out" in why for path, why in bad.items() if path.startswith("aug/noise/"))
    assert bad["aug/noise.scp"] == "no noise was made"
    out = place / "out"
    wavs = files.read_table(out / "test" / "wav.scp")
    assert list(wavs.values()) == [row[7] for row in metadata() if row[2] == "test"]
    seconds = files.read_table(out / "test" / "utt2dur")
    wanted = [row[6] for row in metadata() if row[2] == "test"]
    # beside speech an MP3's silence is not quite silent
    assert [float(s) for s in seconds.values()][:4] == pytest.approx(wanted[:4], abs=0.1)
    assert [float(s) for s in seconds.values()][4:] == wanted[4:]
    assert files.read_table(out / "test" / "spk2gender")["cv-ab-2"] == "u"
    assert len(files.read_table(out / "train" / "spk2utt")["ls-0026"].split()) == 3
    source = next(w for name, w in recordings().items() if name.endswith("/26-495-0000.flac"))
    pieces = [soundfile.read(out / row[7], dtype="int16")[0] for row in metadata()[-3:]]
    # 0.4 s of the leading half second are cut
    assert (np.concatenate(pieces) == source[6400 : 6400 + 165600]).all()


def test_trials_are_all_pairs(place):
    build(place, "out")
    for name, column, source in (("ls", 3, "librispeech"), ("cv_same_lang", 4, "commonvoice6.1")):
        rows = [row for row in metadata() if row[2:4] == ["test", source]]
        wanted = {
            (frozenset((a[0], b[0])), a[1] == b[1])
            for a, b in combinations(rows, 2)
            if a[column] == b[column]
        }
        trials = files.read_trials(place / "out" / "test" / "trials" / f"{name}.trials")
        assert unordered(trials) == wanted and len(trials.test) == 6
    # speakers in the order of LibriSpeech's own names: "1688" before "367"
    trials = files.read_trials(place / "out" / "test" / "trials" / "ls.trials")
    assert ("ls-1688-2-0000", "ls-0367-1-0001") in zip(trials.enroll, trials.test)
    genders = files.read_trials(place / "out" / "test" / "trials" / "ls_same_gender.trials")
    assert genders.is_target.all() and len(genders.test) == 2


def test_same_sources_match_exactly(place):
    golden(place)
    result, _ = build(place, "again", spec="whole")
    copied = {"metadata.tsv", "test/trials/cv_same_lang.trials"}
    assert {path for path, found in result.items() if found == "copied"} == copied
    assert {found for path, found in result.items() if path not in copied} == {"exact"}


def test_every_verdict(place):
    golden(place)
    folder = place / "resemblyzer" / "audio_data" / "librispeech_test-other"
    wav, _ = soundfile.read(folder / "367" / "367-1-0000.flac", dtype="int16")
    wav[20000] += 2
    soundfile.write(folder / "367" / "367-1-0000.flac", wav, 16000)
    wav, _ = soundfile.read(folder / "367" / "367-1-0001.flac", dtype="int16")
    wav[20000] += 3
    soundfile.write(folder / "367" / "367-1-0001.flac", wav, 16000)
    (folder / "1688" / "1688-2-0000.flac").unlink()
    (folder / "1688" / "1688-2-0001.flac").write_text("no audio")
    in_whole = place / "whole" / metadata()[0][7]  # the same samples in other bytes
    samples, _ = soundfile.read(in_whole, dtype="int16")
    soundfile.write(in_whole, samples, 16000, compression_level=0.0)
    manifest = place / "whole" / "MANIFEST.sha256"
    digest = hashlib.sha256(in_whole.read_bytes()).hexdigest()
    lines = [
        f"{digest}  ./{metadata()[0][7]}" if metadata()[0][7] in line else line
        for line in manifest.read_text().splitlines()
    ]
    manifest.write_text("\n".join(lines) + "\n")
    result, bad = build(place, "again", spec="whole")
    found = [result[row[7]] for row in metadata()]
    assert found[:8] == ["samples", "exact", "exact", "exact", "close", "differs", *["missing"] * 2]
    assert found[8:] == ["exact"] * 3
    assert "no such file" in bad[metadata()[6][7]] and "ffmpeg" in bad[metadata()[7][7]]
    # tables list only what is there
    assert len(files.read_table(place / "again" / "test" / "wav.scp")) == 6


def test_leftover_of_an_earlier_run_does_not_count(place):
    golden(place)
    shutil.copytree(place / "whole" / "test" / "wav", place / "again" / "test" / "wav")
    shutil.rmtree(place / "commonvoice" / "ab")
    result, _ = build(place, "again", spec="whole")
    assert [result[row[7]] for row in metadata()[:4]] == ["missing"] * 4


def test_noises_are_cut_at_their_starts(place):
    clone = place / "speech"
    (clone / "bgnoise").mkdir(parents=True)
    wav = tone(45, -30)
    soundfile.write(clone / "bgnoise" / "exercise_bike.wav", wav, 16000)
    clones = {"speech_commands": clone, "arabic_commands": None}
    bad = make_minivox.make_noises(place / "out", clones, minivox_audio.find_programs())
    assert len(bad) == 5 and "no --arabic-commands" in bad["aug/noise/noise-asc-boiler.flac"]
    assert list(files.read_table(place / "out" / "aug" / "noise.scp")) == [
        "noise-gsc-exercise_bike"
    ]
    made, _ = soundfile.read(place / "out/aug/noise/noise-gsc-exercise_bike.flac", dtype="int16")
    assert (made == wav[23 * 16000 : 43 * 16000]).all()


# ------------------------------------------------------------------------------------ the command


def command(place: Path, *more: str, spec="whole", out="again") -> list[str]:
    words = [place / spec, place / out, "--common-voice", place / "commonvoice"]
    return [*map(str, words), "--librispeech", str(place / "resemblyzer"), *more]


def test_command_reports_counts(place, capsys):
    golden(place)
    assert make_minivox.main(command(place, "--jobs", "2")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [*minivox_compare.CLASSES, "all"]
    counts = {line[:22].strip(): line[22:].split() for line in lines[1:6]}
    assert counts["commonvoice6.1 test"] == ["4", "0", "0", "0", "0", "0", "0", "4"]
    assert counts["librispeech train"] == ["3", "0", "0", "0", "0", "0", "0", "3"]
    assert counts["tables and texts"][-1] == "14" and counts["all"][-1] == "25"
    (place / "commonvoice" / "ab" / "clips" / "common_voice_ab_11.mp3").unlink()
    assert make_minivox.main(command(place)) == 2
    assert "missing: test/wav/cv-ab-1/cv-ab-1-11.flac: " in capsys.readouterr().out


@pytest.mark.parametrize(
    "change, more, message",
    [
        (lambda p: None, ["--ffmpeg", "no-such"], "no-such: no such program"),
        (
            lambda p: None,
            ["--speech-commands", "no-such"],
            "expected the clone for speech_commands",
        ),
        (lambda p: (p / "spec" / "MANIFEST.sha256").unlink(), [], "MANIFEST.sha256: no such file"),
        (lambda p: edit(p, "\torig", "\tfrom"), [], "expected the columns"),
        (lambda p: edit(p, "commonvoice6.1", "voxceleb"), [], "unknown source voxceleb test"),
        (lambda p: edit(p, "\tab\tm", "\tab"), [], "8 columns, expected 9"),
    ],
)
def test_bad_input(place, capsys, change, more, message):
    change(place)
    assert make_minivox.main(command(place, *more, spec="spec")) == 1
    assert message in capsys.readouterr().err
    assert not (place / "again").exists()


def edit(place: Path, old: str, new: str) -> None:
    path = place / "spec" / "metadata.tsv"
    path.write_text(path.read_text().replace(old, new))


def test_the_corpus_itself_is_not_overwritten(place, capsys):
    assert make_minivox.main(command(place, spec="spec", out="spec")) == 1
    assert "would overwrite SPEC" in capsys.readouterr().err


def test_what_the_repository_holds_of_the_corpus_is_the_manifests():
    spec = ROOT / "recipes" / "mini" / "minivox"
    lines = (spec / "MANIFEST.sha256").read_text().splitlines()
    wanted = {name: digest for digest, name in (line.split(maxsplit=1) for line in lines)}
    held = [path for path in spec.rglob("*") if path.is_file() and path.name != "MANIFEST.sha256"]
    assert len(held) > 60
    for path in held:
        name = str(path.relative_to(spec))
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        assert wanted.get(name, wanted.get(f"./{name}")) == found, name
