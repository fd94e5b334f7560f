"""What a rank stores: moving it between plans, checkpoints, pretrained tables."""
