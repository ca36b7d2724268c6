"""Mixtures of experts: against naive loops and closed forms, in five architectures, in training."""

import copy
import itertools
import json
import logging
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from torch import nn

from wespeaker_qmargin import experiment, moe, router
from wespeaker_qmargin.checkpoints import average_epochs, read_checkpoint
from wespeaker_qmargin.cli import main
from wespeaker_qmargin.config import load_config
from wespeaker_qmargin.model import SpeakerNet, load_checkpoint
from wespeaker_qmargin.moe import MoEFeedForward, moe_layers, take_router_loss
from wespeaker_qmargin.router import MoEOptions
from wespeaker_qmargin.schedule import parameter_groups
from wespeaker_qmargin.train import train
from wespeaker_qmargin.upcycle import feed_forwards, fit_experts, upcycle
from wespeaker_qmargin.w2vbert import W2VBertFrontend

transformers = pytest.importorskip("transformers")

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


def test_logging_is_quiet_for_three_experts(caplog):
    with caplog.at_level(logging.WARNING):
        upcycle(encoder("wavlm"))
    assert not caplog.records


# Training: the router losses are in the loss, experts and routers are groups of their own, a dense
# checkpoint is adapted.


MOE = ["--dataset_args.wavlm_args.moe", "{experts: 3, top_k: 2}"]


def records(exp_dir) -> list[dict]:
    lines = (exp_dir / "metrics.jsonl").read_text().splitlines()
    return [x for x in map(json.loads, lines) if "loss" in x]


def test_training_with_experts(tiny_ssl, tmp_path):
    runs = []
    for name, words in (("dense", []), ("moe", MOE), ("free", MOE)):
        if name == "free":
            words = ["--dataset_args.wavlm_args.moe", "{z_loss: 0, balance_loss: 0}"]
        exp = tmp_path / name
        runs.append(train(load_config(tiny_ssl, [*words, "--exp_dir", str(exp)])))
    dense, mixed, free = map(records, runs)
    assert 15 < mixed[0]["loss"] - free[0]["loss"] < 30, "balance near k = 2, times 10"
    assert 0 < mixed[-1]["least_load"] <= 1 and 0 < mixed[-1]["router_entropy"] <= 1
    assert "least_load" not in dense[-1]
    keys = read_checkpoint(runs[1] / "models" / "model_1.pt").keys()
    assert sum("feed_forward.router.weight" in key for key in keys) == 2
    assert average_epochs(runs[1], 1).is_file()


def test_a_w2v_bert_front_end_has_two_mixtures_a_layer(make_tiny_encoder, tmp_path):
    make_tiny_encoder.make_w2vbert(tmp_path, layers=2)
    dense, mixed = (
        W2VBertFrontend(str(tmp_path), frozen=False, moe=options).eval()
        for options in (None, {"experts": 2, "top_k": 1, "layers": "last1"})
    )
    assert len(moe_layers(mixed)) == 2 == len(mixed.replaced)
    wavs, lens = torch.randn(2, 16000), torch.tensor([16000, 9000])
    with torch.no_grad():
        for one, other in zip(dense(wavs, lens)[0], mixed(wavs, lens)[0]):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    for options in ({"use_lora": True, "frozen": True}, {"feed_forward": {"module": "x:Y"}}):
        with pytest.raises(ValueError, match="moe|feed_forward"):
            W2VBertFrontend(str(tmp_path), moe={"experts": 2}, **options)


def test_router_and_experts_have_their_own_rates(tiny_ssl):
    words = ["--lr_ratio", "{frontend: 0.1, router: 2.0, experts: 0.5, projection: 3}"]
    net = SpeakerNet(load_config(tiny_ssl, [*words, *MOE]), 8)
    groups = parameter_groups(net, load_config(tiny_ssl, words).lr_ratio)
    sizes = {group["name"]: (group["lr_ratio"], len(group["params"])) for group in groups}
    assert sizes["router"] == (2.0, 2) and sizes["experts"] == (0.5, 2 * 3 * 4)
    assert sizes["frontend"][0] == 0.1 and sizes["projection"] == (3.0, 1)
    frozen = parameter_groups(net, {"frontend": 0, "router": 1})
    assert [g["name"] for g in frozen] == ["router", "rest"], "a part of a frozen part is trained"


@pytest.mark.parametrize("reinit", [0, 0.5])
def test_a_dense_run_is_adapted_with_experts(tiny_ssl, corpus, tmp_path, reinit, capsys):
    dense = train(load_config(tiny_ssl, ["--exp_dir", str(tmp_path / "dense")]))
    average_epochs(dense, 1)
    moe_yaml, tuned = tmp_path / "moe.yaml", tmp_path / "tuned"
    moe_yaml.write_text(
        f"dataset_args: {{wavlm_args: {{moe: {{experts: 2, reinit: {reinit}}}}}}}\nnum_epochs: 1\n"
    )
    words = ["--from", dense, "--data", corpus, "--exp_dir", tuned, "--config", moe_yaml]
    assert main(["finetune", *map(str, words), "--prototype_epochs", "0"]) == 0
    start, before = (read_checkpoint(x) for x in (tuned / "init.pt", dense / "models/avg_model.pt"))
    name = "frontend.encoder.encoder.layers.0.feed_forward"
    was = before[f"{name}.intermediate_dense.weight"]
    for i in range(2):
        same = (start[f"{name}.experts.{i}.intermediate_dense.weight"] == was).all(dim=1)
        assert same.sum() == round((1 - reinit) * len(was))
    again = ["--from", tuned, "--data", corpus, "--config", moe_yaml, "--exp_dir", tmp_path / "x"]
    average_epochs(tuned, 1)
    moe_yaml.write_text("dataset_args: {wavlm_args: {moe: {experts: 3}}}\nnum_epochs: 1\n")
    command = ["finetune", *map(str, again), "--prototype_epochs", "0"]
    assert main(command) == 1
    assert "the checkpoint has 2 experts, the network 3" in capsys.readouterr().err
    assert main([*command, "--merge_experts"]) == 0


def test_the_config_of_an_adaptation(tiny_ssl, corpus, tmp_path):
    """The head alone, at its rate; then all, in groups."""
    dense, tuned = tmp_path / "dense", tmp_path / "tuned"
    train(load_config(tiny_ssl, ["--exp_dir", str(dense)]))
    average_epochs(dense, 1)
    words = ["--from", dense, "--data", corpus, "--exp_dir", tuned, "--prototype_lr", "1e-3"]
    words += ["--config", ROOT / "conf/finetune/experts.yaml", "--num_epochs", "1"]
    words += ["--optimizer", "AdamW", "--optimizer_args", "{}"]
    assert main(["finetune", *map(str, words)]) == 0
    places = ("prototypes/models/model_2.pt", "init.pt", "models/model_1.pt")
    first, start, end = (read_checkpoint(tuned / place) for place in places)
    same = {key for key in start if torch.equal(start[key], first[key])}
    assert start.keys() - same == {"projection.weight"}, "the head alone"
    changed = [key for key in end if not torch.equal(end[key], start[key])]
    assert any(".router." in key for key in changed) and any(
        ".experts.2." in key for key in changed
    )


def test_an_export_holds_the_experts(tiny_ssl, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "recipes/voxceleb/local"))
    import export_model

    exp = train(load_config(tiny_ssl, [*MOE, "--exp_dir", str(tmp_path / "exp")]))
    average_epochs(exp, 1)
    out = export_model.export_model(exp, tmp_path / "out")
    net = SpeakerNet(load_config(out / "config.yaml"))
    load_checkpoint(net, out / "avg_model.pt", head=False)
    assert len(moe_layers(net)) == 2


def test_a_collapse_is_told_once(tiny_ssl, tmp_path, caplog):
    moe_args = "{experts: 2, top_k: 1, z_loss: 0, balance_loss: 0}"
    words = ["--dataset_args.wavlm_args.moe", moe_args, "--exp_dir", str(tmp_path / "x")]
    words += ["--num_epochs", "2", "--lr_ratio", "{frontend: 0}"]
    made = load_config(tiny_ssl, words)
    real = experiment.SpeakerNet

    class Collapsed(real):
        def __init__(self, *args):
            super().__init__(*args)
            with torch.no_grad():
                for layer in moe_layers(self).values():
                    layer.router.weight.zero_()  # topk of equal logits: always the same expert

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "SpeakerNet", Collapsed)
        train(made)
    told = [x for x in caplog.messages if "raise balance_loss, or take fewer experts" in x]
    assert len(told) == 2 and "gets 0 % of the choices" in told[0]


@pytest.mark.parametrize(
    "moe_args, message",
    [
        ("{expert: 3}", "wavlm_args.moe.expert: not an argument of MoEOptions"),
        ("{experts: 2, top_k: 3}", "moe.top_k: 3 of 2 experts"),
        ("{layers: [7]}", r"layers: .* got \[7\]"),
    ],
)
def test_bad_options_in_a_yaml(tiny_ssl, moe_args, message):
    words = ["--dataset_args.wavlm_args.moe", moe_args]
    with pytest.raises(ValueError, match=message):
        SpeakerNet(load_config(tiny_ssl, words), 8)


def test_two_processes_are_one(tiny_ssl, tmp_path):
    """DistributedDataParallel: router losses come through the forward, no expert is missing."""
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [sys.executable, *launcher, str(script), str(tiny_ssl)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("equal") == 2


RANKS = """
import copy, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from wespeaker_qmargin.config import load_config
from wespeaker_qmargin.model import SpeakerNet

dist.init_process_group("gloo")
rank = dist.get_rank()
words = ["--dataset_args.wavlm_args.moe", "{experts: 4, top_k: 1, balance_loss: 0}"]
torch.manual_seed(0)
net = SpeakerNet(load_config(sys.argv[1], words), 8).eval()
net.frontend.encoder.config.mask_time_prob = 0.0
for layer in net.modules():
    if hasattr(layer, "router"):
        layer.train()
        layer.experts.eval()
wavs, labels = torch.randn(4, 8000), torch.tensor([0, 1, 2, 3])
mine = slice(2 * rank, 2 * rank + 2)
alone = copy.deepcopy(net)
parallel = DistributedDataParallel(net)
loss, _ = parallel(wavs[mine], labels[mine], None)
loss.backward()
shared = {n: p.grad.clone() for n, p in net.named_parameters()}
alone(wavs, labels, None)[0].backward()
for name, parameter in alone.named_parameters():
    torch.testing.assert_close(shared[name], parameter.grad, atol=1e-5, rtol=1e-3)
print("equal", flush=True)
dist.destroy_process_group()
"""
