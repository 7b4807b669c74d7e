"""A single-host parameter-server launcher for PyTorch. README.md has the module table."""
