"""One copy of the weights: the generation view over it, its fingerprint, and the alone-against-together
comparison."""
