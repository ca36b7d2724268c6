"""Embeddings of whole utterances: deterministic, one utterance at a time, no labels needed."""

import logging
from collections.abc import Iterable
from pathlib import Path

import kaldiio
import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch.utils.data import DataLoader
from tqdm import tqdm

from wespeaker_qmargin.audio import Utterance
from wespeaker_qmargin.checkpoints import find_checkpoint
from wespeaker_qmargin.config import load_config
from wespeaker_qmargin.data import WholeSet
from wespeaker_qmargin.files import atomic_path, write_text
from wespeaker_qmargin.lists import read_utterances
from wespeaker_qmargin.model import SpeakerNet, load_checkpoint

logger = logging.getLogger(__name__)


@torch.no_grad()
def extract(
    net: SpeakerNet,
    utterances: list[Utterance],
    out_dir,
    *,
    device: str | torch.device = "cpu",
    num_workers: int = 0,
    skip_bad: bool = False,
) -> Path:
    """Write ``out_dir/xvector.ark`` and ``xvector.scp``, float32 vectors; return the scp's path.

    Under ``torchrun`` every process embeds its share into ``xvector_<rank>.ark`` and the scp names
    them all. Utterances that cannot be used are told, and listed in ``out_dir/xvector.bad``
    (``key: path: reason``); the others are written all the same.

    Raises:
        ValueError: utterances that cannot be used, after the others were written (not with
            ``skip_bad``); none that can, and then nothing is written.
    """
    out_dir, state = Path(out_dir), PartialState(cpu=torch.device(device).type == "cpu")
    rank, world = state.process_index, state.num_processes
    ark = out_dir / ("xvector.ark" if world == 1 else f"xvector_{rank:03d}.ark")
    problems: list[str] = []
    net.to(device).eval()
    mine = WholeSet(
        utterances[rank::world], net.dataset_args.resample_rate, min_samples=net.min_samples
    )
    loader = DataLoader(mine, batch_size=None, num_workers=num_workers)
    progress = tqdm(loader, desc="extract", unit="utt", disable=None if rank == 0 else True)
    lines = _write_ark(ark, _embeddings(net, progress, device, problems))
    lines, problems = gather_object(lines), gather_object(problems)
    if rank == 0:
        _finish(out_dir, lines, problems)
    if problems and not (skip_bad and lines):
        raise ValueError(
            f"{len(problems)} of {len(utterances)} utterances have no embedding, the first: "
            f"{problems[0]}"
            + (
                ""
                if skip_bad
                else f" (all: {out_dir}/xvector.bad; --skip_bad goes on without them)"
            )
        )
    return out_dir / "xvector.scp"


def _embeddings(net, items: Iterable, device, problems: list[str]):
    for key, wav, problem in items:
        if problem is None:
            try:
                vector = net.embed(wav[None].to(device))[0].float().cpu().numpy()
            except RuntimeError as error:  # fewer frames than a kernel is wide, or no memory
                problem = f"{key}: no embedding of {len(wav)} samples: {str(error).splitlines()[0]}"
            else:
                if np.isfinite(vector).all():
                    yield key, vector
                    continue
                problem = f"{key}: its embedding is not finite"
        logger.warning("%s", problem)
        problems.append(problem)


def _write_ark(ark: Path, embeddings) -> list[str]:
    """Write the vectors and return the scp's lines, with the final path of the ark in them."""
    lines = []
    with atomic_path(ark) as temporary, open(temporary, "wb") as file:
        for key, vector in embeddings:
            lines.append(f"{key} {ark.absolute()}:{file.tell() + len(f'{key} '.encode())}\n")
            kaldiio.save_ark(file, {key: vector})
    return lines


def _finish(out_dir: Path, lines: list[str], problems: list[str]) -> None:
    if lines:
        write_text(out_dir / "xvector.scp", "".join(lines))
    else:
        for ark in out_dir.glob("xvector*.ark"):
            ark.unlink()
    bad = out_dir / "xvector.bad"
    if problems:
        write_text(bad, "".join(f"{problem}\n" for problem in problems))
    else:
        bad.unlink(missing_ok=True)


def open_experiment(exp_dir, which: str = "avg") -> SpeakerNet:
    """Return the network of an experiment, in evaluation, without its head.

    Args:
        exp_dir: has config.yaml and models/.
        which: ``avg``, ``best``, an epoch number, a path, or ``untrained``: the network as the
            config's seed initialises it, for a floor to compare with.
    """
    config = load_config(Path(exp_dir) / "config.yaml", check_paths=False)
    checkpoint = None if which == "untrained" else find_checkpoint(exp_dir, which)
    torch.manual_seed(config.seed)
    net = SpeakerNet(config)
    if checkpoint is not None:
        load_checkpoint(net, checkpoint, head=False)
    return net.eval()


def extract_experiment(
    exp_dir,
    *,
    data_type: str,
    data: str,
    out_dir,
    which: str = "avg",
    device: str = "auto",
    num_workers: int = 0,
    skip_bad: bool = False,
    allow_pipes: bool = False,
) -> Path:
    """Extract with a checkpoint of an experiment, as its config.yaml says; return the scp's path.

    Args:
        exp_dir, which: see ``open_experiment``.
        data_type, data: see ``lists.read_utterances``.
        out_dir: see ``extract``.
    """
    net = open_experiment(exp_dir, which)
    utterances = read_utterances(data_type, data, allow_pipes=allow_pipes)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        device = PartialState().device
    return extract(
        net, utterances, out_dir, device=device, num_workers=num_workers, skip_bad=skip_bad
    )


def add_arguments(parser) -> None:
    parser.epilog = (
        "example:\n  wespeaker-qmargin extract --exp_dir exp/xvec --data_type kaldi "
        "--data data/mini/test --out exp/xvec/embeddings/test"
    )
    parser.add_argument("--exp_dir", required=True, help="experiment: config.yaml, models/")
    parser.add_argument("--data", required=True, help="Kaldi folder, wav.scp, raw or shard list")
    parser.add_argument("--data_type", default="kaldi", choices=("kaldi", "raw", "shard"))
    parser.add_argument("--out", required=True, help="folder for xvector.ark and xvector.scp")
    parser.add_argument(
        "--model", default="avg", help="avg, best, an epoch, a path, or untrained [avg]"
    )
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--num_workers", type=int, default=0, help="processes that read audio [0]")
    parser.add_argument(
        *("--skip-bad", "--skip_bad"),
        action="store_true",
        help="succeed although some utterances cannot be used",
    )
    parser.add_argument(
        *("--allow-pipes", "--allow_pipes"),
        action="store_true",
        help="run the shell commands in the list",
    )


def run(args) -> None:
    scp = extract_experiment(
        args.exp_dir,
        data_type=args.data_type,
        data=args.data,
        out_dir=args.out,
        which=args.model,
        device=args.device,
        num_workers=args.num_workers,
        skip_bad=args.skip_bad,
        allow_pipes=args.allow_pipes,
    )
    print(scp)
