"""What this project claims about speed, as commands: python -m benchmarks.rate, and so on."""
