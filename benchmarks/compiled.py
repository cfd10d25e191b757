"""Whether ``torch.compile`` makes INGD's factor update and the rest of its step quicker, on a CPU.

    python benchmarks/compiled.py [--rounds N] [--write]

The first two layers of the benchmark's MLP, with a batch of 128, and one layer of 2048 x 2048, in float32. Process CPU
time, one BLAS thread, both forms in one process and interleaved; medians, with the quartiles behind them in the JSON
file. Both forms are the library's own. ``--write`` puts the result into benchmarks/RESULTS.md.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import report
import torch
from torch import Tensor, nn

from gnomon import linalg
from gnomon.experiments.bench.models import MODELS
from gnomon.optim import INGD
from gnomon.optim.kronecker import gram_factor, layer_steps
from gnomon.optim.kronecker.compiling import compiled
from gnomon.optim.kronecker.layers.base import FactoredLayer, Move

torch.set_num_threads(1)

Forms = tuple[Callable[[], None], Callable[[], None]]
"""As it is, and compiled."""

WARM_UP = 20  # steps
PROBES = {k: linalg.probe(k, torch.float32, torch.device("cpu")) for k in (785, 513, 512, 10)}


def make_traceable() -> None:
    """Stand-ins for what breaks graphs of dense updates: a tensor that is kept, writing into parts of a matrix."""
    plain = vars(gram_factor)["mirror"]
    vars(gram_factor)["mirror"] = lambda m: m.tril() + m.tril(-1).mT if torch.compiler.is_compiling() else plain(m)
    vars(gram_factor)["probe"] = lambda k, *_: PROBES[k]


def update(optimizer: INGD, layer: FactoredLayer) -> Forms:
    """As it is, and by ``compile=True``; for dense factors that would not be heeded."""
    ok, group = torch.ones((), dtype=torch.bool), optimizer.param_groups[0]

    def run(compiles: bool) -> None:
        vars(optimizer._factors)["_compiles"] = lambda pair: compiles
        optimizer._preconditioner.update([Move(layer, group, {})], optimizer._collector, ok)

    return functools.partial(run, False), functools.partial(run, True)


def step(optimizer: INGD, layer: FactoredLayer) -> Forms:
    """The direction, which is never compiled, and the move along it."""
    group, ok, params = optimizer.param_groups[0], torch.ones((), dtype=torch.bool), layer.layer.parameters
    peaks = linalg.peaks([p.grad for p in params if p.grad is not None])
    largest = layer_steps.Peaks(peaks, {p: i for i, p in enumerate(params)})

    def run(compiles: bool) -> None:
        steps = layer_steps.LayerSteps(
            optimizer._states, optimizer._strategy, optimizer._precondition, replaces_gradients=False, compile=compiles
        )
        steps.by_rms([Move(layer, group, dict.fromkeys(params, group))], largest, ok)

    return functools.partial(run, False), functools.partial(run, True)


def perceptron() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    model = MODELS["mlp"]
    batch = model.batch()
    return model.build(), lambda network: model.loss(network, batch)


def large() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    torch.manual_seed(0)
    inputs = torch.randn(128, 2048)
    return nn.Linear(2048, 2048), lambda network: network(inputs).square().mean()


def seconds(function: Callable[[], object], repeat: int = 1) -> float:
    start = time.process_time()
    for _ in range(repeat):
        function()
    return (time.process_time() - start) / repeat


def measure(
    build: Callable[..., Forms],
    structure: str,
    model: Callable[[], tuple[nn.Module, Callable[[nn.Module], Tensor]]],
    index: int,
    rounds: int,
) -> dict[str, Any]:
    network, loss = model()
    optimizer = INGD(network, structure=structure, update_every=1)
    for number in range(WARM_UP + 1):
        optimizer.zero_grad()
        loss(network).backward()
        if number < WARM_UP:
            optimizer.step()
    layer = [*optimizer._layers.values()][index]
    samples: dict[str, list[float]] = {"eager": [], "compiled": []}
    torch._dynamo.reset()
    compiled.cache_clear()
    with torch.no_grad():
        eager, by_torch = build(optimizer, layer)
        start = time.perf_counter()
        by_torch()
        compilation = time.perf_counter() - start
        repeat = max(1, int(0.05 / min(seconds(eager) for _ in range(3))))
        for _ in range(rounds):
            samples["eager"].append(seconds(eager, repeat))
            samples["compiled"].append(seconds(by_torch, repeat))
    quartiles = {form: statistics.quantiles(values, n=4) for form, values in samples.items()}
    what = {"what": build.__name__, "structure": structure, "sizes": (layer.layer.p, layer.layer.d)}
    ratio = quartiles["compiled"][1] / quartiles["eager"][1]
    return {**what, "quartiles": quartiles, "ratio": ratio, "compilation": compilation}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="timed turns of each form, at least 2")
    parser.add_argument("--write", action="store_true", help="put the result into benchmarks/RESULTS.md")
    options = parser.parse_args()
    make_traceable()
    torch._inductor.config.force_disable_caches = True  # so that each run compiles
    structures = ("dense", "diagonal", "arrow", "heisenberg")
    cases = [(step, s, large, 0) for s in structures if s != "dense"]
    cases += [(f, s, perceptron, i) for f in (step, update) for s in structures for i in (0, 1)]
    results = [measure(*case, options.rounds) for case in cases]
    rows = []
    for r in results:
        times = [f"{1e3 * r['quartiles'][form][1]:.3g}" for form in ("eager", "compiled")]
        what = [r["what"], r["structure"], " and ".join(map(str, r["sizes"]))]
        rows.append([*what, *times, f"{r['ratio']:.2f}", f"{r['compilation']:.0f}"])
    header = ["", "factors", "sizes", "eager, ms", "compiled, ms", "compiled / eager", "compilation, s"]
    text = f"""## Compiled updates and steps

`python benchmarks/compiled.py --write`, on {report.machine()}.

The table has the CPU time of an update of both factors, and of a step without an update, with and without
`torch.compile`. The last column is the time that the first compiled call takes. The layers are those of the MLP
784-512-512-10 and one of 2048 x 2048, with a batch of 128 in float32. Each layer is measured by itself. In a step only
the move is compiled, not the direction. In training, layers that move together take fewer calls.

{report.table(header, rows)}
"""
    print(text)
    if options.write:
        report.write("compiled", text, {"results": results})


if __name__ == "__main__":
    main()
