"""What keeps WeSpeaker's own scripts from running here, and what is done about it.

One `Patch` a fault. It changes nothing where its fault does not show, hence no result on a machine
where the script ran before; everything is changed in this process only.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from wespeaker_qmargin import compat_scripts as cures
from wespeaker_qmargin import compat_torchaudio as ta
from wespeaker_qmargin.checkout import Script


@dataclass(frozen=True)
class Patch:
    """A fault of WeSpeaker's here, and its cure.

    ``where`` is the ``file:line`` in WeSpeaker (of 2026-07-08) that fails, ``calls`` what stands
    there, ``cure`` what is done instead.
    """

    name: str
    where: str
    calls: str
    cure: str
    needed: Callable[[Script], bool]
    apply: Callable[[], None]


def apply_needed(script: Script, *, without: Collection[str] = ()) -> list[str]:
    """Apply the patches that ``script`` needs here; return their names.

    ``without`` names patches to leave off; ``all`` is every one.

    Raises:
        ValueError: an unknown name in ``without``.
    """
    known = [patch.name for patch in PATCHES]
    for name in without:
        if name not in (*known, "all"):
            raise ValueError(f"--no-compat {name}: expected one of all, {', '.join(known)}")
    applied = []
    for patch in PATCHES:
        if patch.name not in without and "all" not in without and patch.needed(script):
            patch.apply()
            applied.append(patch.name)
    return applied


def _imports_torchaudio(script: Script) -> bool:
    return "torchaudio" in script.packages or "frontend" in script.modules


def _torchaudio(needed: Callable[[], bool]) -> Callable[[Script], bool]:
    def needed_here(script: Script) -> bool:
        if not _imports_torchaudio(script) or ta.absent() or ta.extension_needed():
            return False
        return needed()

    return needed_here


# In the order in which they are tried: those of torchaudio build on one another.
PATCHES = (
    Patch(
        "torchaudio-absent",
        "dataset/processor.py:31",
        "import torchaudio",
        "load, speed, Resample, fbank and MelSpectrogram on soundfile, soxr and torch",
        lambda script: _imports_torchaudio(script) and ta.absent(),
        ta.use_standin,
    ),
    Patch(
        "torchaudio-extension",
        "dataset/processor.py:31",
        "import torchaudio",
        "torchaudio without its compiled part, which cannot be loaded here",
        lambda script: _imports_torchaudio(script) and ta.extension_needed(),
        ta.leave_out_extension,
    ),
    Patch(
        "torchaudio-load",
        "dataset/processor.py:135",
        "torchaudio.load(wav)",
        "files read by soundfile",
        _torchaudio(ta.load_needed),
        ta.replace_load,
    ),
    Patch(
        "torchaudio-sox",
        "dataset/processor.py:281",
        "torchaudio.sox_effects.apply_effects_tensor(",
        "speed perturbation by soxr",
        _torchaudio(ta.sox_needed),
        ta.replace_sox,
    ),
    Patch(
        "s3prl-import",
        "frontend/s3prl.py:19",
        "import s3prl",
        "torchaudio.set_audio_backend, which s3prl calls when it is imported, does nothing",
        _torchaudio(ta.backend_needed),
        ta.replace_backend,
    ),
    Patch(
        "frontends",
        "frontend/__init__.py:16",
        "from .s3prl import S3prlFrontend",
        "a front-end whose packages are missing stops only those that ask for it",
        cures.broken_frontends,
        cures.leave_out_frontends,
    ),
    Patch(
        "torchnet",
        "utils/executor.py:19",
        "import torchnet as tnt",
        "two meters of our own for a package that no longer installs",
        cures.torchnet_fails,
        cures.count_without_torchnet,
    ),
    Patch(
        "cpu",
        "bin/train.py:54",
        "dist.init_process_group(backend='nccl')",
        "no CUDA device here: the CPU, and gloo for NCCL",
        cures.no_gpu,
        cures.run_on_cpu,
    ),
    Patch(
        "one-process",
        "bin/train.py:51",
        "os.environ['WORLD_SIZE']",
        "without torchrun: one process",
        cures.no_ranks,
        cures.be_one_rank,
    ),
    Patch(
        "gpus",
        "bin/train.py:52",
        "int(configs['gpus'][local_rank])",
        'gpus: "[0,1]", the text that the YAMLs have, read as a list',
        cures.reads_gpus,
        cures.read_gpus_text,
    ),
    Patch(
        "final-model",
        "bin/train.py:260",
        "os.symlink('model_{}.pt'",
        "a final_model.pt of an earlier run is linked anew",
        cures.links_final_model,
        cures.replace_final_model,
    ),
    Patch(
        "amp",
        "bin/train.py:235",
        "torch.cuda.amp.GradScaler(",
        "torch.amp for the deprecated torch.cuda.amp",
        cures.uses_cuda_amp,
        cures.use_torch_amp,
    ),
    Patch(
        "fork",
        "dataset/lmdb_data.py:24",
        "lmdb.open(",
        "workers are forked (Python 3.14 would pickle them, and an open LMDB cannot be)",
        cures.would_pickle_lmdb,
        cures.fork_workers,
    ),
)
