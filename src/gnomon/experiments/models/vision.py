"""Networks from timm (extra ``vision``). timm is imported when one of them is built.

RegNetX (Radosavovic et al. 2020, arXiv:2003.13678), RegNetZ (Dollar, Singh and Girshick 2021, arXiv:2103.06877), RepVGG
(Ding et al. 2021, arXiv:2101.03697) and ReXNet (Han et al. 2021, arXiv:2007.00992).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def timm_model(name: str, classes: int, channels: int) -> nn.Module:
    """Return timm's network of that name, not trained."""
    return _timm().create_model(name, num_classes=classes, in_chans=channels)


def regnetx_for_small_images(classes: int, channels: int) -> nn.Module:
    """Return RegNetX-1.6GF with stride 1 in stem and first stage, so that 32 x 32 pixels give 4 x 4 positions."""
    network: Any = timm_model("regnetx_016", classes, channels)
    for part in (network.stem, network.s1):
        for module in part.modules():
            if isinstance(module, nn.Conv2d):
                module.stride = (1, 1)
    return network


def repvgg(classes: int, channels: int) -> nn.Module:
    """Return RepVGG-B1G4. Its stem takes every other pixel before its 1 x 1 convolution instead of a stride of 2.

    The result is the same. On some CPUs the gradient of that stride, with few channels in ``channels_last``, ends the
    process with a segmentation fault (torch 2.13).
    """
    network: Any = timm_model("repvgg_b1g4", classes, channels)
    convolution = network.stem.conv_1x1.conv
    convolution.stride = (1, 1)
    convolution.register_forward_pre_hook(_every_other_pixel)
    return network


def _every_other_pixel(module: nn.Module, inputs: tuple[Tensor]) -> Tensor:
    return inputs[0][..., ::2, ::2]


def _timm() -> Any:
    """Import timm, which imports torchvision. That fails if torchvision's C++ operators belong to another torch."""
    try:
        import torchvision  # noqa: F401
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        _declare_operators()
    import timm

    return timm


def _declare_operators() -> None:
    """Declare the operators whose shapes torchvision registers at import. No network here calls them."""
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
