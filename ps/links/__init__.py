"""How ranks find and reach each other. The only door to torch.distributed and to other ranks."""
