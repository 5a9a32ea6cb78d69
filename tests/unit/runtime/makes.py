"""Blocks of many makes, each of which says itself where its hooks are: it calls `self.at(hook, x)` there.

That returns x; in the oracle's run, x plus a vector.
"""

import torch
from torch import nn
from torch.nn.functional import layer_norm

WIDTH, HEADS, ROWS, EXPERTS = 16, 24, 5, 4
ALL = {"pre_attn", "attn_heads", "post_attn", "mlp_in", "mlp_out", "post_block"}
ENDS = {"pre_attn", "post_block"}


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
