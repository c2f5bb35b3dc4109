"""Plans that are proven best: shortest paths over splits, with labels pruned by prices."""
