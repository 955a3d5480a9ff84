"""Search: selects a block for a request by a query over the documents of blocks, instead of by the block's name."""
