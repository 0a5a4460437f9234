"""The head against the model's own logits, in all families and with caps and scales."""

import pytest
import torch
from torch import nn

from attar.models.head import Head, head_of, hidden_states, output_linear
from tests import tiny_models

SCALED = {  # families that do something after the last Linear: (config, model, arguments)
    "cohere": ("CohereConfig", "CohereForCausalLM", {**tiny_models.GQA, "logit_scale": 0.0625}),
    "scaled granite": ("GraniteConfig", "GraniteForCausalLM", {**tiny_models.GQA, "logits_scaling": 6.0}),
    "phi": ("PhiConfig", "PhiForCausalLM", tiny_models.MHA),
    "projected opt": (
        "OPTConfig",
        "OPTForCausalLM",
        {**tiny_models.FAMILIES["opt"][2], "word_embed_proj_dim": 32},
    ),
    "tied gpt2": tiny_models.FAMILIES["gpt2"],
    "gemma2 at 5": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {**tiny_models.WIDE, "final_logit_softcapping": 5.0},
    ),
}
ALL = [*tiny_models.FAMILIES, *SCALED]


def build(name, monkeypatch, **changes):
    if name in SCALED:
        monkeypatch.setitem(tiny_models.FAMILIES, name, SCALED[name])
    return tiny_models.build(name, **changes)


@pytest.mark.few(4)
@pytest.mark.parametrize("name", ALL)
def test_logits_through_the_head_are_the_models(name, monkeypatch):
    model = build(name, monkeypatch).double()
    head, rows = head_of(model), tiny_models.tokens(model)
    assert head is not None
    if name.startswith("gemma2"):
        assert head.softcap == model.config.final_logit_softcapping
    if name == "cohere":
        assert head.scale == 0.0625
    mask = torch.ones_like(rows)
    mask[0, 9:] = 0
    hidden = hidden_states(model, rows, mask)
    assert hidden.shape[:2] == rows.shape and hidden.requires_grad
    wanted = model(input_ids=rows, attention_mask=mask).logits
    assert torch.allclose(head.logits(hidden), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["gemma2 at 5", "scaled granite", "phi"])
def test_backward_is_autograds(name, monkeypatch):
    head = head_of(build(name, monkeypatch).double())
    x = (torch.randn(7, head.weight.shape[0], dtype=torch.float64) * 8).requires_grad_()
    z = head.finish(x * 1.0)
    dz = torch.randn_like(z)
    (wanted,) = torch.autograd.grad(z, x, dz)
    assert torch.allclose(head.backward(z.detach(), dz.clone()), wanted, rtol=1e-12, atol=1e-14)


def test_no_logits_are_made_and_the_model_is_left_as_it_was(monkeypatch):
    model = tiny_models.build("smollm").train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    assert head_of(model).weight is model.get_input_embeddings().weight
    sizes = []
    linear = model.get_output_embeddings()
    handle = linear.register_forward_hook(lambda _, inputs, output: sizes.append(output.shape))
    handle.remove()
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    seen = []
    monkeypatch.setattr(
        linear, "forward", lambda x: seen.append(x.numel()) or nn.functional.linear(x, linear.weight)
    )
    hidden_states(model, tiny_models.tokens(model))
    assert seen == [0]
    assert not linear._forward_hooks and not linear._forward_pre_hooks


def test_checkpointing_and_wrappers_give_the_same_states_and_gradients():
    import peft

    model = tiny_models.build("llama3").train()
    rows = tiny_models.tokens(model)

    def gradient(wrapped):
        model.zero_grad()
        hidden_states(wrapped, rows).square().sum().backward()
        return model.get_input_embeddings().weight.grad.clone()

    class Wrapper(nn.Module):  # as DDP keeps its model
        def __init__(self):
            super().__init__()
            self.module = model

        def forward(self, **inputs):
            return self.module(**inputs)

    wanted = gradient(model)
    assert torch.equal(gradient(Wrapper()), wanted)
    assert head_of(Wrapper()).weight is model.lm_head.weight
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert torch.allclose(gradient(model), wanted, rtol=1e-5, atol=1e-6)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=2))
    head = head_of(adapted)
    assert torch.allclose(
        head.logits(hidden_states(adapted, rows)), adapted(input_ids=rows).logits, atol=1e-5
    )


def test_a_head_that_does_more_is_none():
    import peft

    model = tiny_models.build("llama2")
    assert head_of(peft.get_peft_model(model, peft.LoraConfig(target_modules=["lm_head"], r=2))) is None
    model = tiny_models.build("llama2")
    handle = model.lm_head.register_forward_hook(lambda _, inputs, output: output + 1)
    assert head_of(model) is None and output_linear(model) is None
    handle.remove()
    forward = model.forward

    def shifted(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = output.logits + 3.0
        return output

    model.forward = shifted
    assert head_of(model) is None
    assert head_of(tiny_models.build("llama2").model) is None  # without a head at all


def test_the_type_of_the_weights_does_not_round_a_scale(monkeypatch):
    monkeypatch.setitem(
        SCALED, "scaled granite", (*SCALED["scaled granite"][:2], {**tiny_models.GQA, "logits_scaling": 5.1})
    )
    head = head_of(build("scaled granite", monkeypatch).bfloat16())
    assert head.scale == pytest.approx(1 / 5.1, rel=1e-12)
    assert isinstance(head, Head)
