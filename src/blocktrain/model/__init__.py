"""The mathematics: layers, blocks, objectives and compositions. Torch only; no files, sockets or clock."""
