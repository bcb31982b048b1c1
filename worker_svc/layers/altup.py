"""AltUp (Baykal et al. 2023): several residual streams, and layers that compute one of them, as in Gemma 3n."""

from dataclasses import dataclass

import torch
from torch import nn

from worker_svc.layers.embedding_norm import Numbers, RmsNorm
from worker_svc.layers.linear import Linear, LinearPart
from worker_svc.weights import Placement


@dataclass(frozen=True, slots=True)
class AltUpConfig:
    """
    Attributes:
        count: the number of streams.
        active: the stream that layers compute.
        laurel_rank: the inner size of the learned residual of attention (LAuReL, Menghani et al. 2024).
        scales_active: whether what the other streams get of the active one is scaled.
    """

    count: int
    active: int
    laurel_rank: int
    scales_active: bool


def _linear(name: str, in_features: int, out_features: int, placement: Placement) -> Linear:
    return Linear([LinearPart(name, out_features)], in_features, bias=False, placement=placement)


class AltUpLayer(nn.Module):
    """The part of a layer that mixes the streams, [streams, T, hidden]; `layer` is its name in the checkpoint."""

    def __init__(self, layer: str, config: AltUpConfig, hidden: int, eps: float, placement: Placement) -> None:
        super().__init__()
        name, count = f"{layer}.altup", config.count
        self.active, self._hidden = config.active, hidden
        self.router_norm = RmsNorm(f"{name}.router_norm", hidden, eps, placement=placement)
        self.router = _linear(f"{name}.modality_router", hidden, count, placement)
        self.prediction = _linear(f"{name}.prediction_coefs", count, count * count, placement)
        self.correction = _linear(f"{name}.correction_coefs", count, count, placement)
        self.scale: Numbers | None = None
        if config.scales_active:
            self.scale = Numbers(f"{name}.correct_output_scale", hidden, placement, split=False)
        self.laurel_left = _linear(f"{layer}.laurel.linear_left", hidden, config.laurel_rank, placement)
        self.laurel_right = _linear(f"{layer}.laurel.linear_right", config.laurel_rank, hidden, placement)
        self.laurel_norm = RmsNorm(f"{layer}.laurel.post_laurel_norm", hidden, eps, placement=placement)

    def predict(self, streams: torch.Tensor) -> torch.Tensor:
        """The streams, with a sum of all of them added to each."""
        factors = self.prediction(self._route(streams[self.active])).unflatten(1, (len(streams), -1))
        predicted = streams
        # One by one, so that a token's bits do not depend on the other tokens.
        for stream, of_stream in zip(streams, factors.unbind(2), strict=True):
            predicted = predicted + stream * of_stream.t().unsqueeze(2)
        return predicted

    def correct(self, predicted: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(the streams after the active one has become `output`, [T, hidden], what the others get of it)."""
        factors = self.correction(self._route(output)) + 1
        streams = predicted + (output - predicted[self.active]) * factors.t().unsqueeze(2)
        active = streams[self.active]
        return streams, active if self.scale is None else active * self.scale.values.to(active.dtype)

    def laurel(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden], attention's input -> what is added to its output."""
        return x + self.laurel_norm(self.laurel_right(self.laurel_left(x)))

    def _route(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] -> [T, streams]."""
        routed = self.router(self.router_norm(x)).float() / self._hidden
        # The tangent by a softmax, whose bits do not depend on the place in the batch.
        first, second = torch.stack((routed, -routed), -1).softmax(dim=-1).unbind(-1)
        return (first - second).to(x.dtype)


class AltUpStreams(nn.Module):
    """The streams of an embedding, and the output that they become."""

    def __init__(self, config: AltUpConfig, hidden: int, placement: Placement) -> None:
        super().__init__()
        self.before, self.after = (
            nn.ModuleList(
                _linear(f"model.{name}.{index}", hidden, hidden, placement) for index in range(config.count - 1)
            )
            for name in ("altup_projections", "altup_unembed_projections")
        )

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] -> [streams, T, hidden]."""
        return torch.stack([x, *(_as_large(project(x), x) for project in self.before)])

    def merge(self, streams: torch.Tensor) -> torch.Tensor:
        """The inverse shapes."""
        first, *others = streams.unbind()
        total = first
        for project, stream in zip(self.after, others, strict=True):
            total = total + _as_large(project(stream), first)
        return total / len(streams)


def _as_large(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """x with the magnitude of `like`, both [T, hidden]."""
    squares, wanted = (each.float().square().mean(dim=-1, keepdim=True) for each in (x, like))
    return (x * (wanted / squares.clamp(min=1e-5)).sqrt()).to(x.dtype)
