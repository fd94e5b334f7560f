"""What benchmarks measure with: a real kernel, an environment for peers, what each peer is asked to do."""
