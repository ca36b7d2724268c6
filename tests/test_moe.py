"""A mixture of experts and its losses: against naive loops and closed forms."""

import itertools

import pytest
import torch
from torch import nn

from wespeaker_qmargin import moe, router
from wespeaker_qmargin.moe import MoEFeedForward, take_router_loss
from wespeaker_qmargin.router import MoEOptions

DIM, HIDDEN, TOKENS = 6, 10, 40


class Ffn(nn.Module):
    """What an FFN of an encoder looks like."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

    def forward(self, x):
        return self.fc2(nn.functional.gelu(self.fc1(x)))


def make(experts=3, same=False, **options) -> MoEFeedForward:
    torch.manual_seed(0)
    options = {"top_k": min(2, experts), **options}
    layer = MoEFeedForward(Ffn(), DIM, MoEOptions(experts=experts, **options))
    for expert in () if same else layer.experts:
        expert.fc1.reset_parameters()
        expert.fc2.reset_parameters()
    nn.init.normal_(layer.router.weight)
    return layer


def naive(layer: MoEFeedForward, x):
    """Every expert of every token, and a loop over tokens and their choices."""
    y = torch.zeros_like(x)
    for t, row in enumerate(x):
        logits = layer.router.weight @ row
        order = sorted(range(len(logits)), key=lambda n: -logits[n].item())[: layer.options.top_k]
        gates = logits[order] if layer.options.gates == "logits" else logits[order].softmax(0)
        for gate, n in zip(gates, order):
            y[t] = y[t] + gate * layer.experts[n](row[None])[0]
    return y


@pytest.mark.parametrize("gates", router.GATES)
@pytest.mark.parametrize("experts, top_k", [(1, 1), (2, 1), (3, 2), (4, 2), (4, 4)])
def test_grouped_is_the_naive_loop(experts, top_k, gates):
    layer = make(experts, top_k=top_k, gates=gates).double()
    x = torch.randn(TOKENS, DIM, dtype=torch.float64, requires_grad=True)
    found = layer(x.view(4, 10, DIM)).view(TOKENS, DIM)
    expected = naive(layer, x)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    weight = torch.randn_like(found)
    parameters = [x, *layer.parameters()]
    gradients = [
        torch.autograd.grad((y * weight).sum(), parameters, allow_unused=True)
        for y in (found, expected)
    ]
    for one, other in zip(*gradients):
        other = torch.zeros_like(one) if other is None else other  # an expert nobody chose
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


def test_a_traced_or_exported_layer_hears_other_tokens():
    layer, x = make(3).eval(), torch.randn(4, 10, DIM)
    other = torch.randn(4, 10, DIM)
    traced = torch.jit.trace(layer, x)
    exported = torch.export.export(layer, (x,)).module()
    for found in (traced(other), exported(other)):
        torch.testing.assert_close(found, layer(other), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_equal_experts_are_one_of_them(top_k):
    layer = make(3, same=True, top_k=top_k)
    x = torch.randn(2, 5, DIM)
    torch.testing.assert_close(layer(x), layer.experts[0](x), atol=1e-6, rtol=1e-6)


def test_raw_logits_as_gates_change_the_function():
    layer = make(3, same=True, gates="logits")
    x = torch.randn(2, 5, DIM)
    assert (layer(x) - layer.experts[0](x)).abs().max() > 0.1


@pytest.mark.parametrize("form", router.ROUTER_LOSSES)
def test_gradients_of_router_and_losses(form):
    layer = make(3, losses=form, z_loss=0.7, balance_loss=0.3).double().train()
    torch.manual_seed(1)
    x = torch.randn(7, DIM, dtype=torch.float64, requires_grad=True)

    def function(x, weight):
        y = torch.func.functional_call(layer, {"router.weight": weight}, (x,))
        return y, take_router_loss(layer)

    weight = layer.router.weight.detach().requires_grad_()
    assert torch.autograd.gradcheck(function, (x, weight))


@pytest.mark.parametrize("experts, top_k", [(2, 1), (3, 2), (4, 3)])
def test_balance_at_uniform_load_and_at_collapse(experts, top_k):
    sets = list(itertools.combinations(range(experts), top_k))  # every expert equally often
    chosen = torch.tensor(sets)
    uniform = torch.full((len(sets), experts), 1 / experts)
    assert router.facemoe_balance(uniform, chosen).item() == pytest.approx(top_k)
    assert router.switch_balance(uniform, chosen).item() == pytest.approx(1)
    one = nn.functional.one_hot(torch.zeros(len(sets), dtype=torch.long), experts).float()
    first = torch.arange(top_k).expand(len(sets), -1)
    assert router.facemoe_balance(one, first).item() == pytest.approx(experts)
    assert router.switch_balance(one, first).item() == pytest.approx(experts / top_k)


def test_z_losses():
    logits = torch.tensor([[1.0, -2.0], [0.0, 3.0]])
    assert router.mean_square(logits).item() == pytest.approx((1 + 4 + 0 + 9) / 4)
    expected = (logits.exp().sum(1).log() ** 2).mean()
    assert router.mean_logsumexp_square(logits).item() == pytest.approx(expected.item())


def test_padding_is_in_no_loss_and_no_count():
    layer = make(3).train()
    x = torch.randn(2, 5, DIM)
    valid = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]]).bool()
    moe.count_usage(layer)
    layer.valid = valid
    layer(x)
    padded, counted = take_router_loss(layer), moe.usage(layer)[""]
    moe.count_usage(layer)
    layer.valid = None
    layer(x[valid])
    assert padded.item() == pytest.approx(take_router_loss(layer).item())
    assert counted.tokens == 7 == moe.usage(layer)[""].tokens
    torch.testing.assert_close(counted.load, moe.usage(layer)[""].load)
    assert counted.load.sum().item() == pytest.approx(1)
    assert counted.importance.sum().item() == pytest.approx(1)


@pytest.mark.parametrize("form", router.ROUTER_LOSSES)
def test_a_mask_of_all_padding_and_one_token(form):
    layer = make(3, losses=form).train()
    layer.valid = torch.zeros(2, 5).bool()
    assert layer(torch.randn(2, 5, DIM)).isfinite().all()
    assert take_router_loss(layer).item() == 0
    layer.valid = None
    assert layer(torch.randn(1, DIM)).shape == (1, DIM)
    assert layer(torch.randn(0, DIM)).shape == (0, DIM)
    assert take_router_loss(layer).item() == 0, "no token, no loss"


def test_the_router_is_float32_under_autocast():
    layer = make(3).train()
    x = torch.randn(TOKENS, DIM)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x.bfloat16())
    assert y.dtype == torch.bfloat16 and take_router_loss(layer).dtype == torch.float32
    torch.testing.assert_close(y.float(), layer(x.bfloat16().float()), atol=0.05, rtol=0.05)


def test_jitter_only_in_training():
    layer = make(3, jitter=0.5)
    x = torch.randn(TOKENS, DIM)
    layer.eval()
    assert torch.equal(layer(x), layer(x))
    layer.train()
    assert not torch.equal(layer(x), layer(x))


def test_every_expert_has_a_gradient_and_none_is_left_out():
    layer = make(4, top_k=1).train()
    layer.router.weight.data.zero_()
    layer.router.weight.data[2] = 1.0
    layer(torch.rand(TOKENS, DIM)).sum().backward()
    gradients = [expert.fc1.weight.grad for expert in layer.experts]
    assert all(g is not None for g in gradients), "DistributedDataParallel waits for them"
    assert [bool(g.any()) for g in gradients] == [False, False, True, False]


def test_without_an_expert():
    layer = make(3, top_k=2).eval()
    x = torch.randn(TOKENS, DIM)
    moe.count_usage(layer)
    with moe.without_expert(layer, 1):
        layer(x)
    assert moe.usage(layer)[""].load[1] == 0
    pair = make(2, top_k=2).eval()
    with moe.without_expert(pair, 0):
        torch.testing.assert_close(pair(x), pair.experts[1](x))
    for layer, expert in ((make(1, top_k=1), 0), (pair, 2)):
        with pytest.raises(ValueError, match="cannot do"), moe.without_expert(layer, expert):
            pass
