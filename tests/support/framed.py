"""Points and optimizers that are trained at a moving frame."""

import torch
from torch import optim

import gnomon
from gnomon import groups as g


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


class Velocity(optim.Optimizer):
    """A third-party optimizer of the older sort: writes through .data and names its state in its own way."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                velocity = self.state[p].setdefault("velocity", torch.zeros_like(p))
                velocity.mul_(0.5).add_(p.grad)
                p.data.add_(velocity, alpha=-group["lr"])
        return loss


OPTIMIZERS = {
    "sgd": lambda p: optim.SGD(p, lr=0.2),
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.8),
    "nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.8, nesterov=True),
    "adam": lambda p: optim.Adam(p, lr=0.1),
    "amsgrad": lambda p: optim.Adam(p, lr=0.1, amsgrad=True),
    "adamw": lambda p: optim.AdamW(p, lr=0.1),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.02, momentum=0.5, centered=True),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.5),
    "nadam": lambda p: optim.NAdam(p, lr=0.05),
    "rprop": lambda p: optim.Rprop(p, lr=0.05),
    "lbfgs": lambda p: optim.LBFGS(p, line_search_fn="strong_wolfe"),
    "lbfgs, one iteration": lambda p: optim.LBFGS(p, line_search_fn="strong_wolfe", max_iter=1, max_eval=30),
    "third party": lambda p: Velocity(p),
}


def descend(optimizer, loss, steps):
    def closure():
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    for _ in range(steps):
        optimizer.step(closure)
    return loss().item()


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.cov = gnomon.SPD(g.Triangular(4))
        self.q = gnomon.Gaussian(g.Arrow(4), form="precision")

    def loss(self, x):
        y = self.linear(x)
        return self.cov.quad(y).mean() - self.cov.logdet() - self.q.log_prob(y).mean() + y.square().mean()


def train(model, optimizer, steps, seed, scheduler=None):
    data = generator(seed)
    for _ in range(steps):
        x = torch.randn(8, 4, generator=data)

        def closure(x=x):
            optimizer.zero_grad()
            loss = model.loss(x)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            return loss

        optimizer.step(closure)
        if scheduler:
            scheduler.step()


def optimizers(model):
    groups = [
        {"params": model.linear.parameters(), "lr": 0.05},
        {"params": [*model.cov.parameters(), *model.q.parameters()]},
    ]
    return {
        "sgd": lambda: optim.SGD(groups, lr=0.02, momentum=0.9),
        "adamw": lambda: optim.AdamW(groups, lr=0.02),
        "rmsprop": lambda: optim.RMSprop(groups, lr=0.01, momentum=0.9),
        "lbfgs": lambda: optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe"),
    }
