"""Where sites are found in blocks of many makes, held against what the blocks themselves say.

The blocks are those of makes.py.
"""

import pytest
import torch
from torch import nn

from steergate_server.runtime.blocks import UnrecognisedModelError, find_decoder_stack
from steergate_server.runtime.sites import attach_sites
from steergate_server.schema.hooks import HOOKS
from unit.runtime.makes import (
    EXPERTS,
    HEADS,
    ROWS,
    WIDTH,
    Attend,
    Batched,
    Block,
    HandsOnUnread,
    MlpFirst,
    Model,
    NormedStream,
    OutputNorms,
    Parallel,
    Recurrent,
    SpreadMlp,
    Summed,
    TwoMlps,
    WithExperts,
)

torch.set_num_threads(1)


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
    refused(Model(Block), "a trial forward failed: ValueError: two lines", _fail)
    one = Model(Block, Block)
    one.layers[1] = one.layers[0]
    refused(one, "one block stands at several layers")


def _fail():
    raise ValueError("two\nlines")


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
