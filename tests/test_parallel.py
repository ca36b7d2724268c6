"""parallel.py, sharded.py, ranks.py: ranks over gloo (parallel_worker.py), and one process."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from parallel_worker import CASES, SIZES, TIMEOUT_S, Net

from wespeaker_qmargin.head import QMarginProduct
from wespeaker_qmargin.parallel import (
    ClassParallelQMargin,
    full_weight,
    keep_from_ddp,
    total_norm,
)

WORKER = Path(__file__).resolve().parent / "parallel_worker.py"


def launch(what, size, folder):
    """Run the ranks; return the answer of each, or None, and what they complained of."""
    command = [sys.executable, str(WORKER), what, str(size), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(folder / "errors", "w+") as errors:
        process = subprocess.Popen(command, env=environment, stderr=errors, start_new_session=True)
        try:
            process.wait(timeout=240)
        finally:
            with contextlib.suppress(ProcessLookupError):  # all have ended
                os.killpg(process.pid, signal.SIGKILL)
        errors.seek(0)
        files = [folder / f"{rank}.json" for rank in range(size)]
        answers = [json.loads(file.read_text()) if file.exists() else None for file in files]
        return answers, errors.read()


# ---- ranks that work together


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cases")
    answers, errors = launch("cases", 4, folder)
    assert all(answers), errors
    return answers


NAMES = [f"{name}-{size}" for size in SIZES for name in CASES] + ["checkpoints-4"]


@pytest.mark.parametrize("name", NAMES)
def test_ranks_equal_one_process(cases, name):
    found = {rank: answer.get(name, "not run") for rank, answer in enumerate(cases)}
    for rank in SIZES[int(name[-1])]:
        assert isinstance(found[rank], float), f"rank {rank}: {found[rank]}"


# ---- ranks that are lost


@pytest.mark.parametrize(
    "what, step",
    [
        ("killed-forward", "gathering the losses' gradients"),
        ("killed-backward", "adding up the embeddings' gradients"),
        ("hangs-before", "agreeing on what to do"),
    ],
)
def test_a_lost_rank_ends_the_others_in_time(tmp_path, what, step):
    answers, errors = launch(what, 3, tmp_path)
    assert answers[1] is None
    for rank in (0, 2):
        assert answers[rank], errors
        assert answers[rank]["step"] == 3
        assert answers[rank]["seconds"] < TIMEOUT_S + 4
        assert f"rank {rank} of 3, {step}: another rank was lost" in answers[rank]["error"]


# ---- one process


@pytest.fixture(params=["no torch.distributed", "a group of one"])
def alone(request, tmp_path):
    if request.param == "no torch.distributed":
        yield
        return
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


def batch(size=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 16, generator=generator), torch.arange(size) % 20


@pytest.mark.parametrize("options", [{}, {"impl": "dense"}, {"alpha": 1}, {"sparse_grad": True}])
def test_alone_it_is_the_plain_head(alone, options):
    torch.manual_seed(0)
    plain, state = QMarginProduct(16, 20, **options), torch.get_rng_state()
    torch.manual_seed(0)
    head = ClassParallelQMargin(16, 20, **options)
    assert torch.equal(head.weight, plain.weight) and torch.equal(torch.get_rng_state(), state)
    for one in (head, plain):
        loss, statistics = one.loss(*batch())
        loss.backward()
        scores, again = one(*batch())
        one.found = loss, again, scores, one.weight.grad.to_dense(), *statistics[:3]
    assert all(torch.equal(x, y) for x, y in zip(head.found, plain.found, strict=True))
    assert head.statistics() == plain.statistics()


def test_alone_rows_are_all_rows(alone):
    head, caught_up = ClassParallelQMargin(16, 20), []
    head.register_state_dict_pre_hook(lambda *_: caught_up.append(True))
    whole = full_weight(head)
    assert caught_up == [True]  # as an optimiser that defers steps asks for
    assert torch.equal(whole, head.weight) and whole.data_ptr() != head.weight.data_ptr()
    assert torch.equal(head.own_rows(whole), whole)
    with pytest.raises(ValueError, match=r"expected \(20, ...\), a row a class, got \(19, 16\)"):
        head.own_rows(whole[1:])
    with pytest.raises(ValueError, match=r"expected \(20, ...\), its rows, got \(\)"):
        head.gather_rows(torch.tensor(1.0))
    with pytest.raises(RuntimeError, match="size mismatch"):
        head.load_state_dict({"weight": whole[1:]})


@pytest.mark.parametrize("sparse_grad", [False, True])
def test_alone_the_total_norm_is_torchs(alone, sparse_grad):
    net = Net(ClassParallelQMargin(6, 37, sparse_grad=sparse_grad), torch.float32)
    net.extra = torch.nn.Parameter(torch.ones(3))  # without gradient
    for _ in range(2):  # a sparse gradient has rows twice now
        net(torch.randn(8, 9), torch.arange(8))[0].backward()
    grads = [x.grad.to_dense() for x in net.parameters() if x.grad is not None]
    norm = total_norm(net.parameters(), [net.projection.weight])
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm, torch.nn.utils.get_total_norm(grads))
    net.zero_grad()
    assert total_norm(net.parameters(), [net.projection.weight]) == 0


def test_keep_from_ddp_marks_the_prototypes_alone():
    net = torch.nn.ModuleDict({"net": Net(ClassParallelQMargin(6, 37), torch.float32)})
    net._ddp_params_and_buffers_to_ignore = ["other"]
    keep_from_ddp(net)
    marked = {name for name, x in net.named_parameters() if getattr(x, "_ddp_ignored", False)}
    assert marked == {"net.projection.weight"}
    assert set(net._ddp_params_and_buffers_to_ignore) == {"other", *marked}


def test_a_head_that_is_older_than_the_group(tmp_path, monkeypatch):
    head = ClassParallelQMargin(16, 20)
    monkeypatch.setattr("wespeaker_qmargin.ranks.dist.is_initialized", lambda: True)
    monkeypatch.setattr("wespeaker_qmargin.ranks.dist.get_rank", lambda group: 0)
    monkeypatch.setattr("wespeaker_qmargin.ranks.dist.get_world_size", lambda group: 3)
    with pytest.raises(ValueError, match="built for 1 ranks, and there are 3 now"):
        head.loss(*batch())
    with pytest.raises(ValueError, match='impl "dense"'):
        ClassParallelQMargin(16, 20, impl="dense")
    with pytest.raises(ValueError, match="every rank must hold a class, got 2 for 3 ranks"):
        ClassParallelQMargin(16, 2)
    for bad in ([10, 10], [10, 9, 0], [10, 9, 2], [21, 0, -1]):
        with pytest.raises(ValueError, match="shares must be 3 numbers >= 1"):
            ClassParallelQMargin(16, 20, shares=bad)
    assert ClassParallelQMargin(16, 20).shares == [7, 7, 6]
    monkeypatch.setattr("wespeaker_qmargin.ranks.dist.get_rank", lambda group: -1)
    with pytest.raises(ValueError, match="not in the process group"):
        ClassParallelQMargin(16, 20)
