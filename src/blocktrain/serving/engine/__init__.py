"""From a request to tokens: drafting, traversals over stages, sampling."""
