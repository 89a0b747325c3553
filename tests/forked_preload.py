"""What forked programs have imported before they start, also what they import only when they need it."""

# ruff: noqa: E402, F401, I001

import gc

gc.disable()  # until all is imported, which saves 1.2 of 6.9 s

import anyio._backends._asyncio
import matplotlib.backends.backend_agg
import matplotlib.figure
import numpy.ma
import sqlalchemy.dialects.sqlite.pysqlite
import torch
import torch._dynamo  # optimizers import it when they are made

import blocktrain.api
import blocktrain.cli.main
import blocktrain.coordinator.main
import blocktrain.doctor.network
import blocktrain.local.assembly
import blocktrain.local.demo
import blocktrain.local.launcher
import blocktrain.local.swarm
import blocktrain.local.terminal
import blocktrain.serving.gateway.main
import blocktrain.serving.stage.main
import blocktrain.simulation.run
import blocktrain.worker.program

torch.set_num_threads(1)
# What was imported is there to stay: no child looks at it again to collect garbage, or copies its pages.
gc.freeze()
gc.enable()
