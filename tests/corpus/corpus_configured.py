# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How a program of Hugging Face transformers is built from a configuration, and what it is called with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from corpus_case import Program, Sample, generator, loss_of
from torch import Tensor

WORDS, BATCH, LENGTH, CLASSES, IMAGE = 120, 2, 16, 5, 32

Inputs = Callable[[int], dict[str, Any]]


def words(turn: int, length: int = LENGTH) -> Tensor:
    """Tokens; the numbers below 5 are left to those that mean something."""
    return torch.randint(5, WORDS, (BATCH, length), generator=generator(turn))


def causal(turn: int) -> dict[str, Any]:
    """Tokens that are their own labels."""
    tokens = words(turn)
    return {"input_ids": tokens, "labels": tokens.clone()}


def padded(turn: int) -> dict[str, Any]:
    """Tokens of sentences of two lengths, and the mask that says so."""
    tokens = words(turn)
    mask = torch.ones_like(tokens)
    mask[1, LENGTH - 4 :] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def classified(turn: int) -> dict[str, Any]:
    """Sentences of two lengths, with a class each."""
    given = padded(turn)
    return given | {"labels": torch.randint(CLASSES, (BATCH,), generator=generator(turn + 50))}


def answered(turn: int) -> dict[str, Any]:
    """Sentences in which an answer begins and ends."""
    places = torch.randint(1, LENGTH - 4, (2, BATCH), generator=generator(turn + 50))
    return {**padded(turn), "start_positions": places[0], "end_positions": places[1]} | {"labels": None}


def replaced(turn: int) -> dict[str, Any]:
    """Tokens, some of which were replaced, which the labels say."""
    return padded(turn) | {"labels": torch.randint(2, (BATCH, LENGTH), generator=generator(turn + 50))}


def translated(turn: int) -> dict[str, Any]:
    """Sentences and their translations."""
    given = padded(turn)
    return given | {"labels": words(turn + 50, LENGTH // 2)}


def pixels(turn: int, size: int = IMAGE, channels: int = 3) -> Tensor:
    """Images."""
    return torch.randn(BATCH, channels, size, size, generator=generator(turn))


def images(turn: int, size: int = IMAGE) -> dict[str, Any]:
    """Images, with a class each."""
    return {
        "pixel_values": pixels(turn, size),
        "labels": torch.randint(CLASSES, (BATCH,), generator=generator(turn + 50)),
    }


def only(inputs: Inputs, *names: str) -> Inputs:
    """Some of the inputs."""
    return lambda turn: {name: inputs(turn)[name] for name in names}


def segmented(turn: int, size: int = IMAGE, labels: int = IMAGE) -> dict[str, Any]:
    """Images, with a class for each pixel."""
    places = (BATCH, labels, labels)
    return {
        "pixel_values": pixels(turn, size),
        "labels": torch.randint(CLASSES, places, generator=generator(turn + 50)),
    }


def spoken(turn: int, samples: int = 800) -> dict[str, Any]:
    """Recordings, with a class each."""
    sound = torch.randn(BATCH, samples, generator=generator(turn))
    return {"input_values": sound, "labels": torch.randint(CLASSES, (BATCH,), generator=generator(turn + 50))}


def captioned(turn: int) -> dict[str, Any]:
    """Images and their captions."""
    given = only(padded, "input_ids", "attention_mask")(turn)
    return {**given, "pixel_values": pixels(turn), "return_loss": True}


def heard(turn: int) -> dict[str, Any]:
    """Spectrograms, and what was said."""
    return {"input_features": torch.randn(BATCH, 8, 32, generator=generator(turn)), "labels": words(turn, 8)}


def filmed(turn: int) -> dict[str, Any]:
    """Films of four small images, with a class each."""
    frames = torch.randn(BATCH, 4, 3, 16, 16, generator=generator(turn))
    return {"pixel_values": frames, "labels": torch.randint(CLASSES, (BATCH,), generator=generator(turn + 50))}


def spectrum(turn: int) -> dict[str, Any]:
    """Spectrograms, with a class each."""
    sound = torch.randn(BATCH, 24, 16, generator=generator(turn))
    return {"input_values": sound, "labels": torch.randint(CLASSES, (BATCH,), generator=generator(turn + 50))}


def pictured_question(turn: int) -> dict[str, Any]:
    """Questions about images, and how good each answer would be."""
    answers = torch.rand(BATCH, CLASSES, generator=generator(turn))
    return {**only(padded, "input_ids", "attention_mask")(turn), "pixel_values": pixels(turn), "labels": answers}


def laid_out(turn: int) -> dict[str, Any]:
    """Words with their places on a page, and a class each."""
    boxes = torch.randint(0, 60, (BATCH, LENGTH, 4), generator=generator(turn)).sort(-1).values
    classes = torch.randint(CLASSES, (BATCH, LENGTH), generator=generator(turn + 50))
    return {**padded(turn), "bbox": boxes, "labels": classes}


def episode(turn: int) -> dict[str, Any]:
    """States, actions and returns of an agent."""
    sizes = {"states": 4, "actions": 2, "returns_to_go": 1}
    given = {name: torch.randn(BATCH, 6, n, generator=generator(turn + n)) for name, n in sizes.items()}
    return {**given, "timesteps": torch.arange(6).repeat(BATCH, 1), "attention_mask": torch.ones(BATCH, 6)}


def measured(turn: int) -> dict[str, Any]:
    """Two channels of a series, and how it goes on."""
    future = torch.randn(BATCH, 8, 2, generator=generator(turn + 50))
    return {"past_values": torch.randn(BATCH, 32, 2, generator=generator(turn)), "future_values": future}


def forecast(turn: int) -> dict[str, Any]:
    """A series and how it goes on, with the time of each place."""
    past, future = (torch.randn(BATCH, n, generator=generator(turn + n)).abs() for n in (15, 4))
    return {
        "past_values": past,
        "past_time_features": torch.randn(BATCH, 15, 1, generator=generator(turn)),
        "past_observed_mask": torch.ones(BATCH, 15),
        "future_values": future,
        "future_time_features": torch.randn(BATCH, 4, 1, generator=generator(turn + 2)),
    }


def without(settings: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Settings less some of them."""
    return {name: value for name, value in settings.items() if name not in names}


def still(config: Any) -> Any:
    """A configuration whose model draws no random numbers: every probability of dropping something is zero."""
    for name, value in list(vars(config).items()):
        if isinstance(value, transformers.PretrainedConfig):
            still(value)
        elif isinstance(value, float) and ("drop" in name or "pdrop" in name):
            setattr(config, name, 0.0)
    return config


def _build(
    model: str, config: str, settings: Mapping[str, Any], inputs: Inputs, loss: Callable[[Any], Tensor], random: bool
) -> Sample:
    made = getattr(transformers, config)(**settings)
    built = getattr(transformers, model)(made if random else still(made))
    given = lambda turn: {name: value for name, value in inputs(turn).items() if value is not None}  # noqa: E731
    return Sample(built.train(), given, loss, random)


def entry(
    model: str,
    config: str,
    inputs: Inputs,
    *,
    name: str | None = None,
    loss: Callable[[Any], Tensor] = loss_of,
    random: bool = False,
    **settings: Any,
) -> Program:
    """A program by the names of its classes."""
    build = functools.partial(_build, model, config, settings, inputs, loss, random)
    return Program(name or model, "transformers", build)
