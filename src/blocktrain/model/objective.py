"""What a block is trained to do: the seam between block-local objectives and everything else.

An objective declares which other blocks a block needs frozen, draws the step's noise, and gives the
loss. Equation numbers are those of objective.md's source, the DiffusionBlocks paper. It never sees
optimizers, data files or other blocks' gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from blocktrain.config import ModelConfig, ObjectiveConfig
from blocktrain.model.block import Block, BlockOutput, Hint, build_block
from blocktrain.model.noise import loss_weight, sample_sigma


@dataclass(frozen=True)
class Loss:
    total: Tensor
    """What is minimised."""
    ce: Tensor
    """Plain cross entropy of the sequences that saw no hint, or of all where all saw one."""


class Objective:
    """The published block-local denoising objective, with hint dropout, and its kinds that hear others.

    `chain`: a block takes the features of the blocks before it as input. `composed`: from `composed_from` of
    the steps on, `composed_share` of the loss is that of the mean of all blocks' log-probs.
    """

    composed_share = 0.5
    composed_from = 0.5

    def __init__(self, model: ModelConfig, config: ObjectiveConfig, *, vocabulary: int) -> None:
        self.model, self.config, self.vocabulary = model, config, vocabulary

    def heard(self, block: int) -> tuple[int, ...]:
        """The blocks whose relay block `block` takes as input, in training and in the composed model."""
        return tuple(range(block)) if self.config.kind == "chain" else ()

    def frozen(self, block: int, progress: float = 1.0) -> tuple[int, ...]:
        """The other blocks that training `block` needs, frozen, in the order they run; `progress` is the
        share of the run's steps that are done. At 1, all it ever needs; before, all of these or none."""
        if self.config.kind != "composed":
            return self.heard(block)
        return tuple(b for b in range(self.model.blocks) if b != block and progress >= self.composed_from)

    def relay(self, output: BlockOutput, heard: Tensor | None) -> Tensor:
        """What a frozen block hands on, given what was handed to it; of one shape for all blocks."""
        if self.config.kind != "composed":
            return output.features_BTD
        log_probs_BTV = F.log_softmax(output.logits_BTV.float(), dim=-1)
        return log_probs_BTV if heard is None else heard + log_probs_BTV

    def predict(
        self,
        block: Block,
        tokens_BT: Tensor,
        codebook_VD: Tensor,
        hint: Hint | None = None,
        heard: Tensor | None = None,
    ) -> Tensor:
        """The logits by which the block is judged, given what it heard."""
        logits_BTV: Tensor = block(tokens_BT, codebook_VD, hint, heard).logits_BTV
        if self.config.kind != "composed" or heard is None:
            return logits_BTV
        return self._composed(F.log_softmax(logits_BTV.float(), dim=-1), heard)

    def _composed(self, own_BTV: Tensor, others_BTV: Tensor) -> Tensor:
        """The mean of all blocks' log-probs."""
        return (own_BTV + others_BTV) / self.model.blocks

    def composed_loss(self, own_BTV: Tensor, others_BTV: Tensor, targets_BT: Tensor) -> Tensor:
        mean_BTV = self._composed(own_BTV, others_BTV)
        return F.cross_entropy(mean_BTV.flatten(0, 1), targets_BT.flatten())

    def build(self, block: int, seed: int) -> Block:
        return build_block(
            self.model,
            self.config,
            vocabulary=self.vocabulary + self.trained_for_sweep,
            seed=seed,
            hints=self.config.hint_probability > 0,
            upstream=bool(self.heard(block)),
        )

    def build_reference(self, seed: int) -> Block:
        """All layers end to end, in the same block class, predicting with no hint."""
        return build_block(
            self.model,
            self.config,
            vocabulary=self.vocabulary,
            seed=seed,
            num_layers=self.model.blocks * self.model.layers_per_block,
            hints=False,
        )

    @property
    def composes_by_euler(self) -> bool:
        """Whether blocks were taught to go on from each other's noise: with hints, and hearing nobody."""
        return self.config.hint_probability > 0 and not any(map(self.heard, range(self.model.blocks)))

    @property
    def trained_for_sweep(self) -> bool:
        return self.config.sweep_probability > 0

    @property
    def unknown_token(self) -> int:
        """The id behind the vocabulary that stands for context not yet written."""
        assert self.trained_for_sweep, "only blocks trained for `sweep` have an embedding for it"
        return self.vocabulary

    def hide_context(self, tokens_BT: Tensor, generator: torch.Generator) -> Tensor:
        """Unknown tokens beyond a random prefix, in the first of the sequences that have a hint."""
        if not self.trained_for_sweep:
            return tokens_BT
        length, swept = tokens_BT.shape[1], self.num_swept(tokens_BT.shape[0])
        prefix_S = torch.randint(1, max(2, length), (swept, 1), generator=generator, device=generator.device)
        hidden_ST = torch.arange(length, device=tokens_BT.device) >= prefix_S
        swept_ST = tokens_BT[:swept].masked_fill(hidden_ST, self.unknown_token)
        return torch.cat([swept_ST, tokens_BT[swept:]])

    def num_swept(self, batch: int) -> int:
        """Sequences of a batch, the first ones, with unknown context and attention both ways."""
        if not self.trained_for_sweep:
            return 0
        return min(max(round(self.config.sweep_probability * batch), 1), self.num_hinted(batch))

    def num_hinted(self, batch: int) -> int:
        """Sequences of a batch that get a hint; some but not all where the recipe asks for a share."""
        share = self.config.hint_probability
        if share in (0.0, 1.0):
            return round(share * batch)
        return min(max(round(share * batch), 1), batch - 1)

    def draw_hint(
        self, block: int, targets_BT: Tensor, codebook_VD: Tensor, generator: torch.Generator
    ) -> Hint | None:
        """z = e_y + sigma eps for the share of sequences that get a hint, one sigma per sequence."""
        hinted = self.num_hinted(targets_BT.shape[0])
        if not hinted:
            return None
        sigma_P = sample_sigma(self.config, self.model.blocks, block, hinted, generator)
        e_PTD = F.embedding(targets_BT[:hinted], codebook_VD)
        eps_PTD = torch.randn(e_PTD.shape, generator=generator, device=e_PTD.device)
        return Hint(e_PTD + sigma_P[:, None, None] * eps_PTD, sigma_P)

    def _mean_loss(self, ce_BT: Tensor, tokens_BT: Tensor, swept: int) -> Tensor:
        """Per sequence; of a swept one without the targets that stand in its known context."""
        if not swept:
            return ce_BT.mean(dim=1)
        counts = torch.ones_like(ce_BT)
        counts[:swept, :-1] = (tokens_BT[:swept, 1:] == self.unknown_token).to(counts.dtype)
        return (ce_BT * counts).sum(dim=1) / counts.sum(dim=1)

    def loss(
        self,
        block: Block,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        codebook_VD: Tensor,
        z_PTD: Tensor | None = None,
        sigma_P: Tensor | None = None,
        heard: Tensor | None = None,
    ) -> Loss:
        """w(sigma) * CE(g z_hat E^T, y), weighted per sequence; `heard` is what the frozen blocks hand on."""
        hint = None if z_PTD is None or sigma_P is None else Hint(z_PTD, sigma_P)
        batch, length = tokens_BT.shape
        swept = self.num_swept(batch) if hint is not None else 0
        output = block(tokens_BT, codebook_VD, hint, heard, both_ways=swept)
        sigma_B = torch.full((batch,), torch.inf, device=tokens_BT.device)
        if sigma_P is not None:
            sigma_B = torch.cat([sigma_P, sigma_B[sigma_P.shape[0] :]])
        weight_B = loss_weight(sigma_B, self.config.sigma_data)
        logits_BTV = output.logits_BTV
        if self.config.loss == "mse":
            logits_BTV = block.logit_scale * F.linear(output.z_hat_BTD.detach(), codebook_VD)
        log_probs_BTV = F.log_softmax(logits_BTV.float(), dim=-1)
        ce_BT = F.nll_loss(log_probs_BTV.flatten(0, 1), targets_BT.flatten(), reduction="none")
        ce_BT = ce_BT.view(batch, length)
        total = (weight_B * self._mean_loss(ce_BT, tokens_BT, swept)).mean()
        if self.config.loss == "mse":
            error_BT = (output.z_hat_BTD - F.embedding(targets_BT, codebook_VD)).square().sum(dim=-1)
            total = total + (weight_B * error_BT.mean(dim=1)).mean()
        hinted = 0 if sigma_P is None else sigma_P.shape[0]
        if self.config.kind == "composed" and heard is not None:
            # Frozen blocks see no hint, so the sequences count in which this one sees none either.
            composed = self.composed_loss(log_probs_BTV[hinted:], heard[hinted:], targets_BT[hinted:])
            total = (1 - self.composed_share) * total + self.composed_share * weight_B[-1] * composed
        return Loss(total, ce_BT[hinted if hinted < batch else 0 :].mean().detach())
