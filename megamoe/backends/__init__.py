"""Run the layer: by the persistent kernel, torch.distributed, the emulator or the oracle."""
