"""Lookahead: which experts the next layers will choose, named while this layer's experts still run."""
