"""Foreign checkpoints: what their bytes are, as the parts and the format of a weight. One file for each dialect."""
