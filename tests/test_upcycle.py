"""Experts in the encoders of transformers: found by structure, equal at first, checkpoints."""

import copy

import pytest
import torch
from torch import nn

from wespeaker_qmargin import moe
from wespeaker_qmargin.moe import moe_layers, take_router_loss
from wespeaker_qmargin.upcycle import feed_forwards, fit_experts, upcycle

transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SPEECH = {"intermediate_size": 24, "conv_dim": (8, 8), "conv_kernel": (10, 8), "layerdrop": 0.0}
SPEECH |= {"conv_stride": (5, 8), "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
SPEECH |= {"mask_time_prob": 0.0, "do_stable_layer_norm": False}


def encoder(kind: str) -> nn.Module:
    torch.manual_seed(0)
    t = transformers
    if kind == "vit":
        config = t.ViTConfig(**SMALL, intermediate_size=24, image_size=16, patch_size=4)
        return t.ViTModel(config).eval()
    if kind == "swin":
        sizes = {"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2}
        return t.SwinModel(t.SwinConfig(image_size=16, patch_size=2, **sizes)).eval()
    if kind == "w2vbert":
        sizes = {"intermediate_size": 24, "feature_projection_input_dim": 12, "layerdrop": 0.0}
        return t.Wav2Vec2BertModel(t.Wav2Vec2BertConfig(**SMALL, **sizes)).eval()
    names = {"wavlm": "WavLM", "hubert": "Hubert", "wav2vec2": "Wav2Vec2"}
    config = getattr(t, f"{names[kind]}Config")(**SMALL, **SPEECH)
    return getattr(t, f"{names[kind]}Model")(config).eval()


def inputs(kind: str) -> dict:
    torch.manual_seed(1)
    if kind in ("vit", "swin"):
        return {"pixel_values": torch.randn(2, 3, 16, 16)}
    if kind == "w2vbert":
        mask = torch.ones(2, 9, dtype=torch.long)
        mask[1, 6:] = 0
        return {"input_features": torch.randn(2, 9, 12), "attention_mask": mask}
    mask = torch.ones(2, 800, dtype=torch.long)
    mask[1, 500:] = 0
    return {"input_values": torch.randn(2, 800), "attention_mask": mask}


KINDS = {"wavlm": 2, "w2vbert": 4, "hubert": 2, "wav2vec2": 2, "vit": 2, "swin": 2}


@pytest.mark.parametrize("kind", KINDS)
def test_upcycling_changes_nothing_at_first(kind):
    net = encoder(kind)
    given = inputs(kind)
    with torch.no_grad():
        before = net(**given).last_hidden_state
        names = upcycle(net)
        after = net(**given).last_hidden_state
    assert len(names) == KINDS[kind] == len(moe_layers(net))
    torch.testing.assert_close(after, before, atol=1e-6, rtol=1e-6)
    with pytest.raises(ValueError, match="has experts already"):
        upcycle(net)


@pytest.mark.parametrize("kind", ["wavlm", "w2vbert", "hubert", "wav2vec2"])
def test_the_encoders_padding_is_known_to_the_layers(kind):
    net, given = encoder(kind), inputs(kind)
    upcycle(net)
    moe.count_usage(net)
    with torch.no_grad():
        net(**given)
        (tokens,) = {x.tokens for x in moe.usage(net).values()}
        mask = given.pop("attention_mask").bool()
        (name,) = given
        moe.count_usage(net)
        for row, keep in zip(given[name], mask):
            net(**{name: row[keep][None]})
    (alone,) = {x.tokens for x in moe.usage(net).values()}
    assert tokens == alone, "padding is not counted"


def test_blocks_are_chosen():
    net = encoder("w2vbert")
    assert [slot.block for slot in feed_forwards(net)] == [0, 0, 1, 1]
    assert upcycle(net, layers="last1") == ["encoder.layers.1.ffn1", "encoder.layers.1.ffn2"]
    assert len(upcycle(encoder("wavlm"), layers=[0])) == 1


def test_an_unknown_encoder_is_refused():
    with pytest.raises(ValueError, match="Sequential: no feed-forward module .* WavLM, HuBERT"):
        upcycle(nn.Sequential(nn.Linear(3, 3)))


def test_many_experts_are_warned_of(caplog):
    upcycle(encoder("wavlm"), experts=3)
    assert not caplog.messages
    upcycle(encoder("wavlm"), experts=5)
    assert "moe.experts: 5; in FaceMoE 8 collapsed" in caplog.text


def test_part_of_every_expert_is_drawn_anew():
    net = encoder("wavlm")
    dense = copy.deepcopy(feed_forwards(net)[0].module)
    upcycle(net, reinit=0.5)
    experts = next(iter(moe_layers(net).values())).experts
    for expert in experts:
        rows = (expert.intermediate_dense.weight == dense.intermediate_dense.weight).all(dim=1)
        columns = (expert.output_dense.weight == dense.output_dense.weight).all(dim=0)
        assert rows.sum() == 12 and torch.equal(rows, columns)
    one, other = (x.intermediate_dense.weight for x in experts[:2])
    assert not torch.equal(one, other)


def test_a_checkpoint_goes_into_another_number_of_experts():
    dense = encoder("wavlm")
    three, two = encoder("wavlm"), encoder("wavlm")
    upcycle(three)
    upcycle(two, experts=2)
    state, upcycled = fit_experts(dense.state_dict(), moe_layers(three))
    assert len(upcycled) == 2
    missing, unexpected = three.load_state_dict(state, strict=False)
    assert not unexpected and all(name.endswith("router.weight") for name in missing)
    same, upcycled = fit_experts(three.state_dict(), moe_layers(three))
    assert same.keys() == three.state_dict().keys() and not upcycled
    for layers in (moe_layers(two), {}):
        with pytest.raises(ValueError, match="has 3 experts, the network [12]; set .*merge_exp"):
            fit_experts(three.state_dict(), layers)
    merged, _ = fit_experts(three.state_dict(), {}, merge=True)
    for key, value in dense.state_dict().items():
        torch.testing.assert_close(merged[key], value)
    again, upcycled = fit_experts(three.state_dict(), moe_layers(two), merge=True)
    assert len(upcycled) == 2 and not two.load_state_dict(again, strict=False)[1]


def test_gradient_checkpointing_gives_the_same_loss_and_gradients():
    found = []
    for checkpointed in (False, True):
        net = encoder("wavlm")
        upcycle(net)
        if checkpointed:
            net.gradient_checkpointing_enable({"use_reentrant": False})
        net.train()
        net.config.layerdrop = 0.0
        for module in net.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        hidden = net(input_values=inputs("wavlm")["input_values"]).last_hidden_state
        (hidden.square().mean() + take_router_loss(net)).backward()
        found.append({n: p.grad for n, p in net.named_parameters() if ".router." in n})
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient)
        assert gradient.any()


def test_save_and_load(tmp_path):
    net = encoder("wavlm")
    upcycle(net, reinit=0.3)
    torch.save(net.state_dict(), tmp_path / "x.pt")
    other = encoder("wavlm")
    upcycle(other)
    other.load_state_dict(torch.load(tmp_path / "x.pt", weights_only=True))
    given = inputs("wavlm")
    with torch.no_grad():
        assert torch.equal(net(**given).last_hidden_state, other(**given).last_hidden_state)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"top_k": 4}, r"moe.top_k: 4 of 3 experts"),
        ({"top_k": 0}, "moe.top_k: expected a number >= 1"),
        ({"experts": 0}, "moe.experts: expected a number >= 1"),
        ({"experts": 2.5}, "moe.experts: expected a number >= 1"),
        ({"gates": "hard"}, "moe.gates: expected softmax or logits"),
        ({"losses": "x"}, "moe.losses: expected facemoe or switch"),
        ({"z_loss": -1}, "moe.z_loss: expected a number >= 0"),
        ({"balance_loss": "a"}, "moe.balance_loss: expected a number >= 0"),
        ({"jitter": 1}, r"moe.jitter: expected a number in \[0, 1\)"),
        ({"reinit": 1.5}, r"moe.reinit: expected a number in \[0, 1\)"),
        ({"layers": "first2"}, "layers: expected all, lastM"),
        ({"layers": [2]}, r"blocks in 0 ... 1, got \[2\]"),
        ({"layers": "last3"}, "layers: expected"),
        ({"layers": []}, "layers: expected"),
        ({"layers": 1}, "layers: expected"),
        ({"layers": [True]}, "layers: expected"),
        ({"layers": [[0]]}, "layers: expected"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        upcycle(encoder("wavlm"), **options)
