"""The configuration of a mixture of experts. `models/families` builds it, `models.parts.experts` computes with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How a router's logits choose the experts of a token and weigh their outputs.

    Attributes:
        score: activation that turns logits into scores.
        choice_bias: whether each expert has a bias that is added to its score for the choice, not for the weight.
        groups: number of groups of neighbouring experts.
        chosen_groups: number of best groups whose experts may be chosen.
        group_best: number of a group's best scores whose sum ranks the group.
        normalised: whether the scores of the chosen experts are divided by their sum.
        factor: factor of the weights, applied after `normalised`.
        biased: whether the logits have a bias.
        per_expert_scale: whether each expert has a factor for its weights.
    """

    score: Literal["softmax", "sigmoid"]
    choice_bias: bool
    groups: int
    chosen_groups: int
    group_best: int
    normalised: bool
    factor: float
    biased: bool = False
    per_expert_scale: bool = False


@dataclass(frozen=True, kw_only=True)
class ExpertForm:
    """The form of the experts' gated MLP.

    Attributes:
        act: activation of the gate, without a limit.
        limit: upper bound of the gate g, and bound of the magnitude of the up projection u; the result is then
            g sigmoid(alpha g) (u + 1) (gpt-oss); None: act(g) u.
        alpha: factor in the sigmoid, with a limit.
        biased: whether all projections have a bias.
    """

    act: Literal["silu", "gelu_pytorch_tanh"] = "silu"
    limit: float | None = None
    alpha: float = 1.0
    biased: bool = False


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The experts of a layer: MLPs of which each token uses a few.

    Attributes:
        count: number of experts.
        chosen: experts per token.
        size: inner size of an expert.
        routing: how tokens choose experts.
        shared: inner size of the shared expert, which all tokens use; 0: no shared expert.
        shared_gated: whether a sigmoid gate multiplies the output of the shared expert.
        form: form of the experts' MLP.
        beside: whether the layer has a dense MLP too, and adds the experts' output to it after norms (Gemma 4).
    """

    count: int
    chosen: int
    size: int
    routing: Routing
    shared: int
    shared_gated: bool
    form: ExpertForm = ExpertForm()
    beside: bool = False
