"""The launcher: which WeSpeaker, which script, what it says, and what it stops."""

import json
import logging
import os
import subprocess
import sys
import textwrap
import types
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml

from wespeaker_qmargin import checkout, launch, swallowed
from wespeaker_qmargin.config import load_config
from wespeaker_qmargin.model import SpeakerNet
from wespeaker_qmargin.schedule import Schedules, build_optimizer

LAUNCH = ["-m", "wespeaker_qmargin.launch"]


def run(*words, **environment) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *map(str, words)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        timeout=300,
    )


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


# --- a script of one's own, on the WeSpeaker that is installed ---

OWN = """
    import sys
    from wespeaker.models.projections import get_projection
    from wespeaker.models.speaker_model import get_speaker_model
    import beside
    head = {"embed_dim": 4, "num_class": 3, "scale": 32.0, "project_type": sys.argv[1]}
    print(__name__, sys.argv[1:], __file__ == sys.argv[0], beside.here)
    print(type(get_projection(head)).__name__, get_speaker_model("MHFA").__name__)
    sys.exit(7)
"""


@pytest.fixture
def own(tmp_path):
    write(tmp_path / "beside.py", "here = True")
    return write(tmp_path / "own.py", OWN)


def test_script_runs_as_python_would_run_it(own):
    done = run(*LAUNCH, own, "q_margin", "--config", "x")
    assert done.returncode == 7, done.stderr
    assert done.stdout == (
        "__main__ ['q_margin', '--config', 'x'] True True\nQMarginProduct MHFA\n"
    )
    (line,) = done.stderr.splitlines()
    package = checkout.find_package()
    assert f"WeSpeaker {package} (" in line and line.endswith("; compat: none needed")


def test_unknown_head_stops_and_ranks_but_the_first_are_silent(own):
    done = run(*LAUNCH, own, "q_margn", RANK="1")
    assert done.returncode == 1 and "wespeaker-qmargin" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("ValueError: project_type: unknown head")


@pytest.mark.parametrize(
    "words, message",
    [
        (["none/at/all.py"], "none/at/all.py: no such script"),
        (["--no-compat", "cpus", "OWN", "softmax"], "--no-compat cpus: expected one of all, "),
    ],
)
def test_bad_commands_end_in_one_line(own, words, message):
    with pytest.raises(SystemExit) as stopped:
        launch.main([str(own) if word == "OWN" else word for word in words])
    assert str(stopped.value).startswith(f"wespeaker_qmargin.launch: error: {message}")


def test_help_names_every_patch_and_its_place(capsys):
    with pytest.raises(SystemExit):
        launch.main(["--help"])
    shown = capsys.readouterr().out
    for patch in launch.PATCHES:
        assert patch.name in shown and f"for {patch.where}" in shown


# --- which WeSpeaker ---


@pytest.fixture
def no_wespeaker(monkeypatch):
    monkeypatch.delenv("WESPEAKER_ROOT", raising=False)
    monkeypatch.setattr(checkout.importlib.util, "find_spec", lambda name: None)


SOURCES = {
    "__init__.py": "",
    "models/projections.py": "def get_projection(conf): return 'theirs'",
    "models/speaker_model.py": "def get_speaker_model(model_name): ...",
    "models/__init__.py": "",
    "frontend/__init__.py": "frontend_class_dict = {}",
    "utils/__init__.py": "",
    "utils/utils.py": """
        import yaml

        def parse_config_or_kwargs(config_file, **kwargs):
            with open(config_file) as file:
                content = yaml.safe_load(file)
            list(content.keys())
            return dict(content, **kwargs)
    """,
    "dataset/dataset.py": "def Dataset(data_type, data_list_file, configs, spk2id_dict): ...",
    "dataset/processor.py": """
        import logging

        gone = set()

        def keep_good(data):
            for sample in data:
                try:
                    if "bad" in sample["src"] or sample["src"] in gone:
                        raise OSError("no such file")
                    yield {"key": sample["src"], "long": "short" not in sample["src"]}
                except Exception as ex:
                    logging.warning("Failed to read {}".format(sample["src"]))

        def parse_raw(data):
            return keep_good(data)

        url_opener, parse_feat = parse_raw, parse_raw
        def url_opener(data): return keep_good(data)
        def parse_feat(data): return keep_good(data)
        def tar_file_and_group(data): return data
        def filter(data, min_num_frames=100): return (s for s in data if s["long"])
    """,
    "bin/train.py": "print('trained')",
}


@pytest.fixture
def fake(tmp_path):
    """A checkout of WeSpeaker's shape."""
    for name, text in SOURCES.items():
        write(tmp_path / "checkout" / "wespeaker" / name, text)
    return tmp_path / "checkout"


def test_none_is_found(no_wespeaker):
    with pytest.raises(FileNotFoundError, match="no WeSpeaker found: set WESPEAKER_ROOT to a"):
        launch.prepare(None)


def test_root_that_is_no_checkout(tmp_path, monkeypatch):
    monkeypatch.setenv("WESPEAKER_ROOT", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="not a WeSpeaker checkout"):
        checkout.find_package()


def test_script_brings_its_own_checkout(fake, no_wespeaker):
    package = fake / "wespeaker"
    assert checkout.find_package(package / "bin" / "train.py") == package


def test_link_to_the_same_checkout_is_not_another_one(fake, tmp_path, monkeypatch):
    (tmp_path / "recipe").mkdir()
    link = tmp_path / "recipe" / "wespeaker"
    link.symlink_to(fake / "wespeaker")
    monkeypatch.setenv("WESPEAKER_ROOT", str(fake))
    assert checkout.find_package(link / "bin" / "train.py") == fake / "wespeaker"


def test_two_wespeakers(fake):
    script = fake / "wespeaker" / "bin" / "train.py"
    done = run(*LAUNCH, script, WESPEAKER_ROOT="")
    assert done.returncode == 1 and "two WeSpeakers" in done.stderr
    assert f"WESPEAKER_ROOT={fake}" in done.stderr
    done = run(*LAUNCH, script, WESPEAKER_ROOT=str(fake))
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr


def test_bare_name_is_a_script_of_the_wespeaker_in_use(fake, monkeypatch):
    monkeypatch.setenv("WESPEAKER_ROOT", str(fake))
    assert checkout.find_script("train.py") == fake / "wespeaker" / "bin" / "train.py"
    with pytest.raises(FileNotFoundError, match=r"trian.py: no such file .*which has train.py"):
        checkout.find_script("trian.py")


def test_installed_wespeaker_has_no_scripts(monkeypatch):
    monkeypatch.delenv("WESPEAKER_ROOT", raising=False)
    if (checkout.find_package() / "bin").is_dir():
        pytest.skip("WeSpeaker is a checkout here")
    with pytest.raises(FileNotFoundError, match=r"has no bin/ .* set WESPEAKER_ROOT"):
        checkout.find_script("train.py")


# --- functions that differ ---


def test_functions_of_the_wespeaker_in_use_are_the_ones_we_wrap(fake):
    checkout.check_functions(checkout.find_package())
    checkout.check_functions(fake / "wespeaker")


@pytest.mark.parametrize(
    "file, text, message",
    [
        ("models/projections.py", "def build(conf): ...", r"projections.py has no get_projection"),
        (
            "models/speaker_model.py",
            "def get_speaker_model(model_name, args): ...",
            r"get_speaker_model\(model_name, args\) instead of get_speaker_model\(model_name\)",
        ),
        ("dataset/processor.py", "def filter(data): ...", "processor.py has no url_opener"),
    ],
)
def test_other_functions_are_named(fake, file, text, message):
    write(fake / "wespeaker" / file, text)
    with pytest.raises(ValueError, match=message):
        checkout.check_functions(fake / "wespeaker")


def test_other_functions_stop_before_anything_is_changed(fake):
    write(fake / "wespeaker" / "dataset" / "processor.py", "def filter(data): ...")
    code = """if True:
        import os, sys, torch
        from pathlib import Path
        from wespeaker_qmargin import adapter, launch
        to, path = torch.Tensor.to, list(sys.path)
        try:
            launch.prepare(Path(sys.argv[1]))
        except ValueError as error:
            assert "nothing was registered" in str(error)
        assert "wespeaker" not in sys.modules and sys.path == path and torch.Tensor.to is to
        build = adapter.wespeaker_module("models.projections").get_projection
        assert not hasattr(build, "_qmargin_upstream")
    """
    script = write(fake / "wespeaker" / "bin" / "train.py", "cuda = 1")
    done = run("-c", code, script, WESPEAKER_ROOT=str(fake))
    assert done.returncode == 0, done.stderr


def test_optional_parameters_may_come(fake):
    write(fake / "wespeaker" / "models" / "projections.py", "def get_projection(conf, x=1): ...")
    checkout.check_functions(fake / "wespeaker")


# --- what a script imports ---


def test_imports_are_followed_through_wespeaker(fake):
    package = fake / "wespeaker"
    write(package / "utils" / "executor.py", "import tableprint as tp\nfrom . import utils")
    write(package / "frontend" / "__init__.py", "from .s3prl import S3prlFrontend")
    write(package / "frontend" / "s3prl.py", "import s3prl")
    script = write(
        package / "bin" / "train.py",
        """
        import os, fire
        from wespeaker.utils.executor import run_epoch
        from wespeaker.frontend import *
        def late(): import not_at_once
        """,
    )
    read = checkout.read_script(script, package)
    assert read.modules == {"utils.executor", "utils", "utils.utils", "frontend"}
    assert read.packages == {"os", "fire", "tableprint", "yaml"}


def test_missing_packages_are_named_together(tmp_path):
    write(tmp_path / "mine.py", "")
    path = write(tmp_path / "x.py", "import os, mine, no_such_a, sklearn_x\nimport no_such_b.c")
    script = checkout.read_script(path, tmp_path)
    with pytest.raises(ModuleNotFoundError, match="pip install no_such_a no_such_b sklearn_x$"):
        checkout.check_packages(script)


# --- faults that upstream swallows ---


@pytest.fixture
def processor(fake, monkeypatch):
    """The fake data pipeline, watched."""
    path = fake / "wespeaker" / "dataset" / "processor.py"
    module = types.ModuleType("processor")
    module.__file__ = str(path)
    exec(compile(path.read_text(), str(path), "exec"), vars(module))
    monkeypatch.setattr(swallowed, "wespeaker_module", lambda name: module)
    root = logging.getLogger()
    monkeypatch.setattr(root, "filters", [])
    swallowed.watch(checkout.Script(None, "", frozenset(["dataset.processor"]), frozenset()))
    return module


def listed(names, *, repeat, num_workers=1):
    """What upstream's DataList yields: the same text objects again and again."""
    while True:
        for name in names:
            yield {"src": name, "num_workers": num_workers}
        if not repeat:
            return


def new(word: str) -> str:
    """Another text object, as every line of a file is."""
    return "".join(list(word))


def test_list_of_which_some_are_bad_is_as_before(processor, caplog):
    stream = processor.parse_raw(listed(["a", "bad1", new("bad1"), "b"], repeat=True))
    assert [next(stream)["key"] for _ in range(6)] == ["a", "b", "a", "b", "a", "b"]
    assert "Failed to read bad1 (OSError: no such file)" in caplog.text, "the reason is told"


@pytest.mark.parametrize("reader", ["parse_raw", "parse_feat", "url_opener"])
def test_list_whose_files_all_fail_stops_after_one_pass(processor, reader):
    stream = getattr(processor, reader)(listed(["bad1", "bad2", "bad3", "bad4"], repeat=True))
    with pytest.raises(ValueError, match=r"this worker's 4 entries .*bad1 \(OSError.*bad3.*; \.\."):
        next(stream)


def test_equal_bad_entries_are_not_a_pass(processor):
    twice = [new("bad1") for _ in range(3)]
    stream = processor.parse_raw(listed([*twice, "a"], repeat=True))
    assert next(stream)["key"] == "a" and next(stream)["key"] == "a"


def test_files_that_vanish_during_training_stop_it(processor):
    stream = processor.parse_raw(listed(["a1", "a2", "bad3"], repeat=True))
    assert next(stream)["key"] == "a1"
    processor.gone.update(["a1", "a2"])
    with pytest.raises(ValueError, match="3 entries"):
        next(stream)


def test_everything_too_short_stops(processor):
    data = listed(["short1", "short1b"], repeat=True)
    stream = processor.filter(processor.parse_raw(data))
    with pytest.raises(ValueError, match="short1: shorter than .*min_num_frames"):
        next(stream)
    mixed = processor.filter(processor.parse_raw(listed(["short1", "a"], repeat=True)))
    assert [next(mixed)["key"] for _ in range(3)] == ["a", "a", "a"]


def test_list_that_ends(processor, caplog):
    assert [s["key"] for s in processor.parse_raw(listed(["bad1", "a"], repeat=False))] == ["a"]
    assert list(processor.parse_raw(listed([], repeat=False))) == []
    with pytest.raises(ValueError, match="1 entries"):
        list(processor.parse_raw(listed(["bad1"], repeat=False)))
    assert list(processor.parse_raw(listed(["bad1"], repeat=False, num_workers=2))) == []
    assert "none of this worker's 1 entries" in caplog.text


@pytest.fixture
def parse(fake, monkeypatch):
    """A function that parses a config, watched, in a script that trains."""
    path = fake / "wespeaker" / "utils" / "utils.py"

    def parse(content, *fixes):
        utils, dataset = types.ModuleType("utils"), types.ModuleType("dataset")
        exec(path.read_text(), vars(utils))
        dataset.Dataset = lambda kind, file, configs, speakers: configs
        modules = {"utils.utils": utils, "dataset.dataset": dataset}
        monkeypatch.setattr(swallowed, "wespeaker_module", modules.get)
        script = checkout.Script(None, "do_lm", frozenset(["utils.utils"]), frozenset())
        swallowed.watch(script, fixes=fixes)
        config = fake / "c.yaml"
        config.write_text(yaml.safe_dump(content))
        found = utils.parse_config_or_kwargs(str(config))
        made = dataset.Dataset("raw", "list", found["dataset_args"], {})
        return found, made

    return parse


LM = {"do_lm": True, "data_type": "raw", "dataset_args": {"speed_perturb": True, "x": 1}}


def test_large_margin_stage_that_perturbs_is_told_and_not_changed(parse, caplog):
    found, made = parse(LM)
    assert made is found["dataset_args"] and found == LM
    (record,) = caplog.records
    assert "--fix lm-speed" in record.getMessage() and "\n" not in record.getMessage()


def test_fix_lm_speed(parse, caplog):
    found, made = parse(LM, "lm-speed")
    assert made == {"speed_perturb": False, "x": 1} and found == LM, "the head keeps its classes"
    assert caplog.records == []


def test_experts_without_router_losses_are_told(parse, caplog):
    content = {"dataset_args": {"frontend": "wavlm", "wavlm_args": {"moe": {"experts": 3}}}}
    parse(content)
    (message,) = caplog.messages
    assert "without the z and balance losses" in message
    caplog.clear()
    content["dataset_args"]["wavlm_args"]["moe"] = {}
    parse(content)
    assert not caplog.messages


@pytest.mark.parametrize(
    "other", [{"do_lm": False}, {"data_type": "feat"}, {"dataset_args": {"speed_perturb": False}}]
)
def test_other_stages_are_left_alone(parse, caplog, other):
    found, made = parse({**LM, **other}, "lm-speed")
    assert made is found["dataset_args"] and caplog.records == []


def test_yaml_that_is_no_mapping(parse):
    with pytest.raises(ValueError, match="c.yaml: expected a YAML mapping"):
        parse(["a", "b"])


# --- upstream's own scripts ---

needs_packages = pytest.mark.skipif(
    not all(map(find_spec, ("fire", "tableprint", "sklearn"))),
    reason="upstream's scripts need fire, tableprint and scikit-learn",
)


@pytest.fixture(scope="session")
def upstream_config(corpus, tmp_path_factory):
    """Upstream's resnet.yaml with another head, and sizes for a CPU; its data beside it."""
    folder = tmp_path_factory.mktemp("upstream")
    wavs = dict(line.split() for line in (corpus / "wav.scp").read_text().splitlines())
    speakers = dict(line.split() for line in (corpus / "utt2spk").read_text().splitlines())
    lines = [json.dumps({"key": k, "wav": w, "spk": speakers[k]}) for k, w in wavs.items()]
    (folder / "raw.list").write_text("".join(f"{line}\n" for line in lines))
    trials = [
        f"{a} {b} {'target' if speakers[a] == speakers[b] else 'nontarget'}\n"
        for i, a in enumerate(wavs)
        for b in list(wavs)[:i]
    ]
    (folder / "trials").write_text("".join(trials))
    root = Path(os.environ["WESPEAKER_ROOT"])
    config = yaml.safe_load(
        (root / "examples" / "voxceleb" / "v2" / "conf" / "resnet.yaml").read_text()
    )
    config["projection_args"]["project_type"] = "q_margin"
    config["projection_args"]["alpha"] = 1.5
    config.update(num_epochs=2, num_avg=2, save_epoch_interval=1, log_batch_interval=1)
    config["dataloader_args"].update(batch_size=8, num_workers=1)
    config["dataset_args"].update(num_frms=60, filter_args={"min_num_frames": 50})
    config["dataset_args"]["fbank_args"].update(num_mel_bins=16)
    config.update(model="ResNet18", model_args={"feat_dim": 16, "embed_dim": 16})
    config["margin_update"].update(increase_start_epoch=1, fix_start_epoch=2)
    config["scheduler_args"].update(warm_up_epoch=1)
    config.update(
        data_type="raw",
        train_data=str(folder / "raw.list"),
        train_label=str(corpus / "utt2spk"),
        exp_dir=str(folder / "exp"),
    )
    (folder / "c.yaml").write_text(yaml.safe_dump(config))
    return folder / "c.yaml"


def launched(name, *words, torchrun=0, **environment):
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={torchrun}"]
    done = run(*(command if torchrun else []), *LAUNCH, name, *words, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.mark.checkout
@needs_packages
def test_recipe_of_upstreams_scripts(upstream_config):
    exp = upstream_config.parent / "exp"
    trained = launched("train.py", "--config", upstream_config)
    assert "compat: " in trained.stderr.splitlines()[0]
    assert os.readlink(exp / "models" / "final_model.pt") == "model_2.pt"
    models = ["--src_path", exp / "models", "--num", "2"]
    launched("average_model.py", "--dst_model", exp / "models" / "avg_model.pt", *models)
    words = ["--config", exp / "config.yaml", "--model_path", exp / "models" / "avg_model.pt"]
    words += ["--data_type", "raw", "--data_list", upstream_config.parent / "raw.list"]
    launched("extract.py", *words, "--embed_ark", exp / "emb" / "xvector.ark")
    scp = exp / "emb" / "xvector.scp"
    assert len(scp.read_text().splitlines()) == 60
    words = ["--exp_dir", exp, "--eval_scp_path", scp, "--cal_mean", "True"]
    trials = upstream_config.parent / "trials"
    launched("score.py", *words, "--cal_mean_dir", exp / "emb", trials)
    scores = exp / "scores" / "trials.score"
    words = ["--trial_score_file", scores, "--score_norm_file", exp / "norm.score"]
    words += ["--cohort_emb_scp", scp, "--eval_emb_scp", scp, "--top_n", "10"]
    words += ["--mean_vec_path", exp / "emb" / "mean_vec.npy"]
    launched("score_norm.py", "--score_norm_method", "asnorm", *words)
    costs = ["--p_target", "0.01", "--c_fa", "1", "--c_miss", "1"]
    told = launched("compute_metrics.py", *costs, scores, exp / "norm.score")
    assert (told.stdout + told.stderr).count("EER = ") == 2
    # a run that goes on: final_model.pt is there
    more = ["--num_epochs", "3", "--checkpoint", exp / "models" / "model_2.pt"]
    launched("train.py", "--config", upstream_config, *more)
    assert os.readlink(exp / "models" / "final_model.pt") == "model_3.pt"


@pytest.mark.checkout
@needs_packages
def test_wavlm_and_mhfa_in_upstreams_trainer(upstream_config, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_conv_pos_embeddings": 8}
    shape = transformers.WavLMConfig(
        num_hidden_layers=2, num_attention_heads=2, conv_dim=[8] * 7, **sizes
    )
    transformers.WavLMModel(shape).save_pretrained(tmp_path / "wavlm")
    normalised = {"do_normalize": False, "feature_extractor_type": "Wav2Vec2FeatureExtractor"}
    (tmp_path / "wavlm" / "preprocessor_config.json").write_text(json.dumps(normalised))
    config = yaml.safe_load(upstream_config.read_text())
    config.update(model="MHFA", model_args={"embed_dim": 8, "head_nb": 2, "nb_layer": 3})
    config.update(exp_dir=str(tmp_path / "exp"), num_epochs=1)
    config["dataset_args"].update(frontend="wavlm", cmvn=False)
    config["dataset_args"]["wavlm_args"] = {"model_name": str(tmp_path / "wavlm")}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    launched("train.py", "--config", tmp_path / "c.yaml")
    keys = torch.load(tmp_path / "exp" / "models" / "model_1.pt").keys()
    assert "pooling_fc.weight" in keys and "projection.weight" in keys
    assert any(key.startswith("frontend.encoder.") for key in keys)


@pytest.mark.checkout
@needs_packages
def test_two_ranks(upstream_config, tmp_path):
    words = ["--config", upstream_config, "--exp_dir", tmp_path / "exp", "--num_epochs", "1"]
    done = launched("train.py", *words, torchrun=2)
    assert done.stderr.count("head q_margin, model MHFA") == 1
    assert (tmp_path / "exp" / "models" / "model_1.pt").is_file()


@pytest.mark.checkout
@needs_packages
def test_real_pipeline_stops_when_no_file_can_be_read(upstream_config, tmp_path):
    bad = tmp_path / "bad.list"
    text = (upstream_config.parent / "raw.list").read_text()
    bad.write_text(text.replace('"wav": "', '"wav": "/none'))
    words = ["--config", upstream_config, "--exp_dir", tmp_path / "exp", "--train_data", bad]
    done = run(*LAUNCH, "train.py", *words)
    assert done.returncode == 1
    assert "none of this worker's 60 entries of the list could be used" in done.stderr
    assert "No such file or directory" in done.stderr


RECORD = """
    import runpy, sys, torch
    from pathlib import Path
    from wespeaker_qmargin import launch
    launch.prepare(Path(sys.argv[1]))
    import wespeaker.dataset.processor as processor
    import wespeaker.utils.executor as executor
    train, folder = sys.argv[1:3]
    theirs, fbank = executor.run_epoch, processor.compute_fbank
    losses, batches = [], []

    def compute_fbank(data, **options):
        for sample in data:
            for made in fbank(iter([sample]), **options):
                yield {**made, "wav": sample["wav"][0]}

    def run_epoch(dataloader, epoch_iter, model, *args, **options):
        net = model.module
        if not batches:
            torch.save(net.state_dict(), f"{folder}/init.pt")
            net.projection.register_forward_hook(lambda m, i, out: losses.append(out[1].item()))

        def recorded():
            for batch in dataloader:
                batches.append((batch["wav"], batch["label"]))
                yield batch

        theirs(recorded(), epoch_iter, model, *args, **options)
        torch.save((batches, losses), f"{folder}/run.pt")

    processor.compute_fbank, executor.run_epoch = compute_fbank, run_epoch
    sys.argv = [train, *sys.argv[3:]]
    runpy.run_path(train, run_name="__main__")
"""


@pytest.mark.checkout
@needs_packages
def test_loss_curve_is_ours_on_the_same_batches(upstream_config, tmp_path):
    """Upstream's trainer, and our network, optimiser and schedules on the waves that it drew.

    The batches and the first weights are taken from upstream's run; dither, which is drawn
    otherwise, is off. Features, network, head, loss and updates are each one's own.
    """
    config = yaml.safe_load(upstream_config.read_text())
    config["dataset_args"]["fbank_args"]["dither"] = 0.0
    config["exp_dir"] = str(tmp_path / "exp")
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(config))
    train = Path(os.environ["WESPEAKER_ROOT"]) / "wespeaker" / "bin" / "train.py"
    done = run(write(tmp_path / "record.py", RECORD), train, tmp_path, "--config", path)
    assert done.returncode == 0, done.stderr[-3000:]
    batches, expected = torch.load(tmp_path / "run.pt")
    num_batches = len(expected)
    assert num_batches == 2 * (60 // 8)

    ours = load_config(path)
    net = SpeakerNet(ours, num_class=30)
    state = torch.load(tmp_path / "init.pt")
    mine = {k: state[k.removeprefix("backbone.")] for k in net.state_dict()}
    net.load_state_dict(mine)
    optimizer = build_optimizer(net, ours)
    schedules = Schedules(net, optimizer, ours, epoch_iter=num_batches // 2, step_batch=8)
    found = []
    for step, (wavs, labels) in enumerate(batches[:num_batches]):
        schedules.step(step)
        loss, _ = net(wavs, labels, seeds=range(8))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    worst = max(abs(a - b) for a, b in zip(found, expected))
    print(f"largest difference of {num_batches} losses: {worst:.2e}")
    assert worst < 1e-4
    assert max(expected) - min(expected) > 0.1, "the curve moves"


@pytest.mark.parametrize(
    ("scale", "warned"), [(32.0, True), (10, False), ("auto", False), (None, False)]
)
def test_a_scale_left_from_cosface_is_told(parse, scale, warned, caplog):
    head = {"project_type": "q_margin", "alpha": 1.5}
    head |= {} if scale is None else {"scale": scale}
    parse({"dataset_args": {}, "projection_args": head, "margin_update": {"final_margin": 0.2}})
    assert ("gap of 1.53" in caplog.text and "'scale: auto' (10)" in caplog.text) == warned
