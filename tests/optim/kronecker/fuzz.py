"""Train random networks with random settings, types and situations, and say what does not hold.

    python tests/optim/kronecker/fuzz.py --count 1000 --first 1000      # cases 1000 to 1999
    python tests/optim/kronecker/fuzz.py --first 137 --count 1 --show   # one case, with what it is made of

A case is determined by its number. It trains for eight steps; in the middle the model and its optimizer are copied, and
the state goes through a file into a new optimizer. The three must end with the same weights. An optimizer may refuse a
case with a ValueError or TypeError before the first step. Anything else that is raised, numbers that are not finite and
parameters that have not moved are findings.
"""

import argparse
import copy
import io
import random
import traceback
import warnings
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from gnomon.optim import INGD, KFAC

STEPS, MIDDLE = 8, 4
CLASSES, VOCABULARY, LENGTH = 3, 13, 4
ROUNDING = 1e-7
"""A gradient below it may be one of zero, as that of a bias before a batch norm."""
HALF = (torch.bfloat16, torch.float16)


# ---------------------------------------------------------------------- stages: from (samples, positions, features)
class Convolution(nn.Module):
    """A convolution along positions, or over positions and features as an image or a volume."""

    def __init__(self, layer, axes):
        super().__init__()
        self.layer, self.axes = layer, axes

    def forward(self, x):
        if self.axes == 1:
            return self.layer(x.mT).mT
        shape = (len(x), 1, *x.shape[1:]) if self.axes == 2 else (len(x), 1, 1, *x.shape[1:])
        return self.layer(x.reshape(shape)).flatten(2).mT


class Attention(nn.Module):
    def __init__(self, width, heads, **options):
        super().__init__()
        self.inner = nn.MultiheadAttention(width, heads, batch_first=True, **options)

    def forward(self, x):
        return x + self.inner(x, x, x, need_weights=False)[0]


class Recurrent(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)[0]


class Cell(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        state, found = None, []
        for now in x.unbind(1):
            state = self.inner(now, state)
            found.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(found, 1)


class Bare(nn.Module):
    """A bare matrix, or a stack of them of which each position takes one."""

    def __init__(self, width, outputs, experts):
        super().__init__()
        shape = (experts, outputs, width) if experts else (outputs, width)
        self.matrix = nn.Parameter(torch.randn(shape) / width**0.5)
        self.position = nn.Parameter(torch.zeros(1, 1, outputs))

    def forward(self, x):
        if self.matrix.ndim == 2:
            return x @ self.matrix.T + self.position
        chosen = self.matrix[torch.arange(x.shape[1]) % len(self.matrix)]
        return torch.einsum("ntp,tdp->ntd", x, chosen) + self.position


class Twice(nn.Module):
    """A square layer that is used twice, or whose weight another layer of its own shares."""

    def __init__(self, width, tied):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width) if tied else self.first
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


class Channels(nn.Module):
    """A norm over features, which come second for it."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return self.norm(x.mT).mT


class Checkpointed(nn.Module):
    def __init__(self, inner, reentrant):
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


class Bilinear(nn.Module):
    def __init__(self, width, outputs):
        super().__init__()
        self.inner = nn.Bilinear(width, width, outputs)

    def forward(self, x):
        return self.inner(x, x.tanh())


class Network(nn.Module):
    """Stages after tokens or vectors, a mean over positions, and an output layer."""

    def __init__(self, start, stages, width):
        super().__init__()
        self.start, self.stages, self.head = start, nn.ModuleList(stages), nn.Linear(width, CLASSES)

    def forward(self, x):
        x = self.start(x)
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean(1))


def random_stage(r, width):
    """A stage and its number of outputs."""
    out, bias = r.choice([3, 4, 6, 8]), r.random() < 0.7
    kind = r.choice(
        [
            "linear",
            "linear",
            "conv",
            "conv",
            "conv2d",
            "conv3d",
            "transposed",
            "attention",
            "lstm",
            "gru",
            "rnn",
            "cell",
            "bare",
            "experts",
            "twice",
            "norm",
            "act",
            "drop",
            "normed",
            "bilinear",
            "checkpoint",
        ]
    )
    if kind == "linear":
        return nn.Linear(width, out, bias), out
    if kind == "conv":
        groups = r.choice([g for g in (1, 2, 4) if width % g == 0 and out % g == 0])
        options = {"padding": "same"} if r.random() < 0.5 else {"padding": 2, "stride": r.choice([1, 2])}
        layer = nn.Conv1d(width, out, r.choice([1, 3]), groups=groups, dilation=r.choice([1, 2]), bias=bias, **options)
        return Convolution(layer, 1), out
    if kind == "conv2d":
        mode = r.choice(["zeros", "reflect", "circular"])
        return Convolution(nn.Conv2d(1, out, 3, padding=1, stride=2, bias=bias, padding_mode=mode), 2), out
    if kind == "conv3d":
        return Convolution(nn.Conv3d(1, out, (1, 2, 3), padding=(0, 1, 1), bias=bias), 3), out
    if kind == "transposed":
        groups = r.choice([g for g in (1, 2) if width % g == 0 and out % g == 0])
        return Convolution(nn.ConvTranspose1d(width, out, 2, stride=r.choice([1, 2]), groups=groups, bias=bias), 1), out
    if kind == "attention":
        options = {"kdim": width, "vdim": width} if r.random() < 0.2 else {}
        return Attention(width, r.choice([h for h in (1, 2) if width % h == 0]), bias=bias, **options), width
    if kind in ("lstm", "gru", "rnn"):
        options = {"num_layers": r.choice([1, 2]), "bidirectional": r.random() < 0.3, "bias": bias, "batch_first": True}
        if kind == "lstm" and out > 3 and r.random() < 0.3:
            options["proj_size"] = 2
        outputs = options.get("proj_size", out) * (1 + options["bidirectional"])
        return Recurrent({"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}[kind](width, out, **options)), outputs
    if kind == "cell":
        return Cell(r.choice([nn.LSTMCell, nn.GRUCell, nn.RNNCell])(width, out, bias)), out
    if kind in ("bare", "experts"):
        return Bare(width, out, r.choice([2, 3]) if kind == "experts" else 0), out
    if kind == "twice":
        return Twice(width, r.random() < 0.5), width
    if kind == "norm":
        norms = [
            nn.LayerNorm(width),
            nn.RMSNorm(width),
            Channels(nn.BatchNorm1d(width)),
            Channels(nn.GroupNorm(1, width)),
        ]
        return r.choice(norms), width
    if kind == "act":
        return r.choice([nn.Tanh(), nn.Softplus(), nn.GELU(), nn.PReLU()]), width
    if kind == "drop":
        return nn.Dropout(0.2), width
    if kind == "normed":
        return parametrizations.weight_norm(nn.Linear(width, out, bias)), out
    if kind == "bilinear":
        return Bilinear(width, out), out
    inner, out = random_stage(r, width)
    norms = (nn.BatchNorm1d, Checkpointed)  # statistics of a norm would be taken twice
    if any(isinstance(module, norms) for module in inner.modules()):
        return inner, out
    return Checkpointed(nn.Sequential(inner, nn.SiLU(inplace=True)), r.random() < 0.4), out


def random_network(r):
    """A network and whether it takes tokens."""
    tokens = r.random() < 0.4
    width = r.choice([4, 6, 8])
    start = nn.Embedding(VOCABULARY, width, padding_idx=r.choice([None, 0])) if tokens else nn.Linear(5, width)
    stages, outputs = [], width
    for _ in range(r.randint(1, 4)):
        stage, outputs = random_stage(r, outputs)
        stages.append(stage)
        if r.random() < 0.3:
            stages.append(r.choice([nn.ReLU(inplace=True), nn.ELU(inplace=True), nn.Dropout(0.1)]))
    return Network(start, stages, outputs), tokens


# ---------------------------------------------------------------------- settings and situations
def random_settings(r, kind):
    """Settings of an optimizer; most are left at their defaults."""
    choices = {
        "momentum": [0.0, 0.9],
        "weight_decay": [0.0, 0.01],
        "damping": [1e-3, 1.0, lambda step: 0.1 + 0.01 * step],
        "update_every": [1, 3],
        "curvature": ["gradient"],
        "fisher": ["mc"],
        "approx": ["expand", "reduce"],
        "grouped": ["average"],
        "polar": [False],
        "relative": [False],
        "growing_intervals": [False],
        "subsample": [False],
        "max_dim": [4],
        "fallback": ["sgd"],
        "fallback_lr": [1e-3, lambda step: 1e-2 / (1 + step)],
        "lr": [torch.tensor(1e-2), torch.tensor([1e-2]), lambda step: 1e-2 / (1 + step)],
        "preset": ["paper"],
    }
    if kind is INGD:
        choices |= {
            "structure": ["triangular", "diagonal", "block", "arrow", "heisenberg", "toeplitz", ("dense", "identity")],
            "precond_lr": [0.05],
            "precond_momentum": [0.5],
            "order": [1],
            "max_factor_step": [1.0],
            "convention": ["outside"],
            "precond_dtype": [torch.bfloat16, torch.float16, torch.float64],
            "memory": ["low"],
        }
    chosen = {name: r.choice(values) for name, values in choices.items() if r.random() < 0.1}
    if r.random() < 0.1:
        chosen["kl_clip" if r.random() < 0.5 else "step_rms"] = 1e-2
    chosen.setdefault("lr", 1e-3 if chosen.get("preset") == "paper" else 1e-2)
    return chosen


SITUATIONS = (
    "accumulated",
    "clipped",
    "closure",
    "scaled",
    "autocast",
    "frozen",
    "bias frozen",
    "groups",
    "zeros",
    "not finite",
    "empty",
    "single",
    "penalty",
    "other gradients",
    "outer",
    "scheduler",
)


@dataclass
class Case:
    """A network with an optimizer's settings and a way to train it."""

    number: int
    kind: type = INGD
    dtype: torch.dtype = torch.float32
    settings: dict = field(default_factory=dict)
    situations: set = field(default_factory=set)

    def __post_init__(self):
        r = random.Random(self.number)
        torch.manual_seed(self.number)
        self.model, self.tokens = random_network(r)
        self.kind = INGD if r.random() < 0.75 else KFAC
        self.settings = random_settings(r, self.kind)
        self.situations = {name for name in SITUATIONS if r.random() < 0.1}
        self.dtype = r.choice([torch.float32] * 4 + [torch.float64] * 3 + [*HALF])
        if "autocast" in self.situations:
            self.dtype = torch.float32
        if "outer" in self.situations:
            self.settings["precondition_only"] = True
        self.generator = torch.Generator().manual_seed(self.number)
        self.model.to(self.dtype)
        if not self._runs():  # torch has no such operation in half precision
            self.dtype = torch.float32
            self.model.to(self.dtype)
            self.situations.discard("autocast")
        if not self._runs():  # an activation overwrites what another module needs for its gradient
            for module in self.model.modules():
                if hasattr(module, "inplace"):
                    module.inplace = False
        if self.settings.get("fisher") == "mc" or "other gradients" in self.situations:
            for module in self.model.modules():
                if isinstance(module, Checkpointed):
                    module.reentrant = False  # which works with backward() alone
        if "frozen" in self.situations:
            self.model.stages[0].requires_grad_(False)
        if "bias frozen" in self.situations:
            self.model.head.bias.requires_grad_(False)

    def _runs(self):
        """Whether torch itself can train the network."""
        for step in range(STEPS):
            try:
                twin = copy.deepcopy(self.model)
                self.loss(twin, None, *self.batch(step)).backward()
            except (RuntimeError, NotImplementedError):
                return False
        return True

    def __str__(self):
        options = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        return f"{self.kind.__name__}({options}), {self.dtype}, {sorted(self.situations)}\n{self.model}"

    # ------------------------------------------------------------------ data
    def batch(self, step):
        size = 1 if "single" in self.situations and step % 3 == 1 else 6
        size = 0 if "empty" in self.situations and step == 5 and self._may_be_empty() else size
        generator = torch.Generator().manual_seed(1000 * self.number + step)
        if self.tokens:
            x = torch.randint(0, VOCABULARY, (size, LENGTH), generator=generator)
        else:
            x = torch.randn(size, LENGTH, 5, generator=generator).to(self.dtype)
            if "not finite" in self.situations and step == 2:
                x = x * float("nan")
        return x, torch.randint(0, CLASSES, (size,), generator=generator)

    def _may_be_empty(self):
        """Some modules of torch take no empty batch."""
        kinds = (nn.BatchNorm1d, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention, nn.GroupNorm, Convolution)
        return not any(isinstance(module, kinds) for module in self.model.modules())

    # ------------------------------------------------------------------ training
    def build(self, model):
        settings = dict(self.settings)
        if isinstance(settings["lr"], torch.Tensor):
            settings["lr"] = settings["lr"].clone()
        if "groups" in self.situations:
            settings["groups"] = [{"params": list(model.head.parameters()), "weight_decay": 0.0, "momentum": 0.5}]
            if "bias frozen" in self.situations:
                settings["groups"][0]["params"] = [model.head.weight]
        if "scaled" in self.situations:
            settings["scaler"] = torch.amp.GradScaler("cpu", init_scale=256.0)
        return self.kind(model, **settings), settings.get("scaler")

    def loss(self, model, optimizer, x, y):
        with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in self.situations):
            output = model(x)
        if optimizer is not None and self.settings.get("fisher") == "mc":
            optimizer.observe(output)
        loss = nn.functional.cross_entropy(output.float(), y, reduction="mean" if len(y) else "sum")
        if "penalty" in self.situations:
            loss = loss + 1e-3 * sum(p.float().square().sum() for p in model.parameters() if p.requires_grad)
        return loss

    def backward(self, model, optimizer, scaler, step):
        optimizer.zero_grad(set_to_none="zeros" not in self.situations)
        parts = 2 if "accumulated" in self.situations else 1
        for x, y in zip(*(t.chunk(parts) for t in self.batch(step)), strict=True):
            loss = self.loss(model, optimizer, x, y) / parts
            (loss if scaler is None else scaler.scale(loss)).backward()
        if "other gradients" in self.situations and not self.tokens:
            x = self.batch(step)[0].requires_grad_()
            torch.autograd.grad(model(x).sum(), x)
        return loss

    def train(self, model, optimizer, scaler, steps, outer=None):
        for step in steps:
            torch.manual_seed(step)
            if "scheduler" in self.situations:
                for group in optimizer.param_groups:
                    group["lr"] = group["lr"] * 0.9
            if "closure" in self.situations and scaler is None:
                optimizer.step(lambda step=step: self.backward(model, optimizer, scaler, step))
            else:
                self.backward(model, optimizer, scaler, step)
                if scaler is not None and "clipped" in self.situations:
                    scaler.unscale_(optimizer)
                if "clipped" in self.situations:
                    nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 0.1)
                if scaler is None:
                    optimizer.step()
                else:
                    scaler.step(optimizer)
                    scaler.update()
            if outer is not None and all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None):
                outer.step()


class FindingError(AssertionError):
    """Something that must not be."""


def outer_of(case, model):
    return torch.optim.SGD(model.parameters(), lr=1e-3) if "outer" in case.situations else None


def run(number):
    """Train a case; gives the reason where the optimizer refused it before the first step, else None."""
    case = Case(number)
    model, start = case.model, copy.deepcopy(case.model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            optimizer, scaler = case.build(model)
            case.train(model, optimizer, scaler, range(1), outer_of(case, model))
        except (ValueError, TypeError) as error:
            return f"{type(error).__name__}: {error}"
        case.train(model, optimizer, scaler, range(1, MIDDLE), outer_of(case, model))
        copied_model, copied, copied_scaler = copy.deepcopy((model, optimizer, scaler))
        file = io.BytesIO()
        torch.save((model.state_dict(), optimizer.state_dict(), scaler and scaler.state_dict()), file)
        file.seek(0)
        weights, state, scale = torch.load(file)
        other_model = copy.deepcopy(start)
        other_model.load_state_dict(weights)
        other, other_scaler = case.build(other_model)
        other.load_state_dict(state)
        if other_scaler is not None:
            other_scaler.load_state_dict(scale)
        if "zeros" in case.situations:  # copies have no gradients, and new ones may have another layout in memory
            for p, *others in zip(*(m.parameters() for m in (model, copied_model, other_model)), strict=True):
                for q in others:
                    q.grad = None if p.grad is None else torch.zeros_like(p.grad)
        rest = range(MIDDLE, STEPS)
        case.train(model, optimizer, scaler, rest, outer_of(case, model))
        case.train(copied_model, copied, copied_scaler, rest, outer_of(case, copied_model))
        case.train(other_model, other, other_scaler, rest, outer_of(case, other_model))
        str(optimizer.summary()), optimizer.memory_usage()
    check(case, start, model, optimizer)
    compare(model, copied_model, "the copy")
    compare(model, other_model, "the run that was resumed")
    return None


def check(case, start, model, optimizer):
    """Raise where a number is not finite, or a parameter has not moved, or a frozen one has."""
    before = dict(start.named_parameters())
    for name, p in model.named_parameters():
        if not p.isfinite().all():
            raise FindingError(f"{name} is not finite")
        for key, value in optimizer.state.get(p, {}).items():
            if isinstance(value, torch.Tensor) and not value.isfinite().all():
                raise FindingError(f"{key} of {name} is not finite")
        moved = not torch.equal(p, before[name])
        if moved and not p.requires_grad:
            raise FindingError(f"{name} is frozen and has moved")
        reached = p.requires_grad and p.grad is not None and bool((p.grad.abs() > ROUNDING).any())
        may_stay = case.dtype in HALF or "outer" in case.situations  # where SGD's step may be lost in rounding
        if reached and not moved and not may_stay:
            raise FindingError(f"{name} has a gradient and has not moved")
    natural = any(group["step_rms"] is None for group in optimizer.param_groups)
    may_skip = "not finite" in case.situations or (natural and case.dtype in HALF)  # whose range may be too small
    if optimizer.skipped_steps and not may_skip:
        raise FindingError(f"{optimizer.skipped_steps} steps were skipped")


def compare(model, other, what):
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        if not torch.equal(p, q):
            far = ((p - q).abs().max() / p.abs().max()).detach()
            raise FindingError(f"{name} of {what} differs by {float(far):.1e}")


# ---------------------------------------------------------------------- by hand
def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--show", action="store_true", help="print what each case is made of")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    refused, findings = 0, 0
    for number in range(arguments.first, arguments.first + arguments.count):
        if arguments.show:
            print(number, Case(number))
        try:
            reason = run(number)
        except Exception as error:
            findings += 1
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{place.filename.rpartition('/')[2]}:{place.lineno}"
            print(f"{number}: {type(error).__name__}: {error} ({where})", flush=True)
            if arguments.show:
                traceback.print_exc()
            continue
        if reason is not None:
            refused += 1
            print(f"{number}: refused: {reason}", flush=True)
    print(f"{arguments.count} cases, {refused} refused, {findings} findings")
    raise SystemExit(bool(findings))


if __name__ == "__main__":
    main()
