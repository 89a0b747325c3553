"""What forked programs have imported before they start."""

import torch
import torch._dynamo  # optimizers import it when they are made

import blocktrain.cli.main
import blocktrain.coordinator.main
import blocktrain.doctor.network
import blocktrain.local.assembly
import blocktrain.serving.gateway.main
import blocktrain.serving.stage.main
import blocktrain.worker.program  # noqa: F401

torch.set_num_threads(1)
