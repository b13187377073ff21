"""Training by a parameter server and workers: the workers, what carries their gradients, and a virtual clock."""
