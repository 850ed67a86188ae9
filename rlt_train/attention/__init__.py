"""Paged attention as a property of a call: contracts, the step planner, the dispatch function, and the
backends."""
