"""The faults that `compat` knows, but for torchaudio's own: when each shows, and its cure."""

import ast
import functools
import importlib
import multiprocessing
import os
import socket
import sys
import types
from pathlib import Path

import torch
import torch.distributed

from wespeaker_qmargin import meters
from wespeaker_qmargin.adapter import wespeaker_module
from wespeaker_qmargin.checkout import Script


def no_gpu(script: Script) -> bool:
    return "cuda" in script.text and not torch.cuda.is_available()


def run_on_cpu() -> None:
    """Let what asks for CUDA get the CPU, and NCCL gloo."""
    move, join = torch.Tensor.to, torch.distributed.init_process_group

    @functools.wraps(move)
    def to(tensor, *args, **options):
        options = {name: _no_cuda(value) for name, value in options.items()}
        return move(tensor, *map(_no_cuda, args), **options)

    @functools.wraps(join)
    def init_process_group(backend=None, *args, **options):
        return join("gloo" if backend == "nccl" else backend, *args, **options)

    torch.Tensor.to = to
    torch.Tensor.cuda = lambda tensor, *args, **options: tensor
    torch.cuda.set_device = lambda device: None
    torch.distributed.init_process_group = init_process_group


def _no_cuda(value):
    is_cuda = isinstance(value, str | torch.device) and str(value).startswith("cuda")
    return torch.device("cpu") if is_cuda else value


def no_ranks(script: Script) -> bool:
    return "WORLD_SIZE" in script.text and "WORLD_SIZE" not in os.environ


def be_one_rank() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        os.environ.setdefault(name, value)


def reads_gpus(script: Script) -> bool:
    return "configs['gpus']" in script.text and "utils.utils" in script.modules


def read_gpus_text() -> None:
    """Let ``gpus: "[0,1]"`` and ``gpus: 0`` be lists; on a CPU, have one entry a rank."""
    utils = wespeaker_module("utils.utils")
    theirs = utils.parse_config_or_kwargs

    @functools.wraps(theirs)
    def parse_config_or_kwargs(config_file, **options):
        configs = theirs(config_file, **options)
        if "gpus" in configs:
            configs["gpus"] = _gpu_list(configs["gpus"])
        return configs

    utils.parse_config_or_kwargs = parse_config_or_kwargs


def _gpu_list(gpus) -> list[int]:
    if isinstance(gpus, str):
        try:
            gpus = ast.literal_eval(gpus)
        except (ValueError, SyntaxError):
            raise ValueError(f"gpus: expected a list such as [0, 1], found {gpus!r}") from None
    gpus = [gpus] if isinstance(gpus, int) else list(gpus)
    missing = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) - len(gpus)
    return gpus if torch.cuda.is_available() else gpus + [0] * missing


def links_final_model(script: Script) -> bool:
    return "final_model.pt" in script.text


def replace_final_model() -> None:
    theirs = os.symlink

    @functools.wraps(theirs)
    def symlink(src, dst, *args, **options):
        if Path(dst).name == "final_model.pt" and Path(dst).is_symlink():
            os.unlink(dst)
        return theirs(src, dst, *args, **options)

    os.symlink = symlink


def uses_cuda_amp(script: Script) -> bool:
    return "torch.cuda.amp" in script.text


def use_torch_amp() -> None:
    """Let ``torch.cuda.amp``'s names, deprecated since 2.4, be those that took their place."""

    class autocast(torch.amp.autocast):
        def __init__(self, enabled=True, dtype=torch.float16, cache_enabled=True):
            super().__init__("cuda", dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)

    torch.cuda.amp.autocast = autocast
    torch.cuda.amp.GradScaler = functools.partial(torch.amp.GradScaler, "cuda")


def torchnet_fails(script: Script) -> bool:
    if "torchnet" not in script.packages:
        return False
    try:
        importlib.import_module("torchnet")
    except ImportError:
        return True
    return False


def count_without_torchnet() -> None:
    sys.modules.update(meters.modules())


def broken_frontends(script: Script) -> bool:
    return "frontend" in script.modules and bool(_frontend_faults())


@functools.cache
def _frontend_faults() -> dict[str, Exception]:
    """Front-end module of WeSpeaker's -> why it cannot be imported."""
    faults = {}
    for module, _ in _frontend_classes():
        try:
            wespeaker_module(f"frontend.{module}")
        # whatever their packages raise while they are imported
        except Exception as error:
            faults[module] = error
    return faults


def _frontend_classes() -> list[tuple[str, str]]:
    wespeaker_module("utils")
    source = Path(sys.modules["wespeaker.frontend"].__file__).read_bytes()
    imports = [n for n in ast.parse(source).body if isinstance(n, ast.ImportFrom) and n.level]
    return [(node.module, alias.name) for node in imports for alias in node.names]


def leave_out_frontends() -> None:
    for module, name in _frontend_classes():
        if module in _frontend_faults():
            standin = types.ModuleType(f"wespeaker.frontend.{module}")
            setattr(standin, name, _unusable(name, module, _frontend_faults()[module]))
            sys.modules[standin.__name__] = standin


def _unusable(name: str, module: str, reason: Exception) -> type:
    def __init__(self, *args, **options):
        raise ImportError(f"the front-end {module} cannot be used here: {reason}") from reason

    return type(name, (), {"__init__": __init__})


def would_pickle_lmdb(script: Script) -> bool:
    methods = multiprocessing.get_all_start_methods()
    method = multiprocessing.get_start_method(allow_none=True) or methods[0]
    return "dataset.lmdb_data" in script.modules and method != "fork" and "fork" in methods


def fork_workers() -> None:
    multiprocessing.set_start_method("fork", force=True)
