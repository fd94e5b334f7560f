"""``torchrec.modules.hash_mc_evictions``, ``hash_mc_modules`` and ``mc_modules``: parts of managed collisions."""
