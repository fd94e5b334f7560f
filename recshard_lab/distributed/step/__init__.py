"""One step of a sharded collection: ids to the ranks that store their rows, lookup, rows back to the source ranks."""
