"""The paper's own results (its tables ``results1``, ``results2``): test errors in %, means over the last 10 epochs."""

from __future__ import annotations

METHODS = ("sgd", "adam", "adamw", "lion", "kfac", "ingd")

_ROWS: dict[str, dict[str, tuple[float, ...]]] = {
    "cifar100": {
        "vgg16-bn": (26.45, 30.14, 31.50, 31.83, 27.68, 26.06),
        "pyramidnet-65": (25.65, 28.95, 28.61, 28.14, 25.93, 25.39),
        "convmixer256-12": (27.35, 31.20, 30.5, 29.10, 26.14, 25.79),
        "regnetx-1.6gf": (21.62, 28.46, 26.94, 25.53, 23.11, 21.89),
    },
    "tiny-imagenet": {
        "vgg16-bn": (40.18, 44.17, 45.10, 45.53, 41.59, 40.01),
        "pyramidnet-65": (41.94, 45.00, 42.72, 41.04, 41.23, 40.82),
        "convmixer256-12": (40.03, 43.05, 46.46, 43.83, 42.43, 39.09),
        "regnetx-1.6gf": (34.38, 43.72, 40.26, 38.31, 36.64, 34.85),
    },
    "imagenet-100": {
        "convmixer180-16": (20.37, 22.79, 23.38, 22.25, 20.70, 18.84),
        "regnetz-500mf": (20.80, 24.48, 19.65, 18.66, 20.07, 18.30),
        "rexnetr-100": (17.07, 19.58, 17.43, 17.43, 20.24, 16.73),
        "repvgg-b1g4": (16.15, 17.95, 18.23, 18.30, 16.97, 15.81),
    },
}

ERRORS: dict[str, dict[str, dict[str, float]]] = {
    data: {model: dict(zip(METHODS, row, strict=True)) for model, row in models.items()}
    for data, models in _ROWS.items()
}
"""The test errors in %, by data set, model and optimizer."""
