"""BlockTrain: train and serve one model, block by block, on machines of different owners.

The names below are for Python programs and notebooks (docs/python.md). Each is loaded when it is first used:
torch takes seconds, and the command line's `--help` imports this module too.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blocktrain.api import TextScores, evaluate, generate, load, recipe, stream, train
    from blocktrain.client.coordinator import public_client as coordinator_client
    from blocktrain.client.gateway import GatewayClient
    from blocktrain.config import Recipe
    from blocktrain.errors import BlocktrainError
    from blocktrain.training.checkpoint import Checkpoint
    from blocktrain.training.report import TrainingReport

__version__ = "0.1.0"
__all__ = [
    "BlocktrainError",
    "Checkpoint",
    "GatewayClient",
    "Recipe",
    "TextScores",
    "TrainingReport",
    "coordinator_client",
    "evaluate",
    "generate",
    "load",
    "recipe",
    "stream",
    "train",
]
_HOMES = {
    "BlocktrainError": "errors",
    "Checkpoint": "training.checkpoint",
    "GatewayClient": "client.gateway",
    "Recipe": "config",
    "TrainingReport": "training.report",
    "coordinator_client": "client.coordinator:public_client",
}
"""Where the names are that are not in `api`."""

if not TYPE_CHECKING:  # else every misspelt name would have the type Any

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module 'blocktrain' has no attribute {name!r}")
        import_module("blocktrain.starting").quiet_threads()
        module, _, original = _HOMES.get(name, "api").partition(":")
        return getattr(import_module(f"blocktrain.{module}"), original or name)

    def __dir__() -> list[str]:
        return [*globals(), *__all__]
