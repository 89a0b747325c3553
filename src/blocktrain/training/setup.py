"""What a recipe means: objective, codebook and first weights, built in this one place.

A local run, a worker, a judge, a coordinator and a simulation must build exactly the same parts from the same
recipe, or their hashes differ. Knows no files, network or device.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from blocktrain.config import Recipe
from blocktrain.data.tokenizer import ByteTokenizer
from blocktrain.errors import RecipeError
from blocktrain.ids import derive_seed
from blocktrain.model.block import Block
from blocktrain.model.objective import Objective
from blocktrain.training.inner import Codebook, build_codebook

REFERENCE = "reference"


@dataclass(frozen=True)
class Setup:
    recipe: Recipe
    objective: Objective

    @classmethod
    def of(cls, recipe: Recipe, vocabulary: int = ByteTokenizer.vocabulary) -> Setup:
        """`vocabulary` is that of the run's text (`RunText.manifest`)."""
        return cls(recipe, Objective(recipe.model, recipe.objective, vocabulary=vocabulary))

    @classmethod
    def of_swarm(cls, recipe: Recipe, vocabulary: int = ByteTokenizer.vocabulary) -> Setup:
        """The same for a run of many machines, which refuses what only one machine can train."""
        # A learned table would have to be merged and sent like a block, and every block would depend on it.
        if recipe.objective.codebook == "learned":
            raise RecipeError(
                f'a swarm needs objective.codebook = "fixed" or "own", found {recipe.objective.codebook!r}: '
                "blocks on different machines cannot share a learned one"
            )
        return cls.of(recipe, vocabulary)

    @property
    def vocabulary(self) -> int:
        return self.objective.vocabulary

    def codebook(self) -> Codebook:
        """The codebook before the first step; in a swarm it stays so."""
        return build_codebook(self.recipe, self.vocabulary)

    def initial(self, block: int) -> Block:
        """A block before its first step: its weights follow from (seed, block), so anybody can rebuild it."""
        return self.objective.build(block, derive_seed("init", self.recipe.seed, block))

    def initial_reference(self) -> Block:
        return self.objective.build_reference(derive_seed("init", self.recipe.seed, REFERENCE))


def with_swarm_schedule(recipe: Recipe) -> Recipe:
    """The recipe with as many training steps per block as a swarm runs: rounds times steps per round.

    The learning rate of a swarm follows this length; `training.steps` is the length of a local run.
    """
    training = dataclasses.replace(recipe.training, steps=recipe.swarm.total_steps)
    return dataclasses.replace(recipe, training=training)
