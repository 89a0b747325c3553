"""What the processes of the end-to-end tests have imported before they start."""

import torch
import torch._dynamo  # optimizers import it when they are made

import blocktrain.cli.main
import blocktrain.coordinator.main
import blocktrain.worker.program  # noqa: F401

torch.set_num_threads(1)
