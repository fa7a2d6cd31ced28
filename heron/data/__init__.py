"""From shards on disk to the batch of a step: plan, protocol, reader, batches, views."""
