# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What people write around torch.nn: training steps of the kinds that tutorials, papers and courses show."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from corpus_case import Program, Sample, generator, mean_square
from torch import Tensor, nn

BATCH, CLASSES = 8, 5
Built = tuple[nn.Module, Callable[[int], dict[str, Any]]]


def _normal(*shape: int) -> Callable[[int], Tensor]:
    return lambda turn: torch.randn(*shape, generator=generator(turn))


def entry(
    name: str,
    build: Callable[[], Built],
    loss: Callable[[Any], Tensor] = lambda output: output,
) -> Program:
    """A program by its name; its model gives the loss, unless ``loss`` makes one of what it gives."""

    def make() -> Sample:
        model, inputs = build()
        return Sample(model.train(), inputs, loss)

    return Program(name, "torch.nn", make)


class Recurrent(nn.Module):
    """A classifier of sequences."""

    def __init__(self, kind: Callable[..., nn.Module], **settings: Any) -> None:
        super().__init__()
        self.recurrent = kind(6, 16, batch_first=True, **settings)
        self.head = nn.Linear(16 * (2 if settings.get("bidirectional") else 1), CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        states, _ = self.recurrent(x)
        return F.cross_entropy(self.head(states[:, -1]), y)


def _classes(turn: int, *shape: int) -> Tensor:
    return torch.randint(CLASSES, shape or (BATCH,), generator=generator(turn + 50))


def recurrent(kind: Callable[..., nn.Module], **settings: Any) -> Built:
    return Recurrent(kind, **settings), lambda turn: {"x": _normal(BATCH, 10, 6)(turn), "y": _classes(turn)}


class Translator(nn.Module):
    """An encoder and a decoder with attention, word by word, each fed with the true word before."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 16)
        self.encoder = nn.GRU(16, 16, batch_first=True)
        self.cell = nn.GRUCell(32, 16)
        self.head = nn.Linear(16, 40)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        states, last = self.encoder(self.words(source))
        state, losses = last[0], []
        for place in range(target.shape[1] - 1):
            weights = torch.softmax((states @ state.unsqueeze(-1)).squeeze(-1), -1)
            context = (weights.unsqueeze(1) @ states).squeeze(1)
            state = self.cell(torch.cat([self.words(target[:, place]), context], -1), state)
            losses.append(F.cross_entropy(self.head(state), target[:, place + 1]))
        return torch.stack(losses).mean()


def translator() -> Built:
    def inputs(turn: int) -> dict[str, Any]:
        source, target = torch.randint(40, (2, BATCH, 7), generator=generator(turn))
        return {"source": source, "target": target}

    return Translator(), inputs


class Attention(nn.Module):
    """torch.nn's own transformer, with causal masks and padding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 32)
        self.transformer = nn.Transformer(32, 4, 1, 1, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, 40)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1] - 1)
        padding = source == 0
        given = self.words(target[:, :-1])
        states = self.transformer(
            self.words(source), given, tgt_mask=mask, src_key_padding_mask=padding, memory_key_padding_mask=padding
        )
        return F.cross_entropy(self.head(states).flatten(0, 1), target[:, 1:].flatten())


def attention() -> Built:
    def inputs(turn: int) -> dict[str, Any]:
        source, target = torch.randint(1, 40, (2, BATCH, 7), generator=generator(turn))
        source[0, 5:] = 0
        return {"source": source, "target": target}

    return Attention(), inputs


class UNet(nn.Module):
    """Noise predicted from a noisy image and the time, as diffusion models do."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 16))
        self.down = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(4, 16)
        self.middle = nn.Conv2d(16, 16, 3, padding=1)
        self.up = nn.ConvTranspose2d(32, 8, 4, stride=2, padding=1)
        self.out = nn.Conv2d(11, 3, 3, padding=1)

    def forward(self, x: Tensor, time: Tensor, noise: Tensor) -> Tensor:
        angles = time[:, None] * torch.exp(-torch.arange(4.0, device=x.device))
        embedded = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        share = torch.cos(time)[:, None, None, None]
        noisy = share * x + (1 - share.square()).sqrt() * noise
        low = F.silu(self.norm(self.down(noisy)) + embedded[:, :, None, None])
        high = self.up(torch.cat([low, F.silu(self.middle(low))], 1))
        return F.mse_loss(self.out(torch.cat([high, noisy], 1)), noise)


def unet() -> Built:
    def inputs(turn: int) -> dict[str, Any]:
        time = torch.rand(BATCH, generator=generator(turn + 1))
        return {"x": _normal(BATCH, 3, 16, 16)(turn), "time": time, "noise": _normal(BATCH, 3, 16, 16)(turn + 2)}

    return UNet(), inputs


class Autoencoder(nn.Module):
    """A variational autoencoder; the noise comes from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.LeakyReLU(0.2), nn.Flatten())
        self.statistics = nn.Linear(8 * 64, 16)
        self.decoder = nn.Sequential(
            nn.Linear(8, 8 * 64), nn.Unflatten(1, (8, 8, 8)), nn.ConvTranspose2d(8, 1, 4, 2, 1), nn.Sigmoid()
        )

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        mean, log_variance = self.statistics(self.encoder(x)).chunk(2, -1)
        decoded = self.decoder(mean + noise * torch.exp(0.5 * log_variance))
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(-1).mean()
        return F.binary_cross_entropy(decoded, x, reduction="sum") / len(x) + divergence  # type: ignore[no-any-return]


def autoencoder() -> Built:
    def inputs(turn: int) -> dict[str, Any]:
        return {"x": torch.rand(BATCH, 1, 16, 16, generator=generator(turn)), "noise": _normal(BATCH, 8)(turn + 1)}

    return Autoencoder(), inputs


class Towers(nn.Module):
    """Two encoders, and the contrastive loss of a batch of pairs in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(12, 8), nn.Linear(10, 8)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        a, b = F.normalize(self.left(left), dim=-1), F.normalize(self.right(right), dim=-1)
        logits = self.scale.exp() * a @ b.t()
        labels = torch.arange(len(left), device=left.device)
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


def towers() -> Built:
    return Towers(), lambda turn: {"left": _normal(BATCH, 12)(turn), "right": _normal(BATCH, 10)(turn + 1)}


class Codebook(nn.Module):
    """Vector quantization with a straight-through gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(12, 8), nn.Linear(8, 12)
        self.codes = nn.Parameter(torch.randn(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        encoded = self.encoder(x)
        nearest = torch.cdist(encoded, self.codes).argmin(-1)
        chosen = self.codes[nearest]
        decoded = self.decoder(encoded + (chosen - encoded).detach())
        commitment = F.mse_loss(encoded, chosen.detach()) + F.mse_loss(chosen, encoded.detach())
        return F.mse_loss(decoded, x) + 0.25 * commitment


class GraphAttention(nn.Module):
    """Attention over the edges of a graph, by scatters."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.score, self.head = nn.Linear(6, 16), nn.Linear(32, 1), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor, edges: Tensor, y: Tensor) -> Tensor:
        states = self.project(x)
        source, target = edges
        scores = F.leaky_relu(self.score(torch.cat([states[source], states[target]], -1))).squeeze(-1)
        weights = (scores - scores.max().detach()).exp()
        totals = torch.zeros(len(x), dtype=x.dtype).scatter_add(0, target, weights)
        share = weights / totals[target].clamp_min(1e-6)
        gathered = torch.zeros_like(states).index_add(0, target, share.unsqueeze(-1) * states[source])
        return F.cross_entropy(self.head(F.elu(gathered)), y)


def graph_attention() -> Built:
    def inputs(turn: int) -> dict[str, Any]:
        edges = torch.randint(12, (2, 40), generator=generator(turn))
        return {"x": _normal(12, 6)(turn), "edges": edges, "y": _classes(turn, 12)}

    return GraphAttention(), inputs


class MessagePassing(nn.Module):
    """Molecules, say: messages along the edges, gated states, and what is pooled of each graph in three ways."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update, self.head = nn.Linear(12, 6), nn.GRUCell(6, 6), nn.Linear(18, CLASSES)

    def forward(self, x: Tensor, edges: Tensor, graph: Tensor, y: Tensor) -> Tensor:
        states, (source, target) = torch.tanh(x), edges
        for _ in range(2):
            messages = F.relu(self.message(torch.cat([states[source], states[target]], -1)))
            states = self.update(torch.zeros_like(states).index_add(0, target, messages), states)
        places = graph.unsqueeze(-1).expand_as(states)
        pooled = [
            states.new_zeros(len(y), 6).scatter_reduce(0, places, states, kind, include_self=False)
            for kind in ("amax", "mean", "sum")
        ]
        return F.cross_entropy(self.head(torch.cat(pooled, -1)), y)


def message_passing() -> Built:
    def inputs(turn: int) -> dict[str, Any]:
        edges = torch.randint(20, (2, 50), generator=generator(turn))
        return {"x": _normal(20, 6)(turn), "edges": edges, "graph": torch.arange(20) // 5, "y": _classes(turn, 4)}

    return MessagePassing(), inputs


class Oscillator(nn.Module):
    """A network whose derivative is part of its loss, as in physics-informed learning."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, time: Tensor) -> Tensor:
        time = time.requires_grad_()
        place = self.net(time)
        (speed,) = torch.autograd.grad(place.sum(), time, create_graph=True)
        (acceleration,) = torch.autograd.grad(speed.sum(), time, create_graph=True)
        return (acceleration + 4 * place).square().mean() + (place[0] - 1).square().mean()  # type: ignore[no-any-return]


class Flow(nn.Module):
    """A normalizing flow of affine couplings."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 6)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        log_determinant = x.new_zeros(len(x))
        for layer in self.layers:
            kept, moved = x.chunk(2, -1)
            scale, shift = layer(kept).chunk(2, -1)
            scale = torch.tanh(scale)
            x = torch.cat([moved * scale.exp() + shift, kept], -1)
            log_determinant = log_determinant + scale.sum(-1)
        return (0.5 * x.square().sum(-1) - log_determinant).mean()


class Chain(nn.Module):
    """A conditional random field: the forward algorithm against the score of the true labels."""

    def __init__(self) -> None:
        super().__init__()
        self.emit = nn.Linear(6, CLASSES)
        self.moves = nn.Parameter(torch.randn(CLASSES, CLASSES) * 0.1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        emitted = self.emit(x)
        scores = emitted[:, 0]
        for place in range(1, x.shape[1]):
            scores = torch.logsumexp(scores.unsqueeze(-1) + self.moves, 1) + emitted[:, place]
        true = emitted.gather(-1, y.unsqueeze(-1)).squeeze(-1).sum(-1) + self.moves[y[:, :-1], y[:, 1:]].sum(-1)
        return (torch.logsumexp(scores, -1) - true).mean()  # type: ignore[no-any-return]


class Field(nn.Module):
    """Colours along rays, rendered from a field of density, as neural radiance fields do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, origins: Tensor, directions: Tensor, colours: Tensor) -> Tensor:
        depths = torch.linspace(0.5, 2.5, 12, device=origins.device, dtype=origins.dtype)
        points = origins[:, None] + directions[:, None] * depths[None, :, None]
        angles = points.unsqueeze(-1) * 2.0 ** torch.arange(4, device=points.device)
        out = self.net(torch.cat([angles.sin(), angles.cos()], -1).flatten(-2))
        opacity = 1 - torch.exp(-F.softplus(out[..., 3]) * (depths[1] - depths[0]))
        clear = torch.cumprod(torch.cat([torch.ones_like(opacity[:, :1]), 1 - opacity + 1e-10], -1), -1)[:, :-1]
        rendered = ((opacity * clear).unsqueeze(-1) * torch.sigmoid(out[..., :3])).sum(1)
        return F.mse_loss(rendered, colours)


def field() -> Built:
    def inputs(turn: int) -> dict[str, Any]:
        colours = torch.rand(BATCH, 3, generator=generator(turn + 2))
        return {"origins": _normal(BATCH, 3)(turn), "directions": _normal(BATCH, 3)(turn + 1), "colours": colours}

    return Field(), inputs


class Critic(nn.Module):
    """The loss of a Wasserstein critic with the penalty on its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def forward(self, real: Tensor, fake: Tensor, share: Tensor) -> Tensor:
        between = (share * real + (1 - share) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(self.net(between).sum(), between, create_graph=True)
        penalty = (slope.norm(dim=-1) - 1).square().mean()
        return self.net(fake).mean() - self.net(real).mean() + 10 * penalty  # type: ignore[no-any-return]


def critic() -> Built:
    def inputs(turn: int) -> dict[str, Any]:
        share = torch.rand(BATCH, 1, generator=generator(turn + 2))
        return {"real": _normal(BATCH, 4)(turn), "fake": _normal(BATCH, 4)(turn + 1), "share": share}

    return Critic(), inputs


class Policy(nn.Module):
    """The clipped loss of proximal policy optimization, with an entropy bonus and a value loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.actor, self.critic = (
            nn.Sequential(nn.Linear(6, 16), nn.Tanh()),
            nn.Linear(16, 4),
            nn.Linear(16, 1),
        )

    def forward(self, state: Tensor, action: Tensor, before: Tensor, advantage: Tensor, value: Tensor) -> Tensor:
        hidden = self.body(state)
        distribution = torch.distributions.Categorical(logits=self.actor(hidden))
        ratio = (distribution.log_prob(action) - before).exp()
        gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        loss = F.mse_loss(self.critic(hidden).squeeze(-1), value)
        return 0.5 * loss - gain - 0.01 * distribution.entropy().mean()  # type: ignore[no-any-return]


def policy() -> Built:
    def inputs(turn: int) -> dict[str, Any]:
        return {
            "state": _normal(BATCH, 6)(turn),
            "action": torch.randint(4, (BATCH,), generator=generator(turn)),
            "before": -_normal(BATCH)(turn + 1).abs(),
            "advantage": _normal(BATCH)(turn + 2),
            "value": _normal(BATCH)(turn + 3),
        }

    return Policy(), inputs


class Experts(nn.Module):
    """A mixture of experts with the two best of four, each on the rows that chose it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = torch.topk(torch.softmax(self.gate(x), -1), 2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, slot = torch.where(chosen == number)
            out = out.index_add(0, rows, weights[rows, slot, None] * expert(x[rows]))
        return out.square().mean()


class Pixels(nn.Module):
    """Convolutions under spectral and weight norm, as discriminators have."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 8, 4, 2, 1))
        self.second = nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 8, 4, 2, 1))
        self.head = nn.Linear(8 * 16, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = F.leaky_relu(self.second(F.leaky_relu(self.first(x), 0.2)), 0.2)
        return F.binary_cross_entropy_with_logits(self.head(hidden.flatten(1)).squeeze(-1), y)


def pixels() -> Built:
    def inputs(turn: int) -> dict[str, Any]:
        return {"x": _normal(BATCH, 3, 16, 16)(turn), "y": (torch.arange(BATCH) % 2).float()}

    return Pixels(), inputs


def _alone(model: Callable[[], nn.Module], name: str, *shape: int) -> Callable[[], Built]:
    return lambda: (model(), lambda turn: {name: _normal(*shape)(turn)})


def _chain() -> Built:
    return Chain(), lambda turn: {"x": _normal(BATCH, 9, 6)(turn), "y": _classes(turn, BATCH, 9)}


def _network() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, CLASSES))


PROGRAMS = [
    entry("MLP with batch norm", _alone(_network, "input", BATCH, 12), mean_square),
    entry("LSTM classifier", functools.partial(recurrent, nn.LSTM, num_layers=2, bidirectional=True)),
    entry("GRU classifier", functools.partial(recurrent, nn.GRU)),
    entry("translator of GRU cells with attention", translator),
    entry("nn.Transformer with masks", attention),
    entry("diffusion U-Net", unet),
    entry("variational autoencoder", autoencoder),
    entry("two towers, contrastive", towers),
    entry("vector quantization", _alone(Codebook, "x", BATCH, 12)),
    entry("graph attention", graph_attention),
    entry("message passing, pooled by graph", message_passing),
    entry("oscillator, physics-informed", _alone(Oscillator, "time", BATCH, 1)),
    entry("normalizing flow", _alone(Flow, "x", BATCH, 6)),
    entry("conditional random field", _chain),
    entry("radiance field", field),
    entry("Wasserstein critic with gradient penalty", critic),
    entry("proximal policy optimization", policy),
    entry("mixture of experts by rows", _alone(Experts, "x", BATCH, 8)),
    entry("spectral and weight norm", pixels),
]
