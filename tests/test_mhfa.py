"""MHFA against a reference written head by head, padding, memory, precision."""

import pytest
import torch

from wespeaker_qmargin.mhfa import MHFA


def hidden_states(layers: int, batch: int, frames: int, dim: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(batch, frames, dim, generator=generator) for _ in range(layers))


def small(**options) -> MHFA:
    torch.manual_seed(1)
    net = MHFA(**{"feat_dim": 12, "embed_dim": 7, "head_nb": 3, "compression_dim": 5, **options})
    with torch.no_grad():
        net.weights_k.normal_()
        net.weights_v.normal_()
    return net


def by_heads(net: MHFA, hidden) -> torch.Tensor:
    """Utterance by utterance, head by head, in float64."""
    state = {name: value.detach().double() for name, value in net.state_dict().items()}
    weights = {w: state[f"weights_{w}"].exp() / state[f"weights_{w}"].exp().sum() for w in "kv"}
    rows = []
    for utt in range(len(hidden[0])):
        layers = [states[utt].double() for states in hidden]
        keys, values = (
            sum(w * h for w, h in zip(weights[name], layers)) @ state[f"cmp_linear_{name}.weight"].T
            + state[f"cmp_linear_{name}.bias"]
            for name in "kv"
        )
        pooled = []
        for weight, bias in zip(state["att_head.weight"], state["att_head.bias"]):
            shares = (keys @ weight + bias).exp()
            pooled.append(shares / shares.sum() @ values)
        rows.append(state["pooling_fc.weight"] @ torch.cat(pooled) + state["pooling_fc.bias"])
    return torch.stack(rows)


def test_number_of_parameters():
    assert sum(p.numel() for p in MHFA().parameters()) == 2_302_554
    large = MHFA(feat_dim=1024, nb_layer=25)
    assert sum(p.numel() for p in large.parameters()) == 2_302_554 + 2 * 12 + 2 * 256 * 128


def test_names_of_the_authors_code():
    modules = ("cmp_linear_k", "cmp_linear_v", "att_head", "pooling_fc")
    names = {f"{module}.{part}" for module in modules for part in ("weight", "bias")}
    assert set(MHFA().state_dict()) == {"weights_k", "weights_v", *names}


def test_equals_the_reference():
    net = small(nb_layer=4)
    hidden = hidden_states(4, 3, 9, 12)
    expected = by_heads(net, hidden)
    torch.testing.assert_close(net(hidden).double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(net.double()([h.double() for h in hidden]), expected)


def test_gradients():
    net = small(nb_layer=2, feat_dim=4).double()
    hidden = [h.double().requires_grad_() for h in hidden_states(2, 2, 3, 4)]
    inputs = (*hidden, *net.parameters())
    names = [name for name, _ in net.named_parameters()]

    def call(*tensors):
        return torch.func.functional_call(net, dict(zip(names, tensors[2:])), (tensors[:2],))

    assert torch.autograd.gradcheck(call, inputs)


def test_layers_are_weighted_apart_for_keys_and_values():
    net = small(nb_layer=3)
    hidden = hidden_states(3, 2, 6, 12)
    outputs = []
    for key_layer, value_layer in ((0, 2), (2, 0), (2, 2)):
        with torch.no_grad():
            net.weights_k.fill_(-50)[key_layer] = 50
            net.weights_v.fill_(-50)[value_layer] = 50
        outputs.append(net(hidden))
        swapped = list(hidden)
        swapped[1] = swapped[1] + 1e3
        torch.testing.assert_close(net(swapped), outputs[-1], atol=0, rtol=0)
    assert all((a - b).abs().max() > 1e-2 for a, b in zip(outputs, (*outputs[1:], outputs[0])))


def test_padded_batch_equals_each_alone():
    net = small(nb_layer=3).double()
    lens = torch.tensor([9, 1, 5])
    hidden = [h.double() for h in hidden_states(3, 3, 9, 12)]
    padded = [h.masked_fill((torch.arange(9) >= lens[:, None])[:, :, None], 1e4) for h in hidden]
    batch = net(padded, lens)
    for row, length in enumerate(lens.tolist()):
        alone = net([h[row : row + 1, :length] for h in hidden])
        torch.testing.assert_close(batch[row : row + 1], alone, atol=1e-6, rtol=1e-6)
    assert (net(padded) - batch)[1:].abs().max() > 1, "the lengths matter"
    torch.testing.assert_close(net(hidden, torch.full((3,), 9)), net(hidden))


def test_frames_have_no_order():
    net = small(nb_layer=2)
    hidden = hidden_states(2, 2, 8, 12)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    shuffled = [h[:, order] for h in hidden]
    torch.testing.assert_close(net(shuffled), net(hidden), atol=1e-5, rtol=1e-5)


def test_no_stacked_copy_of_the_layers():
    layers, batch, frames, dim = 12, 4, 50, 64
    net = MHFA(feat_dim=dim, head_nb=4, compression_dim=8, nb_layer=layers)
    hidden = hidden_states(layers, batch, frames, dim)
    given = {tensor.data_ptr() for tensor in (*hidden, *net.parameters())}
    kept = {}

    def pack(tensor):
        if tensor.data_ptr() not in given:
            kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        net(hidden)
    # the two weighted sums, and less than one more for what is compressed
    assert sum(kept.values()) < 3 * batch * frames * dim


def test_bfloat16_is_summed_in_float32():
    net = small(nb_layer=25)
    hidden = [h.bfloat16() for h in hidden_states(25, 2, 40, 12)]
    exact = by_heads(net, [h.float() for h in hidden])
    with torch.autocast("cpu", torch.bfloat16):
        found = net(hidden)
    scale = exact.abs().max()
    assert (net(hidden) - exact).abs().max() < 0.003 * scale
    assert (found - exact).abs().max() < 0.02 * scale
    found.float().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in net.parameters())


@pytest.mark.parametrize("option", ["feat_dim", "embed_dim", "head_nb", "compression_dim"])
def test_every_option_counts(option):
    sizes = {"feat_dim": 12, "embed_dim": 7, "head_nb": 3, "compression_dim": 5}
    wider = small(**{**sizes, option: sizes[option] + 1})
    count, more = (sum(p.numel() for p in net.parameters()) for net in (small(), wider))
    assert count < more


def test_bad_input():
    net = small(nb_layer=4)
    with pytest.raises(ValueError, match=r"4 hidden states.*found 3 x \(2, 5, 12\).*nb_layer"):
        net(hidden_states(3, 2, 5, 12))
    with pytest.raises(ValueError, match=r"\(B, T, 12\), found 4 x \(2, 5, 16\)"):
        net(hidden_states(4, 2, 5, 16))
    with pytest.raises(ValueError, match=r"found one tensor \(4, 2, 5, 12\)"):
        net(torch.stack(hidden_states(4, 2, 5, 12)))
    for lens in ([5, 0], [6, 5], [5]):
        with pytest.raises(ValueError, match=r"expected lens \(2,\) in \[1, 5\], found"):
            net(hidden_states(4, 2, 5, 12), torch.tensor(lens))
