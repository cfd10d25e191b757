"""Item response: answers of persons to questions. Questions are global unknowns, the ability of a person is local."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Parameter, Posterior, Values
from .densities import binomial_logit, cauchy, log_normal, normal
from .hierarchical import column, positive
from .registry import posterior
from .store import read
from .transforms import POSITIVE


@posterior("irt_2pl-irt_2pl")
def _two_parameters(name: str) -> Posterior:
    """Define the model in which each question has a difficulty b and a slope a: ``logit p = a (theta - b)``."""
    data = read("irt_2pl")
    questions, persons = data["y"].shape

    def log_joint(v: Values) -> Tensor:
        logits = v["a"][:, :, None] * (v["theta"][:, None, :] - v["b"][:, :, None])
        log_likelihood = binomial_logit(data["y"], 1, logits).sum((1, 2))
        log_local = normal(v["theta"], 0, column(v["sigma_theta"])).sum(-1)
        log_questions = log_normal(v["a"], 0, column(v["sigma_a"])) + normal(
            v["b"], column(v["mu_b"]), column(v["sigma_b"])
        )
        log_prior = (
            cauchy(v["sigma_theta"], 2) + cauchy(v["sigma_a"], 2) + cauchy(v["sigma_b"], 2) + normal(v["mu_b"], 0, 5)
        )
        return log_likelihood + log_local + log_questions.sum(-1) + log_prior

    common = [
        *positive("sigma_theta", "sigma_a"),
        Parameter("mu_b"),
        *positive("sigma_b"),
        Parameter("a", (questions,), POSITIVE),
        Parameter("b", (questions,)),
    ]
    names = [parameter.name for parameter in common]
    return Posterior(name, [*common, Parameter("theta", (persons,))], log_joint, global_parameters=names)


def rasch(name: str, answers: Tensor, prior_scale: float) -> Posterior:
    """Define the model of questions with difficulties ``alpha`` and one slope ``beta``.

    It is ``logit p = beta theta - alpha``. ``answers`` has the shape ``(persons, questions)``. Abilities are standard
    normal. Difficulties and slope are normal with the given scale.
    """
    persons, questions = answers.shape

    def log_joint(v: Values) -> Tensor:
        alpha, beta, theta = v["alpha"], v["beta"], v["theta"]
        logits = (column(beta) * theta)[:, :, None] - alpha[:, None, :]
        log_local = binomial_logit(answers, 1, logits).sum((1, 2)) + normal(theta, 0, 1).sum(-1)
        return log_local + normal(alpha, 0, prior_scale).sum(-1) + normal(beta, 0, prior_scale)

    parameters = [Parameter("alpha", (questions,)), *positive("beta"), Parameter("theta", (persons,))]
    return Posterior(name, parameters, log_joint, global_parameters=["alpha", "beta"])


@posterior("lsat_data-lsat_model")
def _law_school(name: str) -> Posterior:
    """Define the model of 1,000 persons and five questions.

    The data counts the persons with each pattern of answers.
    """
    data = read("lsat_data")
    counts = torch.diff(data["culm"].long(), prepend=torch.zeros(1, dtype=torch.long))
    return rasch(name, data["response"].repeat_interleave(counts, 0), 100.0)
