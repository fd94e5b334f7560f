"""Plans over many machines: numbers of ranks, memories, links and batch sizes."""
