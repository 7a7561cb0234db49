"""Accuracy of small networks, one for each order, on a dataset that is made up: large enough that memory holds as many
chunks for each class as it does in practice.

Each class is several clusters of points, so that a network with a hidden layer is needed to tell classes apart. All
networks of a seed begin with the same weights, and some are trained side by side, as one: that takes half the time.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import torch
from delivered_orders import Order, delivered
from torch import nn

__all__ = ["accuracies"]

DIMENSIONS, HIDDEN, CLUSTERS = 32, 64, 4
SEPARATION = 0.95
"""Of the clusters, in standard deviations of the points of each, in one dimension."""
LEARNING_RATE, MOMENTUM = 0.1, 0.9
NUM_TEST = 16_384
SIDE_BY_SIDE = 8
"""Networks: more of them leave the processor's cache."""


class Networks(nn.Module):
    """Several networks of one hidden layer with batch normalisation, all with the same weights to begin with.

    What they are given and what they give is ``(networks, batch, dimensions)``, of each its own.
    """

    def __init__(self, count: int, num_classes: int) -> None:
        super().__init__()

        def parameter(*shape: int, spread: float) -> nn.Parameter:
            return nn.Parameter((torch.randn(shape) * spread).repeat(count, 1, 1))

        self.into = parameter(DIMENSIONS, HIDDEN, spread=DIMENSIONS**-0.5)
        self.scale, self.shift = nn.Parameter(torch.ones(count, 1, HIDDEN)), parameter(1, HIDDEN, spread=0)
        self.out, self.bias = parameter(HIDDEN, num_classes, spread=HIDDEN**-0.5), parameter(1, num_classes, spread=0)
        self.mean, self.variance = torch.zeros(count, 1, HIDDEN), torch.ones(count, 1, HIDDEN)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        hidden = points @ self.into
        variance, mean = self.variance, self.mean
        if self.training:
            variance, mean = torch.var_mean(hidden, 1, keepdim=True)
            self.variance.lerp_(variance.detach(), 0.1)  # as in torch's batch normalisation
            self.mean.lerp_(mean.detach(), 0.1)
        hidden = (hidden - mean) * torch.rsqrt(variance + 1e-5) * self.scale + self.shift
        return torch.relu(hidden) @ self.out + self.bias


def accuracies(
    orders: list[Order], exact_orders: int, num_samples: int, num_classes: int, batch: int, num_epochs: int, seed: int
) -> np.ndarray:
    """Test accuracy in percent after each epoch, ``(orders, epochs)``. That of ``exact`` is the mean of several."""
    points, labels = _clusters(num_samples + NUM_TEST, num_classes, seed)
    test = points[num_samples:], labels[num_samples:]
    # Samples are made in no order of classes: that is how they are stored mixed.
    by_class = np.argsort(labels[:num_samples].numpy(), kind="stable")

    @cache
    def samples(order: Order, order_seed: int, epoch: int) -> np.ndarray:
        """``order`` with ``by_class``, whose order of numbers both ways of storing them have."""
        return delivered(order, num_samples, batch, order_seed, epoch).astype(np.int32)

    runs = [
        (row, order, seed + 1_000_003 * each)
        for row, order in enumerate(orders)
        for each in range(exact_orders if order.policy == "exact" else 1)
    ]
    found = np.zeros((len(orders), num_epochs))
    for first in range(0, len(runs), SIDE_BY_SIDE):
        side_by_side = runs[first : first + SIDE_BY_SIDE]
        torch.manual_seed(seed)
        networks = Networks(len(side_by_side), num_classes)
        optimizer = torch.optim.SGD(networks.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
        for epoch in range(num_epochs):
            stored = [
                (order.by_class, samples(replace(order, by_class=True), s, epoch)) for _, order, s in side_by_side
            ]
            rows = np.stack([by_class[given] if sort else given for sort, given in stored])
            networks.train()
            for step in torch.from_numpy(rows.astype(np.int64)).split(batch, dim=1):
                loss = nn.functional.cross_entropy(networks(points[step]).flatten(0, 1), labels[step].flatten())
                optimizer.zero_grad()
                (loss * len(side_by_side)).backward()  # the mean of each, not of all
                optimizer.step()
            for (row, order, _), accuracy in zip(side_by_side, _tested(networks, *test), strict=True):
                found[row, epoch] += accuracy / (exact_orders if order.policy == "exact" else 1)
    return found


def _clusters(count: int, num_classes: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points ``(count, dimensions)`` and their labels."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(num_classes * CLUSTERS, DIMENSIONS, generator=generator) * SEPARATION
    cluster = torch.randint(len(centres), (count,), generator=generator)
    points = centres[cluster] + torch.randn(count, DIMENSIONS, generator=generator)
    return points, cluster % num_classes


def _tested(networks: Networks, points: torch.Tensor, labels: torch.Tensor) -> list[float]:
    """Accuracy of each, in percent."""
    networks.eval()
    right = torch.zeros(len(networks.into))
    with torch.no_grad():
        for some, wanted in zip(points.split(2048), labels.split(2048), strict=True):
            right += (networks(some).argmax(-1) == wanted).sum(-1)
    return (100 * right / len(points)).tolist()
