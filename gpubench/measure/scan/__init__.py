"""Name the bad part among thousands of nodes: matchings, scores, confirmation, decoding, report."""
