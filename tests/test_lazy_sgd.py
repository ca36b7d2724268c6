"""lazy_sgd.py and lazy_rows.py against torch.optim.SGD with the dense gradient."""

import copy
import gc
import io
import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from wespeaker_qmargin import lazy_rows
from wespeaker_qmargin.lazy_sgd import LazySGD
from wespeaker_qmargin.sparse import sparse_q_margin

OPTIONS = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}
# (_WHOLE, _CROWD): as measured, and each of the three ways to step by itself
PATHS = {"default": None, "rows": (1.0, 1.0), "whole": (0.0, 1.0), "crowd": (0.0, -1.0)}


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    if PATHS[request.param] is not None:
        monkeypatch.setattr(lazy_rows, "_WHOLE", PATHS[request.param][0])
        monkeypatch.setattr(lazy_rows, "_CROWD", PATHS[request.param][1])
    monkeypatch.setattr(lazy_rows, "_BLOCK_BYTES", 1000)  # several blocks
    return request.param


def worst(found, expected):
    """The largest error, relative to the largest value."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    return ((found - expected).abs().max() / expected.abs().max().clamp_min(1e-30)).item()


def sparse(rows, values, shape):
    return torch.sparse_coo_tensor(rows[None], values, shape, check_invariants=True)


def across(vectors, weight):
    """Return the part of ``vectors`` across the rows of ``weight``, as a cosine's gradient is."""
    unit = F.normalize(weight)
    return vectors - (vectors * unit).sum(1, keepdim=True) * unit


class Twins:
    """The same weight under LazySGD and under torch.optim.SGD, and gradients for both."""

    def __init__(self, size=(40, 6), seed=0, dtype=torch.float64, **options):
        self.generator = torch.Generator().manual_seed(seed)
        self.lazy = nn.Parameter(self.randn(*size).to(dtype))
        self.dense = nn.Parameter(self.lazy.detach().clone())
        self.options = OPTIONS | options
        self.lazy_sgd = LazySGD([self.lazy], **self.options)
        self.dense_sgd = torch.optim.SGD([self.dense], **self.options)

    def randn(self, *size):
        return torch.randn(*size, generator=self.generator, dtype=torch.float64)

    def grad(self, count, size=0.1):
        """Give both a gradient of ``count`` rows, the dense one true for its true weight."""
        rows = torch.randperm(len(self.dense), generator=self.generator)[:count].sort()[0]
        values = size * self.randn(count, self.dense.shape[1]).to(self.dense.dtype)
        values = across(values, self.dense.detach()[rows])
        self.lazy.grad = sparse(rows, values, self.dense.shape)
        self.dense.grad = torch.zeros_like(self.dense).index_copy_(0, rows, values)
        return rows

    def step(self, count=3, **group):
        rows = self.grad(count)
        self.set(**group)
        self.lazy_sgd.step()
        self.dense_sgd.step()
        return rows

    def set(self, **group):
        for optimizer in (self.lazy_sgd, self.dense_sgd):
            optimizer.param_groups[0].update(group)

    @property
    def momenta(self):
        pairs = ((self.lazy_sgd, self.lazy), (self.dense_sgd, self.dense))
        return [optimizer.state[weight]["momentum_buffer"] for optimizer, weight in pairs]

    def check(self, tolerance):
        self.lazy_sgd.catch_up()
        assert worst(self.lazy.detach(), self.dense.detach()) <= tolerance
        if self.options["momentum"]:
            assert worst(*self.momenta) <= tolerance


# ---- real training


class Training:
    """A cosine Q-Margin head on clustered embeddings from a linear layer; what it draws is fixed.

    Classes come in ten parts, one after the other for 25 steps each, so that rows idle for 225
    steps and come back.
    """

    num_class, dim, batch = 6000, 96, 32

    def __init__(self, make, dtype):
        self.generator, self.dtype = torch.Generator().manual_seed(0), dtype
        centres = sum(  # of parts, in them clusters, in them classes
            spread * self.randn(count, self.dim).repeat_interleave(self.num_class // count, 0)
            for spread, count in ((1.0, 10), (1.0, 2000), (0.7, 6000))
        )
        self.centres = F.normalize(centres)
        layer = self.randn(self.dim, self.dim) / self.dim**0.5
        weight = F.normalize(self.centres @ layer.t()) + 0.05 * self.randn(self.num_class, self.dim)
        self.layer = nn.Parameter(layer.to(dtype))
        self.weight = nn.Parameter(0.3 * weight.to(dtype))
        self.optimizer = make(
            [
                {"params": [self.layer], "lr_ratio": 0.1, "name": "rest"},
                {"params": [self.weight], "lr_ratio": 1.0, "name": "projection"},
            ]
        )
        self.losses, self.touched, self.at = [], 0, 0
        self.last, self.returned = torch.zeros(self.num_class), 0

    def randn(self, *size):
        return torch.randn(*size, generator=self.generator, dtype=torch.float64)

    def run(self, steps, *, backwards=False):
        """Take ``steps``, of 500; the batch's order changes rounding alone."""
        lazy = isinstance(self.optimizer, LazySGD)
        for _ in range(steps):
            part = self.at // 25 % 10
            labels = torch.randint(self.num_class // 10, (self.batch,), generator=self.generator)
            labels = part * self.num_class // 10 + labels
            inputs = self.centres[labels] + 0.05 * self.randn(self.batch, self.dim)
            if backwards:
                inputs, labels = inputs.flip(0), labels.flip(0)
            lr = 0.05 * min(1, self.at / 50) * math.exp(-3 * self.at / 500)
            for group in self.optimizer.param_groups:
                group["lr"] = lr * group["lr_ratio"]
            emb = inputs.to(self.dtype) @ self.layer.t()
            options = {"alpha": 1.5, "scale": 10.0, "margin": 0.2, "sparse_grad": lazy}
            loss = sparse_q_margin(emb, self.weight, labels, **options)[0].mean()
            self.optimizer.zero_grad()
            loss.backward()
            if lazy:
                self._note(self.weight.grad._indices()[0])
            self.optimizer.step()
            self.losses.append(loss.item())
            self.at += 1

    def _note(self, rows):
        self.touched += len(rows)
        self.returned += ((self.last[rows] > 0) & (self.last[rows] < self.at - 110)).sum().item()
        self.last[rows] = self.at

    def result(self):
        """Return (losses, weight, momentum, layer) after ``catch_up``."""
        if isinstance(self.optimizer, LazySGD):
            self.optimizer.catch_up()
        momentum = self.optimizer.state[self.weight]["momentum_buffer"]
        losses = torch.tensor(self.losses, dtype=torch.float64)
        return losses, self.weight.detach(), momentum, self.layer.detach()


@pytest.mark.parametrize(
    ("dtype", "nesterov", "decay", "tolerance"),
    [
        (torch.float64, False, 1e-2, 1e-11),
        (torch.float64, True, 1e-4, 1e-11),
        (torch.float32, False, 1e-4, 1e-5),
        (torch.float32, True, 1e-2, 1e-5),
    ],
)
def test_training_is_that_of_dense_sgd(dtype, nesterov, decay, tolerance, monkeypatch):
    moved, move = [], lazy_rows.LazyRows._move

    def watched(self):
        moved.append((self.due > self.wait).float().mean().item())
        move(self)

    def train(kind, **order):
        options = OPTIONS | {"nesterov": nesterov, "weight_decay": decay}
        training = Training(lambda groups: kind(groups, **options), dtype)
        training.run(500, **order)
        return training

    def differences(found):
        losses = (found[0] - expected[0]).abs().max().item()
        return [losses, *(worst(x, y) for x, y in zip(found[1:], expected[1:]))]

    monkeypatch.setattr(lazy_rows.LazyRows, "_move", watched)
    if dtype == torch.float64:  # in which rows wait later: row by row all the same
        monkeypatch.setattr(lazy_rows, "_WHOLE", 1.0)
    lazy, expected = train(LazySGD), train(torch.optim.SGD).result()
    errors = differences(lazy.result())
    assert max(errors) <= tolerance, errors
    assert max(expected[0][:50]) > 1.2 * expected[0][-50:].mean()  # the head learns
    # few rows have a gradient, many wait, and come back after long enough to be still
    assert 100 < lazy.touched / 500 < 0.05 * lazy.num_class
    assert lazy.returned > 3000
    if dtype == torch.float32:
        assert len(moved) > 400 and 0.1 < sum(moved) / len(moved) < 0.6
    if (dtype, decay) == (torch.float32, 1e-2):
        # dense SGD is hardly nearer to itself with the batch in another order
        noise = differences(train(torch.optim.SGD, backwards=True).result())
        assert min(noise) > 1e-8 and max(errors) < 10 * max(noise), (errors, noise)


def test_a_resumed_run_equals_the_one_that_saved():
    def make(groups):
        return LazySGD(groups, **OPTIONS, nesterov=True)

    straight = Training(make, torch.float32)
    straight.run(60)
    straight.optimizer.catch_up()
    file = io.BytesIO()
    torch.save((straight.optimizer.state_dict(), straight.layer, straight.weight), file)
    generator = straight.generator.get_state()
    straight.run(60)

    resumed = Training(make, torch.float32)
    resumed.generator.set_state(generator)
    resumed.at, resumed.losses = 60, straight.losses[:60]
    file.seek(0)
    state, layer, weight = torch.load(file, weights_only=True)
    with torch.no_grad():
        resumed.layer.copy_(layer)
        resumed.weight.copy_(weight)
    resumed.optimizer.load_state_dict(state)
    assert [g["name"] for g in resumed.optimizer.param_groups] == ["rest", "projection"]
    resumed.run(60)
    for found, expected in zip(resumed.result(), straight.result()):
        assert torch.equal(found, expected)


# ---- every kind of step


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(
    ("momentum", "decay"),
    [(0.9, 0.0), (0.9, 1e-3), (0.9, 0.05), (0.5, 0.3), (0.5, 1.0), (0.0, 0.3)],
)
def test_any_sequence_of_steps(path, momentum, decay, nesterov):
    """From (0.9, 0.05) on idle rows oscillate in places; (0.5, 0.3) soon needs a new scale."""
    nesterov = nesterov and momentum > 0  # as torch wants it
    twins = Twins(momentum=momentum, weight_decay=decay, nesterov=nesterov)
    choice = random.Random(f"{momentum} {decay} {nesterov}")
    for step in range(200):
        lr = choice.choice([0.0, 0.01, 0.1, 0.2])
        kind = choice.choice(["sparse"] * 10 + ["none"] * 3 + ["catch up", "dense", "scale"])
        if step == 0 or step > 120:  # long idle at the end
            kind = "sparse" if step % 40 == 0 else "none"
        twins.set(lr=lr, momentum=momentum * choice.choice([1, 0.9]))
        twins.grad(choice.choice([0, 1, 3, 20]))
        if kind == "none":
            twins.lazy.grad = None
            twins.dense.grad.zero_()
        elif kind == "catch up":
            twins.lazy_sgd.catch_up()
        elif kind == "dense":
            twins.lazy.grad = twins.dense.grad.clone()
        twins.lazy_sgd.step()
        twins.dense_sgd.step()
        if kind == "dense":  # None after it is none, as for torch.optim.SGD
            twins.step(1)
    twins.check(1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_directions_are_right_at_any_time(path, dtype):
    twins = Twins((200, 8), dtype=dtype, weight_decay=4e-3)
    eps = torch.finfo(dtype).eps
    for step in range(200):
        count = 30 if step % 20 == 7 else 4  # a crowd, or not
        twins.step(count if step % 100 < 50 else 0, lr=0.1 * (step % 7))
        unit, expected = F.normalize(twins.lazy.detach()), F.normalize(twins.dense.detach())
        assert (unit - expected).norm(dim=1).max() < 20 * eps
    assert worst(twins.lazy.detach(), twins.dense.detach()) > 0.1  # of another length
    twins.check(300 * eps)


def test_momentum_comes_and_goes():
    """torch.optim.SGD keeps a buffer that it does not use."""
    twins = Twins(momentum=0.0, weight_decay=0.1)
    for momentum in (0.0, 0.9, 0.0, 0.5):
        for _ in range(10):
            twins.step(momentum=momentum)
    twins.options["momentum"] = 0.5
    twins.check(1e-13)


def test_numbers_stay_in_range():
    twins = Twins(dtype=torch.float32, weight_decay=0.02)
    for step in range(1000):
        twins.step(3 if step % 400 == 0 else 0)
        assert twins.lazy_sgd.state[twins.lazy]["lazy"].scale >= 1e-3
    assert len(twins.lazy._backward_hooks) == 1  # though it began anew
    assert twins.dense.norm(dim=1).median() < 1e-7
    twins.check(1e-4)
    for _ in range(1000):
        twins.step(0, weight_decay=0)
    left = twins.lazy_sgd.state[twins.lazy]["lazy"].left
    assert (left == 0).all()  # 0.9 ** 1000 is denormal


def test_idle_rows_are_left_alone():
    twins = Twins((400, 6))
    for _ in range(5):
        twins.step(3)
    for _ in range(400):
        twins.step(0)
    before = twins.lazy.detach().clone()
    rows = twins.grad(3)
    with Recorder(numel=twins.lazy.numel()) as recorder:
        twins.lazy_sgd.step()
    twins.dense_sgd.step()
    changed = (twins.lazy.detach() != before).any(1).nonzero().squeeze(1)
    assert torch.equal(changed, rows)
    # of single rows, all of them
    assert recorder.names == {"index_select", "index_copy_", "_embedding_bag_forward_only"}
    twins.check(1e-12)


class Recorder(TorchDispatchMode):
    """Names the operations on tensors of at least ``numel`` numbers."""

    def __init__(self, numel):
        super().__init__()
        self.numel, self.names = numel, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        dense = all(x.layout == torch.strided for x in tensors)
        if dense and any(x.numel() >= self.numel for x in tensors):
            self.names.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def test_dense_parameters_are_stepped_by_torch():
    twins = Twins(nesterov=True)
    for _ in range(5):
        twins.dense.grad = twins.randn(*twins.dense.shape)
        twins.lazy.grad = twins.dense.grad.clone()
        twins.lazy_sgd.step()
        twins.dense_sgd.step()
    twins.lazy.grad = None  # never sparse: skipped
    twins.lazy_sgd.step()
    assert torch.equal(twins.lazy, twins.dense) and torch.equal(*twins.momenta)


def test_a_dense_gradient_ends_lazy_stepping():
    twins = Twins()
    twins.step()
    twins.grad(3)
    twins.lazy.grad = twins.dense.grad.clone()
    for _ in range(2):
        twins.lazy_sgd.step()
        twins.dense_sgd.step()
        twins.lazy.grad = twins.dense.grad = None  # torch.optim.SGD stops, momentum and all
    assert "slope" not in twins.lazy_sgd.state[twins.lazy]
    twins.check(1e-14)


def test_rows_in_any_order_add_up():
    twins = Twins((100, 6))
    rows = torch.tensor([7, 3, 7])
    for _ in range(3):
        values = across(twins.randn(3, 6), twins.dense.detach()[rows])
        twins.lazy.grad = sparse(rows, values, twins.dense.shape)
        twins.dense.grad = twins.lazy.grad.to_dense()
        twins.lazy_sgd.step()
        twins.dense_sgd.step()
    twins.check(1e-13)


def test_a_frozen_weight_stays():
    twins = Twins()
    twins.step()
    before, twins.lazy.grad = twins.lazy.detach().clone(), None
    twins.lazy.requires_grad_(False)
    twins.lazy_sgd.step()
    assert torch.equal(twins.lazy, before)
    twins.check(1e-14)


# ---- the gradient in spite of the length in memory


def head_loss(weight, sparse_grad, seed):
    generator = torch.Generator().manual_seed(seed)
    emb = torch.randn(8, weight.shape[1], generator=generator, dtype=weight.dtype)
    labels = torch.randint(len(weight), (8,), generator=generator)
    options = {"alpha": 1.5, "scale": 10.0, "margin": 0.2, "sparse_grad": sparse_grad}
    return sparse_q_margin(emb, weight, labels, **options)[0].mean()


def test_grad_is_that_at_the_true_weight():
    """Accumulated, clipped to a norm, and under a gradient scaler's factor."""
    twins = Twins((60, 6), weight_decay=0.1)
    for step in range(40):
        for weight, sparse_grad in ((twins.lazy, True), (twins.dense, False)):
            weight.grad = None
            for part in range(2):
                (64 * head_loss(weight, sparse_grad, 2 * step + part)).backward()
            weight.grad.div_(64)
            length = weight.grad.coalesce().values().norm() if sparse_grad else weight.grad.norm()
            weight.grad.mul_(0.2 / length)
            if sparse_grad:
                found = length
        assert abs(found / length - 1) < 1e-11
        twins.lazy_sgd.step()
        twins.dense_sgd.step()
    assert twins.lazy_sgd.state[twins.lazy]["lazy"].scale < 0.8
    twins.check(1e-11)


def test_catch_up_between_backward_and_step():
    twins = Twins((60, 6), weight_decay=0.1)
    for step in range(20):
        for optimizer, weight in ((twins.lazy_sgd, twins.lazy), (twins.dense_sgd, twins.dense)):
            optimizer.zero_grad()
            head_loss(weight, weight is twins.lazy, step).backward()
        if step % 3 == 0:
            twins.lazy_sgd.catch_up()
        twins.lazy_sgd.step()
        twins.dense_sgd.step()
    twins.check(1e-11)


def test_nothing_is_left_of_a_dead_optimiser():
    twins = Twins((60, 6), weight_decay=0.5)
    for _ in range(10):
        twins.step()
    weight = twins.lazy
    twins.lazy_sgd.zero_grad()
    del twins
    gc.collect()
    head_loss(weight, True, 0).backward()
    fresh = weight.detach().clone().requires_grad_()
    head_loss(fresh, True, 0).backward()
    assert torch.equal(weight.grad.to_dense(), fresh.grad.to_dense())


# ---- saving, loading, copying


def test_states_are_those_of_torch_sgd():
    twins = Twins(nesterov=True)
    for _ in range(30):
        twins.step()
    ours, theirs = twins.lazy_sgd.state_dict(), twins.dense_sgd.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert set(ours["state"][0]) == {"momentum_buffer", "slope"}
    assert set(theirs["state"][0]) == {"momentum_buffer"}
    swapped = Twins(nesterov=True)
    with torch.no_grad():
        swapped.lazy.copy_(twins.dense)
        swapped.dense.copy_(twins.lazy)
    swapped.lazy_sgd.load_state_dict(copy.deepcopy(theirs))
    swapped.dense_sgd.load_state_dict(copy.deepcopy(ours))
    for _ in range(30):
        swapped.step()
    swapped.check(1e-12)


def test_keep_current():
    twins, owner = Twins(weight_decay=0.1), nn.Module()
    owner.weight = twins.lazy
    net = nn.ModuleDict({"projection": owner})
    twins.lazy_sgd.keep_current(owner)
    for _ in range(5):
        twins.step()
    assert worst(twins.lazy.detach(), twins.dense.detach()) > 1e-3
    assert worst(net.state_dict()["projection.weight"], twins.dense.detach()) < 1e-13
    twins.step()
    new = twins.randn(*twins.dense.shape)
    net.load_state_dict({"projection.weight": new})
    with torch.no_grad():
        twins.dense.copy_(new)
    twins.check(1e-13)  # the momenta as well
    for _ in range(5):
        twins.step()
    twins.check(1e-13)


def test_copies_are_complete():
    twins = Twins(weight_decay=0.1)
    for _ in range(5):
        twins.step()
    copied = copy.deepcopy(twins.lazy_sgd)
    weight = copied.param_groups[0]["params"][0]
    for step in range(5):
        for optimizer, x in ((copied, weight), (twins.dense_sgd, twins.dense)):
            optimizer.zero_grad()
            head_loss(x, x is weight, step).backward()
            optimizer.step()
    copied.catch_up()
    assert weight is not twins.lazy
    assert worst(weight.detach(), twins.dense.detach()) < 1e-12


def test_closure_and_step_hooks():
    twins = Twins()
    twins.step()  # torch wraps the steps of both classes
    calls = []
    twins.lazy_sgd.register_step_pre_hook(lambda *_: calls.append("pre"))
    twins.lazy_sgd.register_step_post_hook(lambda *_: calls.append("post"))

    def closure():
        calls.append(torch.is_grad_enabled())
        twins.grad(3)
        return 7.0

    assert twins.lazy_sgd.step(closure) == 7.0
    assert calls == ["pre", True, "post"]
    twins.dense_sgd.step()
    twins.check(1e-13)


# ---- bad input


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_gradient_spoils_its_row_alone(path, value):
    twins = Twins(weight_decay=1e-3)
    twins.step()
    rows = twins.grad(5)
    twins.lazy.grad._values()[2, 1] = value
    twins.dense.grad[rows[2], 1] = value
    for step in range(30):
        twins.lazy_sgd.step()
        twins.dense_sgd.step()
        twins.lazy.grad = None
        twins.dense.grad.zero_()
        assert not twins.lazy[rows[2]].isfinite().all(), step
    twins.lazy_sgd.catch_up()
    others = torch.arange(40) != rows[2]
    assert worst(twins.lazy.detach()[others], twins.dense.detach()[others]) < 1e-13
    for found, expected in ((twins.lazy, twins.dense), twins.momenta):
        assert torch.equal(found.isfinite(), expected.isfinite())


def test_a_row_of_zeros():
    twins = Twins((60, 6), weight_decay=0.1)
    with torch.no_grad():
        twins.lazy[5] = twins.dense[5] = 0
    for step in range(30):
        for optimizer, weight in ((twins.lazy_sgd, twins.lazy), (twins.dense_sgd, twins.dense)):
            optimizer.zero_grad()
            head_loss(weight, weight is twins.lazy, step).backward()
            optimizer.step()
        if step == 0:
            assert (twins.dense[5].norm() == 0) == (twins.lazy[5].norm() == 0)
    twins.lazy_sgd.catch_up()
    assert twins.dense[5].norm() > 1e6
    unit, expected = F.normalize(twins.lazy.detach()), F.normalize(twins.dense.detach())
    assert (unit - expected).abs().max() < 1e-11


def test_a_loss_that_sees_lengths_is_refused():
    table = nn.Embedding(50, 16, sparse=True)
    optimizer = LazySGD(table.parameters(), **OPTIONS)
    table(torch.arange(9)).square().sum().backward()
    before = table.weight.detach().clone()
    with pytest.raises(ValueError, match="depends on their length"):
        optimizer.step()
    assert torch.equal(table.weight, before)
    optimizer.zero_grad()
    (table(torch.arange(9)) * torch.randn(9, 16, generator=torch.Generator().manual_seed(0))).sum()
    (table(torch.arange(9)) @ torch.ones(16)).sum().backward()
    with pytest.raises(ValueError, match="depends on their length"):
        optimizer.step()


@pytest.mark.parametrize(
    "option", [{"dampening": 0.1}, {"maximize": True}, {"differentiable": True}, {"fused": True}]
)
def test_options_that_are_not_offered(option):
    weight, name = nn.Parameter(torch.ones(3, 2)), next(iter(option))
    with pytest.raises(ValueError, match=name):
        LazySGD([weight], **OPTIONS, **option)
    with pytest.raises(ValueError, match=name):
        LazySGD([{"params": [weight], **option}], **OPTIONS)
    optimizer = LazySGD([weight], **OPTIONS, fused=False, foreach=True)
    state = optimizer.state_dict()
    state["param_groups"][0].update(option)
    with pytest.raises(ValueError, match=name):
        optimizer.load_state_dict(state)


def test_gradients_that_are_not_row_sparse():
    for grad, message in (
        (torch.eye(4).to_sparse(), r"sparse_dim 1, dense_dim 1\), got \(2, 0\)"),
        (torch.zeros(4, 4, dtype=torch.float16).to_sparse(1), "float16"),
        (torch.zeros(4, 4, dtype=torch.bfloat16).to_sparse(1), "bfloat16"),
    ):
        weight = nn.Parameter(torch.ones(4, 4, dtype=grad.dtype))
        weight.grad = grad
        with pytest.raises(ValueError, match=message):
            LazySGD([weight], **OPTIONS).step()


def test_decay_that_halves_the_weights():
    twins = Twins(weight_decay=1.0)
    twins.step(lr=0.3)
    before = twins.lazy.detach().clone()
    twins.grad(3)
    twins.set(lr=0.6)
    with pytest.raises(ValueError, match=r"lr 0\.6 and weight_decay 1\.0 leave 0\.4 of a weight"):
        twins.lazy_sgd.step()
    assert worst(F.normalize(twins.lazy.detach()), F.normalize(before)) < 1e-12


@pytest.mark.gpu
def test_gpu_equals_dense(path):
    generator = torch.Generator("cuda").manual_seed(0)
    lazy = nn.Parameter(torch.randn(5000, 32, generator=generator, device="cuda"))
    dense = nn.Parameter(lazy.detach().clone())
    optimizers = LazySGD([lazy], **OPTIONS), torch.optim.SGD([dense], **OPTIONS)
    for step in range(200):
        for optimizer, weight in zip(optimizers, (lazy, dense)):
            optimizer.zero_grad()
            generator.manual_seed(step)
            emb = torch.randn(32, 32, generator=generator, device="cuda")
            labels = torch.randint(5000, (32,), generator=generator, device="cuda")
            loss, _ = sparse_q_margin(
                emb, weight, labels, alpha=1.5, scale=10, margin=0.2, sparse_grad=weight is lazy
            )
            loss.mean().backward()
            optimizer.step()
    optimizers[0].catch_up()
    assert worst(lazy.detach(), dense.detach()) < 1e-5
