"""A model as a torch.export program, which runs without this library."""
