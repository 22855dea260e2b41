"""``lightning``: batches per second of a Trainer by each strategy, alone and beside a late rank."""
