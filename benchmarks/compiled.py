"""Whether ``torch.compile`` makes INGD's factor update and its preconditioned step quicker, on a CPU.

    python benchmarks/compiled.py [--rounds N] [--write]

The first two layers of the benchmark's MLP, in float32, with a batch of 128. Process CPU time, one BLAS thread, both
forms in one process and interleaved; medians, with the quartiles behind them in the JSON file. Both forms call
the library's own functions, each in one graph. ``--write`` puts the result into benchmarks/RESULTS.md.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, Literal

import report
import torch
from torch import Tensor

from gnomon.experiments.bench_models import MODELS
from gnomon.groups import base
from gnomon.optim import INGD, moves, rules, square

torch.set_num_threads(1)

Forms = tuple[Callable[[], None], Callable[[], None]]
"""As it is, and compiled."""

WARM_UP = 20  # steps, each with an update; so has the next one
PROBES = {k: base.probe(k, torch.float32, torch.device("cpu")) for k in (785, 513, 512, 10)}


def make_traceable() -> None:
    """Stand-ins for what breaks graphs: lerp by tensors, tensors that are kept, writing into parts of a matrix."""

    def lerp(tensors: list[Tensor], ends: list[Tensor], weights: Any) -> None:
        for i, tensor in enumerate(tensors):
            tensor.lerp_(ends[i], weights[i] if isinstance(weights, (tuple, list)) else weights)

    vars(moves)["_constant"] = lambda values, dtype, device: torch.tensor(values, dtype=dtype, device=device)
    vars(torch._dynamo.polyfills)["foreach_lerp_inplace"] = lerp  # torch's own takes no tensors for weights
    plain = vars(square)["mirror"]
    vars(square)["mirror"] = lambda m: m.tril() + m.tril(-1).mT if torch.compiler.is_compiling() else plain(m)
    vars(square)["probe"] = lambda k, *_: PROBES[k]


def update(optimizer: INGD, tracked: moves.Tracked) -> Forms:
    """As it is, and by ``compile=True``; for dense factors that would not be heeded."""
    ok, group = torch.ones((), dtype=torch.bool), optimizer.param_groups[0]

    def run(compiles: bool) -> None:
        vars(optimizer)["_compiles"] = lambda factors: compiles
        optimizer._update([tracked], group, ok)

    return functools.partial(run, False), functools.partial(run, True)


def step(optimizer: INGD, tracked: moves.Tracked) -> Forms:
    """The direction, Nesterov's average, its length, decay and move."""
    group, layer, rows = optimizer.param_groups[0], tracked.layer, tracked.rows
    params, states = [p.detach() for p in layer.parameters], [optimizer.state[p] for p in layer.parameters]
    gradients = [p.grad for p in layer.parameters if p.grad is not None]

    sides: dict[Literal["K", "C"], Any] = {"K": tracked.factors.left, "C": tracked.factors.right}
    squares = {side: optimizer._square([tracked], side, sides[side], torch.float32) for side in sides}

    def times(side: Literal["K", "C"], rows: Tensor) -> Tensor:
        return sides[side].times_square(squares[side], rows, overwrite=True)

    def run() -> None:
        if rows is not None:
            found = times("C", rows[1]).mT @ times("K", rows[0])
        else:
            found = times("K", times("C", layer.matrix(*gradients).mT).mT).contiguous()
        parts = layer.tensors(found)
        rules.look_ahead(params, states, parts, group["momentum"])
        rms = moves.rms_of([found.view(1, -1)], found.device)
        gates = rms.isfinite().to(found.dtype).expand(len(params))
        found.nan_to_num_(0.0, 0.0, 0.0)
        rules.remember(params, states, parts, group["momentum"], gates)
        rules.decoupled(params, parts, (gates * group["step_rms"] / rms).to(found.dtype), group, gates)

    return run, torch.compile(run, fullgraph=True)


def seconds(function: Callable[[], object], repeat: int = 1) -> float:
    start = time.process_time()
    for _ in range(repeat):
        function()
    return (time.process_time() - start) / repeat


def measure(structure: str, index: int, build: Callable[..., Forms], rounds: int) -> dict[str, Any]:
    model = MODELS["mlp"]
    network, batch = model.build(), model.batch()
    optimizer = INGD(network, structure=structure)
    for number in range(WARM_UP + 1):
        optimizer.zero_grad()
        model.loss(network, batch).backward()
        if number < WARM_UP:
            optimizer.step()
    tracked = [*optimizer._tracked.values()][index]
    samples: dict[str, list[float]] = {"eager": [], "compiled": []}
    torch._dynamo.reset()
    with torch.no_grad():
        eager, compiled = build(optimizer, tracked)
        start = time.perf_counter()
        compiled()
        compilation = time.perf_counter() - start
        repeat = max(1, int(0.05 / min(seconds(eager) for _ in range(3))))
        for _ in range(rounds):
            samples["eager"].append(seconds(eager, repeat))
            samples["compiled"].append(seconds(compiled, repeat))
    quartiles = {form: statistics.quantiles(values, n=4) for form, values in samples.items()}
    what = {"what": build.__name__, "structure": structure, "sizes": (tracked.layer.p, tracked.layer.d)}
    ratio = quartiles["compiled"][1] / quartiles["eager"][1]
    return {**what, "quartiles": quartiles, "ratio": ratio, "compilation": compilation}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="timed turns of each form, at least 2")
    parser.add_argument("--write", action="store_true", help="put the result into benchmarks/RESULTS.md")
    options = parser.parse_args()
    make_traceable()
    torch._inductor.config.force_disable_caches = True  # so that each run compiles
    cases = [(s, i, f) for f in (step, update) for s in ("dense", "diagonal", "arrow", "heisenberg") for i in (0, 1)]
    results = [measure(*case, options.rounds) for case in cases]
    rows = []
    for r in results:
        times = [f"{1e3 * r['quartiles'][form][1]:.3g}" for form in ("eager", "compiled")]
        what = [r["what"], r["structure"], " and ".join(map(str, r["sizes"]))]
        rows.append([*what, *times, f"{r['ratio']:.2f}", f"{r['compilation']:.0f}"])
    header = ["", "factors", "sizes", "eager, ms", "compiled, ms", "compiled / eager", "compilation, s"]
    text = f"""## Compiled updates and steps

`python benchmarks/compiled.py --write`, on {report.machine()}.

INGD on the MLP 784-512-512-10 with a batch of 128, float32, a layer at a time: CPU time of an update of both factors
and of a preconditioned step without one, as they are and by `torch.compile`, and the time the first call takes.

{report.table(header, rows)}
"""
    print(text)
    if options.write:
        report.write("compiled", text, {"results": results})


if __name__ == "__main__":
    main()
