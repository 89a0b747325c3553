"""What a block is trained to do: the seam between block-local objectives and everything else.

An objective says which other blocks a block takes input from, draws the step's noise, and gives the loss. It
never sees optimizers, data files or other blocks' gradients. Numbers in brackets are the equations of
docs/objective.md, which has them in the symbols of the DiffusionBlocks and EDM papers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from blocktrain.config import ModelConfig, ObjectiveConfig
from blocktrain.model.block import Block, BlockOutput, Hint
from blocktrain.model.cross_entropy import chunked_cross_entropy, rows_at_once
from blocktrain.model.families import build_block, denoises
from blocktrain.model.noise import loss_weight, sample_sigma


@dataclass(frozen=True)
class Loss:
    total: Tensor
    """What is minimised."""
    ce: Tensor
    """Plain cross entropy of the sequences that saw no hint, or of all where all saw one."""


class Objective:
    """The published block-local denoising objective, with hint dropout."""

    def __init__(self, model: ModelConfig, config: ObjectiveConfig, *, vocabulary: int) -> None:
        self.model, self.config, self.vocabulary = model, config, vocabulary

    def upstream(self, block: int) -> tuple[int, ...]:
        """The blocks that must run, in this order, before `block`: it takes the features of the last of them
        as input. In training they are frozen.

        Everything else asks here or below and does not look at `objective.kind`: the trainer which blocks to
        freeze, a coordinator which snapshots an assignment names, a stage which blocks it must hold too.
        """
        # `denoise` needs no other block, so none can be stale and any subset is a model. A `chain` costs 52 %
        # more compute for 1.086 against 1.064 nats per byte after 500 steps: docs/decisions/0008.
        return tuple(range(block)) if self.config.kind in ("chain", "serial") else ()

    def downstream(self, block: int) -> tuple[int, ...]:
        """The blocks that the loss of `block` runs through, in this order, behind it. In training they are
        frozen: gradients pass through them to `block` and change nothing on the way."""
        return tuple(range(block + 1, self.model.blocks)) if self.is_serial else ()

    def frozen(self, block: int) -> tuple[int, ...]:
        """All other blocks that take part in a step of `block`, in the order in which they run."""
        return (*self.upstream(block), *self.downstream(block))

    @property
    def is_serial(self) -> bool:
        """True if the blocks are parts of one deep model, of which the last alone predicts."""
        return self.config.kind == "serial"

    def fixed_pooling(self) -> list[float] | None:
        """Pooling weights that need no fitting: of a serial model the last part has all the say."""
        return [0.0] * (self.model.blocks - 1) + [1.0] if self.is_serial else None

    def build(self, block: int, seed: int) -> Block:
        return build_block(
            self.model.of_block(block),
            self.config,
            # One embedding more, for the unknown token; the codebook has no row for it, so it is never
            # predicted.
            vocabulary=self.vocabulary + self.trained_for_sweep,
            seed=seed,
            hints=self.config.hint_probability > 0,
            upstream=bool(self.upstream(block)),
            last=not self.is_serial or block == self.model.blocks - 1,
        )

    def build_reference(self, seed: int) -> Block:
        """All layers end to end, in the same block class, predicting with no hint."""
        return build_block(
            self.model,
            self.config,
            vocabulary=self.vocabulary,
            seed=seed,
            # The same layers and bytes as all blocks together: 0.9865 nats per byte beside their 0.9975
            # (docs/experiments.md).
            num_layers=self.model.layers_before(self.model.blocks),
            hints=False,
        )

    @property
    def composes_by_euler(self) -> bool:
        """True if blocks can go on from each other's noise: they know hints, and need no features."""
        return self.config.hint_probability > 0 and not any(map(self.upstream, range(self.model.blocks)))

    @property
    def trained_for_sweep(self) -> bool:
        return self.config.sweep_probability > 0

    @property
    def unknown_token(self) -> int:
        """The id behind the vocabulary that stands for context not yet written."""
        assert self.trained_for_sweep, "only blocks trained for `sweep` have an embedding for it"
        return self.vocabulary

    def num_hinted(self, batch: int) -> int:
        """Sequences of a batch that get a hint; some but not all where the recipe asks for a share."""
        share = self.config.hint_probability
        if share in (0.0, 1.0):
            return round(share * batch)
        # Both kinds in every batch: a step without hints would train the noise condition on nothing.
        return min(max(round(share * batch), 1), batch - 1)

    def num_swept(self, batch: int) -> int:
        """Sequences of a batch, the first ones, with unknown context and attention both ways."""
        if not self.trained_for_sweep:
            return 0
        return min(max(round(self.config.sweep_probability * batch), 1), self.num_hinted(batch))

    def draw_hint(
        self, block: int, targets_BT: Tensor, codebook_VD: Tensor, generator: torch.Generator
    ) -> Hint | None:
        """The noised targets of the share of sequences that get a hint, the first ones."""
        hinted = self.num_hinted(targets_BT.shape[0])
        if not hinted:
            return None
        # (2): one sigma for a whole sequence, from the interval of the block.
        sigma_P = sample_sigma(self.config, self.model.blocks, block, hinted, generator)
        # (1): z = e_y + sigma eps. No leak: z at an earlier position hides a token that the context shows.
        e_PTD = F.embedding(targets_BT[:hinted], codebook_VD)
        eps_PTD = torch.randn(e_PTD.shape, generator=generator, device=e_PTD.device)
        return Hint(e_PTD + sigma_P[:, None, None] * eps_PTD, sigma_P)

    def hide_context(self, tokens_BT: Tensor, generator: torch.Generator) -> Tensor:
        """Unknown tokens beyond a random prefix, in the first of the sequences that have a hint."""
        if not self.trained_for_sweep:
            return tokens_BT
        length, swept = tokens_BT.shape[1], self.num_swept(tokens_BT.shape[0])
        # At least one known token: `sweep` always goes on from a prompt.
        prefix_S = torch.randint(1, max(2, length), (swept, 1), generator=generator, device=generator.device)
        hidden_ST = torch.arange(length, device=tokens_BT.device) >= prefix_S
        swept_ST = tokens_BT[:swept].masked_fill(hidden_ST, self.unknown_token)
        return torch.cat([swept_ST, tokens_BT[swept:]])

    def loss(
        self,
        block: Block,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        codebook_VD: Tensor,
        hint: Hint | None = None,
        upstream_BTD: Tensor | None = None,
        swept: int | None = None,
    ) -> Loss:
        """(6): w(sigma) * CE(g z_hat E^T, y), the weight one number per sequence; plain cross entropy where
        the family knows no noise. `swept`: how many of the first sequences have unknown context, if not the
        share that a batch of this size has."""
        batch, length = tokens_BT.shape
        hinted = 0 if hint is None else hint.sigma_P.shape[0]
        if swept is None:
            swept = self.num_swept(batch) if hint is not None else 0
        # (4), (5): one pass over hinted sequences and those without; the latter are the limit sigma -> inf.
        output: BlockOutput = block(tokens_BT, codebook_VD, hint, upstream_BTD, both_ways=swept)
        # w has shape [B], as ce_B has: [B, 1] would broadcast to [B, B] and mix the sequences' weights.
        weight_B = torch.ones(batch, device=tokens_BT.device)
        if denoises(self.model):
            sigma_B = torch.full((batch,), torch.inf, device=tokens_BT.device)
            if hint is not None:
                sigma_B = torch.cat([hint.sigma_P, sigma_B[hinted:]])
            weight_B = loss_weight(sigma_B, self.config.sigma_data)
        counts_BT: Tensor | None = None
        if swept:
            # A target that stands in the known context of a swept sequence, which attends both ways, could be
            # copied: it does not count.
            counts_BT = torch.ones(batch, length, device=tokens_BT.device)
            unknown_ST = tokens_BT[:swept, 1:] == self.unknown_token
            counts_BT[:swept, :-1] = unknown_ST.to(counts_BT.dtype)
        # With `mse` the regression alone trains z_hat; cross entropy then fits the scale g and nothing else.
        z_hat_BTD = output.z_hat_BTD.detach() if self.config.loss == "mse" else output.z_hat_BTD
        if self.holds_logits(batch * length):
            # In fp32: in bf16 logits of 12 come in steps of 1/16, too coarse for a loss of 1 nat.
            logits_BTV = output.logits_of(z_hat_BTD)
            ce = F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten(), reduction="none")
            ce_BT = ce.view(batch, length)
            if counts_BT is None:
                ce_B = ce_BT.mean(dim=1)
            else:
                ce_B = (ce_BT * counts_BT).sum(dim=1) / counts_BT.sum(dim=1)
            total = (weight_B * ce_B).mean()
        else:
            if output.scale is not None:
                z_hat_BTD = (output.scale * z_hat_BTD).to(z_hat_BTD.dtype)
            share_BT = weight_B[:, None].expand(batch, length) / (batch * length)
            if counts_BT is not None:
                share_BT = counts_BT * (weight_B / batch / counts_BT.sum(dim=1))[:, None]
            assert output.map_VD is not None, "an inner part of a serial model has no loss of its own"
            total, ce = chunked_cross_entropy(
                z_hat_BTD.flatten(0, 1),
                output.map_VD,
                targets_BT.flatten(),
                share_BT.flatten(),
                compiled=block.is_compiled,
            )
            ce_BT = ce.view(batch, length)
        if self.config.loss == "mse":
            error_BT = (output.z_hat_BTD - F.embedding(targets_BT, codebook_VD)).square().sum(dim=-1)
            total = total + (weight_B * error_BT.mean(dim=1)).mean()
        # Reported is what a block knows without the truth in its input: the local cross entropy with a noised
        # truth is better by (1 - E|p|^2) / (2 sigma_min^2) nats, 0.22 at [1, 10], and means nothing.
        return Loss(total, ce_BT[hinted if hinted < batch else 0 :].mean().detach())

    def holds_logits(self, positions: int) -> bool:
        """Whether the logits of so many positions are held at once; see cross_entropy.py."""
        return positions <= rows_at_once(self.vocabulary)
