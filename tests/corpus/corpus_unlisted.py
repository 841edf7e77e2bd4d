# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Programs that nobody chose: every architecture of transformers' auto classes that the corpus has not, made small by
what its sizes are called; more of timm's; and torchvision's, where it is installed."""

from __future__ import annotations

import copy
import functools
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import corpus_timm
import torch
import transformers
from corpus_case import Program, Sample, generator, loss_of, mean_square
from corpus_configured import BATCH, CLASSES, LENGTH, pixels, words
from corpus_programs import PROGRAMS
from corpus_shrunk import NoProgramError, check_small, image_size_of, shrink, without_drops
from torch import Tensor
from transformers.models.auto import configuration_auto, modeling_auto

# The kinds of auto classes, as transformers names their tables, and what their models are called with. Where one model
# of an architecture was taken, those of the kinds below the line have nothing new.
_KINDS = {
    "causal": "CAUSAL_LM",
    "masked": "MASKED_LM",
    "seq2seq": "SEQ_TO_SEQ_CAUSAL_LM",
    "image": "IMAGE_CLASSIFICATION",
    "segment": "SEMANTIC_SEGMENTATION",
    "audio": "AUDIO_CLASSIFICATION",
    "depth": "DEPTH_ESTIMATION",
    "ctc": "CTC",
    "detect": "OBJECT_DETECTION",
    "video": "VIDEO_CLASSIFICATION",
    "pairs": "ZERO_SHOT_IMAGE_CLASSIFICATION",
}
_NOTHING_NEW = {"classify": "SEQUENCE_CLASSIFICATION", "tokens": "TOKEN_CLASSIFICATION"}

_TORCHVISION = (
    "alexnet vgg11_bn googlenet inception_v3 mnasnet0_5 shufflenet_v2_x0_5 squeezenet1_1 mobilenet_v2 "
    "mobilenet_v3_small efficientnet_v2_s regnet_y_400mf densenet121 convnext_tiny swin_t swin_v2_t resnext50_32x4d "
    "wide_resnet50_2"
)
# By the side of their images.
_TIMM = {
    64: (
        "hardcorenas_a ghostnet_050 mnasnet_small lcnet_035 tinynet_e repvgg_a0 dla34 selecsls42 vovnet39a "
        "hrnet_w18_small skresnet18 gernet_s cspresnet50 ese_vovnet19b_dw edgenext_xx_small fastvit_t8 mobileone_s0 "
        "poolformerv2_s12 inception_next_atto resmlp_12_224 convit_tiny twins_svt_small pit_ti_224 coat_lite_tiny "
        "mvitv2_tiny gcvit_xxtiny focalnet_tiny_srf davit_tiny repvit_m0_9 starnet_s1 mambaout_femto rdnet_tiny "
        "efficientvit_b0 resnest14d seresnet18 legacy_seresnet18 resnetv2_50 darknet17 cs3darknet_s xception41 "
        "nextvit_small shvit_s1"
    ),
    224: (
        "efficientformerv2_s0 gmlp_s16_224 visformer_tiny hiera_tiny_224 tnt_s_patch16_224 volo_d1_224 sequencer2d_s "
        "coatnet_pico_rw_224 nest_tiny tiny_vit_5m_224 efficientvit_m0 haloregnetz_b swiftformer_xs"
    ),
    240: "crossvit_tiny_240",
    256: (
        "maxvit_pico_rw_256 botnet26t_256 halonet26t lambda_resnet26t eca_botnext26ts_256 lamhalobotnet50ts_256 csatv2"
    ),
}
_TAKES_SIZE = (
    "vit swin deit gmixer gmlp resmlp pit volo sequencer coat mvit cross nest twins tnt convit visformer hiera"
)


def inputs_of(kind: str, config: Any, turn: int) -> dict[str, Any]:
    """What a model of a kind is called with at a turn: small, and right for most."""
    tokens, side = words(turn), image_size_of(config)
    later = generator(turn + 50)
    classes = torch.randint(CLASSES, (BATCH,), generator=later)
    if kind in ("causal", "masked"):
        return {"input_ids": tokens, "labels": tokens.clone()}
    if kind == "seq2seq":
        return {"input_ids": tokens, "labels": words(turn + 50, LENGTH // 2)}
    if kind == "classify":
        return {"input_ids": tokens, "labels": classes}
    if kind == "tokens":
        return {"input_ids": tokens, "labels": torch.randint(CLASSES, (BATCH, LENGTH), generator=later)}
    if kind == "image":
        return {"pixel_values": pixels(turn, side), "labels": classes}
    if kind == "segment":
        places = (BATCH, side, side)
        return {"pixel_values": pixels(turn, side), "labels": torch.randint(CLASSES, places, generator=later)}
    if kind in ("depth", "detect"):
        return {"pixel_values": pixels(turn, 64 if kind == "detect" else side)}
    if kind in ("audio", "ctc"):
        sound = torch.randn(BATCH, 800 if kind == "audio" else 1600, generator=generator(turn))
        return {"input_values": sound, "labels": classes if kind == "audio" else words(turn, 4)}
    if kind == "video":
        shape = (BATCH, getattr(config, "num_frames", 4), 3, side, side)
        return {"pixel_values": torch.randn(shape, generator=generator(turn)), "labels": classes}
    if kind == "pairs":
        images = pixels(turn, image_size_of(getattr(config, "vision_config", config)))
        return {"input_ids": tokens, "pixel_values": images, "return_loss": True}
    return {"input_ids": tokens}


def any_loss(output: Any) -> Tensor:
    """What a model calls its loss, or one of its first output."""
    try:
        return loss_of(output)
    except (AttributeError, KeyError, TypeError):
        return mean_square(output)


def as_program(model: torch.nn.Module, inputs: Callable[[int], dict[str, Any]]) -> Sample:
    """The sample of a model that eager runs.

    Raises:
        NoProgramError: eager does not run it, or it is not small.
    """
    sample = Sample(check_small(without_drops(model)).train(), inputs, any_loss)
    try:
        first, second = (_loss(sample, seed) for seed in (0, 1))
    except Exception as error:
        raise NoProgramError(f"{type(error).__name__}: {error}") from error
    return Sample(sample.model, inputs, any_loss, random=abs(first - second) > 1e-5 * abs(first))


def _loss(sample: Sample, seed: int) -> float:
    """The loss of a step of a copy, random numbers from this seed."""
    torch.manual_seed(seed)
    loss = sample.loss(copy.deepcopy(sample.model)(**sample.inputs(0)))
    loss.backward()
    return float(loss.detach())


def _build_transformers(kind: str, model: str, config: str) -> Sample:
    try:
        made = shrink(getattr(transformers, config))
        built = getattr(transformers, model)(made)
    except Exception as error:
        raise NoProgramError(f"{type(error).__name__}: {error}") from error
    return as_program(built, functools.partial(inputs_of, kind, made))


def find_transformers(known: Iterable[str]) -> Iterator[Program]:
    """The models of the auto classes that are none of the ``known``."""
    taken, architectures = set(known), set[str]()
    for kind, table in {**_KINDS, **_NOTHING_NEW, "base": ""}.items():
        names: Mapping[str, Any] = getattr(modeling_auto, f"MODEL_{table and f'FOR_{table}_'}MAPPING_NAMES")
        for architecture, models in names.items():
            config = configuration_auto.CONFIG_MAPPING_NAMES.get(architecture)
            for model in (models,) if isinstance(models, str) else models:
                old = kind not in _KINDS and architecture in architectures
                if config is None or model in taken or old:
                    continue
                taken.add(model)
                architectures.add(architecture)
                build = functools.partial(_build_transformers, kind, model, config)
                yield Program(model, "transformers", build)


def _images(side: int, turn: int) -> dict[str, Any]:
    return {"x": torch.randn(BATCH, 3, side, side, generator=generator(turn))}


def _build_timm(name: str, side: int) -> Sample:
    sized = {"img_size": side} if any(kind in name for kind in _TAKES_SIZE.split()) else {}
    return as_program(corpus_timm.create(name, **sized), functools.partial(_images, side))


def _build_torchvision(name: str) -> Sample:
    models = importlib.import_module("torchvision.models")
    old = {"init_weights": False, "aux_logits": False} if name in ("inception_v3", "googlenet") else {}
    model = models.get_model(name, weights=None, num_classes=CLASSES, **old)
    return as_program(model, functools.partial(_images, 96 if name == "inception_v3" else 64))


def find_unlisted(listed: Sequence[str] = tuple(PROGRAMS)) -> dict[str, Program]:
    """All of them, by name; programs of the corpus begin with the names of their classes."""
    found = [*find_transformers({name.partition(" ")[0] for name in listed})]
    sides = ((side, name) for side, names in _TIMM.items() for name in names.split())
    found += [Program(f"timm {name}", "timm", functools.partial(_build_timm, name, side)) for side, name in sides]
    if importlib.util.find_spec("torchvision") is not None:
        builds = {name: functools.partial(_build_torchvision, name) for name in _TORCHVISION.split()}
        found += [Program(f"torchvision {name}", "torchvision", build) for name, build in builds.items()]
    return {program.name: program for program in found}
