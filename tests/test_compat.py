"""Each fault of WeSpeaker's here: it shows without its patch, and does not with it."""

import ast
import io
import math
import multiprocessing
import os
import subprocess
import sys
import textwrap
import warnings
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from wespeaker_qmargin import adapter, checkout, compat, compat_scripts, meters
from wespeaker_qmargin import compat_torchaudio as ta
from wespeaker_qmargin import torchaudio_standin as standin

PATCHES = {patch.name: patch for patch in compat.PATCHES}


def script(text="", modules=(), packages=()) -> checkout.Script:
    return checkout.Script(Path("x.py"), text, frozenset(modules), frozenset(packages))


AUDIO = script(packages=["torchaudio"])


def upstream_file(name: str) -> Path:
    return Path(os.environ["WESPEAKER_ROOT"]) / "wespeaker" / name


@pytest.mark.checkout
@pytest.mark.parametrize("patch", compat.PATCHES, ids=PATCHES)
def test_upstream_still_has_what_a_patch_is_for(patch):
    file, line = patch.where.split(":")
    lines = upstream_file(file).read_text().splitlines()
    now = [i for i, text in enumerate(lines, 1) if patch.calls in text]
    assert int(line) in now, f"{patch.where}: {patch.calls!r} is now in lines {now}"


def test_unknown_patch_is_told():
    with pytest.raises(ValueError, match="--no-compat cpus: expected one of all, torchaudio-abs"):
        compat.apply_needed(script(), without=["cpus"])


def test_a_script_that_needs_nothing_gets_nothing():
    before = torch.Tensor.to, os.symlink, torch.cuda.set_device
    assert compat.apply_needed(script("import numpy", packages=["numpy"])) == []
    assert before == (torch.Tensor.to, os.symlink, torch.cuda.set_device)


def test_patches_can_be_left_off():
    train = script("cuda WORLD_SIZE", packages=["torchaudio"])
    assert compat.apply_needed(train, without=["all"]) == []


# --- torchaudio ---


@pytest.fixture
def fake_torchaudio(tmp_path, monkeypatch):
    """A function that puts a torchaudio of the given sources, or none, in place of the real one."""

    def forget():
        for name in [n for n in sys.modules if n.split(".")[0] == "torchaudio"]:
            del sys.modules[name]

    hidden = {n: m for n, m in sys.modules.items() if n.split(".")[0] == "torchaudio"}
    forget()
    real_find_spec = ta.importlib.util.find_spec

    def put(**sources):
        if not sources:
            monkeypatch.setattr(
                ta.importlib.util,
                "find_spec",
                lambda name, *a: None if name == "torchaudio" else real_find_spec(name, *a),
            )
        for name, text in sources.items():
            path = tmp_path / "torchaudio" / f"{name}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(textwrap.dedent(text))
        monkeypatch.syspath_prepend(str(tmp_path))

    yield put
    forget()
    sys.modules.update(hidden)


EXTENSION = """
    _IS_TORCHAUDIO_EXT_AVAILABLE = True
    def lazy_import_sox_ext(): ...
"""
BROKEN_EXTENSION = "raise OSError('Could not load this library')"
OLD_INIT = """
    from torchaudio import _extension
    import torchaudio
    torchaudio._extension.lazy_import_sox_ext()
    import torch
    def load(file, normalize=True): return torch.zeros(1, 3, dtype=torch.int16), 16000
    def info(file): ...
    def set_audio_backend(name): ...
    from torchaudio import sox_effects
"""
SOX = "def apply_effects_tensor(wav, rate, effects): return wav, rate"
NEW_INIT = """
    from torchaudio import _extension
    def load(file, normalize=True): raise ImportError('TorchCodec is required')
"""
CODEC_INIT = """
    import torch
    def load(file, normalize=True): return torch.full((1, 3), 0.5), 16000
    def info(file): ...
    def set_audio_backend(name): ...
    from torchaudio import sox_effects
"""


def test_working_torchaudio_is_left_alone(fake_torchaudio):
    fake_torchaudio(__init__=OLD_INIT, _extension=EXTENSION, sox_effects=SOX)
    import torchaudio

    before = dict(vars(torchaudio)), dict(vars(torchaudio.sox_effects))
    assert compat.apply_needed(AUDIO) == []
    assert before == (vars(torchaudio), vars(torchaudio.sox_effects))


def test_torchaudio_whose_extension_is_broken(fake_torchaudio):
    fake_torchaudio(__init__=OLD_INIT, _extension=BROKEN_EXTENSION, sox_effects=SOX)
    with pytest.raises(OSError):
        import torchaudio
    assert compat.apply_needed(AUDIO) == ["torchaudio-extension"]
    import torchaudio

    assert not torchaudio._extension._IS_TORCHAUDIO_EXT_AVAILABLE


def test_patches_of_torchaudio_need_one_that_can_be_imported(fake_torchaudio):
    fake_torchaudio(__init__=NEW_INIT, _extension=BROKEN_EXTENSION)
    assert compat.apply_needed(AUDIO, without=["torchaudio-extension"]) == []


def test_torchaudio_that_dropped_everything(fake_torchaudio):
    fake_torchaudio(__init__=NEW_INIT, _extension=EXTENSION)
    import torchaudio

    with pytest.raises(ImportError):
        torchaudio.load(io.BytesIO())
    expected = ["torchaudio-load", "torchaudio-sox", "s3prl-import"]
    assert compat.apply_needed(AUDIO) == expected
    assert compat.apply_needed(AUDIO) == [], "all of it works now"
    from torchaudio.sox_effects import apply_effects_tensor

    assert apply_effects_tensor is torchaudio.sox_effects.apply_effects_tensor
    assert torchaudio.set_audio_backend("sox_io") is None


def test_sox_without_its_library(fake_torchaudio):
    sox = "def apply_effects_tensor(*a): raise OSError('libsox.so: cannot open')"
    fake_torchaudio(__init__=OLD_INIT, _extension=EXTENSION, sox_effects=sox)
    assert compat.apply_needed(AUDIO) == ["torchaudio-sox"]


def test_torchcodec_reads_floats_and_soundfile_integers(fake_torchaudio, tmp_path):
    fake_torchaudio(__init__=CODEC_INIT, sox_effects=SOX)
    import torchaudio

    soundfile.write(tmp_path / "a.wav", [0.25, -0.5], 16000)
    assert torchaudio.load(tmp_path / "a.wav", normalize=False)[0].dtype == torch.float32
    assert compat.apply_needed(AUDIO) == ["torchaudio-load"]
    assert torchaudio.load("anything")[0].tolist() == [[0.5, 0.5, 0.5]], "torchcodec's, as before"
    wav, rate = torchaudio.load(tmp_path / "a.wav", normalize=False)
    assert (wav.tolist(), wav.dtype, rate) == ([[8192, -16384]], torch.int16, 16000)


def test_torchaudio_that_is_absent(fake_torchaudio):
    fake_torchaudio()
    assert compat.apply_needed(AUDIO) == ["torchaudio-absent"]
    import torchaudio
    import torchaudio.compliance.kaldi as kaldi

    assert kaldi is torchaudio.compliance.kaldi and kaldi.fbank is standin.fbank
    assert torchaudio.transforms.Resample is standin.Resample
    assert find_spec("torchaudio") is not None, "other packages ask so whether it is there"
    assert compat.apply_needed(AUDIO) == []


def test_stand_in_has_all_that_upstream_calls():
    """Every attribute of torchaudio that WeSpeaker's sources name."""
    package = checkout.find_package()
    made = standin.modules()
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_bytes())):
            words = ast.unparse(node).split(".") if isinstance(node, ast.Attribute) else [""]
            if words[0] in ("torchaudio", "kaldi") and all(w.isidentifier() for w in words):
                root = "torchaudio.compliance.kaldi" if words[0] == "kaldi" else "torchaudio"
                found = made[root]
                for word in words[1:]:
                    assert hasattr(found, word), f"{file}: {'.'.join(words)}"
                    found = getattr(found, word)


@pytest.mark.parametrize(
    "subtype, dtype, unit",
    [("PCM_16", torch.int16, 2**15), ("PCM_24", torch.int32, 2**31), ("FLOAT", torch.float32, 1)],
)
def test_load_and_info(tmp_path, subtype, dtype, unit):
    stereo = np.array([[0.5, -0.25], [0.125, 0.0], [-1.0, 0.75]])
    path = tmp_path / "a.wav"
    soundfile.write(path, stereo, 8000, subtype=subtype)
    wav, rate = standin.load(str(path))
    assert rate == 8000 and wav.dtype == torch.float32 and wav.tolist() == stereo.T.tolist()
    with open(path, "rb") as file:
        whole, _ = standin.load(file, normalize=False, channels_first=False)
    assert whole.dtype == dtype and whole.tolist() == (stereo * unit).tolist()
    assert standin.load(path, frame_offset=1, num_frames=1)[0].tolist() == [[0.125], [0.0]]
    about = standin.info(path)
    assert (about.sample_rate, about.num_frames, about.num_channels) == (8000, 3, 2)
    with pytest.raises(FileNotFoundError):
        standin.load(tmp_path / "none.wav")


def sine(frequency, rate, size):
    return torch.sin(2 * math.pi * frequency * torch.arange(size) / rate)[None]


@pytest.mark.parametrize("speed", [0.9, 1.1])
def test_speed_makes_a_sine_higher(speed):
    wav, rate = standin.apply_effects_tensor(
        sine(500, 16000, 8000), 16000, [["speed", str(speed)], ["rate", "16000"]]
    )
    assert rate == 16000 and wav.shape == (1, round(8000 / speed)) and wav.dtype == torch.float32
    expected = sine(500 * speed, 16000, wav.shape[1])
    torch.testing.assert_close(wav[:, 500:-500], expected[:, 500:-500], atol=1e-3, rtol=0)


def test_other_effects_are_refused():
    with pytest.raises(ValueError, match=r"\['reverb', '50'\]: only speed"):
        standin.apply_effects_tensor(torch.zeros(1, 9), 16000, [["reverb", "50"]])


@pytest.mark.parametrize("orig, new", [(48000, 16000), (8000, 16000), (44100, 16000)])
def test_resample_keeps_a_sine(orig, new):
    wav = standin.Resample(orig_freq=orig, new_freq=new)(sine(440, orig, orig // 4))
    assert wav.shape == (1, math.ceil(new * (orig // 4) / orig))
    expected = sine(440, new, wav.shape[1])
    torch.testing.assert_close(wav[:, 100:-100], expected[:, 100:-100], atol=2e-3, rtol=0)


def test_fbank_takes_one_channel_on_kaldis_scale():
    wav = torch.randint(-3000, 3000, (2, 4000), generator=torch.manual_seed(0)).float()
    options = {"num_mel_bins": 20, "window_type": "hamming"}
    plain = standin.fbank(wav, **options)
    assert plain.shape == (23, 20) and torch.equal(plain, standin.fbank(wav[:1], **options))
    louder = standin.fbank(wav * 2, **options)
    torch.testing.assert_close(louder, plain + math.log(4), atol=1e-4, rtol=0)
    noisy = [standin.fbank(wav, dither=1.0, **options) for _ in range(2)]
    assert 0 < (noisy[0] - plain).abs().mean() < 0.01 and not torch.equal(*noisy)
    with pytest.raises(ValueError, match="use_energy"):
        standin.fbank(wav, use_energy=True)


def test_mel_spectrogram_by_the_formula():
    wav = torch.randn(2, 400, generator=torch.manual_seed(0))
    sizes = {"sample_rate": 8000, "n_fft": 64, "win_length": 50, "hop_length": 20, "n_mels": 6}
    mel = standin.MelSpectrogram(**sizes, f_min=100, f_max=3000, window_fn=torch.hamming_window)
    assert sorted(mel.state_dict()) == ["mel_scale.fb", "spectrogram.window"]
    padded = np.pad(wav.numpy(), ((0, 0), (32, 32)), mode="reflect")
    window = np.zeros(64)
    window[7:57] = torch.hamming_window(50).numpy()
    frames = np.stack([padded[:, 20 * t : 20 * t + 64] * window for t in range(21)], axis=1)
    power = np.abs(np.fft.rfft(frames)) ** 2
    points = np.linspace(*(2595 * np.log10(1 + np.array([100, 3000]) / 700)), 8)
    hertz = 700 * (10 ** (points / 2595) - 1)
    expected = np.zeros((2, 6, 21))
    for m in range(6):
        triangle = np.interp(np.arange(33) * 125.0, hertz[m : m + 3], [0, 1, 0], left=0, right=0)
        expected[:, m] = power @ triangle
    np.testing.assert_allclose(mel(wav).numpy(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(find_spec("torchaudio") is None, reason="needs some torchaudio as the oracle")
def test_stand_in_equals_the_real_one():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(ORACLE)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


ORACLE = """
    import torch
    from wespeaker_qmargin import compat_torchaudio as ta, torchaudio_standin as standin
    if ta.extension_needed():
        ta.leave_out_extension()
    import torchaudio
    wav = torch.randn(2, 16000, generator=torch.manual_seed(0)) * 0.1
    for orig, new in (48000, 16000), (8000, 16000), (44100, 16000):
        ours, theirs = (m.Resample(orig, new)(wav) for m in (standin, torchaudio.transforms))
        torch.testing.assert_close(ours, theirs, atol=5e-6, rtol=0)
    sizes = dict(n_fft=512, win_length=400, hop_length=240, f_min=20, f_max=7600, n_mels=72)
    ours, theirs = (m.MelSpectrogram(**sizes, window_fn=torch.hamming_window)
                    for m in (standin, torchaudio.transforms))
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    torch.testing.assert_close(ours(wav), theirs(wav), atol=1e-3, rtol=1e-3)
    ours, theirs = (k.fbank(wav * 2**15, num_mel_bins=80, window_type="hamming",
                            use_energy=False, dither=0.0)
                    for k in (standin, torchaudio.compliance.kaldi))
    assert torch.equal(ours, theirs)
"""


# --- the trainer ---


@pytest.fixture
def restored(monkeypatch):
    """What the patches replace, put back afterwards."""
    for owner, name in (
        (torch.Tensor, "to"),
        (torch.Tensor, "cuda"),
        (torch.cuda, "set_device"),
        (torch.distributed, "init_process_group"),
        (torch.cuda.amp, "autocast"),
        (torch.cuda.amp, "GradScaler"),
        (os, "symlink"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    return monkeypatch


@pytest.mark.skipif(torch.cuda.is_available(), reason="is for machines without CUDA")
def test_cuda_is_the_cpu(restored):
    patch = PATCHES["cpu"]
    assert patch.needed(script('torch.device("cuda")')) and not patch.needed(script("cpu"))
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1).to(torch.device("cuda"))
    patch.apply()
    cpu = torch.device("cpu")
    assert torch.zeros(1).to(torch.device("cuda")).device == cpu
    assert torch.zeros(1).to("cuda:1", dtype=torch.float64).dtype == torch.float64
    assert torch.zeros(1).to(device="cuda", non_blocking=True).device == cpu
    assert torch.zeros(1).to(torch.zeros(1).double()).dtype == torch.float64
    layer = torch.nn.Linear(2, 2)
    weight = layer.weight
    assert layer.cuda().weight is weight and layer.to("cuda").double().weight.device == cpu
    assert torch.cuda.set_device(3) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="is for machines without CUDA")
def test_nccl_is_gloo_and_one_process_needs_no_torchrun(restored):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        restored.delenv(name, raising=False)
    train = script("int(os.environ['WORLD_SIZE']) cuda")
    restored.setattr(os, "environ", {**os.environ})
    with pytest.raises((ValueError, RuntimeError)):
        torch.distributed.init_process_group(backend="nccl")
    applied = compat.apply_needed(train)
    assert applied == ["cpu", "one-process"]
    assert (os.environ["WORLD_SIZE"], os.environ["RANK"]) == ("1", "0")
    assert not PATCHES["one-process"].needed(train), "torchrun's values stay"


@pytest.mark.parametrize(
    "given, expected",
    [("[0,1]", [0, 1]), (0, [0]), ([2, 3], [2, 3]), ("[1]", [1, 0]), ((1, 2), [1, 2])],
)
def test_gpus_as_text(given, expected, tmp_path, monkeypatch):
    utils = adapter.wespeaker_module("utils.utils")
    monkeypatch.setattr(utils, "parse_config_or_kwargs", utils.parse_config_or_kwargs)
    monkeypatch.setattr(compat_scripts.torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2" if expected == [1, 0] else "1")
    config = tmp_path / "c.yaml"
    config.write_text('gpus: "[0,1]"\nother: 1\n')
    untouched = utils.parse_config_or_kwargs(config)["gpus"]
    assert isinstance(untouched, str), "upstream reads the text of its own YAMLs as a list now"
    PATCHES["gpus"].apply()
    assert utils.parse_config_or_kwargs(config, gpus=given) == {"gpus": expected, "other": 1}
    with pytest.raises(ValueError, match="expected a list such as"):
        utils.parse_config_or_kwargs(config, gpus="none of them")


def test_final_model_is_linked_anew(restored, tmp_path):
    link = tmp_path / "final_model.pt"
    link.symlink_to("model_1.pt")
    with pytest.raises(FileExistsError):
        os.symlink("model_2.pt", link)
    PATCHES["final-model"].apply()
    os.symlink("model_2.pt", str(link))
    assert os.readlink(link) == "model_2.pt"
    other, real = tmp_path / "other.pt", tmp_path / "real" / "final_model.pt"
    other.symlink_to("a")
    real.parent.mkdir()
    real.write_text("weights")
    for path in (other, real):
        with pytest.raises(FileExistsError):
            os.symlink("b", path)
    assert real.read_text() == "weights"


def test_amp_without_deprecated_names(restored):
    with pytest.warns(FutureWarning, match="GradScaler"):
        torch.cuda.amp.GradScaler(enabled=False)
    with pytest.warns(FutureWarning, match="autocast"):
        torch.cuda.amp.autocast(enabled=False)
    PATCHES["amp"].apply()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaler = torch.cuda.amp.GradScaler(enabled=False)
        with torch.cuda.amp.autocast(enabled=False) as entered:
            assert isinstance(entered, torch.amp.autocast) and entered.device == "cuda"
    weight = torch.nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler.scale(weight * 2).backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight.item() == 0.0


def test_meters():
    average = meters.AverageValueMeter()
    assert math.isnan(average.value()[0])
    for value in (1.0, 2.0, 6.0):
        average.add(value)
    assert average.value()[0] == 3.0
    outputs, targets = np.eye(4)[[0, 1, 2, 3]], np.array([0, 1, 2, 0])
    for accuracy, expected in ((True, 75.0), (False, 25.0)):
        meter = meters.ClassErrorMeter(accuracy=accuracy)
        meter.add(outputs[:3], targets[:3])
        meter.add(outputs[3:], targets[3:])
        assert meter.value() == [expected]


def test_torchnet_has_a_stand_in_where_it_cannot_be_imported(monkeypatch):
    patch = PATCHES["torchnet"]
    monkeypatch.setitem(sys.modules, "torchnet", None)
    assert patch.needed(script(packages=["torchnet"])) and not patch.needed(script())
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    patch.apply()
    assert sys.modules["torchnet"].meter.ClassErrorMeter is meters.ClassErrorMeter


@pytest.mark.checkout
def test_real_torchnet_gives_the_same_numbers():
    pytest.importorskip("torchnet", exc_type=ImportError)
    from torchnet import meter

    rng = np.random.default_rng(0)
    pairs = [
        (meter.AverageValueMeter(), meters.AverageValueMeter()),
        (meter.ClassErrorMeter(accuracy=True), meters.ClassErrorMeter(accuracy=True)),
    ]
    for _ in range(20):
        value, outputs = rng.normal(), rng.normal(size=(8, 5))
        targets = rng.integers(5, size=8)
        for a in pairs[0]:
            a.add(value)
        for a in pairs[1]:
            a.add(outputs, targets)
    assert pairs[0][0].value()[0] == pytest.approx(pairs[0][1].value()[0], abs=1e-12)
    assert pairs[1][0].value() == pairs[1][1].value()


def test_frontends_whose_packages_are_missing():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FRONTENDS)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


FRONTENDS = """
    import sys
    sys.modules["s3prl"] = None  # as if it were not installed
    from wespeaker_qmargin import adapter, compat, checkout
    adapter.wespeaker_module("utils")
    try:
        import wespeaker.frontend; wespeaker.frontend.frontend_class_dict
    except ImportError as error:
        assert "s3prl" in str(error)
    else:
        raise AssertionError("upstream no longer imports every front-end")
    script = checkout.Script(None, "", frozenset(["frontend"]), frozenset())
    assert "frontends" in compat.apply_needed(script)
    adapter.register()
    from wespeaker.frontend import *
    assert set(frontend_class_dict) >= {"s3prl", "tfmel", "w2vbert", "wavlm"}
    assert frontend_class_dict["tfmel"].__module__ == "wespeaker.frontend.tfmel"
    try:
        frontend_class_dict["s3prl"](upstream_args={})
    except ImportError as error:
        assert "the front-end s3prl cannot be used here" in str(error)
    else:
        raise AssertionError
"""


def test_workers_are_forked(monkeypatch):
    patch, reads = PATCHES["fork"], script(modules=["dataset.lmdb_data"])
    chosen = []
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none: "forkserver")
    monkeypatch.setattr(
        multiprocessing, "set_start_method", lambda method, force: chosen.append((method, force))
    )
    assert patch.needed(reads) and not patch.needed(script())
    patch.apply()
    assert chosen == [("fork", True)]
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none: "fork")
    assert not patch.needed(reads)


@pytest.mark.checkout
def test_upstreams_lmdb_still_cannot_be_pickled(tmp_path):
    lmdb = pytest.importorskip("lmdb")
    import pickle

    with lmdb.open(str(tmp_path / "db")) as database, database.begin(write=True) as transaction:
        transaction.put(b"__keys__", pickle.dumps(["a"]))
    data = adapter.wespeaker_module("dataset.lmdb_data").LmdbData(str(tmp_path / "db"))
    with pytest.raises(TypeError):
        pickle.dumps(data)
