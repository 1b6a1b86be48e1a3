"""Steps on an NVIDIA GPU: one compute stream for two slots, CUDA graphs for decode, results awaited as events."""
