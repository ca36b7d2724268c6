"""The border with WeSpeaker, tested on its real classes."""

import subprocess
import sys
import textwrap

import pytest
import torch

from wespeaker_qmargin import QMarginProduct, adapter, upstream


@pytest.fixture
def projections():
    module = adapter.wespeaker_module("models.projections")
    yield module
    adapter.unregister()


def args(**more):
    return {"embed_dim": 8, "num_class": 5, "scale": 32.0, "easy_margin": False, **more}


def test_register_is_idempotent_and_undoable(projections):
    original = projections.get_projection
    adapter.register()
    once = projections.get_projection
    adapter.register()
    assert projections.get_projection is once and once is not original
    head = projections.get_projection(args(project_type="q_margin", alpha=1.25))
    assert isinstance(head, QMarginProduct) and head.margin == 0.0 and head.alpha == 1.25
    adapter.unregister()
    assert projections.get_projection is original
    adapter.unregister()
    assert projections.get_projection is original


def test_register_reaches_modules_that_imported_by_name(projections):
    import types

    user = types.ModuleType("user_of_projections")
    user.get_projection = user.build_head = projections.get_projection
    sys.modules["user_of_projections"] = user
    try:
        adapter.register()
        for function in (user.get_projection, user.build_head):
            assert isinstance(function(args(project_type="q_margin")), QMarginProduct)
        adapter.unregister()
        assert user.build_head is projections.get_projection
    finally:
        del sys.modules["user_of_projections"]


def test_every_known_head_is_the_one_asked_for(projections):
    adapter.register()
    names = {
        kind: type(projections.get_projection(args(project_type=kind))).__name__
        for kind in adapter.HEADS
    }
    assert len(set(names.values())) == len(adapter.HEADS)
    assert names["softmax"] == "Linear" and names["add_margin"] == "AddMarginProduct"


def test_unknown_head_is_told_with_the_nearest(projections):
    for register in (False, True):
        if register:
            adapter.register()
        build = projections.get_projection if register else adapter.get_projection
        with pytest.raises(ValueError, match=r"q_margn.*softmax.*Did you mean 'q_margin'"):
            build(args(project_type="q_margn"))


def test_head_that_this_wespeaker_lacks(projections, monkeypatch):
    monkeypatch.setattr(projections, "get_projection", lambda conf: projections.Linear(8, 5))
    with pytest.raises(ValueError, match="built Linear instead of HyperbolicAMSoftmax"):
        adapter.get_projection(args(project_type="ham_margin"))


@pytest.mark.parametrize("harmless", [{"easy_margin": False}, {"margin": 0.5}, {"do_lm": True}])
def test_harmless_foreign_options(harmless):
    adapter.check_projection_args({"project_type": "q_margin", **harmless})


@pytest.mark.parametrize(
    "refused, message",
    [
        ({"easy_margin": True}, "easy_margin"),
        ({"K": 3}, "projection_args.K"),
        ({"mp": 0.06}, "mp"),
        ({"k_top": 5}, "k_top"),
        ({"scal": 3}, "Did you mean 'scale'"),
    ],
)
def test_refused_foreign_options(refused, message):
    with pytest.raises(ValueError, match=message):
        adapter.check_projection_args({"project_type": "q_margin", **refused})


def test_backbones_and_schedulers():
    xvec = adapter.get_speaker_model("XVEC")(feat_dim=8, hid_dim=4, stats_dim=6, embed_dim=5)
    assert xvec(torch.randn(2, 40, 8))[-1].shape == (2, 5)
    assert adapter.get_scheduler("ExponentialDecrease").__module__ == "wespeaker.utils.schedulers"
    with pytest.raises(ValueError, match="Did you mean 'ResNet34'"):
        adapter.get_speaker_model("ResNet43")
    with pytest.raises(ValueError, match="unknown backbone 'Foo'"):
        adapter.get_speaker_model("Foo")
    with pytest.raises(ValueError, match="Did you mean 'MarginScheduler'"):
        adapter.get_scheduler("MarginSchedule")


def test_narrow_resnet34():
    narrow = adapter.build_speaker_model(
        "ResNet",
        {
            "block": "BasicBlock",
            "num_blocks": [3, 4, 6, 3],
            "m_channels": 4,
            "feat_dim": 16,
            "embed_dim": 8,
        },
    )
    assert narrow(torch.randn(2, 40, 16))[-1].shape == (2, 8)
    wide = adapter.build_speaker_model("ResNet34", {"feat_dim": 16, "embed_dim": 8})
    assert narrow.state_dict().keys() == wide.state_dict().keys()


def run_python(code: str, **environment) -> subprocess.CompletedProcess:
    import os

    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=120,
    )


FAKE_INIT = """
    import sys
    sys.heavy = getattr(sys, "heavy", 0) + 1
    from .models import projections
    from .late import load_model
"""


@pytest.fixture
def fake_checkout(tmp_path):
    """A package of WeSpeaker's shape whose ``__init__`` tells when it runs."""
    files = {
        "wespeaker/__init__.py": textwrap.dedent(FAKE_INIT),
        "wespeaker/late.py": "def load_model(name): return name",
        "wespeaker/models/__init__.py": "",
        "wespeaker/models/projections.py": "def get_projection(conf): return 'linear'",
        "wespeaker/models/speaker_model.py": "def get_speaker_model(name): return 'theirs'",
        "wespeaker/frontend/__init__.py": (
            "import sys; sys.frontend_ran = True\nclasses = {}\nfrontend_class_dict = {}"
        ),
        "wespeaker/frontend/tfmel.py": "name = 'tfmel'",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_package_init_runs_when_it_is_used_and_once(fake_checkout):
    done = run_python(
        """
        import sys
        from wespeaker_qmargin import adapter
        adapter.register()
        assert adapter.wespeaker_module("frontend.tfmel").name == "tfmel"
        assert not hasattr(sys, "heavy") and not hasattr(sys, "frontend_ran")
        import wespeaker
        assert not hasattr(sys, "heavy"), "import alone needs nothing of it"
        assert wespeaker.load_model("x") == "x" and sys.heavy == 1
        assert wespeaker.models.projections.get_projection is not None
        from wespeaker.late import load_model
        from wespeaker.frontend import *
        assert classes == {} and sys.frontend_ran and sys.heavy == 1
        from wespeaker.frontend import frontend_class_dict
        assert list(frontend_class_dict) == ["wavlm", "w2vbert"], "added when it was loaded"
        from wespeaker.models.speaker_model import get_speaker_model
        assert get_speaker_model("MHFA").__name__ == "MHFA"
        assert get_speaker_model("ResNet34") == "theirs"
        adapter.unregister()
        assert frontend_class_dict == {}
        from wespeaker.models.speaker_model import get_speaker_model
        assert get_speaker_model("MHFA") == "theirs"
        import inspect; inspect.getmodule(adapter)
        """,
        WESPEAKER_ROOT=str(fake_checkout),
    )
    assert done.returncode == 0, done.stderr


def test_real_package_already_imported_is_kept(fake_checkout):
    done = run_python(
        """
        import sys
        import wespeaker
        assert sys.heavy == 1
        from wespeaker.models.projections import get_projection
        from wespeaker_qmargin import adapter
        adapter.register()
        assert type(get_projection({"project_type": "q_margin", "embed_dim": 4,
                                    "num_class": 3})).__name__ == "QMarginProduct"
        assert sys.heavy == 1
        """,
        PYTHONPATH=str(fake_checkout),
    )
    assert done.returncode == 0, done.stderr


def test_init_that_fails_says_its_own_reason(fake_checkout):
    (fake_checkout / "wespeaker" / "late.py").write_text("import no_such_package")
    done = run_python(
        """
        from wespeaker_qmargin import adapter
        adapter.register()
        import wespeaker
        for _ in range(2):
            try:
                wespeaker.load_model
            except ModuleNotFoundError as error:
                assert "no_such_package" in str(error)
            else:
                raise AssertionError
        """,
        WESPEAKER_ROOT=str(fake_checkout),
    )
    assert done.returncode == 0, done.stderr


def test_wespeaker_root_that_is_none(tmp_path):
    done = run_python(
        "from wespeaker_qmargin import adapter; adapter.register()", WESPEAKER_ROOT=str(tmp_path)
    )
    assert done.returncode != 0 and "not a WeSpeaker checkout" in done.stderr


def test_source_is_told(fake_checkout):
    source = upstream.wespeaker_source()
    assert source["path"].endswith("wespeaker")
    assert (source["version"] is None) != (source["commit"] is None) or source["commit"] is None


def test_plain_import_is_light():
    done = run_python(
        """
        import sys, wespeaker_qmargin
        heavy = {"wespeaker", "transformers", "accelerate", "yaml", "kaldiio", "soundfile",
                 "torchaudio", "matplotlib", "scipy", "soxr", "tensorboard"}
        assert not heavy & set(sys.modules), heavy & set(sys.modules)
        for name in ("alpha_softargmax", "q_margin_loss", "zero_loss_gap", "QMarginProduct",
                     "register"):
            assert hasattr(wespeaker_qmargin, name), name
        """
    )
    assert done.returncode == 0, done.stderr
