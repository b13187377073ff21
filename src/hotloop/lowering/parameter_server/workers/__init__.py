"""Workers that compute gradients: processes, actors of Ray, or simulated ones."""
