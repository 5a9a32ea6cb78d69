"""Where sites are found in blocks of many makes, held against what the blocks themselves say.

Each block calls `self.at(hook, x)` where wire.md places a hook. It returns x; in the oracle's run, x plus a vector.
"""

import pytest
import torch
from torch import nn
from torch.nn.functional import layer_norm

from steergate_server.runtime.blocks import UnrecognisedModelError, find_decoder_stack
from steergate_server.runtime.sites import attach_sites
from steergate_server.schema.hooks import HOOKS

WIDTH, HEADS, ROWS, EXPERTS = 16, 24, 5, 4
ALL = {"pre_attn", "attn_heads", "post_attn", "mlp_in", "mlp_out", "post_block"}
ENDS = {"pre_attn", "post_block"}

torch.set_num_threads(1)


class Attend(nn.Module):
    """Stands for an attention layer, which rows of a trial do not reach: it returns what lay in memory."""

    def __init__(self, gain=0.3):
        super().__init__()
        self.gain = gain

    def forward(self, heads):
        return heads.cumsum(0) * self.gain if self.gain else torch.full_like(heads, float("nan"))


class Norm(nn.Module):
    """A norm; with a second argument it adds the two first and returns the sum, too."""

    def forward(self, hidden, residual=None):
        total = hidden if residual is None else hidden + residual
        normed = layer_norm(total, total.shape[-1:])
        return normed if residual is None else (normed, total)


class Attention(nn.Module):
    def __init__(self, at):
        super().__init__()
        self.at = at
        self.qkv, self.attn = nn.Linear(WIDTH, HEADS), Attend()
        self.o_proj = nn.Linear(HEADS, WIDTH)

    def forward(self, positions, hidden):
        assert positions.shape == (ROWS,)
        return self.o_proj(self.at("attn_heads", self.attn(self.qkv(hidden))))


class Mlp(nn.Module):
    def __init__(self, at):
        super().__init__()
        self.at = at
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, hidden):
        return self.at("mlp_out", self.down(torch.tanh(self.up(self.at("mlp_in", hidden)))))


class Experts(nn.Module):
    def __init__(self, at):
        super().__init__()
        self.at = at
        self.gate, self.experts = nn.Linear(WIDTH, EXPERTS), nn.Linear(WIDTH, EXPERTS * WIDTH)

    def forward(self, hidden):
        hidden = self.at("mlp_in", hidden)
        weight = self.at("router_logits", self.gate(hidden)).softmax(-1)
        each = self.experts(hidden).unflatten(-1, (EXPERTS, WIDTH))
        return self.at("mlp_out", (weight.unsqueeze(-1) * each).sum(-2))


class Block(nn.Module):
    """What all blocks here have. The stream is `hidden_states` alone."""

    hooks = ALL
    mlp_class = Mlp

    def __init__(self):
        super().__init__()
        self.wanted = None
        self.input_layernorm, self.post_attention_layernorm = Norm(), Norm()
        self.self_attn, self.mlp = Attention(self.at), self.mlp_class(self.at)

    def at(self, hook, x):
        if self.wanted is not None and self.wanted[0] == hook:
            return x + self.wanted[1]
        return x

    def forward(self, positions, hidden_states):
        stream = self.at("pre_attn", hidden_states)
        stream = stream + self.self_attn(positions, self.input_layernorm(stream))
        stream = self.at("post_attn", stream)
        stream = stream + self.mlp(self.post_attention_layernorm(stream))
        return self.at("post_block", stream)


class WithExperts(Block):
    hooks = ALL | {"router_logits"}
    mlp_class = Experts


class Summed(Block):
    """The stream travels in two parts."""

    def forward(self, positions, hidden_states, residual):
        hidden_states = self.at("pre_attn", hidden_states)
        if residual is None:
            normed, residual = self.input_layernorm(hidden_states), hidden_states
        else:
            normed, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.at("post_attn", self.self_attn(positions, normed))
        normed, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.at("post_block", self.mlp(normed)), residual


class HandsOnUnread(Block):
    """A residual is handed on, and nobody reads it: it is no part of the stream."""

    def forward(self, positions, hidden_states, residual):
        del residual
        stream = super().forward(positions, hidden_states)
        return stream, hidden_states * 2


class Parallel(Block):
    """Attention and MLP read the same stream, through norms that are called as in other models."""

    hooks = ALL - {"post_attn"}

    def forward(self, positions, hidden_states):
        stream = self.at("pre_attn", hidden_states)
        attended = self.self_attn(positions, self.input_layernorm(stream))
        return self.at("post_block", stream + attended + self.mlp(self.post_attention_layernorm(stream)))


class MlpFirst(Parallel):
    """Both read one tensor, and the MLP does so first."""

    def forward(self, positions, hidden_states):
        stream = self.at("pre_attn", hidden_states)
        normed = self.input_layernorm(stream)
        computed = self.mlp(normed)
        return self.at("post_block", stream + computed + self.self_attn(positions, normed))


class OutputNorms(Block):
    """Norms stand behind attention and MLP, so the MLP is given the stream itself."""

    def forward(self, positions, hidden_states):
        stream = self.at("pre_attn", hidden_states)
        stream = stream + self.post_attention_layernorm(self.self_attn(positions, stream))
        stream = self.at("post_attn", stream)
        return self.at("post_block", stream + self.input_layernorm(self.mlp(stream)))


class NormedStream(Block):
    """The stream itself is normed: nothing is carried on by adding to it."""

    hooks = ENDS | {"attn_heads"}

    def forward(self, positions, hidden_states):
        stream = self.at("pre_attn", hidden_states)
        stream = self.input_layernorm(stream + self.self_attn(positions, stream))
        return self.at("post_block", self.post_attention_layernorm(stream + self.mlp(stream)))


class TwoMlps(Block):
    """A second branch beside the MLP: neither is "the MLP"."""

    hooks = ENDS | {"attn_heads"}

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH)

    def forward(self, positions, hidden_states):
        stream = self.at("pre_attn", hidden_states)
        stream = stream + self.self_attn(positions, self.input_layernorm(stream))
        normed = self.post_attention_layernorm(stream)
        return self.at("post_block", stream + self.mlp(normed) + self.shared(normed))


class SpreadMlp(Block):
    """The MLP's layers are the block's own; a norm has a name of its own; arguments go by name."""

    def __init__(self):
        super().__init__()
        del self.mlp, self.post_attention_layernorm
        self.fc1, self.fc2, self.some_norm = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), Norm()

    def forward(self, positions, x):
        stream = self.at("pre_attn", x)
        stream = self.at("post_attn", stream + self.self_attn(positions, self.input_layernorm(stream)))
        inner = torch.tanh(self.fc1(input=self.at("mlp_in", self.some_norm(hidden=stream))))
        return self.at("post_block", stream + self.at("mlp_out", self.fc2(inner)))


class Batched(Block):
    """Rows come in a batch of one, and go in a tuple."""

    def forward(self, positions, hidden_states):
        def attended(rows):
            return self.self_attn(positions, rows.squeeze(0)).unsqueeze(0)

        stream = self.at("pre_attn", hidden_states)
        stream = self.at("post_attn", stream + attended(self.input_layernorm(stream)))
        return (self.at("post_block", stream + self.mlp(self.post_attention_layernorm(stream))),)


class Recurrent(Block):
    """Rows are mixed by something that is no attention layer."""

    hooks = ENDS

    def __init__(self):
        super().__init__()
        del self.self_attn
        self.mixer = nn.Linear(WIDTH, WIDTH)

    def forward(self, positions, hidden_states):
        del positions
        stream = self.at("pre_attn", hidden_states)
        stream = stream + self.mixer(self.input_layernorm(stream)).cumsum(0)
        return self.at("post_block", stream + self.mlp(self.post_attention_layernorm(stream)))


class Model(nn.Module):
    def __init__(self, *blocks, batched=False):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(block() for block in blocks)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.4)
        self.batched = batched

    def forward(self, rows):
        residual, positions = None, torch.arange(ROWS)
        rows = rows.unsqueeze(0) if self.batched else rows
        for block in self.layers:
            if isinstance(block, Summed | HandsOnUnread):
                rows, residual = block(positions, rows, residual)
            else:
                rows = block(positions, rows)
                rows = rows[0] if isinstance(rows, tuple) else rows
        if self.layers and isinstance(self.layers[0], Summed):
            rows = rows + residual
        return rows.squeeze(0) if self.batched else rows


def is_attend(module):
    return isinstance(module, Attend)


def attach(model, hooks, op, run=None):
    """Attach as the runner does: during the trial the attention layer returns nonsense."""
    stack = find_decoder_stack(model, is_attend)
    layers = [module for module in model.modules() if is_attend(module)]
    for layer in layers:
        layer.gain = None
    try:
        start = run or (lambda: model(torch.randn(ROWS, WIDTH)))
        return attach_sites(stack, hooks, WIDTH, is_attend, lambda module: isinstance(module, nn.Identity), op, start)
    finally:
        for layer in layers:
            layer.gain = 0.3


MAKES = [
    Block,
    WithExperts,
    Summed,
    HandsOnUnread,
    Parallel,
    MlpFirst,
    OutputNorms,
    NormedStream,
    TwoMlps,
    SpreadMlp,
    Batched,
]


@pytest.mark.parametrize("make", MAKES, ids=lambda make: make.__name__)
def test_sites_are_where_the_block_says(make):
    """Two blocks: what is written at a site of the first one, too, has to come out right at the end."""
    model = Model(make, make, batched=make is Batched)
    wanted = {}

    def op(hidden, residual, number):
        stream = hidden if residual is None else hidden + residual
        if number == wanted.get("site"):
            wanted["seen"] = stream.clone()
            hidden += wanted["vector"]

    possible = sorted(make.hooks, key=HOOKS.index)
    sites = attach(model, possible, op)
    widths = {"attn_heads": HEADS, "router_logits": EXPERTS}
    assert [site[:3] for site in sites] == [
        (layer, hook, widths.get(hook, WIDTH)) for layer in (0, 1) for hook in possible
    ]
    rows = torch.randn(ROWS, WIDTH)
    plain = model(rows.clone())
    for number, site in enumerate(sites):
        vector = torch.randn(site.width)
        wanted.update(site=number, vector=vector)
        steered = model(rows.clone())
        wanted["site"] = None
        model.layers[site.layer].wanted = (site.hook, vector)
        expected = model(rows.clone())
        model.layers[site.layer].wanted = None
        assert (expected - plain).abs().max() > 1e-2, site
        torch.testing.assert_close(steered, expected, rtol=0, atol=1e-4, msg=lambda text, site=site: f"{site}: {text}")
    for hook in set(HOOKS) - make.hooks:
        with pytest.raises(UnrecognisedModelError, match=f"{make.__name__} has no place for hook '{hook}'") as caught:
            attach(Model(make, make, batched=make is Batched), ["post_block", hook], op)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("make", [Block, Summed, HandsOnUnread], ids=lambda make: make.__name__)
def test_the_stream_is_seen_whole(make):
    """An op at the first hook of the second block sees what the first one returned, all of it and nothing else."""
    model = Model(make, make)
    seen = {}

    def op(hidden, residual, number):
        seen[number] = hidden.clone() if residual is None else hidden + residual

    attach(model, ["pre_attn", "post_block"], op)
    final = model(torch.randn(ROWS, WIDTH))
    torch.testing.assert_close(seen[1], seen[2])
    torch.testing.assert_close(seen[3], final)


def test_a_trial_leaves_no_hook_and_no_gradient_behind():
    model = Model(Block)
    attach(model, ["post_block"], lambda *_: None)
    hooks = [hook for module in model.modules() for hook in (*module._forward_hooks, *module._forward_pre_hooks)]
    assert len(hooks) == 1
    assert all(parameter.grad is None for parameter in model.parameters())


def test_other_mixers_are_steered_at_their_ends():
    sites = attach(Model(Recurrent, Block, Recurrent), list(HOOKS[:1] + HOOKS[1:4]), lambda *_: None)
    assert {layer: {site.hook for site in sites if site.layer == layer} for layer in range(3)} == {
        0: {"pre_attn"},
        1: {"pre_attn", "attn_heads", "post_attn", "mlp_in"},
        2: {"pre_attn"},
    }


def test_layers_of_other_ranks_keep_their_numbers():
    model = Model(Block, Block, Block)
    model.layers[0] = nn.Identity()
    model.forward = lambda rows: [block(torch.arange(ROWS), rows) for block in model.layers[1:]]
    assert [site.layer for site in attach(model, ["post_block"], lambda *_: None)] == [1, 2]


class Scaled(Block):
    def forward(self, positions, hidden_states, residual):
        residual = 0.0 if residual is None else residual
        return super().forward(positions, hidden_states + 0.5 * residual), hidden_states


class Twice(Block):
    def forward(self, positions, hidden_states, original):
        return super().forward(positions, hidden_states) + original


class Wide(Block):
    def forward(self, positions, hidden_states):
        return torch.stack([super(Wide, self).forward(positions, part) for part in hidden_states])


class Blind(Block):
    def forward(self, positions, hidden_states):
        return self.mlp(super().forward(positions, hidden_states) * 0)


def _calls(model, *more):
    rows = torch.randn(ROWS, WIDTH)
    return lambda: model.layers[0](torch.arange(ROWS), rows, *(rows if one is rows else one for one in more))


def test_what_is_not_understood_is_refused_in_one_line():
    def refused(model, why, run=None):
        with pytest.raises(UnrecognisedModelError, match=why) as caught:
            attach(model, ["post_block"], lambda *_: None, run)
        assert "\n" not in str(caught.value)

    def same_twice(model):
        rows = torch.randn(ROWS, WIDTH)
        return lambda: model.layers[0](torch.arange(ROWS), rows, rows)

    refused(Model(Recurrent), "no ModuleList whose children hold a decoder's attention layer")
    refused(nn.Linear(2, 2), "Linear: no ModuleList")
    scaled, twice, wide, blind = (Model(make) for make in (Scaled, Twice, Wide, Blind))
    refused(scaled, "Scaled: `residual` is read, but is not a summand", _calls(scaled, None))
    refused(twice, "one tensor as `hidden_states` and `original`", same_twice(twice))
    refused(wide, r"shape \[2, 5, 16\]", lambda: wide.layers[0](torch.arange(ROWS), torch.randn(2, ROWS, WIDTH)))
    refused(blind, "has no effect", None)
    refused(Model(Block, Block), "the forward does not run block 0", lambda: None)
    one = Model(Block, Block)
    one.layers[1] = one.layers[0]
    refused(one, "one block stands at several layers")


class SeesAndWrites(nn.Module):
    def __init__(self, seen, written):
        super().__init__()
        self.vision_tower, self.language_model = Model(*[Block] * seen), Model(*[Block] * written)


def test_an_encoder_is_never_numbered():
    """Nor guessed at: where two stacks could be the decoder, the longer one is no better than the other."""
    model = SeesAndWrites(seen=5, written=2)
    assert find_decoder_stack(model.language_model, is_attend) is model.language_model.layers
    attending = {id(module) for module in model.language_model.modules() if is_attend(module)}
    assert find_decoder_stack(model, lambda module: id(module) in attending) is model.language_model.layers
    with pytest.raises(UnrecognisedModelError, match=r"vision_tower.layers \(5 blocks\), language_model.layers \(2 bl"):
        find_decoder_stack(model, is_attend)


def test_a_view_of_a_part_of_the_stack_is_not_another_stack():
    model = Model(Block, Block, Block)
    model.first_half = nn.ModuleList(model.layers[:2])
    assert find_decoder_stack(model, is_attend) is model.layers
