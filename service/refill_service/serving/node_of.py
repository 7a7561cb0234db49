"""Which pod is asked? Routes are made once in a process, which may be several pods; the application is one pod's."""

from __future__ import annotations

from starlette.types import Scope

from refill_service.pod.cache_node import CacheNode

__all__ = ["node_of"]


def node_of(scope: Scope) -> CacheNode:
    """The pod that a request is made to, as :mod:`refill_service.serving.app` has it."""
    node: CacheNode = scope["app"].state.node
    return node
