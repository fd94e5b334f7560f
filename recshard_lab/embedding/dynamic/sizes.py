"""Sizes of an index: buckets of 128 slots, in partitions, which are what ranks divide among them. No torch here."""

SLOTS = 128
PARTITION_BUCKETS = 64  # buckets of a partition at the largest size, where that leaves several partitions
LEAST_PARTITIONS, MOST_PARTITIONS = 8, 64  # where there are as many buckets


def partitions_for(capacity: int) -> int:
    """A power of two: one partition for each `PARTITION_BUCKETS` buckets, but `LEAST_PARTITIONS` if that is more.

    >>> partitions_for(128), partitions_for(1000), partitions_for(16 * 8192), partitions_for(1 << 24)
    (1, 8, 16, 64)
    """
    buckets = -(-capacity // SLOTS)
    many = max(min(LEAST_PARTITIONS, buckets), buckets // PARTITION_BUCKETS)
    return min(MOST_PARTITIONS, 1 << (many.bit_length() - 1))


def buckets_for(capacity: int, partitions: int) -> int:
    """Buckets of each partition."""
    return -(-capacity // (SLOTS * partitions))


def slots_for(capacity: int, max_capacity: int) -> int:
    """The slots of an index of these arguments: ``capacity`` rounded up to whole buckets of every partition.

    >>> slots_for(1000, 1000), slots_for(1000, 1_000_000)
    (1024, 8192)
    """
    partitions = partitions_for(max_capacity)
    return partitions * buckets_for(capacity, partitions) * SLOTS
