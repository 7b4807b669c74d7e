"""What this project claims about speed, as commands: python -m benchmarks.bench, and so on."""
